// The router with a few lanes per token.
#include "kernels/cuda/router_lanes.hpp"

#include "kernels/cuda/router_choice.cuh"

namespace moe::cuda {
namespace {

// Small blocks for few logits, so that they come to all multiprocessors.
template <int span>
constexpr int threads = span < 32 ? row_threads / 2 : row_threads;

template <int span, int L, int K>
__global__ void __launch_bounds__(threads<span>, 3 * row_threads / threads<span>)
    router_lanes_kernel(RouterShape s, Src logits, Form form, Src bias, const std::int32_t* positions,
                        std::int32_t* index, float* weight) {
    __shared__ Spans<span> spans_of[threads<span> / warp_size];
    __shared__ std::int32_t choices[threads<span> / L][K];
    alignas(16) __shared__ float biases[L][padded<span>];
    const Tokens<span, L> tokens(s);
    const int lane = lane_id(), part = lane % L;
    Spans<span>& spans = spans_of[threadIdx.x / warp_size];
    if (bias.data != nullptr) {
        for (int e = static_cast<int>(threadIdx.x); e < s.experts; e += threads<span>)
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

// Whether groups consist of whole spans, by a power of two.
bool whole_groups(const RouterShape& s, int span) {
    const int size = s.experts / s.groups, lanes = size / span;
    return size % span == 0 && (lanes & (lanes - 1)) == 0;
}

// run(L, K) with the lanes of a token and the length of lists that hold the chosen, as constants.
template <int span, class Run>
bool with_lists(const RouterShape& s, Run run) {
    return with_lanes<span>(s.experts, [&](auto lanes) {
        if constexpr (span == 32) {
            if (s.top_k > 8) return run(lanes, std::integral_constant<int, 16>{});
        }
        run(lanes, std::integral_constant<int, 8>{});
    });
}

} // namespace

bool router_lanes(const RouterShape& s, Src logits, Src bias, const std::int32_t* positions, std::int32_t* index,
                  float* weight, void* stream) {
    if (s.top_k > 16) return false;
    int span = span_of(s);
    if (s.groups > 1 && s.groups_kept < s.groups) {
        constexpr int summed = 8; // of a group's scores at most: as many as the lists hold
        while (span > 8 && s.top_k <= 8 && !whole_groups(s, span)) span /= 2;
        if (!whole_groups(s, span) || s.group_score_top > summed) return false;
    }
    const auto launch = [&](auto size) {
        return with_lists<size()>(s, [&](auto lanes, auto length) {
            constexpr auto kernel = router_lanes_kernel<size(), lanes(), length()>;
            const unsigned blocks = blocks_for(s.tokens, threads<size()> / lanes());
            const Form form = form_of(logits.data, logits.type, s.experts);
            kernel<<<blocks, threads<size()>, 0, stream_of(stream)>>>(s, logits, form, bias, positions, index, weight);
            CUDA_CHECK(cudaGetLastError());
        });
    };
    if (span == 8) return launch(std::integral_constant<int, 8>{});
    if (span == 16) return launch(std::integral_constant<int, 16>{});
    return launch(std::integral_constant<int, 32>{});
}

} // namespace moe::cuda
