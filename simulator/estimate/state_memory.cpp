// Closed forms of what a rank keeps of its parameters, whole or sharded, and of the buffers that FSDP works in.
#include "simulator/estimate/state_memory.hpp"

#include "planner/lower/emit/parameters.hpp"
#include "planner/model/model.hpp"

#include <algorithm>

namespace moe::estimate {

double passed_table_bytes(const plan::Plan& plan) {
    if (plan.lora.on()) return 0.0;                          // The table is frozen.
    const std::int64_t rows = plan.padded_vocab() / plan.tp; // multiple of TP
    const double table =
        passes::gradient_bytes(plan) * static_cast<double>(rows) * static_cast<double>(plan.model->hidden);
    return emit::shares_table(plan) ? table / (static_cast<double>(plan.dp) * plan.cp) : table; // The table is reduced.
}

namespace {

// FSDP: bytes of a kind's gathered weights and whole gradients.
struct Buffers {
    std::int64_t weights = 0, gradients = 0;
    std::int64_t staging = 0; // BF16 weights of a bucket between their gather and their quantization
};

// The buffers that layers of even or of odd places take turns with, each as large as its largest user.
Buffers largest_of(const plan::Plan& plan, const std::vector<passes::BucketSize>& buckets) {
    std::vector<const passes::BucketSize*> largest;
    for (const passes::BucketSize& b : buckets) {
        if (b.group_size == 1) continue;
        const auto same = std::find_if(largest.begin(), largest.end(), [&b](const passes::BucketSize* other) {
            return other->domain == b.domain && other->group == b.group && other->weight_dtype == b.weight_dtype;
        });
        if (same == largest.end())
            largest.push_back(&b);
        else if ((*same)->elements < b.elements)
            *same = &b;
    }
    Buffers sum;
    for (const passes::BucketSize* b : largest) {
        sum.weights += static_cast<std::int64_t>(passes::weight_bytes(*b));
        sum.gradients += static_cast<std::int64_t>(passes::gradient_bytes(plan)) * b->elements;
        if (program::is_quantized(b->weight_dtype)) sum.staging = std::max(sum.staging, 2 * b->elements);
    }
    return sum;
}

std::vector<passes::BucketSize> buckets_of_layer(SegmentCache& cache, const plan::Plan& plan, SegmentId id) {
    std::vector<passes::BucketSize> list = cache.buckets(plan, id);
    std::erase_if(list, [](const passes::BucketSize& b) { return b.layer < 0; });
    return list;
}

// Gathered weights and whole gradients of what lies outside of layers.
Buffers ends_of(SegmentCache& cache, const plan::Plan& plan, lower::SegmentKind kind) {
    return largest_of(plan, cache.buckets(plan, {kind, 0}));
}

} // namespace

namespace {

// Buffers of one shape are there from the first of a stage's segments that has them to the last.
struct SharedSpan {
    memory::SegmentMemory::Shared shared;
    std::size_t first = 0, last = 0;
};

void extend(std::vector<SharedSpan>& spans, const memory::SegmentMemory::Shared& more, std::size_t at) {
    const auto same = std::find_if(spans.begin(), spans.end(), [&more](const SharedSpan& span) {
        const memory::SegmentMemory::Shared& s = span.shared;
        return s.backward == more.backward && s.dtype == more.dtype && s.rows == more.rows && s.cols == more.cols;
    });
    if (same == spans.end()) {
        spans.push_back({more, at, at});
        return;
    }
    same->shared.count = std::max(same->shared.count, more.count);
    same->last = at;
}

void add(memory::SegmentMemory& memory, const memory::SegmentMemory::Shared& s, int times) {
    (s.backward ? memory.backward : memory.forward) += times * s.count * s.bytes;
}

} // namespace

std::vector<memory::SegmentMemory> memory_beside_shared(SegmentCache& cache, const plan::Plan& plan,
                                                        const Segments& segments) {
    std::vector<memory::SegmentMemory> result;
    std::vector<SharedSpan> spans;
    for (std::size_t i = 0; i < segments.size(); ++i) {
        result.push_back(cache.size(plan, segments[i].first).memory);
        for (const memory::SegmentMemory::Shared& s : result.back().shared) extend(spans, s, i);
    }
    for (std::size_t i = 0; i < result.size(); ++i) {
        for (const memory::SegmentMemory::Shared& s : result[i].shared) add(result[i], s, -1);
        for (const SharedSpan& span : spans)
            if (span.first <= i && i <= span.last) add(result[i], span.shared, 1);
    }
    return result;
}

ReshardedMemory resharded_memory(SegmentCache& cache, const plan::Plan& plan, const Segments& segments) {
    std::vector<passes::BucketSize> places[2]; // users of either turn
    int place = 0, mtp = 0;
    for (const auto& [id, times] : segments) {
        const std::vector<passes::BucketSize> own = buckets_of_layer(cache, plan, id);
        for (int i = 0; i < (own.empty() ? 0 : std::min(times, 2)); ++i) {
            std::vector<passes::BucketSize>& users = places[(place + i) % 2];
            users.insert(users.end(), own.begin(), own.end());
        }
        place += own.empty() ? 0 : times;
        mtp += lower::is_mtp(id.kind) ? times : 0;
    }
    const Buffers even = largest_of(plan, places[0]), odd = largest_of(plan, places[1]);
    const Buffers& last = place % 2 == 1 ? even : odd;
    const std::int64_t forward = even.weights + odd.weights, backward = forward + even.gradients + odd.gradients;
    ReshardedMemory memory;
    // MTP adds to the embedding's gradient before the layers' backward, the embedding itself behind it.
    const std::int64_t table = mtp > 0 ? ends_of(cache, plan, lower::SegmentKind::embedding).gradients : 0;
    // MTP reads the LM head's weights, which are there once.
    memory.counted_twice = mtp * ends_of(cache, plan, lower::SegmentKind::head).weights;
    // Only the gradient between two layers is alive where one layer's backward ends and the next one's weights arrive.
    memory.workspace.backward =
        backward + table + std::max(even.staging, odd.staging) + 2 * plan.tokens_local() * plan.model->hidden;
    const auto raise = [](std::int64_t& height, std::int64_t to) { height = std::max(height, to); };
    const std::vector<memory::SegmentMemory> memories = memory_beside_shared(cache, plan, segments);
    for (std::size_t i = 0; i < segments.size(); ++i) {
        const SegmentId id = segments[i].first;
        const memory::SegmentMemory& alone = memories[i];
        const Buffers own = largest_of(plan, buckets_of_layer(cache, plan, id));
        if (own.weights > 0) {
            // Of several depths of MTP the last one's backward comes first.
            const std::int64_t around = backward + (id.kind == lower::SegmentKind::layer || mtp > 1 ? table : 0);
            raise(memory.workspace.forward, alone.forward - own.weights + forward);
            raise(memory.workspace.backward, alone.backward - own.weights - own.gradients + around);
        } else { // The loss lies between the layers and MTP, or behind the last layer, whose weights are on their way.
            raise(memory.workspace.forward, alone.forward + (mtp > 0 ? forward : last.weights));
            raise(memory.workspace.backward, alone.backward + (mtp > 0 ? backward : last.weights));
        }
    }
    return memory;
}

double state_bytes(const plan::Plan& plan, const passes::BucketSize& b) {
    if (plan.reshards() && b.group_size > 1) {
        const auto n = static_cast<double>(b.elements);
        const double weights = plan.precision == machine::Precision::fp32 ? 4.0 : 2.0;
        return (weights + passes::gradient_bytes(plan)) * n / b.group_size;
    }
    return passes::weight_bytes(b) + passes::gradient_bytes(plan, b);
}

} // namespace moe::estimate
