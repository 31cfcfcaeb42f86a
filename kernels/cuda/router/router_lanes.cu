// The router with a few lanes per token.
#include "kernels/cuda/router/router_lanes.hpp"

#include "kernels/cuda/router/router_chooser.cuh"

namespace moe::cuda {
namespace {

constexpr int threads = row_threads / 2;

// The experts of a warp's tokens, whose logits are in `spans`, and their weights. lanes: as of choose; whole: for each
// of a warp's tokens there is one, and an expert for each place of the spans.
template <int span, int L, int K, By by, bool whole>
__device__ void route(const RouterShape& s, int lanes, const Tokens<span, L>& tokens, Spans<span>& spans,
                      const float (&bias)[L][padded<span>], Shortlist<span, L, K>& list, const std::int32_t* positions,
                      std::int32_t* index, float* weight) {
    Chooser<span, L, by> chooser(s, spans, bias);
    Scoring& scoring = chooser.scoring;
    const bool shares = !s.normalize || by == By::score || positions != nullptr; // whether multiples do not suffice
    const int part = chooser.part;
    const std::int64_t token = tokens.mine();
    const bool there = whole || token < s.tokens;
    float x[span];
    spans.read(x);
    if (scoring.softmax && shares) chooser.know_softmax(x);
    if (positions == nullptr) {
        choose<span, L, K>(chooser, x, lanes, whole ? span : tokens.real(), there, list);
    } else {
        const int forced = there ? positions[(s.first + token) / s.batch] : 0;
        for (int k = part; k < s.top_k; k += L)
            list.expert[k] =
                static_cast<std::uint16_t>(tokens.place_of((forced + k * (s.experts / s.top_k)) % s.experts));
        __syncwarp();
    }
    if (scoring.softmax && !shares) { // The largest logit is the first chosen one's.
        scoring.largest = chooser.logit(there ? list.expert[0] : 0);
        scoring.inverse = 1.0f;
    }
    constexpr int each = (K + L - 1) / L;
    const int top_k = there ? s.top_k : 0;
    float score[each], sum = 0.0f, largest = -INFINITY;
    int place[each];
#pragma unroll
    for (int i = 0; i < each; ++i) {
        const bool has = part + i * L < top_k;
        place[i] = list.expert[has ? part + i * L : 0];
        place[i] = has ? place[i] : 0;
        score[i] = chooser.score(place[i]);
        score[i] = has ? score[i] : scoring.plain ? -INFINITY : 0.0f;
        largest = fmaxf(largest, score[i]);
    }
    if (scoring.plain) largest = largest_of<L>(largest);
#pragma unroll
    for (int i = 0; i < each; ++i) {
        if (scoring.plain) score[i] = expf(score[i] - largest);
        sum += score[i];
    }
    sum = sum_of<L>(sum) + (scoring.plain ? 0.0f : tiny_sum);
    if (!scoring.plain && !s.normalize) sum = 1.0f;
    const float factor = static_cast<float>(s.scale) * reciprocal(sum);
#pragma unroll
    for (int i = 0; i < each; ++i) {
        const int k = part + i * L;
        if (k >= top_k) continue;
        index[token * s.top_k + k] = whole ? place[i] : tokens.expert_of(place[i]);
        weight[token * s.top_k + k] = score[i] * factor;
    }
}

template <int span, int L>
__device__ void bring_bias(const Tokens<span, L>& tokens, Src bias, float (&biases)[L][padded<span>]) {
    for (int i = static_cast<int>(threadIdx.x); i < L * span; i += static_cast<int>(blockDim.x)) {
        const int e = tokens.expert_of(i), column = i % span;
        biases[i / span][column] =
            bias.data != nullptr && column < tokens.each && e < tokens.experts ? load(bias, e) : 0.0f;
    }
    __syncthreads();
}

template <int span, int L, int K, By by>
__global__ void __launch_bounds__(threads, 5)
    router_lanes_kernel(RouterShape s, int lanes, int experts_of_lane, Src logits, Form form, Src bias,
                        const std::int32_t* positions, std::int32_t* index, float* weight) {
    __shared__ Spans<span> spans_of[threads / warp_size];
    __shared__ Shortlist<span, L, K> lists[threads / L];
    alignas(16) __shared__ float biases[L][padded<span>];
    const Tokens<span, L> tokens(s, by == By::logit ? span : experts_of_lane); // With another `by`, groups may count.
    Spans<span>& spans = spans_of[threadIdx.x / warp_size];
    if constexpr (by == By::score) bring_bias(tokens, bias, biases);
    bring(form, tokens, logits, spans);
    route<span, L, K, by, false>(s, lanes, tokens, spans, biases, lists[threadIdx.x / L], positions, index, weight);
}

// Whole tokens in FP32, in blocks of two warps: the sooner a warp's place is free for the next tokens.
constexpr int whole_threads = 64;

template <int span, int L, int K, By by>
__global__ void __launch_bounds__(whole_threads, by == By::score ? 14 : 16)
    router_whole_kernel(RouterShape s, int lanes, const float* logits, Src bias, const std::int32_t* positions,
                        std::int32_t* index, float* weight) {
    __shared__ Spans<span> spans_of[whole_threads / warp_size];
    __shared__ Shortlist<span, L, K> lists[whole_threads / L];
    alignas(16) __shared__ float biases[L][padded<span>];
    const Tokens<span, L> tokens(s);
    Spans<span>& spans = spans_of[threadIdx.x / warp_size];
    const bool idle = tokens.first >= s.tokens;
    if (!idle) tokens.fetch(logits, spans);
    end_group();
    if constexpr (by == By::score) bring_bias(tokens, bias, biases);
    if (idle) return;
    wait_for_groups<0>();
    __syncwarp();
    route<span, L, K, by, true>(s, lanes, tokens, spans, biases, lists[threadIdx.x / L], positions, index, weight);
}

// The layout of a token's experts in spans: where groups limit the choice all of a lane's are in one group, whose lanes
// are a power of two.
struct Layout {
    int span = 0, lanes = 0, each = 0; // lanes: lanes of a group, 0 where groups do not count; each: experts of a lane
};
// The layout for groups of any size: a span of at least the usual length that is more than half full and takes whole
// packs, or the shortest.
Layout layout_of(const RouterShape& s) {
    const int least = span_of(s), size = s.experts / s.groups;
    if (!limits_groups(s)) return {least, 0, least};
    Layout found;
    for (const int span : {8, 16, 32}) {
        if (s.top_k > 8 && span < 32) continue; // The lists are longer.
        int lanes = 1;
        while (lanes < warp_size && (size % lanes != 0 || size / lanes > span)) lanes *= 2;
        const int each = size / lanes;
        const bool fits = size % lanes == 0 && each <= span && lanes * s.groups <= warp_size;
        const bool better = (found.span < least || found.each % 4 != 0) && each % 4 == 0 && 2 * each > span;
        if (fits && (found.span == 0 || better)) found = {span, lanes, each};
    }
    return found;
}

// Calls run(L, K) with the lanes of a token and at least the number of the chosen, as constants.
template <int span, class Run>
bool with_lists(const RouterShape& s, int experts_of_lane, Run run) {
    return with_lanes<span>(ceil_div(s.experts, experts_of_lane) * span, [&](auto lanes) {
        if constexpr (span == 32) {
            if (s.top_k > 8) return run(lanes, std::integral_constant<int, 16>{});
        }
        run(lanes, std::integral_constant<int, 8>{});
    });
}

// The span that whole tokens in FP32 fill all lanes with, 0: none does. Lanes of a group are a power of two.
int whole_span(const RouterShape& s, bool by_logits) {
    const auto power_of_two = [](int n) { return n > 0 && (n & (n - 1)) == 0; };
    const int size = s.experts / s.groups;
    for (const int span : {32, 24, 20}) {
        const int lanes = s.experts / span;
        const bool fills = span == 32 ? s.experts % span == 0 && power_of_two(lanes) && lanes <= 16
                                      : s.top_k <= 8 && fills_lanes(s.experts, span);
        const bool groups =
            !limits_groups(s) || (size % span == 0 && power_of_two(size / span) && (by_logits || span == 32));
        if (fills && groups && s.tokens * lanes % warp_size == 0) return span;
    }
    return 0;
}

struct Operands {
    Src logits, bias;
    const std::int32_t* positions;
    std::int32_t* index;
    float* weight;
    cudaStream_t stream;
};

template <int span, By by>
void launch_whole(const RouterShape& s, const Operands& o) {
    const auto launch = [&](auto L, auto K) {
        const int lanes_of_group = limits_groups(s) ? s.experts / s.groups / span : 0;
        router_whole_kernel<span, L(), K(), by>
            <<<blocks_for(s.tokens, whole_threads / L()), whole_threads, 0, o.stream>>>(
                s, lanes_of_group, static_cast<const float*>(o.logits.data), o.bias, o.positions, o.index, o.weight);
    };
    if constexpr (span == 32) {
        with_lists<span>(s, span, launch);
    } else {
        with_filled_lanes<span>(s.experts, [&](auto L) { launch(L, std::integral_constant<int, 8>{}); });
    }
}

template <By by>
bool launch_by(const RouterShape& s, const Operands& o) {
    const Layout layout = layout_of(s);
    const Form form = form_of(o.logits.data, o.logits.type, s.experts, 4);
    const int whole = form == Form::f32 && span_of(s) == 32 ? whole_span(s, by != By::score) : 0;
    const auto launch = [&](auto span) {
        return with_lists<span()>(s, layout.each, [&](auto L, auto K) {
            router_lanes_kernel<span(), L(), K(), by><<<blocks_for(s.tokens, threads / L()), threads, 0, o.stream>>>(
                s, layout.lanes, layout.each, o.logits, form_of(o.logits.data, o.logits.type, s.experts, layout.each),
                o.bias, o.positions, o.index, o.weight);
        });
    };
    bool launched = true;
    if (whole == 32) {
        launch_whole<32, by>(s, o);
    } else if (whole == 24) {
        launch_whole<24, by>(s, o);
    } else if (whole == 20) {
        launch_whole<20, by>(s, o);
    } else if (layout.span == 8) {
        launched = launch(std::integral_constant<int, 8>{});
    } else if (layout.span == 16) {
        launched = launch(std::integral_constant<int, 16>{});
    } else {
        launched = layout.span == 32 && launch(std::integral_constant<int, 32>{});
    }
    CUDA_CHECK(cudaGetLastError());
    return launched;
}

} // namespace

bool router_lanes(const RouterShape& s, Src logits, Src bias, const std::int32_t* positions, std::int32_t* index,
                  float* weight, void* stream) {
    if (s.top_k > 16) return false;
    if (limits_groups(s) && s.group_score_top > 2) return false;
    const Operands operands{logits, bias, positions, index, weight, stream_of(stream)};
    if (!by_logit(s, bias.data != nullptr)) return launch_by<By::score>(s, operands);
    return limits_groups(s) ? launch_by<By::logit_in_groups>(s, operands) : launch_by<By::logit>(s, operands);
}

} // namespace moe::cuda
