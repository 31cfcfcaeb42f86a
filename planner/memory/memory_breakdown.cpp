// Splits a planned arena into the components that tables of memory name: states by domain, activations by module.
#include "planner/memory/memory.hpp"
#include "planner/plan/schedule.hpp"
#include "planner/program/program.hpp"

#include <algorithm>
#include <numeric>
#include <set>

namespace moe::memory {

const char* to_string(MemoryClass memory_class) {
    switch (memory_class) {
    case MemoryClass::weights:
        return "weights";
    case MemoryClass::gradients:
        return "gradients";
    case MemoryClass::optimizer:
        return "optimizer";
    case MemoryClass::saved:
        return "saved activations";
    case MemoryClass::transient:
        return "workspace";
    case MemoryClass::inputs:
        return "inputs";
    }
    return "?";
}

namespace {

std::size_t index_of(MemoryClass memory_class) { return static_cast<std::size_t>(memory_class); }

// Buffers of experts: buckets hold one domain each.
void add_expert_states(const program::Program& program, const MemoryPlan& plan, MemoryBreakdown& result) {
    for (const program::Bucket& bucket : program.buckets) {
        if (bucket.domain != plan::Domain::expert) continue;
        for (const program::TensorId id :
             {bucket.weights, bucket.gradients, bucket.master, bucket.exp_avg, bucket.exp_avg_sq}) {
            if (id == program::no_tensor) continue;
            const Place& place = plan.places[static_cast<std::size_t>(id)];
            result.expert[index_of(place.memory_class)] += place.stride * place.instances;
        }
    }
}

// Before every backward slot, the forward that runs beside it not counted.
int most_kept(const program::Program& program) {
    std::vector<plan::Turn> turns;
    for (const program::Slot& slot : program.slots) {
        const program::Template& tmpl = program.templates[static_cast<std::size_t>(slot.index)];
        if (tmpl.chunk >= 0) turns.push_back({tmpl.kind, tmpl.chunk, slot.micro_batch, slot.merge >= 0});
    }
    int most = 0;
    for (const plan::Kept& state : plan::kept_together(turns, static_cast<int>(program.chunks.size())))
        most = std::max(most, std::accumulate(state.micro_batches.begin(), state.micro_batches.end(), 0));
    return most;
}

} // namespace

MemoryBreakdown memory_breakdown(const program::Program& program, const MemoryPlan& plan) {
    MemoryBreakdown result;
    result.classes = plan.class_bytes;
    add_expert_states(program, plan, result);
    std::vector<program::Module> writer(program.tensors.size(), program::Module::pipeline);
    for (const program::Template& tmpl : program.templates) {
        if (tmpl.kind != plan::SlotKind::forward && tmpl.kind != plan::SlotKind::dgrad) continue;
        for (const program::Op& op : tmpl.ops)
            for (const program::TensorId id : op.out)
                if (id != program::no_tensor) writer[static_cast<std::size_t>(id)] = op.module;
    }
    // Blocks of one pool hold the same tensors, each in its own chunk and layer.
    std::set<int> counted;
    for (const SavedBlock& block : plan.blocks)
        if (counted.insert(block.pool).second)
            for (const program::TensorId id : block.tensors) {
                const Place& place = plan.places[static_cast<std::size_t>(id)];
                result.saved[writer[static_cast<std::size_t>(id)]] +=
                    aligned(program.tensors[static_cast<std::size_t>(id)].bytes()) * place.instances;
            }
    result.kept = most_kept(program);
    return result;
}

} // namespace moe::memory
