// Predicts published runs with the very plans of their rows, and sums up how far the predictions are off.
#pragma once

#include "planner/plan/plan.hpp"
#include "planner/search/pricing.hpp"
#include "simulator/published/neighbours.hpp"
#include "simulator/published/run_plan.hpp"

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace moe::published {

struct Prediction {
    std::string run_id;
    std::string skipped; // reason, empty when predicted
    // The values that rows are grouped by; family and kind are empty for rows without a model.
    std::string model, family, kind, system, precision, stack, tier, tier_and_kind, system_and_stack;
    double published = 0.0, predicted = 0.0; // TFLOP/s per GPU
    double error = 0.0;                      // predicted / published - 1
    plan::Plan plan;                         // the plan, with what was open chosen
    stack::Workload workload;                // of the plan; empty where it was skipped
    search::Estimate estimate;
    std::vector<std::string> warnings;
    std::optional<Correction> correction; // of correct_runs(), by which predicted, error and estimate are corrected
    std::optional<Interval> interval;     // of correct_runs(), around `predicted`
};

// Predicts with these coefficients. `progress` is called before each row with the number of rows done; it may be empty.
std::vector<Prediction> predict_runs(const std::vector<Run>& runs, const machine::Coefficients& coefficients,
                                     const std::function<void(std::size_t)>& progress);

// Corrects predictions by runs nearby, unless `on` is false, and sets their intervals. A run that is known by its
// run_id corrects all others but itself.
void correct_runs(std::vector<Prediction>& predictions, const machine::Coefficients& coefficients, bool on);

struct ValidationSummary {
    int rows = 0, predicted = 0, skipped = 0;
    // These figures are of the predicted rows; 0 when there are none.
    double mape = 0.0;              // mean of |error|
    double bias = 0.0;              // mean of error
    double within_10_percent = 0.0; // fraction of rows with |error| <= 0.1
    double kendall_tau = 0.0;       // (concordant - discordant) / pairs; see `pairs`
    int pairs = 0;                  // pairs of rows of one model whose published figures differ by more than 3 %
    int intervals = 0;              // rows that have an interval; the next two are of these
    double coverage = 0.0;          // fraction of them whose published figure lies inside
    double width = 0.0;             // mean of high / low - 1
};
ValidationSummary summarize(const std::vector<Prediction>& predictions);

// The values by which reports group the rows.
inline constexpr std::array<std::pair<const char*, const std::string Prediction::*>, 8> validation_groups{{
    {"tier", &Prediction::tier},
    {"kind", &Prediction::kind},
    {"system", &Prediction::system},
    {"precision", &Prediction::precision},
    {"stack", &Prediction::stack},
    {"family", &Prediction::family},
    {"model", &Prediction::model},
    {"class", &Prediction::tier_and_kind},
}};
// Summarizes the rows of every value of a grouping, in the order of values.
std::vector<std::pair<std::string, ValidationSummary>> summarize_by(const std::vector<Prediction>& predictions,
                                                                    const std::string Prediction::*group);

} // namespace moe::published
