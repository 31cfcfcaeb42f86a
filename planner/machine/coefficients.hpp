// Coefficients: the few fitted numbers that stacks name instead of stating them, each with its prior and its evidence.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace moe::machine {

struct Coefficient {
    double value = 0.0;
    double prior = 0.0;  // value that is known without the published runs
    double spread = 0.0; // spread of log(value / prior) that is still plausible; 0: known, not fitted
    double error = 0.0;  // standard error of log(value) after the fit; 0 where it was not fitted
    std::string unit, source;
};

// Coefficients by name, in the order of the names.
using Coefficients = std::map<std::string, Coefficient>;

// profiles/coefficients.json. Throws Error (bad_input).
Coefficients load_coefficients();
void save_coefficients(const Coefficients& coefficients, const std::string& path);

} // namespace moe::machine
