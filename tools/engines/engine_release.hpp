// Which release of an engine a plan is written for, and whether that release would run it.
#pragma once

#include "planner/plan/fwd.hpp"
#include "planner/stack/stack.hpp"

#include <string>

namespace moe::tools {

// The plan's own stack where it stands for a release of that engine ("megatron-core"), else the newest that does;
// `with_bridge`: the newest beside which a Megatron-Bridge is known. Throws Error (bad_input) where no stack stands for
// it.
stack::Stack engine_stack(const plan::Plan& plan, const std::string& engine, bool with_bridge = false);

// Throws Error (bad_input) with the first rule of the stack's engine that the plan breaks, and its source.
void check_rules(const plan::Plan& plan, const stack::Stack& stack);

} // namespace moe::tools
