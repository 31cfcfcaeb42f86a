// The best experts of a token whose scores lie in a few lanes: sorting networks of keys, and where the best were.
#pragma once

#include "kernels/cuda/router_lanes.cuh"

namespace moe::cuda {

// Numbers that order as the values do, from 2 up; 1 for NaN, which is the lowest value, 0 for what is out of the
// choice.
__device__ inline unsigned order_of(float value) {
    const unsigned bits = __float_as_uint(value + 0.0f); // -0 becomes +0: they are equal
    return isnan(value) ? 1u : (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ inline float value_of(unsigned order) {
    return __uint_as_float((order & 0x80000000u) != 0 ? order & 0x7fffffffu : ~order);
}

__device__ inline void put_in_order(unsigned& high, unsigned& low) {
    const unsigned larger = max(high, low);
    low = min(high, low);
    high = larger;
}
// Batcher's odd-even merge sort, the largest first; as templates, since a key must not be found by an index.
template <int first, int count, int step, int K>
__device__ void merge_halves(unsigned (&key)[K]) {
    if constexpr (2 * step < count) {
        merge_halves<first, count, 2 * step>(key);
        merge_halves<first + step, count, 2 * step>(key);
#pragma unroll
        for (int i = first + step; i + step < first + count; i += 2 * step) put_in_order(key[i], key[i + step]);
    } else {
        put_in_order(key[first], key[first + step]);
    }
}
template <int first, int count, int K>
__device__ void sort(unsigned (&key)[K]) {
    if constexpr (count > 1) {
        sort<first, count / 2>(key);
        sort<first + count / 2, count / 2>(key);
        merge_halves<first, count, 1>(key);
    }
}
// The largest of two sorted lists, sorted: their first halves crosswise, which rise and fall, and a bitonic merge.
template <int K>
__device__ void merge(unsigned (&best)[K], const unsigned (&other)[K]) {
#pragma unroll
    for (int i = 0; i < K; ++i) best[i] = max(best[i], other[K - 1 - i]);
#pragma unroll
    for (int step = K / 2; step >= 1; step /= 2)
#pragma unroll
        for (int i = 0; i < K; ++i)
            if (i % (2 * step) < step) put_in_order(best[i], best[i + step]);
}

template <int span, int K>
__device__ void best_of_span(const unsigned (&key)[span], unsigned (&best)[K]) {
#pragma unroll
    for (int g = 0; g < span / K; ++g) {
        unsigned part[K];
#pragma unroll
        for (int i = 0; i < K; ++i) part[i] = key[g * K + i];
        sort<0, K>(part);
        if (g > 0) merge(best, part);
#pragma unroll
        for (int i = 0; i < K && g == 0; ++i) best[i] = part[i];
    }
}

// Whether the group of this lane, whose best keys are known, is one of the groups_kept best; `lanes` hold a group.
template <int L, int K>
__device__ bool group_kept(const RouterShape& s, const unsigned (&best)[K], int lanes) {
    const int group = lane_id() % L / lanes, top = min(s.group_score_top, s.experts / s.groups);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < K; ++i) sum += i < top ? value_of(best[i]) : 0.0f;
    const unsigned mine = group < s.groups ? order_of(sum) : 0u;
    int better = 0;
    for (int apart = lanes; apart < L; apart += lanes) {
        const unsigned other = __shfl_xor_sync(all_lanes, mine, apart);
        better += other > mine || (other == mine && (lane_id() % L ^ apart) / lanes < group) ? 1 : 0;
    }
    return better < s.groups_kept;
}

// What the choice goes by: a number that orders as score + bias does.
struct Keys {
    bool plain;        // shares of a softmax: none is below zero, and NaN are all or none
    const float* bias; // of this lane's experts, or null
    __device__ unsigned operator()(float score, int i) const {
        if (plain) return __float_as_uint(score) + 1;
        return order_of(score + (bias != nullptr ? bias[i] : 0.0f));
    }
};

// choice[k] of this lane's token, from the keys that are the best of all, best first, and those of this lane's experts.
// Most often they differ, and each finds its place by itself.
template <int L, int span, int K>
__device__ void choose(int top_k, const unsigned (&best)[K], const unsigned (&key)[span], const Keys& keys,
                       bool eligible, const Spans<span>& spans, std::int32_t* choice) {
    const int lane = lane_id(), first = lane % L * span;
    unsigned least = best[0];
    bool tie = false;
#pragma unroll
    for (int k = 1; k < K; ++k) {
        if (k < top_k) tie = tie || best[k] == least;
        least = k < top_k ? best[k] : least;
    }
    unsigned left = 0; // a bit for each expert that may be chosen
#pragma unroll
    for (int i = 0; i < span; ++i) left |= key[i] >= least ? 1u << i : 0u;
    if (!eligible) left = 0;
    int found = __popc(left);
#pragma unroll
    for (int offset = 1; offset < L; offset *= 2) found += __shfl_xor_sync(all_lanes, found, offset);
    if (!__any_sync(all_lanes, tie || found != top_k)) {
        while (left != 0) {
            const int i = __ffs(static_cast<int>(left)) - 1;
            left &= left - 1;
            const unsigned own = keys(spans.at[lane][i], i);
            int place = 0;
#pragma unroll
            for (int k = 0; k < K; ++k) place += best[k] > own ? 1 : 0;
            choice[place] = first + i;
        }
        __syncwarp();
        return;
    }
    if (lane % L == 0) {
#pragma unroll
        for (int k = 0; k < K; ++k) choice[k] = static_cast<std::int32_t>(best[k]);
    }
    __syncwarp();
    for (int k = 0; k < top_k; ++k) {
        const auto wanted = static_cast<unsigned>(choice[k]);
        unsigned equal = 0;
#pragma unroll
        for (int i = 0; i < span; ++i) equal |= key[i] == wanted ? 1u << i : 0u;
        equal &= left;
        const int mine = equal != 0 ? first + __ffs(static_cast<int>(equal)) - 1 : L * span;
        int lowest = mine;
#pragma unroll
        for (int offset = 1; offset < L; offset *= 2) lowest = min(lowest, __shfl_xor_sync(all_lanes, lowest, offset));
        __syncwarp(); // all have read what was wanted
        if (mine == lowest && equal != 0) {
            left &= ~(equal & -equal);
            choice[k] = mine;
        }
    }
    __syncwarp();
}

} // namespace moe::cuda
