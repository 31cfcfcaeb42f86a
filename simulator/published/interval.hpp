// The range by which a predicted rate may be off: quantiles of cross-validated residuals of published runs.
#pragma once

#include "planner/search/pricing.hpp"
#include "planner/stack/workload.hpp"

#include <optional>
#include <string>
#include <vector>

namespace moe::published {

// log(predicted / published TFLOPS) of one run, predicted by fits that did not see its model family, or its system.
struct Residual {
    std::string run_id, family, system, kind, tier; // cells as in Prediction; kind: that of kind_of
    double family_left_out = 0.0, system_left_out = 0.0;
    double fitted = 0.0;           // by a fit that saw all runs
    double release_left_out = 0.0; // by a fit that saw none of its system and stack; 0 where no workload is told
    stack::Workload workload{};    // workload of the run; empty where the list does not tell it
};

// A list of objects {run_id, family, system, kind, tier, log_residual, system_left_out}, with {fitted,
// release_left_out, model, hardware, generation, precision, stack, software, gpus, seq} where the workload is told;
// other fields are ignored.
// Throws Error (bad_input).
std::vector<Residual> residuals_from_json(const std::string& text, const std::string& place);
// profiles/runs/residuals.json for published stacks. For the executable stack on a calibrated machine: on a CPU
// profiles/measured/cpu-residuals.json, measured with tools/bench/predictions; on a GPU
// profiles/measured/gpu-residuals.json, of cards that were not calibrated (tools/bench/cards.py), for plans on one GPU
// and on as many as calls among GPUs were measured of. Else none.
std::vector<Residual> load_residuals(const plan::Plan& plan, bool executable);

// Bounds of log(predicted / true).
struct ResidualRange {
    double low = 0.0, high = 0.0;
    int rows = 0;
};
inline constexpr double interval_coverage = 0.8; // nominal: quantiles 10 % and 90 %

// Quantiles over the rows of tiers A and B of one kind, each row left out by family, or by system where the kind has
// one family alone, whose absence leaves out what only this kind needs. For a family that has no row among them, each
// family counts as much as any other and the wider of both bounds holds; for such a system the same over systems, each
// row left out by system. Empty without rows of the kind.
std::optional<ResidualRange> residual_range(const std::vector<Residual>& residuals, const std::string& kind,
                                            const std::string& family, const std::string& system);

struct Interval {
    double low = 0.0, high = 0.0; // TFLOPS/GPU
    int rows = 0;                 // that it rests on
    bool new_family = false, new_system = false, new_stack = false;
    bool new_release = false; // no run of the plan's stack on its system; not told without a correction
};
struct IntervalResult {
    std::optional<Interval> interval;
    std::string reason; // why there is none
};
// new_stack: no published run is of the plan's stack; the range is then that of a family and a system that no row is
// of.
IntervalResult interval_of(const plan::Plan& plan, const search::Estimate& estimate,
                           const std::vector<Residual>& residuals, bool new_stack = false);
// True where the plan's stack stands for no published run: its file lists none, as that of a release that is newer than
// all runs. False for the executable stack, which has residuals of its own.
bool is_new_stack(const plan::Plan& plan);

} // namespace moe::published
