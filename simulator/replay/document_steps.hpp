// Steps over samples whose documents have drawn lengths: how much longer than with mean lengths they are.
#pragma once

#include "planner/plan/plan.hpp"
#include "simulator/replay/simulate.hpp"
#include "simulator/routing/routing.hpp"

#include <optional>

namespace moe::replay {

// The rule. Samples are cut from documents of the plan's lengths in random order, one behind the other. A micro-batch
// takes attention's cores the time that Simulation::core_seconds says times its visible pairs over their mean, windows
// counted by their layers; all else takes what it takes. Data-parallel replicas that share experts wait for the slowest
// of them in every micro-batch; all others once, at the end of the step, for the slowest sum. CP ranks share the pairs
// of a sample evenly.
struct DocumentSteps {
    routing::Quantiles step_seconds; // over the drawn steps
    double mean_length = 0.0;        // tokens of a document
    double pairs = 1.0;              // visible pairs of a sample over those of one document as long
    int steps = 0;                   // steps that were drawn
};

// None where the plan masks no documents of known lengths. `step_seconds`: of the step with mean lengths, as it is
// shown. The same draws every time.
std::optional<DocumentSteps> document_steps(const plan::Plan& plan, double core_seconds, double step_seconds);

} // namespace moe::replay
