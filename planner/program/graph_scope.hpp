// Which ops of a step CUDA graphs hold.
#pragma once

#include "planner/plan/fwd.hpp"
#include "planner/program/fwd.hpp"

namespace moe::program {

// True where a CUDA graph of the plan holds the op: with cuda_graph = full every one; else those of forward and
// backward that belong to one of its scopes, or all of these where rows are planned, so that no shape ever changes. Our
// engine leaves communication out of them (engine/run/graph_runs.hpp).
bool in_graph(const plan::Plan& plan, const Op& op);

} // namespace moe::program
