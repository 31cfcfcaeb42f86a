// Corrects the predictions of published runs by their neighbours, each without itself, and sets their intervals.
#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "simulator/published/validate.hpp"

#include <cmath>
#include <map>

namespace moe::published {

void correct_runs(std::vector<Prediction>& predictions, const machine::Coefficients& coefficients, bool on) {
    std::map<std::pair<std::string, std::string>, stack::Stack> stacks; // by name and machine
    std::map<bool, std::optional<Neighbours>> neighbours;               // by whether the stack is executable
    for (Prediction& p : predictions) {
        if (!p.skipped.empty()) continue;
        const std::pair<std::string, std::string> key{p.plan.stack, p.plan.hardware->name};
        auto stack = stacks.find(key);
        if (stack == stacks.end())
            stack = stacks.emplace(key, stack::load_stack(p.plan.stack, *p.plan.hardware, coefficients)).first;
        const bool executable = stack->second.executable;
        if (on && !neighbours.contains(executable)) neighbours[executable] = load_neighbours(stack->second);
        if (on && neighbours[executable]) {
            p.correction = neighbours[executable]->of(p.workload, p.run_id);
            p.estimate = corrected(p.estimate, *p.correction);
            p.predicted /= p.correction->factor();
            p.error = p.predicted / p.published - 1.0;
        }
        search::Estimate as_published;
        as_published.tflops_per_gpu = p.predicted;
        p.interval = interval_of(p.plan, as_published, executable, p.correction ? &*p.correction : nullptr).interval;
    }
}

} // namespace moe::published
