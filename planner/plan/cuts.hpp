// The cuts of layers into stages that published recipes have besides the even and the balanced one.
#pragma once

#include "planner/model/fwd.hpp"
#include "planner/plan/schedule.hpp"

#include <vector>

namespace moe::plan {

// Cuts of a model into `count` stages, none twice; empty where no rule gives any.
// * Equal parts: the embedding, every decoder layer, every MTP layer and the LM head count as one layer each. Source:
//   Megatron-LM, megatron/training/arguments.py, --account-for-embedding-in-pipeline-split and -loss-.
// * Equal runs of decoder layers, of which the last or the first takes what is over; MTP layers and the head follow in
//   the last run, or have a stage each. Source: Megatron-MoE-ModelZoo, design_docs/MR2795 (fewer layers before the
//   loss, more where they are dense).
std::vector<std::vector<Stage>> recipe_cuts(const model::Model& model, int count);

} // namespace moe::plan
