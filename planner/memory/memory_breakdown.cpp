// Splits a planned arena into the components that tables of memory name: states by domain, activations by module.
#include "planner/memory/memory.hpp"
#include "planner/plan/schedule.hpp"
#include "planner/program/program.hpp"

#include <algorithm>
#include <numeric>
#include <set>

namespace moe {

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
void add_expert_states(const Program& program, const MemoryPlan& plan, MemoryBreakdown& result) {
    for (const Bucket& bucket : program.buckets) {
        if (bucket.domain != Domain::expert) continue;
        for (const TensorId id : {bucket.weights, bucket.gradients, bucket.master, bucket.exp_avg, bucket.exp_avg_sq}) {
            if (id == no_tensor) continue;
            const Place& place = plan.places[static_cast<std::size_t>(id)];
            result.expert[index_of(place.memory_class)] += place.stride * place.instances;
        }
    }
}

// Before every backward slot, the forward that runs beside it not counted.
int most_kept(const Program& program) {
    std::vector<Turn> turns;
    for (const Slot& slot : program.slots) {
        const Template& tmpl = program.templates[static_cast<std::size_t>(slot.index)];
        if (tmpl.chunk >= 0) turns.push_back({tmpl.kind, tmpl.chunk, slot.micro_batch, slot.merge >= 0});
    }
    int most = 0;
    for (const Kept& state : kept_together(turns, static_cast<int>(program.chunks.size())))
        most = std::max(most, std::accumulate(state.micro_batches.begin(), state.micro_batches.end(), 0));
    return most;
}

} // namespace

MemoryBreakdown memory_breakdown(const Program& program, const MemoryPlan& plan) {
    MemoryBreakdown result;
    result.classes = plan.class_bytes;
    add_expert_states(program, plan, result);
    std::vector<Module> writer(program.tensors.size(), Module::pipeline);
    for (const Template& tmpl : program.templates) {
        if (tmpl.kind != SlotKind::forward && tmpl.kind != SlotKind::dgrad) continue;
        for (const Op& op : tmpl.ops)
            for (const TensorId id : op.out)
                if (id != no_tensor) writer[static_cast<std::size_t>(id)] = op.module;
    }
    // Blocks of one pool hold the same tensors, each in its own chunk and layer.
    std::set<int> counted;
    for (const SavedBlock& block : plan.blocks)
        if (counted.insert(block.pool).second)
            for (const TensorId id : block.tensors) {
                const Place& place = plan.places[static_cast<std::size_t>(id)];
                result.saved[writer[static_cast<std::size_t>(id)]] +=
                    aligned(program.tensors[static_cast<std::size_t>(id)].bytes()) * place.instances;
            }
    result.kept = most_kept(program);
    return result;
}

} // namespace moe
