// Tries the requirements of a stack on plans that hold nothing but a machine and what is asked of it.
#include "planner/stack/requirements.hpp"

#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/plan/plan.hpp"
#include "planner/stack/stack.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <memory>

namespace moe::stack {
namespace {

// The caller's machine, which outlives the plan.
plan::Plan plan_on(const machine::Hardware& hardware) {
    plan::Plan plan;
    plan.hardware = std::shared_ptr<const machine::Hardware>(&hardware, [](const machine::Hardware*) {});
    return plan;
}

const Rule* broken_of(const std::vector<Rule>& requirements, const plan::Plan& plan) {
    if (plan.hardware->compute_capability == 0.0) return nullptr; // a CPU, or nothing is known of it
    const auto found = std::find_if(requirements.begin(), requirements.end(),
                                    [&plan](const Rule& rule) { return rule.broken_by(plan); });
    return found == requirements.end() ? nullptr : &*found;
}

} // namespace

std::vector<Rule> read_requirements(const nlohmann::json& list, const std::string& place) {
    if (!list.is_array()) refuse("{}: \"requirements\" must be a list, found {}", place, list.type_name());
    std::vector<Rule> requirements;
    for (const nlohmann::json& item : list) {
        Rule rule = read_rule(item, place);
        for (const Condition* condition : {&rule.when, &rule.test})
            for (const std::string& field : condition->fields())
                if (field != "precision" && field != "dispatcher" && field.rfind("hardware", 0) != 0)
                    refuse("{}: requirement \"{}\": {}: must be precision, dispatcher or a fact of the hardware", place,
                           rule.name, field);
        requirements.push_back(std::move(rule));
    }
    return requirements;
}

void refuse_machine(const std::string& stack, const std::vector<Rule>& requirements,
                    const machine::Hardware& hardware) {
    std::vector<Rule> of_every_plan = requirements;
    std::erase_if(of_every_plan, [](const Rule& rule) { return !rule.when.fields().empty(); });
    if (const Rule* rule = broken_of(of_every_plan, plan_on(hardware)))
        refuse("hardware {}: stack {}: {} ({})", hardware.name, stack, rule->message, rule->source);
}

void leave_out_lacking(Stack& stack, const machine::Hardware& hardware) {
    if (stack.requirements == nullptr) return;
    plan::Plan plan = plan_on(hardware);
    plan.precision = machine::Precision::fp32;
    std::erase_if(stack.dispatchers, [&](plan::Dispatcher dispatcher) {
        plan.dispatcher = dispatcher;
        return broken_of(*stack.requirements, plan) != nullptr;
    });
    plan.dispatcher = plan::Dispatcher::alltoall;
    std::erase_if(stack.precisions, [&](machine::Precision precision) {
        plan.precision = precision;
        return broken_of(*stack.requirements, plan) != nullptr;
    });
    const auto& left = stack.dispatchers;
    if (!left.empty() && std::find(left.begin(), left.end(), stack.usual_dispatcher) == left.end())
        stack.usual_dispatcher = left.front();
}

std::string lacking(const plan::Plan& plan, const Stack& stack) {
    const Rule* rule = stack.requirements == nullptr ? nullptr : broken_of(*stack.requirements, plan);
    return rule == nullptr ? "" : fmt::format("{} ({})", rule->message, rule->source);
}

} // namespace moe::stack
