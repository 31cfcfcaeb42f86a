// Lifetimes of activations: pools of saved blocks by schedule, first-fit packing of the rest, all in one arena.
#include "planner/memory/memory.hpp"

#include "planner/memory/packing.hpp"
#include "planner/plan/schedule.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>

namespace moe::memory {

namespace {

MemoryClass class_of(program::Storage storage) {
    switch (storage) {
    case program::Storage::parameter:
        return MemoryClass::weights;
    case program::Storage::gradient:
        return MemoryClass::gradients;
    case program::Storage::optimizer:
        return MemoryClass::optimizer;
    case program::Storage::activation:
        return MemoryClass::transient;
    case program::Storage::input:
    case program::Storage::scalar:
    case program::Storage::host: // The host's memory lies outside of the arena.
        return MemoryClass::inputs;
    }
    return MemoryClass::inputs;
}

// Saved tensors by chunk and by the layer whose backward reads them first.
std::vector<SavedBlock> saved_blocks(const program::Program& program, const std::vector<Use>& use) {
    std::vector<SavedBlock> blocks;
    std::map<std::tuple<int, int, bool, bool>, std::size_t> index; // number by (chunk, layer, from_dgrad, until_wgrad)
    std::vector<bool> taken(program.tensors.size(), false);
    for (const program::Template& tmpl : program.templates) {
        if (tmpl.kind == plan::SlotKind::forward) continue;
        for_each_access(program, tmpl, [&](program::TensorId id, int op, bool) {
            const auto i = static_cast<std::size_t>(id);
            if (taken[i] || !use[i].saved()) return;
            taken[i] = true;
            const int chunk = std::max(0, program.tensors[i].chunk),
                      layer = tmpl.ops[static_cast<std::size_t>(op)].layer;
            const bool from_dgrad = !use[i].forward, until_wgrad = use[i].wgrad;
            const auto [at, fresh] = index.try_emplace({chunk, layer, from_dgrad, until_wgrad}, blocks.size());
            if (fresh) blocks.push_back({chunk, layer, from_dgrad, until_wgrad, {}, 0, 0, {}});
            SavedBlock& block = blocks[at->second];
            block.tensors.push_back(id);
            block.bytes += aligned(program.tensors[i].bytes());
        });
    }
    return blocks;
}

struct Pool {
    std::int64_t bytes = 0; // bytes of one instance
    int instances = 0;
    std::vector<int> free; // released instances, the last one is taken first
};

// Gives every block an instance for every micro-batch, and instances that are free again to others.
class Instances {
public:
    Instances(const program::Program& program, std::vector<SavedBlock>& blocks) : program_(program) {
        std::map<std::int64_t, int> pool_of_size;
        of_chunk_.resize(program.chunks.size());
        int micro_batches = 1;
        for (std::size_t s = 0; s < program.slots.size(); ++s) {
            micro_batches = std::max(micro_batches, program.slots[s].micro_batch + 1);
            last_[{chunk(s), program.slots[s].micro_batch}] = s;
        }
        of_tensor_.resize(program.tensors.size());
        for (SavedBlock& block : blocks) {
            for (const program::TensorId id : block.tensors) of_tensor_[static_cast<std::size_t>(id)] = &block;
            const auto [at, fresh] = pool_of_size.try_emplace(block.bytes, static_cast<int>(pools_.size()));
            if (fresh) pools_.push_back({block.bytes, 0, {}});
            block.pool = at->second;
            block.instance.assign(static_cast<std::size_t>(micro_batches), -1);
            of_chunk_[static_cast<std::size_t>(block.chunk)].push_back(&block);
        }
        // Blocks go in the order of the forward; those outside of layers are the loss for the most part.
        for (auto& list : of_chunk_)
            std::stable_sort(list.begin(), list.end(), [](const SavedBlock* a, const SavedBlock* b) {
                return (a->layer < 0 ? unbounded : a->layer) < (b->layer < 0 ? unbounded : b->layer);
            });
    }

