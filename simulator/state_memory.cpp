// Closed forms of what a rank keeps of its parameters, whole or sharded, and of the buffers that FSDP works in.
#include "simulator/state_memory.hpp"

#include <algorithm>

namespace moe {

bool is_quantized(Dtype dtype) { return dtype != Dtype::f32 && dtype != Dtype::bf16; }

double weight_bytes(const BucketSize& b) {
    return static_cast<double>(bytes_of(b.weight_dtype, is_quantized(b.weight_dtype) ? 2 * b.elements : b.elements));
}

Dtype gradient_dtype(const Plan& plan) { return plan.gradients == Precision::bf16 ? Dtype::bf16 : Dtype::f32; }
double gradient_bytes(const Plan& plan) { return plan.gradients == Precision::bf16 ? 2.0 : 4.0; }

namespace {

// FSDP: the buffers that layers of even and odd places take turns with, each as large as its largest user.
struct TurnBuffers {
    std::int64_t weights = 0, gradients = 0; // of one turn
    std::int64_t staging = 0;                // BF16 weights of a bucket between their gather and their quantization
    TurnBuffers(const Plan& plan, const std::vector<BucketSize>& buckets) {
        std::vector<const BucketSize*> largest;
        for (const BucketSize& b : buckets) {
            if (b.group_size == 1) continue;
            const auto same = std::find_if(largest.begin(), largest.end(), [&b](const BucketSize* other) {
                return other->domain == b.domain && other->group == b.group && other->weight_dtype == b.weight_dtype;
            });
            if (same == largest.end())
                largest.push_back(&b);
            else if ((*same)->elements < b.elements)
                *same = &b;
        }
        for (const BucketSize* b : largest) {
            weights += static_cast<std::int64_t>(weight_bytes(*b));
            gradients += static_cast<std::int64_t>(gradient_bytes(plan)) * b->elements;
            if (is_quantized(b->weight_dtype)) staging = std::max(staging, 2 * b->elements);
        }
    }
};

} // namespace

Workspace resharded_workspace(SegmentCache& cache, const Plan& plan, const Segments& segments) {
    std::vector<BucketSize> layers;
    int count = 0;
    for (const auto& [id, times] : segments) {
        if (id.kind != SegmentKind::layer) continue;
        const std::vector<BucketSize>& own = cache.buckets(plan, id);
        layers.insert(layers.end(), own.begin(), own.end());
        count += times;
    }
    const TurnBuffers turn(plan, layers);
    const int turns = std::min(count, 2);
    // Where one layer's backward ends and the next one's weights arrive, only the gradient between them is alive.
    const std::int64_t between = 2 * plan.tokens_local() * plan.model->hidden;
    Workspace workspace{0, turns * (turn.weights + turn.gradients) + turn.staging + between};
    const auto raise = [](std::int64_t& height, std::int64_t to) { height = std::max(height, to); };
    for (const auto& [id, times] : segments) {
        const SegmentMemory memory = cache.size(plan, id).memory;
        if (id.kind == SegmentKind::layer) {
            const TurnBuffers own(plan, cache.buckets(plan, id));
            raise(workspace.forward, memory.forward - own.weights + turns * turn.weights);
            raise(workspace.backward,
                  memory.backward - own.weights - own.gradients + turns * (turn.weights + turn.gradients));
        } else {
            raise(workspace.forward, memory.forward + turn.weights);
            raise(workspace.backward, memory.backward + turn.weights);
        }
    }
    return workspace;
}

double state_bytes(const Plan& plan, const BucketSize& b) {
    const auto n = static_cast<double>(b.elements);
    const double optimizer = (plan.optimizer.bf16_moments ? 8.0 : 12.0) * n / b.group_size;
    if (plan.reshards() && b.group_size > 1) {
        const double weights = plan.precision == Precision::fp32 ? 4.0 : 2.0;
        return (weights + gradient_bytes(plan)) * n / b.group_size + optimizer;
    }
    return weight_bytes(b) + gradient_bytes(plan) * n + optimizer;
}

} // namespace moe
