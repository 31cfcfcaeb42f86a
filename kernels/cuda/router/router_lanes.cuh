// A few lanes per token: each has the logits and scores of neighbouring experts, in shared memory and in registers.
#pragma once

#include "kernels/cuda/router/scores.cuh"
#include "kernels/cuda/rows.cuh"

namespace moe::cuda {

// The distance from one lane's experts to the next's, of which there are span: an odd number of packs, so that those of
// eight lanes lie in all banks.
template <int span>
inline constexpr int padded = span / 4 % 2 == 1 ? span : span + 4;

// The values that a warp works on in shared memory: a span per lane.
template <int span>
struct alignas(16) Spans {
    float at[warp_size][padded<span>];

    __device__ float4& pack(int lane, int i) { return *reinterpret_cast<float4*>(&at[lane][4 * i]); }
    __device__ void read(float (&x)[span]) {
#pragma unroll
        for (int i = 0; i < span / 4; ++i) {
            const float4 four = pack(lane_id(), i);
            x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
        }
    }
    __device__ void write(const float (&x)[span]) {
#pragma unroll
        for (int i = 0; i < span / 4; ++i) pack(lane_id(), i) = {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
    }
};

// The tokens of a warp, L lanes each. A lane has `each` experts in the first places of its span.
template <int span, int L>
struct Tokens {
    static constexpr int count = warp_size / L;
    std::int64_t first, all;
    int experts, each;
    __device__ explicit Tokens(const RouterShape& s, int experts_of_lane = span)
        : first((std::int64_t{blockIdx.x} * (blockDim.x / warp_size) + threadIdx.x / warp_size) * count),
          all(s.tokens),
          experts(s.experts),
          each(experts_of_lane) {}
    __device__ std::int64_t mine() const { return first + lane_id() / L; }
    // True where there is an expert for every place of the spans, so that they lie in memory as they do here.
    __device__ bool whole() const { return experts == L * span && first + count <= all; }
    // Between an expert and its place in its token's spans, which are in the same order.
    __device__ int place_of(int expert) const { return expert + expert / each * (span - each); }
    __device__ int expert_of(int place) const { return place - place / span * (span - each); }
    __device__ int real() const { // number of this lane's experts
        const int left = experts - lane_id() % L * each;
        return left < each ? left : each;
    }