    std::vector<Pool> play() {
        for (std::size_t s = 0; s < program_.slots.size(); ++s) {
            if (chunk(s) < 0) continue;
            if (program_.slots[s].merge >= 0) {
                merge(s, s + 1);
                ++s;
                continue;
            }
            for (SavedBlock* block : blocks(s)) take(*block, s);
            for (SavedBlock* block : blocks(s)) release(*block, s);
        }
        return std::move(pools_);
    }

private:
    static constexpr int unbounded = std::numeric_limits<int>::max();

    int chunk(std::size_t slot) const {
        return program_.templates[static_cast<std::size_t>(program_.slots[slot].index)].chunk;
    }
    plan::SlotKind kind(std::size_t slot) const {
        return program_.templates[static_cast<std::size_t>(program_.slots[slot].index)].kind;
    }
    std::vector<SavedBlock*>& blocks_of(int chunk) { return of_chunk_[static_cast<std::size_t>(chunk)]; }
    std::vector<SavedBlock*>& blocks(std::size_t slot) { return blocks_of(chunk(slot)); }

    void take(SavedBlock& block, std::size_t slot) {
        if (block.from_dgrad && kind(slot) != plan::SlotKind::dgrad) return;
        Pool& pool = pools_[static_cast<std::size_t>(block.pool)];
        int& instance = block.instance[static_cast<std::size_t>(program_.slots[slot].micro_batch)];
        if (instance >= 0) return;
        if (pool.free.empty()) pool.free.push_back(pool.instances++);
        instance = pool.free.back();
        pool.free.pop_back();
    }
    void release(const SavedBlock& block, std::size_t slot) {
        const int micro_batch = program_.slots[slot].micro_batch,
                  instance = block.instance[static_cast<std::size_t>(micro_batch)];
        const bool last = last_.at({chunk(slot), micro_batch}) == slot;
        const bool early = kind(slot) == plan::SlotKind::dgrad && !block.until_wgrad; // dgrad has freed it
        const bool freed = !block.until_wgrad && kind(slot) == plan::SlotKind::wgrad;
        if (instance < 0 || freed || (!last && !early)) return;
        pools_[static_cast<std::size_t>(block.pool)].free.push_back(instance);
    }
    // A forward takes a block when its first op touches it, the backward beside it releases one behind its last.
    void merge(std::size_t forward, std::size_t backward) {
        const program::Merge& merge = program_.merges[static_cast<std::size_t>(program_.slots[forward].merge)];
        const Touches &filled = touches(merge.forward), &emptied = touches(merge.backward);
        std::size_t f = 0, b = 0;
        for (const bool from_backward : merge.from_backward) {
            if (from_backward)
                for (const SavedBlock* block : emptied[b++].last) release(*block, backward);
            else
                for (SavedBlock* block : filled[f++].first) take(*block, forward);
        }
    }

    // Blocks that an op of a template is the first or the last to touch.
    struct Touch {
        std::vector<SavedBlock*> first, last;
    };
    using Touches = std::vector<Touch>;
    const Touches& touches(int index) {
        const auto [at, fresh] = touches_.try_emplace(index);
        if (!fresh) return at->second;
        const program::Template& tmpl = program_.templates[static_cast<std::size_t>(index)];
        at->second.resize(tmpl.ops.size());
        std::map<SavedBlock*, Lifetime> touched;
        for_each_access(program_, tmpl, [&](program::TensorId id, int op, bool) {
            SavedBlock* block = of_tensor_[static_cast<std::size_t>(id)];
            if (block == nullptr) return;
            Lifetime& life = touched[block];
            life.first = std::min(life.first, op);
            life.last = std::max(life.last, op);
        });
        for (SavedBlock* block : blocks_of(tmpl.chunk)) {
            const auto found = touched.find(block);
            if (found == touched.end()) continue;
            at->second[static_cast<std::size_t>(found->second.first)].first.push_back(block);
            at->second[static_cast<std::size_t>(found->second.last)].last.push_back(block);
        }
        return at->second;
    }

