// The scratch that attention takes of a GPU, by the shapes of a plan's layers.
#include "planner/library_memory.hpp"

#include <algorithm>

namespace moe {

namespace {

std::int64_t rounded(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }

} // namespace

// The bounds are those of kernels/cuda/attention_library.cu, the sizes those of cuDNN 9.14 and 9.19 on Hopper.
double attention_scratch(std::int64_t batch, int heads, int kv_heads, int qk_dim, int v_dim, std::int64_t seq) {
    constexpr std::int64_t most_of_slice = std::int64_t{9} << 28, most_of_group = std::int64_t{4} << 30;
    const std::int64_t share = heads / std::max(kv_heads, 1), scores = rounded(seq, 64) * rounded(seq, 128) * 2;
    const std::int64_t group = share * scores;
    std::int64_t groups = kv_heads, sequences = batch;
    if (group * groups * sequences > most_of_slice) {
        if (group > most_of_group) return 0.0;
        sequences = std::max<std::int64_t>(1, most_of_slice / (group * groups));
        groups = std::min(groups, std::max<std::int64_t>(1, most_of_slice / group));
    }
    const std::int64_t slice = sequences * groups * share; // heads of it
    const std::int64_t shared = share > 1 ? 2 * seq * (qk_dim + v_dim) : 0;
    return static_cast<double>(slice * (scores + shared) + rounded(slice * seq * 4, 256));
}

double library_memory(const Plan& plan) {
    double scratch = 0.0;
    const bool ring = plan.cp > 1 && plan.cp_comm == ContextComm::ring; // its runs of a sequence go to plain kernels
    const bool library = plan.stack == "moe-plan" && !plan.hardware->cpu && plan.precision != Precision::fp32 && !ring;
    for (const LayerKind& kind : plan.model->kinds) {
        const Attention& a = kind.attention;
        if (!library || (a.kind != AttentionKind::gqa && a.kind != AttentionKind::mla)) continue;
        const int split = plan.tp * plan.cp, kv_heads = a.kind == AttentionKind::mla ? a.heads : a.kv_heads;
        scratch = std::max(scratch, attention_scratch(plan.mbs, std::max(1, a.heads / split),
                                                      std::max(1, kv_heads / split), a.qk_dim, a.v_dim, plan.seq));
    }
    return plan.hardware->context_bytes + scratch;
}

} // namespace moe
