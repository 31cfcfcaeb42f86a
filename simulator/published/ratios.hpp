// How far the predicted ratio of two plans of one workload may be off: most of their error they share.
#pragma once

#include "planner/plan/plan.hpp"
#include "simulator/published/validate.hpp"

#include <optional>
#include <string>
#include <vector>

namespace moe::published {

// Two published runs of one model, machine, precision, number of GPUs, batch and sequence: the error of their ratio.
struct RatioError {
    std::string kind;       // of the model, see kind_of()
    int fields = 0;         // plan fields in which they differ, see differing_choices()
    double log_error = 0.0; // |difference of log(predicted / published)|, each predicted without its model family
};

// Choices of a plan's search in which two plans differ. Fields that follow from others (dp, edp, and schedule from the
// number of chunks), the stack and the workload do not count.
int differing_choices(const plan::Plan& a, const plan::Plan& b);

// All such pairs of predictions that differ in a choice, in the order of their rows.
std::vector<RatioError> ratio_errors(const std::vector<Prediction>& predictions);

// A list of objects {kind, fields, log_error}. Throws Error (bad_input).
std::vector<RatioError> ratio_errors_from_json(const std::string& text, const std::string& place);
std::string ratio_errors_json(const std::vector<RatioError>& errors);
// profiles/runs/ratios.json; none for the executable stack, whose errors these are not, and without the file.
std::vector<RatioError> load_ratio_errors(bool executable);

// Largest |log(ratio of rates)| that does not tell two such plans apart, at interval_coverage; 0 for equal plans, empty
// where nothing is known.
std::optional<double> ratio_margin(const std::vector<RatioError>& errors, const plan::Plan& a, const plan::Plan& b);
// Probability that the faster one by prediction is the faster one, where their rates differ by exp(log_ratio): 0.5 to
// 1; empty where nothing is known.
std::optional<double> certainty(const std::vector<RatioError>& errors, const plan::Plan& a, const plan::Plan& b,
                                double log_ratio);

} // namespace moe::published
