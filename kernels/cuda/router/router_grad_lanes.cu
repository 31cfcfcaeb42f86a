// The gradient of the router with a few lanes per token.
#include "kernels/cuda/router/router_lanes.cuh"
#include "kernels/cuda/router/router_lanes.hpp"

namespace moe::cuda {
namespace {

// Slope of sigmoid and sqrt(softplus) at a logit whose score is known.
__device__ float slope_of(Score score, float logit, float value) {
    if (score == Score::softmax) return 1.0f;
    if (score == Score::sigmoid) return value * (1.0f - value);
    return value > 0.0f ? sigmoid(logit) / (2.0f * value) : 0.0f; // Where the score underflowed, its slope has, too.
}

// The chosen of a lane: the k-th of a token's belongs to its lane k % L.
template <int L, int K>
struct Chosen {
    static constexpr int each = (K + L - 1) / L;
    int expert[each];
    float score[each], dweight[each], logit[each];
    bool has[each];
};

constexpr int threads = row_threads / 2;

template <int span, int L, int K>
__global__ void __launch_bounds__(threads, 4)
    router_grad_lanes_kernel(RouterShape s, const float* dweight, Src logits, Form form, const std::int32_t* index,
                             Dst dlogits, Form out) {
    __shared__ Spans<span> spans_of[threads / warp_size];
    const Tokens<span, L> tokens(s);
    const int lane = lane_id(), part = lane % L;
    const std::int64_t token = tokens.mine();
    Spans<span>& spans = spans_of[threadIdx.x / warp_size];
    Scoring scoring(s);
    Chosen<L, K> chosen;
#pragma unroll
    for (int i = 0; i < chosen.each; ++i) {
        const int k = part + i * L;
        chosen.has[i] = token < s.tokens && k < s.top_k;
        chosen.expert[i] = chosen.has[i] ? index[token * s.top_k + k] : 0;
        chosen.dweight[i] = chosen.has[i] ? dweight[token * s.top_k + k] : 0.0f;
    }
    float x[span];
    if (scoring.softmax) {
        bring(form, tokens, logits, spans);
        spans.read(x);
        score_all<L>(x, scoring);
        spans.write(x);
        __syncwarp();
    } else {
#pragma unroll
        for (float& each : x) each = 0.0f;
    }
    const auto place = [&](int e) -> float& { return spans.at[lane - part + e / span][e % span]; };
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < chosen.each; ++i) {
        const int e = chosen.expert[i];
        chosen.logit[i] = !scoring.softmax && chosen.has[i] ? load(logits, token * s.experts + e) : 0.0f;
        chosen.score[i] = scoring.softmax ? place(e) : scoring(chosen.logit[i]);
        if (chosen.has[i]) largest = fmaxf(largest, chosen.score[i]);
    }
    if (s.softmax_after_top_k) {
        largest = largest_of<L>(largest);
#pragma unroll
        for (float& score : chosen.score) score = expf(score - largest);
    }
    float sum = 0.0f, along = 0.0f;
#pragma unroll
    for (int i = 0; i < chosen.each; ++i) {
        sum += chosen.has[i] ? chosen.score[i] : 0.0f;
        along += chosen.has[i] ? chosen.dweight[i] * chosen.score[i] : 0.0f;
    }
    sum = sum_of<L>(sum) + (s.softmax_after_top_k ? 0.0f : tiny_sum);
    along = sum_of<L>(along) / sum;
    const auto scale = static_cast<float>(s.scale);
    float through = 0.0f; // sum that goes through the softmax over all experts
    float grad[chosen.each];
#pragma unroll
    for (int i = 0; i < chosen.each; ++i) {
        const float apart = chosen.dweight[i] - along;
        if (s.softmax_after_top_k) {
            grad[i] = scale * (chosen.score[i] / sum) * apart;
        } else {
            grad[i] = s.normalize ? scale * apart / sum : scale * chosen.dweight[i];
            if (!scoring.softmax) grad[i] *= slope_of(s.score, chosen.logit[i], chosen.score[i]);
        }
        through += chosen.has[i] ? grad[i] * chosen.score[i] : 0.0f;
    }
    through = scoring.softmax ? sum_of<L>(through) : 0.0f;
    __syncwarp(); // The chosen scores have been read.
#pragma unroll
    for (float& each : x) each *= 0.0f - through;
    spans.write(x);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < chosen.each; ++i) {
        if (chosen.has[i]) place(chosen.expert[i]) = scoring.softmax ? chosen.score[i] * (grad[i] - through) : grad[i];
    }
    if (out == Form::f32) {
        tokens.template take<Access<float, 4>>(spans, dlogits);
    } else if (out == Form::bf16) {
        tokens.template take<Access<__nv_bfloat16, 8>>(spans, dlogits);
    } else {
        tokens.template take<Access<float, 1>>(spans, dlogits);
    }
}

} // namespace

bool router_grad_lanes(const RouterShape& s, const float* dweight, Src logits, const std::int32_t* index, Dst dlogits,
                       void* stream) {
    if (s.top_k > 16) return false;
    const auto launch_with = [&](auto span, auto lanes, auto length) {
        constexpr auto kernel = router_grad_lanes_kernel<span(), lanes(), length()>;
        const unsigned blocks = blocks_for(s.tokens, threads / lanes());
        const Form form = form_of(logits.data, logits.type, s.experts, span()),
                   out = form_of(dlogits.data, dlogits.type, s.experts, span());
        kernel<<<blocks, threads, 0, stream_of(stream)>>>(s, dweight, logits, form, index, dlogits, out);
        CUDA_CHECK(cudaGetLastError());
    };
    const auto launch = [&](auto span, auto length) {
        return with_lanes<span()>(s.experts, [&](auto lanes) { launch_with(span, lanes, length); });
    };
    const auto fill = [&](auto span) {
        using K = std::integral_constant<int, 8>;
        with_filled_lanes<span()>(s.experts, [&](auto lanes) { launch_with(span, lanes, K{}); });
        return true;
    };
    using std::integral_constant;
    if (s.top_k > 8) return launch(integral_constant<int, 32>{}, integral_constant<int, 16>{});
    const bool narrow = span_of(s) == 8;
    if (s.top_k <= 4 && narrow) return launch(integral_constant<int, 8>{}, integral_constant<int, 4>{});
    if (narrow) return launch(integral_constant<int, 8>{}, integral_constant<int, 8>{});
    const bool f32 = logits.type == Type::f32 && dlogits.type == Type::f32; // 20 are no whole packs of BF16
    if (fills_lanes(s.experts, 20) && f32) return fill(integral_constant<int, 20>{});
    if (fills_lanes(s.experts, 24)) return fill(integral_constant<int, 24>{});
    return launch(integral_constant<int, 16>{}, integral_constant<int, 8>{});
}

} // namespace moe::cuda