    const program::Program& program_;
    std::vector<Pool> pools_;
    std::vector<std::vector<SavedBlock*>> of_chunk_;
    std::vector<SavedBlock*> of_tensor_;              // block of each tensor; null: not saved
    std::map<int, Touches> touches_;                  // touches by template
    std::map<std::pair<int, int>, std::size_t> last_; // last slot by (chunk, micro-batch)
};

void place_saved(const program::Program& program, const std::vector<Use>& use, MemoryPlan& plan) {
    plan.blocks = saved_blocks(program, use);
    const std::vector<Pool> pools = Instances(program, plan.blocks).play();
    std::vector<std::int64_t> start;
    for (const Pool& pool : pools) {
        start.push_back(plan.arena_bytes);
        plan.arena_bytes += pool.bytes * pool.instances;
        plan.class_bytes[static_cast<std::size_t>(MemoryClass::saved)] += pool.bytes * pool.instances;
    }
    for (std::size_t b = 0; b < plan.blocks.size(); ++b) {
        const SavedBlock& block = plan.blocks[b];
        const Pool& pool = pools[static_cast<std::size_t>(block.pool)];
        std::int64_t offset = start[static_cast<std::size_t>(block.pool)];
        for (const program::TensorId id : block.tensors) {
            plan.places[static_cast<std::size_t>(id)] = {MemoryClass::saved, offset, pool.bytes, pool.instances,
                                                         static_cast<int>(b)};
            offset += aligned(program.tensors[static_cast<std::size_t>(id)].bytes());
        }
    }
}

// Copies of a tensor on the host: of activations as many as are under way.
int host_instances(const program::Program& program, const program::Tensor& t) {
    if (!t.per_micro_batch || t.chunk < 0) return 1;
    return std::max(1, program.in_flight[static_cast<std::size_t>(t.chunk)]);
}

} // namespace

std::int64_t host_memory(const program::Program& program) {
    std::int64_t bytes = 0;
    for (const program::Tensor& t : program.tensors)
        if (t.storage == program::Storage::host) bytes += aligned(t.bytes()) * host_instances(program, t);
    return bytes;
}

MemoryPlan plan_memory(const program::Program& program, int micro_batches) {
    MemoryPlan plan;
    plan.places.resize(program.tensors.size());
    const std::vector<Use> use = uses(program);
    for (const program::Slot& slot : program.slots) micro_batches = std::max(micro_batches, slot.micro_batch + 1);

    const auto reserve = [&](std::size_t id, MemoryClass memory_class, int instances) {
        Place& place = plan.places[id];
        place.memory_class = memory_class;
        place.offset = plan.arena_bytes;
        place.stride = aligned(program.tensors[id].bytes());
        place.instances = instances;
        plan.arena_bytes += place.stride * instances;
        plan.class_bytes[static_cast<std::size_t>(memory_class)] += place.stride * instances;
    };
    for (const program::Storage storage :
         {program::Storage::parameter, program::Storage::gradient, program::Storage::optimizer, program::Storage::input,
          program::Storage::scalar})
        for (std::size_t id = 0; id < program.tensors.size(); ++id) {
            const program::Tensor& t = program.tensors[id];
            if (t.storage != storage || t.base != program::no_tensor) continue;
            reserve(id, class_of(storage), storage == program::Storage::input && t.per_micro_batch ? micro_batches : 1);
        }
    const std::int64_t states = plan.arena_bytes; // bytes kept all the time
    for (const bool visiting : {false, true}) // Optimizer states are first, where a step that is run again has them.
        for (std::size_t id = 0; id < program.tensors.size(); ++id) {
            const program::Tensor& t = program.tensors[id];
            if (t.storage != program::Storage::host || t.per_micro_batch != visiting) continue;
            plan.places[id] = {MemoryClass::inputs, plan.host_bytes, aligned(t.bytes()), host_instances(program, t),
                               -1};
            plan.host_bytes += plan.places[id].stride * plan.places[id].instances;
        }
    place_saved(program, use, plan);

    // Templates take turns with one workspace; a backward that runs beside a forward has its own behind it. Tensors
    // that finish brings to the device lie where activations lay.
    const bool merged = !program.merges.empty();
    std::int64_t heights[2] = {0, 0}, finish_height = 0;
    std::vector<std::vector<Packed>> packed(program.templates.size());
    std::vector<std::vector<std::pair<program::TensorId, Lifetime>>> lists;
    for (const program::Template& tmpl : program.templates) lists.push_back(transients(program, tmpl, use));
    // The last backward differs from the plain one only by reductions of gradients, which may work on copies. The one
    // with more transients gives places to those of both.
    std::vector<std::size_t> order(lists.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return lists[a].size() > lists[b].size(); });
    std::vector<bool> done(program.tensors.size(), false);
    for (const std::size_t t : order) {
        const program::Template& tmpl = program.templates[t];
        auto& list = lists[t];
        if (!list.empty() && done[static_cast<std::size_t>(list.front().first)]) continue;
        for (const auto& [id, life] : list) done[static_cast<std::size_t>(id)] = true;
        std::int64_t& height = tmpl.kind == plan::SlotKind::finish               ? finish_height
                               : merged && tmpl.kind == plan::SlotKind::backward ? heights[1]
                                                                                 : heights[0];
        height = std::max(height, pack(program, std::move(list), packed[t]));
    }
    for (std::size_t t = 0; t < packed.size(); ++t) {
        const plan::SlotKind kind = program.templates[t].kind;
        const std::int64_t start = kind == plan::SlotKind::finish               ? states
                                   : merged && kind == plan::SlotKind::backward ? plan.arena_bytes + heights[0]
                                                                                : plan.arena_bytes;
        for (const Packed& p : packed[t])
            plan.places[static_cast<std::size_t>(p.id)] = {MemoryClass::transient, start + p.offset, 0, 1, -1};
    }
    const std::int64_t workspace = std::max(heights[0] + heights[1], states + finish_height - plan.arena_bytes);
    plan.arena_bytes += workspace;
    plan.class_bytes[static_cast<std::size_t>(MemoryClass::transient)] = workspace;

