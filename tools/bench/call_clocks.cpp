// The clocks of the measured calls that a plan's products and attention are priced by, for clocked.py. Build target
// bench-call-clocks; bench-call-clocks PLAN, of a profile with measured_clocks.
#include "planner/base/error.hpp"
#include "planner/lower/lower.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/measured.hpp"
#include "planner/program/program.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/cost/cost.hpp"

#include <fmt/core.h>

#include <exception>
#include <map>
#include <utility>

namespace {

using namespace moe;

bool computes(program::OpKind kind) {
    return kind == program::OpKind::gemm || kind == program::OpKind::grouped_gemm ||
           kind == program::OpKind::attention || kind == program::OpKind::attention_grad;
}

// Seconds of a step by op kind and MHz, of the first pipeline rank.
void run(const char* path) {
    const plan::Plan plan = plan::load_plan(path);
    const stack::Stack stack = stack::load_stack(plan.stack, *plan.hardware);
    const cost::Machine machine(*plan.hardware);
    const cost::CostModel model(plan, stack, machine);
    const program::Program program = lower::lower(plan, 0);
    std::map<std::pair<program::OpKind, double>, double> seconds;
    for (const program::Slot& slot : program.slots)
        for (const program::Op& op : program.templates[static_cast<std::size_t>(slot.index)].ops) {
            if (!computes(op.kind)) continue;
            const program::CostPoint at = program::cost_point(op, program);
            const cost::MeasuredFamily* family = machine.measured.find(at);
            const double clock = family == nullptr ? 0.0 : family->clock_hz(at.work, at.sides);
            seconds[{op.kind, clock / 1e6}] += model(op, program).device;
        }
    for (const auto& [place, sum] : seconds)
        fmt::print("{} {} {}\n", program::to_string(place.first), place.second, sum);
}

} // namespace

int main(int count, char** arguments) {
    try {
        if (count != 2) moe::refuse("give a plan.json");
        run(arguments[1]);
        return 0;
    } catch (const std::exception& error) {
        fmt::print(stderr, "bench-call-clocks: {}\n", error.what());
        return 1;
    }
}
