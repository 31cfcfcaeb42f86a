// The choice of a token's experts by logits or scores, from a lane's logits to the list of the best.
#pragma once

#include "kernels/cuda/router/router_choice.cuh"

namespace moe::cuda {

// Within two units of the last place.
__device__ inline float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The values by which a token's experts are chosen: the logits, of all groups or of those whose best are the best, or
// scores with a bias, which may limit the choice to some groups.
enum class By { logit, logit_in_groups, score };

template <int span, int L, By by>
struct Chooser {
    static constexpr bool by_logit = by != By::score;
    const RouterShape& s;
    Spans<span>& spans;
    const float (&bias)[L][padded<span>];
    Scoring scoring;
    const int lane = lane_id(), part = lane % L;
    bool scored = false; // whether the spans hold scores now
    bool unclear = false;

    __device__ Chooser(const RouterShape& shape, Spans<span>& logits, const float (&biases)[L][padded<span>])
        : s(shape), spans(logits), bias(biases), scoring(shape) {}

    // Scores that are quick to have, which are off by less than error() * (1 + score) / 2.
    __device__ bool has_quick() const { return scoring.softmax || scoring.plain || scoring.score == Score::sigmoid; }
    __device__ float error() const { return by_logit || scored || scoring.plain || !has_quick() ? 0.0f : 1e-6f; }
    __device__ float quick(float logit) const {
        constexpr float log2_of_e = 1.44269504f;
        if (scoring.plain) return logit;
        if (scoring.softmax) return power_of_two((logit - scoring.largest) * log2_of_e) * scoring.inverse;
        return reciprocal(1.0f + power_of_two(-log2_of_e * logit));
    }
    // The logit at a place of the spans of this lane's token.
    __device__ float logit(int place) const {
        return (&spans.at[lane - part][0])[place + place / span * (padded<span> - span)];
    }
    __device__ float score(int place) const {
        const float value = logit(place);
        return scored ? value : scoring.softmax ? quick(value) : scoring(value);
    }
    __device__ float value(int place) const {
        if constexpr (by_logit) return logit(place);
        return (scored ? logit(place) : scoring(logit(place))) + bias[place / span][place % span];
    }

    // The softmax's largest logit and its sum.
    __device__ void know_softmax(const float (&x)[span]) {
        float largest = x[0], sum = 0.0f;
#pragma unroll
        for (const float each : x) largest = fmaxf(largest, each);
        scoring.largest = largest_of<L>(largest);
        scoring.inverse = 1.0f;
#pragma unroll
        for (const float each : x) sum += quick(each);
        scoring.sum = sum_of<L>(sum);
        scoring.inverse = 1.0f / scoring.sum;
    }

    // Scores in place of this lane's logits.
    __device__ void score_all() {
        if (!scored) {
#pragma unroll 1 // Scores are long code.
            for (int i = 0; i < span / 4; ++i) {
                const float4 four = spans.pack(lane, i);
                spans.pack(lane, i) = {scoring(four.x), scoring(four.y), scoring(four.z), scoring(four.w)};
            }
            scored = true;
            __syncwarp();
        }
    }

    // Turns this lane's logits into what is chosen by, and the largest of its parts; tells whether its experts are
    // eligible, of groups that `lanes` hold.
    template <int N>
    __device__ bool weigh(float (&x)[span], float (&part_of)[N], int real, int lanes, bool exactly) {
        unclear = false;
        if constexpr (by == By::logit) {
            largest_of_parts(x, part_of);
            return true;
        }
        if constexpr (by == By::logit_in_groups) {
            largest_of_parts(x, part_of);
            float best = part_of[0];
#pragma unroll
            for (const float each : part_of) best = fmaxf(best, each);
            return keep(group_kept<L>(s, best, -INFINITY, lanes, lane, 0.0f, unclear), part_of);
        }
        if (exactly || !has_quick()) {
            score_all();
            spans.read(x);
        } else {
#pragma unroll
            for (float& each : x) each = quick(each);
        }
#pragma unroll
        for (int i = 0; i < span; i += 4) {
            const float4 b = *reinterpret_cast<const float4*>(&bias[part][i]);
            x[i] += b.x, x[i + 1] += b.y, x[i + 2] += b.z, x[i + 3] += b.w;
        }
        if (real < span) {
#pragma unroll
            for (int i = 0; i < span; ++i) x[i] = i < real ? x[i] : -INFINITY;
        }
        if constexpr ((span & (span - 1)) == 0) {
            if (lanes != 0) {
                float first, second;
                best_two(x, part_of, first, second);
                return keep(group_kept<L>(s, first, second, lanes, lane, error(), unclear), part_of);
            }
        }
        largest_of_parts(x, part_of); // Other spans hold no groups that go by scores (whole_span).
        return true;
    }
    template <int N>
    __device__ static bool keep(bool kept, float (&part_of)[N]) {
#pragma unroll
        for (float& each : part_of) each = kept ? each : -INFINITY;
        return kept;
    }
};

// The places of a token's best experts from this lane's logits, best first. lanes: that hold a group, if groups limit
// the choice; real: experts of this lane; there: whether the token is one.
template <int span, int L, int K, By by>
__device__ void choose(Chooser<span, L, by>& chooser, float (&x)[span], int lanes, int real, bool there,
                       Shortlist<span, L, K>& list) {
    using List = Shortlist<span, L, K>;
    constexpr bool limited = by != By::logit; // Groups may limit a choice by scores.
    const int part = chooser.part, top_k = chooser.s.top_k;
    float part_of[parts_of<span, L, K, limited>];
    for (bool exactly = false;; exactly = true) {
        const bool eligible = chooser.weigh(x, part_of, real, lanes, exactly);
        float least = floor_of_best<L, K, limited>(part_of);
        if (chooser.error() > 0.0f) least -= chooser.error() * (1.0f + fabsf(least));
        const float negated = 0.0f - least; // +0 where the floor is 0, whatever its sign: a logit of -0 is not below it
        unsigned below[2] = {0, 0};         // bits of values below, by the difference's sign: none is among the best
#pragma unroll
        for (int i = 0; i < span / 2; ++i)
#pragma unroll
            for (int half : {0, 1})
                below[half] = below[half] << 1 | __float_as_uint(x[half * span / 2 + i] + negated) >> 31;
        unsigned bits = ~(below[0] << span / 2 | below[1]) << (warp_size - span);
        if (real < span) bits = real > 0 ? bits & 0xffffffffu << (warp_size - real) : 0u;
        const int count = list.fill(eligible && there ? bits : 0u, part);
        bool unclear = chooser.unclear || count < top_k || count > List::places;
        int number[List::each];
        float own[List::each];
#pragma unroll
        for (int j = 0; j < List::each; ++j) {
            const int p = part + L * j;
            const bool listed = p < count && count <= List::places;
            number[j] = list.expert[p < List::places ? p : 0];
            number[j] = listed ? number[j] : 0;
            own[j] = chooser.by_logit || listed ? chooser.value(number[j]) : List::none;
            own[j] = listed ? own[j] : List::none;
            unclear = unclear || !(own[j] > -INFINITY);
        }
        if (!__any_sync(all_lanes, unclear && there)) return list.put_in_order(number, own, count, part);
        __syncwarp();
        if (chooser.error() > 0.0f) continue; // The next round goes by exact scores.
        unsigned key[span];
#pragma unroll
        for (int i = 0; i < span; ++i) key[i] = eligible && i < real ? order_of(x[i]) : 0u;
        return take_in_turn<L>(top_k, key, part, list.expert);
    }
}

} // namespace moe::cuda
