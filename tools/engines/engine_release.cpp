// Releases are those of the stacks: profiles/stacks says which engine each of them stands for.
#include "tools/engines/engine_release.hpp"

#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/plan/plan.hpp"

#include <optional>

namespace moe::tools {
namespace {

bool stands_for(const stack::Stack& stack, const std::string& engine, bool with_bridge) {
    return stack.engine.name == engine && !stack.engine.release.empty() &&
           (!with_bridge || !stack.engine.bridge.empty());
}

} // namespace

stack::Stack engine_stack(const plan::Plan& plan, const std::string& engine, bool with_bridge) {
    stack::Stack own = stack::load_stack(plan.stack, *plan.hardware);
    if (stands_for(own, engine, with_bridge)) return own;
    std::optional<stack::Stack> newest;
    for (const std::string& name : stack::stack_names()) {
        stack::Stack other = stack::load_stack(name, *plan.hardware);
        if (!stands_for(other, engine, with_bridge)) continue;
        if (!newest || stack::compare_versions(other.engine.release, newest->engine.release) > 0)
            newest = std::move(other);
    }
    if (!newest) refuse("{}: no stack in profiles/stacks stands for a release of it", engine);
    return *newest;
}

void check_rules(const plan::Plan& plan, const stack::Stack& stack) {
    const auto broken = stack::broken_rules(plan, stack);
    if (!broken.empty()) refuse("{} ({})", broken.front()->message, broken.front()->source);
}

} // namespace moe::tools
