// Plans of published models on published machines, for tests that set what they are about.
#pragma once

#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan.hpp"

#include <cstdint>
#include <memory>
#include <string>

// All degrees 1, no batch yet.
inline moe::plan::Plan published_plan(const std::string& model, const std::string& hardware, const std::string& stack,
                                      std::int64_t seq = 4096) {
    moe::plan::Plan plan;
    plan.model = std::make_shared<const moe::model::Model>(moe::families::load_model(model));
    plan.hardware = std::make_shared<const moe::machine::Hardware>(moe::machine::load_hardware(hardware));
    plan.stack = stack;
    plan.seq = seq;
    return plan;
}
