// Which plan takes the place of one that overflowed, and the memory that both need.
#include "planner/rerun.hpp"

#include "planner/lower.hpp"
#include "planner/plan_choices.hpp"
#include "planner/plan_limits.hpp"

#include <algorithm>

namespace moe {

bool may_overflow(const Plan& plan) {
    return plan.stack == "moe-plan" && plan.capacity > 0.0 && plan.ep > 1 && has_experts(plan);
}

std::optional<Plan> rerun_plan(const Plan& plan) {
    if (!may_overflow(plan)) return std::nullopt;
    Plan again = plan;
    again.capacity = limits::most_capacity; // the worst case caps it, and scalars stay where they are
    again.recompute = recompute::full;
    again.offload &= offload::optimizer;
    again.ep_overlap = false; // a merged pair needs the workspace of both
    return again;
}

MemoryPlan plan_memory_with_rerun(const Plan& plan, const Program& program) {
    MemoryPlan memory = plan_memory(program);
    const std::optional<Plan> again = rerun_plan(plan);
    if (!again) return memory;
    const std::int64_t missing = plan_memory(lower(*again, program.pipeline_rank)).arena_bytes - memory.arena_bytes;
    if (missing <= 0) return memory;
    memory.arena_bytes += missing;
    memory.class_bytes[static_cast<std::size_t>(MemoryClass::transient)] += missing;
    return memory;
}

namespace {

struct Held {
    Storage storage;
    std::int64_t offset, bytes;
    int instances;
    bool operator==(const Held&) const = default;
};

std::vector<Held> states(const Program& program, const MemoryPlan& memory) {
    std::vector<Held> list;
    for (std::size_t id = 0; id < program.tensors.size(); ++id) {
        const Tensor& t = program.tensors[id];
        const bool visits = t.storage == Storage::activation || (t.storage == Storage::host && t.per_micro_batch);
        if (visits || t.base != no_tensor) continue;
        const Place& place = memory.places[id];
        list.push_back({t.storage, place.offset, t.bytes(), place.instances});
    }
    return list;
}

} // namespace

bool same_states(const Program& a, const MemoryPlan& memory_a, const Program& b, const MemoryPlan& memory_b) {
    return states(a, memory_a) == states(b, memory_b);
}

} // namespace moe
