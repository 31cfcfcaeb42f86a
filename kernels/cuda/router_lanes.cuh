// A few lanes per token: each has the logits and scores of 32 neighbouring experts, in shared memory and in registers.
#pragma once

#include "kernels/cuda/rows.cuh"
#include "kernels/cuda/scores.cuh"

namespace moe::cuda {

inline constexpr int span = 32;              // experts of a lane
inline constexpr int padded_span = span + 4; // from one lane's to the next: packs of eight lanes lie in all banks
inline constexpr int most_lanes = 16;        // of a token

// What a warp works on in shared memory: a span per lane.
struct alignas(16) Spans {
    float at[warp_size][padded_span];

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

// The tokens of a warp, L lanes each.
template <int L>
struct Tokens {
    static constexpr int count = warp_size / L;
    std::int64_t first, all;
    int experts;
    __device__ explicit Tokens(const RouterShape& s)
        : first((std::int64_t{blockIdx.x} * row_warps + threadIdx.x / warp_size) * count),
          all(s.tokens),
          experts(s.experts) {}
    __device__ std::int64_t mine() const { return first + lane_id() / L; }
    // Whether there is an expert for every place of the spans, so that they lie in memory as they do here.
    __device__ bool whole() const { return experts == L * span && first + count <= all; }

    // run(p, lane, column, element, whether there is one) for each pack of W that this lane brings in or out.
    template <int W, bool whole, class Run>
    __device__ void for_packs(Run run) const {
#pragma unroll
        for (int p = 0; p < span / W; ++p) {
            const int at = (p * warp_size + lane_id()) * W, lane = at / span, column = at % span;
            if constexpr (whole) {
                run(p, lane, column, first * experts + at, true);
            } else {
                const std::int64_t token = first + lane / L;
                const int e = lane % L * span + column;
                run(p, lane, column, token * experts + e, token < all && e < experts);
            }
        }
    }
    template <class A, bool whole>
    __device__ void bring_packs(Src logits, Spans& spans) const {
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
    template <class A, bool whole>
    __device__ void take_packs(const Spans& spans, Dst y) const {
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
    __device__ void bring(Src logits, Spans& spans) const {
        if (whole()) {
            bring_packs<A, true>(logits, spans);
        } else {
            bring_packs<A, false>(logits, spans);
        }
        __syncwarp();
    }
    template <class A>
    __device__ void take(const Spans& spans, Dst y) const {
        __syncwarp();
        if (whole()) {
            take_packs<A, true>(spans, y);
        } else {
            take_packs<A, false>(spans, y);
        }
    }
};

// Over the lanes of a token.
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

// From a token's logits to its scores. A quotient of the softmax is rounded as a division would.
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
template <int L>
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

enum class Form { any, f32, bf16 }; // how the logits are read

template <int L>
__device__ void bring(Form form, const Tokens<L>& tokens, Src logits, Spans& spans) {
    if (form == Form::f32) {
        tokens.template bring<Access<float, 4>>(logits, spans);
    } else if (form == Form::bf16) {
        tokens.template bring<Access<__nv_bfloat16, 8>>(logits, spans);
    } else {
        tokens.template bring<Access<float, 1>>(logits, spans);
    }
}

inline Form form_of(const void* data, Type type, std::int64_t experts) {
    if (!whole_packs(type, {Src{data, type}}, {experts})) return Form::any;
    return type == Type::f32 ? Form::f32 : Form::bf16;
}

// run(L) with the lanes that hold so many experts, as a constant; false where a token would need too many.
template <class Run>
bool with_lanes(int experts, Run run) {
    if (experts <= span) {
        run(std::integral_constant<int, 1>{});
    } else if (experts <= 2 * span) {
        run(std::integral_constant<int, 2>{});
    } else if (experts <= 4 * span) {
        run(std::integral_constant<int, 4>{});
    } else if (experts <= 8 * span) {
        run(std::integral_constant<int, 8>{});
    } else if (experts <= most_lanes * span) {
        run(std::integral_constant<int, most_lanes>{});
    } else {
        return false;
    }
    return true;
}

// run(L, K) with the lanes that hold so many experts and the length of lists that hold so many chosen ones.
template <class Run>
bool with_lists(const RouterShape& s, Run run) {
    constexpr int few = 8, most = 16;
    return s.top_k <= most && with_lanes(s.experts, [&](auto lanes) {
               if (s.top_k <= few) {
                   run(lanes, std::integral_constant<int, few>{});
               } else {
                   run(lanes, std::integral_constant<int, most>{});
               }
           });
}

} // namespace moe::cuda
