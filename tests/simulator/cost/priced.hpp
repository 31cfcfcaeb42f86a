// What prices single ops in tests: a plan of Qwen3-30B-A3B on a machine, its stack and what is known of the machine.
#pragma once

#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/cost/cost.hpp"

#include <memory>
#include <string>

struct Priced {
    // `stack_name`: "" for the machine's own. The GPUs are data-parallel.
    Priced(const std::string& stack_name, const moe::Hardware& profile, int gpus = 1)
        : stack(moe::load_stack(stack_name, profile)),
          hardware(std::make_shared<const moe::Hardware>(profile)),
          machine(*hardware) {
        plan.model = std::make_shared<const moe::Model>(moe::load_model("Qwen3-30B-A3B"));
        plan.hardware = hardware;
        plan.stack = stack.name;
        plan.gpus = plan.dp = plan.edp = gpus;
    }
    moe::OpCost operator()(const moe::Op& op, const moe::Program& program) const {
        return moe::CostModel(plan, stack, machine)(op, program);
    }

    moe::Plan plan; // its fields may be changed between calls
    moe::Stack stack;
    std::shared_ptr<const moe::Hardware> hardware;
    moe::Machine machine;
};