    // Calls run(p, lane, column, element, whether there is one) for each pack of W that this lane brings in or out.
    template <int W, bool whole, class Run>
    __device__ void for_packs(Run run) const {
        constexpr bool even = warp_size * W % span == 0;
        constexpr int lanes = warp_size * W / span; // lanes whose spans are as long as the packs of a warp
#pragma unroll
        for (int p = 0; p < span / W; ++p) {
            const int at = (even ? 0 : p * warp_size * W) + lane_id() * W;
            const int lane = (even ? p * lanes : 0) + at / span, column = at % span;
            if constexpr (whole) {
                run(p, lane, column, first * experts + lane_id() * W + p * warp_size * W, true);
            } else {
                const std::int64_t token = first + lane / L;
                const int e = lane % L * each + column;
                run(p, lane, column, token * experts + e, token < all && column < each && e < experts);
            }
        }
    }
    template <class A, bool whole>
    __device__ void bring_packs(Src logits, Spans<span>& spans) const {
        constexpr int W = A::width;
        typename A::Held held[span / W];
        for_packs<W, whole>([&](int p, int, int, std::int64_t i, bool there) {
            if (there) held[p] = A::take(logits, i);
        });
        for_packs<W, whole>([&](int p, int lane, int column, std::int64_t, bool there) {
            float x[W];
#pragma unroll
            for (int j = 0; j < W; ++j) x[j] = there ? held[p][j] : -INFINITY;
            if constexpr (W == 1) {
                spans.at[lane][column] = x[0];
            } else {
#pragma unroll
                for (int j = 0; j < W; j += 4)
                    spans.pack(lane, (column + j) / 4) = {x[j], x[j + 1], x[j + 2], x[j + 3]};
            }
        });
    }
    // Whole tokens in FP32, past the registers.
    __device__ void fetch(const float* logits, Spans<span>& spans) const {
        for_packs<4, true>([&](int, int lane, int column, std::int64_t i, bool) {
            copy_async(&spans.pack(lane, column / 4), logits + i);
        });
    }
    template <class A, bool whole>
    __device__ void take_packs(const Spans<span>& spans, Dst y) const {
        constexpr int W = A::width;
        for_packs<W, whole>([&](int, int lane, int column, std::int64_t i, bool there) {
            float value[W];
#pragma unroll
            for (int j = 0; j < W; ++j) value[j] = spans.at[lane][column + j];
            if (there) A::put(y, i, value);
        });
    }
    // Between memory and the spans of the warp.
    template <class A>
    __device__ void bring(Src logits, Spans<span>& spans) const {
        if (whole()) {
            bring_packs<A, true>(logits, spans);
        } else {
            bring_packs<A, false>(logits, spans);
        }
        __syncwarp();
    }
    template <class A>
    __device__ void take(const Spans<span>& spans, Dst y) const {
        __syncwarp();
        if (whole()) {
            take_packs<A, true>(spans, y);
        } else {
            take_packs<A, false>(spans, y);
        }
    }
};

// The sum over the lanes of a token.
template <int L>
__device__ float sum_of(float value) {
#pragma unroll
    for (int offset = 1; offset < L; offset *= 2) value += __shfl_xor_sync(all_lanes, value, offset);
    return value;
}
template <int L>
__device__ float largest_of(float value) {
#pragma unroll
    for (int offset = 1; offset < L; offset *= 2) value = fmaxf(value, __shfl_xor_sync(all_lanes, value, offset));
    return value;
}

// The computation from a token's logits to its scores. A quotient of the softmax is rounded as a division would.
struct Scoring {
    Score score;
    bool softmax, plain; // softmax over all experts; logits as they are, since the softmax comes after the choice
    float largest = 0.0f, sum = 1.0f, inverse = 1.0f;
    __device__ explicit Scoring(const RouterShape& s)
        : score(s.score), softmax(s.score == Score::softmax && !s.softmax_after_top_k), plain(s.softmax_after_top_k) {}
    __device__ float share(float part) const {
        const float near = part * inverse;
        return fmaf(fmaf(-near, sum, part), inverse, near);
    }
    __device__ float operator()(float logit) const {
        if (plain) return logit;
        if (softmax) return share(expf(logit - largest));
        return score == Score::sigmoid ? sigmoid(logit) : sqrtf(softplus(logit));
    }
};

// The scores of this lane's experts in place of their logits.
template <int L, int span>
__device__ void score_all(float (&x)[span], Scoring& scoring) {
    if (scoring.plain) return;
    if (!scoring.softmax) {
#pragma unroll
        for (float& each : x) each = scoring(each);
        return;
    }
    float largest = x[0], sum = 0.0f;
#pragma unroll
    for (const float each : x) largest = fmaxf(largest, each);
    scoring.largest = largest_of<L>(largest);
#pragma unroll
    for (float& each : x) {
        each = expf(each - scoring.largest);
        sum += each;
    }
    scoring.sum = sum_of<L>(sum);
    scoring.inverse = 1.0f / scoring.sum;
#pragma unroll
    for (float& each : x) each = scoring.share(each);
}

enum class Form { any, f32, bf16 }; // ways to read the logits

template <int span, int L>
__device__ void bring(Form form, const Tokens<span, L>& tokens, Src logits, Spans<span>& spans) {
    if (form == Form::f32) {
        tokens.template bring<Access<float, 4>>(logits, spans);
    } else if (form == Form::bf16) {
        tokens.template bring<Access<__nv_bfloat16, 8>>(logits, spans);
    } else {
        tokens.template bring<Access<float, 1>>(logits, spans);
    }
}

// experts_of_lane: any number that packs divide where lanes have whole spans.
inline Form form_of(const void* data, Type type, std::int64_t experts, std::int64_t experts_of_lane = 8) {
    if (!whole_packs(type, {Src{data, type}}, {experts, experts_of_lane})) return Form::any;
    return type == Type::f32 ? Form::f32 : Form::bf16;
}

// Experts of a lane: the fewer, the sooner it has sorted them, but the more lanes join their lists.
inline int span_of(const RouterShape& s) {
    constexpr std::int64_t few = 1 << 18, many = 1 << 20; // numbers of logits
    const std::int64_t logits = s.tokens * s.experts;
    if (s.top_k > 8) return 32; // The lists are longer.
    if (s.experts <= 8 || (logits <= few && s.experts <= 8 * warp_size)) return 8;
    return s.experts <= 16 || logits <= many ? 16 : 32;
}

// Calls run(L) with the lanes that hold so many experts, as a constant; false where a token would need too many.
template <int span, class Run>
bool with_lanes(int experts, Run run) {
    constexpr int most = 512 / span < warp_size ? 512 / span : warp_size;
    if (experts <= span) {
        run(std::integral_constant<int, 1>{});
    } else if (experts <= 2 * span) {
        run(std::integral_constant<int, 2>{});
    } else if (experts <= 4 * span) {
        run(std::integral_constant<int, 4>{});
    } else if (experts <= 8 * span) {
        run(std::integral_constant<int, 8>{});
    } else if (experts <= 16 * span) {
        run(std::integral_constant<int, 16>{});
    } else if (experts <= most * span) {
        run(std::integral_constant<int, most>{});
    } else {
        return false;
    }
    return true;
}

// True where so many experts fill 4, 8 or 16 lanes, where shorter or longer spans would leave some idle.
inline bool fills_lanes(int experts, int span) {
    return experts == 4 * span || experts == 8 * span || experts == 16 * span;
}
// Calls run(L) with the lanes that the experts fill, as a constant.
template <int span, class Run>
void with_filled_lanes(int experts, Run run) {
    if (experts == 4 * span) return run(std::integral_constant<int, 4>{});
    if (experts == 8 * span) return run(std::integral_constant<int, 8>{});
    run(std::integral_constant<int, 16>{});
}

} // namespace moe::cuda
