// The words in which published recipes state their settings, as the choices of a plan.
#pragma once

#include "planner/machine/precision.hpp"
#include "planner/model/fwd.hpp"
#include "planner/plan/fwd.hpp"
#include "planner/stack/fwd.hpp"
#include "simulator/published/runs.hpp"

#include <string>
#include <vector>

namespace moe::published {

// "MXFP8", "FP8-delayed", ...; every per-tensor scaling of FP8 is fp8_tensor. Throws Error (bad_input).
machine::Precision recipe_precision(const std::string& text);

// Sets recompute, offload, optimizer, dispatcher, CUDA graphs, EP overlap and capacity of a plan whose mesh is set.
// Blank cells give the stack's usual choice where it goes together with the rest of the plan. Cells that the plan
// cannot express are added to `warnings`. Throws Error (bad_input) for words that are not known.
void apply_recipe(const Run& run, const stack::Stack& stack, plan::Plan& plan, std::vector<std::string>& warnings);

// Modules of a recompute set that the model has, so that one set serves dense and routed models.
unsigned applicable_recompute(unsigned set, const model::Model& model);

// Layout string for a row: its own, with "m" as the model has MTP layers; where it is blank and the layers divide by
// the stages only when embedding and loss each count as one, that cut; else "" (as even as possible).
std::string recipe_layout(const Run& run, const plan::Plan& plan, std::vector<std::string>& warnings);

} // namespace moe::published