    for (std::size_t id = 0; id < program.tensors.size(); ++id) {
        const program::Tensor& t = program.tensors[id];
        if (t.base == program::no_tensor) continue;
        Place place = plan.places[static_cast<std::size_t>(t.base)];
        place.offset += program::bytes_of(t.dtype, t.offset);
        plan.places[id] = place;
    }
    return plan;
}

namespace {

void add_shared(std::vector<SegmentMemory::Shared>& list, const program::Tensor& tensor, bool backward) {
    const auto same = std::find_if(list.begin(), list.end(), [&](const SegmentMemory::Shared& s) {
        return s.backward == backward && s.dtype == tensor.dtype && s.rows == tensor.rows && s.cols == tensor.cols;
    });
    if (same == list.end())
        list.push_back({tensor.dtype, tensor.rows, tensor.cols, aligned(tensor.bytes()), 1, backward});
    else
        ++same->count;
}

} // namespace

SegmentMemory segment_memory(const program::Program& segment) {
    const std::vector<Use> use = uses(segment);
    SegmentMemory memory;
    for (std::size_t id = 0; id < segment.tensors.size(); ++id)
        if (use[id].saved()) memory.saved += aligned(segment.tensors[id].bytes());
    // Buffers that layers share outlive the one of a segment: FSDP's buffers of gradients, those of offloaded
    // activations.
    const auto widened = [&](int direction) {
        const program::Template& tmpl = segment.templates[static_cast<std::size_t>(direction)];
        const Lifetime whole{0, static_cast<int>(tmpl.ops.size()) - 1};
        auto list = transients(segment, tmpl, use);
        for (auto& [id, life] : list) {
            for (const program::Bucket& b : segment.buckets)
                if (b.whole_gradients == id && b.layer >= 0) life.first = 0;
            const program::Tensor& tensor = segment.tensors[static_cast<std::size_t>(id)];
            if (tensor.chunk >= 0) continue;
            life = whole;
            add_shared(memory.shared, tensor, direction == 1);
        }
        return list;
    };
    std::vector<Packed> placed;
    memory.forward = pack(segment, widened(0), placed);
    placed.clear();
    memory.backward = pack(segment, widened(1), placed);
    return memory;
}

} // namespace moe::memory
