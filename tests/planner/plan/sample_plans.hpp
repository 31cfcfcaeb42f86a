// Plans that exercise every lowering choice, shared by the tests of lowering and memory.
#pragma once

#include "planner/plan/plan.hpp"

#include <memory>
#include <vector>

// Sound plans over profiles/models and a GPU profile. The first one: a GQA mixture of experts on one stage.
std::vector<moe::plan::Plan> sample_plans();

// Layers of 16 experts, two of them chosen, with few heads: its degrees divide what small searches ask for.
std::shared_ptr<moe::model::Model> small_moe_model(int layers);
