// What each term of the cost model gains: refits with its coefficient held where the term says nothing.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace moe::tools {

inline constexpr int ablation_steps = 4;

// The value at which a coefficient says nothing: 0 of a time or a share that is taken away, 1 of a ratio between
// machines, releases or kinds of op. Nothing where a step cannot be priced without it, as the rate of a product.
std::optional<double> neutral(const std::string& coefficient);

// Prints a Markdown table with a line for the fit of all and one for each term as it is found, in any order: mean
// errors fitted, by family and by system left out. `terms`: names of coefficients, or "all". Each fit starts from the
// stored coefficients and takes `steps` with the derivatives there; terms share the processor's threads. A line says
// why where other coefficients then leave their range. Throws Error (bad_input) for a coefficient that has no neutral
// value or no spread.
void print_ablation(const std::vector<std::string>& terms, int steps);

} // namespace moe::tools
