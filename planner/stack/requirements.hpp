// What a stack needs of a machine: rules over its precisions, its dispatchers and the machine, stated in the stack's
// JSON.
#pragma once

#include "planner/machine/fwd.hpp"
#include "planner/plan/fwd.hpp"
#include "planner/stack/fwd.hpp"
#include "planner/stack/rules.hpp"

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <vector>

namespace moe::stack {

// "requirements": rules whose tests read hardware facts, `precision` and `dispatcher` alone. Throws Error (bad_input).
std::vector<Rule> read_requirements(const nlohmann::json& list, const std::string& place);

// Throws Error (bad_input) with the requirement of the whole software (one of every plan) that the machine fails. CPUs
// have none.
void refuse_machine(const std::string& stack, const std::vector<Rule>& requirements, const machine::Hardware& hardware);

// Takes precisions and dispatchers out of the stack for which the machine lacks something; the usual dispatcher is then
// the first that is left.
void leave_out_lacking(Stack& stack, const machine::Hardware& hardware);

// The requirement that the plan's machine fails, as message and source; empty where it meets them all.
std::string lacking(const plan::Plan& plan, const Stack& stack);

} // namespace moe::stack
