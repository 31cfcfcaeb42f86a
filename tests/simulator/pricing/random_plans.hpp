// Random sound plans within a published stack, for tests that must hold for any plan.
#pragma once

#include "planner/plan/plan.hpp"
#include "planner/stack/stack.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

struct RandomPlan {
    moe::plan::Plan plan;
    moe::stack::Stack stack;
    std::string text; // what was drawn, for messages
};

// Plans that are the same for the same seed on every machine.
std::vector<RandomPlan> random_plans(std::uint64_t seed, std::size_t count);
// $MOE_PLAN_SEED, or a fixed one.
std::uint64_t seed_of_run();
