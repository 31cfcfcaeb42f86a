// The parts that price single ops in tests: a plan of Qwen3-30B-A3B on a machine, its stack and what is known of the
// machine.
#pragma once

#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/cost/cost.hpp"

#include <memory>
#include <string>

struct Priced {
    // `stack_name`: "" for the machine's own. The GPUs are data-parallel.
    Priced(const std::string& stack_name, const moe::machine::Hardware& profile, int gpus = 1)
        : stack(moe::stack::load_stack(stack_name, profile)),
          hardware(std::make_shared<const moe::machine::Hardware>(profile)),
          machine(*hardware) {
        plan.model = std::make_shared<const moe::model::Model>(moe::families::load_model("Qwen3-30B-A3B"));
        plan.hardware = hardware;
        plan.stack = stack.name;
        plan.gpus = plan.dp = plan.edp = gpus;
    }
    moe::cost::OpCost operator()(const moe::program::Op& op, const moe::program::Program& program) const {
        return moe::cost::CostModel(plan, stack, machine)(op, program);
    }

    moe::plan::Plan plan; // its fields may be changed between calls
    moe::stack::Stack stack;
    std::shared_ptr<const moe::machine::Hardware> hardware;
    moe::cost::Machine machine;
};
