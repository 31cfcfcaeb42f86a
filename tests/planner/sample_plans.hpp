// Plans that exercise every lowering choice, shared by the tests of lowering and memory.
#pragma once

#include "planner/plan.hpp"

#include <vector>

// Sound plans over profiles/models and a GPU profile. The first one: a GQA mixture of experts on one stage.
std::vector<moe::Plan> sample_plans();
