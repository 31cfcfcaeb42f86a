// Megatron-Core's keyword arguments, as its configuration classes take them.
#include "planner/plan/plan.hpp"
#include "tools/engines/engine_release.hpp"
#include "tools/engines/settings.hpp"
#include "tools/launch/engine_launch.hpp"

namespace moe::tools {

EngineLaunch megatron_core_launch(const plan::Plan& plan) {
    const EngineTable table = load_engine_table("megatron-core");
    const stack::Stack stack = engine_stack(plan, table.name);
    const plan::Plan whole = told(plan);
    check_rules(whole, stack);
    const Settings settings{table, whole, stack.engine.release};
    EngineLaunch launch;
    launch.engine = table.name;
    launch.release = settings.release;
    launch.said = {{"class", settings.class_name()},
                   {"kwargs", settings.part("kwargs")},
                   {"optimizer", settings.part("optimizer")},
                   {"ddp", settings.part("ddp")}};
    launch.environment = settings.environment("kwargs");
    return launch;
}

} // namespace moe::tools
