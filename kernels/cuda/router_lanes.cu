// The router with a few lanes per token.
#include "kernels/cuda/router_lanes.hpp"

#include "kernels/cuda/router_choice.cuh"

namespace moe::cuda {
namespace {

template <int L, int K>
__global__ void __launch_bounds__(row_threads, 3)
    router_lanes_kernel(RouterShape s, Src logits, Form form, Src bias, const std::int32_t* positions,
                        std::int32_t* index, float* weight) {
    __shared__ Spans spans_of[row_warps];
    __shared__ std::int32_t choices[row_threads / L][K];
    alignas(16) __shared__ float biases[L][padded_span];
    const Tokens<L> tokens(s);
    const int lane = lane_id(), part = lane % L;
    Spans& spans = spans_of[threadIdx.x / warp_size];
    if (bias.data != nullptr) {
        for (int e = static_cast<int>(threadIdx.x); e < s.experts; e += row_threads)
            biases[e / span][e % span] = load(bias, e);
        __syncthreads();
    }
    bring(form, tokens, logits, spans);
    float x[span];
    spans.read(x);
    Scoring scoring(s);
    score_all<L>(x, scoring);
    if (!scoring.plain) spans.write(x);
    std::int32_t* const choice = choices[threadIdx.x / L];
    const std::int64_t token = tokens.mine();
    if (positions == nullptr) {
        const bool limited = s.groups > 1 && s.groups_kept < s.groups;
        const Keys keys{scoring.softmax && bias.data == nullptr && !limited,
                        bias.data != nullptr ? biases[part] : nullptr};
        unsigned key[span];
        if (keys.plain) {
#pragma unroll
            for (int i = 0; i < span; ++i) key[i] = __float_as_uint(x[i]) + 1;
        } else if (keys.bias != nullptr) {
#pragma unroll
            for (int i = 0; i < span; i += 4) {
                const float4 b = *reinterpret_cast<const float4*>(keys.bias + i);
                key[i] = order_of(x[i] + b.x), key[i + 1] = order_of(x[i + 1] + b.y);
                key[i + 2] = order_of(x[i + 2] + b.z), key[i + 3] = order_of(x[i + 3] + b.w);
            }
        } else {
#pragma unroll
            for (int i = 0; i < span; ++i) key[i] = order_of(x[i]);
        }
        if (s.experts - part * span < span) {
#pragma unroll
            for (int i = 0; i < span; ++i) key[i] = part * span + i < s.experts ? key[i] : 0u;
        }
        unsigned best[K];
        best_of_span(key, best);
        const int lanes = limited ? s.experts / s.groups / span : L; // of a group
        bool eligible = true;
#pragma unroll
        for (int offset = 1; offset < L; offset *= 2) {
            if (offset == lanes) {
                eligible = group_kept<L>(s, best, lanes);
#pragma unroll
                for (unsigned& each : best) each = eligible ? each : 0u;
            }
            unsigned other[K];
#pragma unroll
            for (int i = 0; i < K; ++i) other[i] = __shfl_xor_sync(all_lanes, best[i], offset);
            merge(best, other);
        }
        __syncwarp(); // the scores are in shared memory
        choose<L>(s.top_k, best, key, keys, eligible, spans, choice);
    } else {
        const int forced = token < s.tokens ? positions[(s.first + token) / s.batch] : 0;
        for (int k = part; k < s.top_k; k += L) choice[k] = (forced + k * (s.experts / s.top_k)) % s.experts;
        __syncwarp();
    }
    const auto chosen = [&](int k) { return spans.at[lane - part + choice[k] / span][choice[k] % span]; };
    float sum = 0.0f, largest = -INFINITY;
    for (int k = part; k < s.top_k; k += L) {
        sum += chosen(k);
        largest = fmaxf(largest, chosen(k));
    }
    if (s.softmax_after_top_k) {
        largest = largest_of<L>(largest);
        sum = 0.0f;
        for (int k = part; k < s.top_k; k += L) sum += expf(chosen(k) - largest);
    }
    sum = sum_of<L>(sum) + (s.softmax_after_top_k ? 0.0f : tiny_sum);
    if (!s.softmax_after_top_k && !s.normalize) sum = 1.0f;
    if (token >= s.tokens) return;
    for (int k = part; k < s.top_k; k += L) {
        const float score = s.softmax_after_top_k ? expf(chosen(k) - largest) : chosen(k);
        index[token * s.top_k + k] = choice[k];
        weight[token * s.top_k + k] = score / sum * static_cast<float>(s.scale);
    }
}

} // namespace

bool router_lanes(const RouterShape& s, Src logits, Src bias, const std::int32_t* positions, std::int32_t* index,
                  float* weight, void* stream) {
    if (s.groups > 1 && s.groups_kept < s.groups) { // groups of whole spans, by a power of two
        constexpr int summed = 8;                   // of a group's scores at most: as many as the shorter lists hold
        const int size = s.experts / s.groups, lanes = size / span;
        if (size % span != 0 || (lanes & (lanes - 1)) != 0 || s.group_score_top > summed) return false;
    }
    return with_lists(s, [&](auto lanes, auto length) {
        constexpr auto kernel = router_lanes_kernel<lanes(), length()>;
        const unsigned blocks = blocks_for(s.tokens, row_threads / lanes());
        const Form form = form_of(logits.data, logits.type, s.experts);
        kernel<<<blocks, row_threads, 0, stream_of(stream)>>>(s, logits, form, bias, positions, index, weight);
        CUDA_CHECK(cudaGetLastError());
    });
}

} // namespace moe::cuda
