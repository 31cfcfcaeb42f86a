// The memory that a step and the one in its place need together.
#include "planner/memory/retry_memory.hpp"

#include "planner/lower/lower.hpp"
#include "planner/plan/overflow_retry.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/program.hpp"

#include <algorithm>
#include <optional>
#include <vector>

namespace moe::memory {

MemoryPlan plan_memory_with_retry(const plan::Plan& plan, const program::Program& program) {
    MemoryPlan memory = plan_memory(program);
    const std::optional<plan::Plan> again = plan::overflow_retry_plan(plan);
    if (!again) return memory;
    const std::int64_t missing =
        plan_memory(lower::lower(*again, program.pipeline_rank)).arena_bytes - memory.arena_bytes;
    if (missing <= 0) return memory;
    memory.arena_bytes += missing;
    memory.class_bytes[static_cast<std::size_t>(MemoryClass::transient)] += missing;
    return memory;
}

namespace {

struct Held {
    program::Storage storage;
    std::int64_t offset, bytes;
    int instances;
    bool operator==(const Held&) const = default;
};

std::vector<Held> states(const program::Program& program, const MemoryPlan& memory) {
    std::vector<Held> list;
    for (std::size_t id = 0; id < program.tensors.size(); ++id) {
        const program::Tensor& t = program.tensors[id];
        const bool visits =
            t.storage == program::Storage::activation || (t.storage == program::Storage::host && t.per_micro_batch);
        if (visits || t.base != program::no_tensor) continue;
        const Place& place = memory.places[id];
        list.push_back({t.storage, place.offset, t.bytes(), place.instances});
    }
    return list;
}

} // namespace

bool same_states(const program::Program& a, const MemoryPlan& memory_a, const program::Program& b,
                 const MemoryPlan& memory_b) {
    return states(a, memory_a) == states(b, memory_b);
}

} // namespace moe::memory
