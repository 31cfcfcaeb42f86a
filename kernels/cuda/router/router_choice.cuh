// The best experts of a token whose logits lie in a few lanes: a short list of those that may be among them, their
// places in it, and how the best are found where the list is too short.
#pragma once

#include "kernels/cuda/router/router_lanes.cuh"

#include <algorithm>
#include <cfloat>

namespace moe::cuda {

// Numbers that order as the values do, from 2 up; 1 for NaN, which is the lowest value, 0 for what is out of the
// choice.
__device__ inline unsigned order_of(float value) {
    const unsigned bits = __float_as_uint(value + 0.0f); // -0 becomes +0: they are equal
    return isnan(value) ? 1u : (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ inline void put_in_order(float& high, float& low) {
    const float larger = fmaxf(high, low);
    low = fminf(high, low);
    high = larger;
}
// Batcher's odd-even merge sort, the largest first; as templates, since a value must not be found by an index.
template <int first, int count, int step, int N>
__device__ void merge_halves(float (&value)[N]) {
    if constexpr (2 * step < count) {
        merge_halves<first, count, 2 * step>(value);
        merge_halves<first + step, count, 2 * step>(value);
#pragma unroll
        for (int i = first + step; i + step < first + count; i += 2 * step) put_in_order(value[i], value[i + step]);
    } else {
        put_in_order(value[first], value[first + step]);
    }
}
template <int first, int count, int N>
__device__ void sort(float (&value)[N]) {
    if constexpr (count > 1) {
        sort<first, count / 2>(value);
        sort<first + count / 2, count / 2>(value);
        merge_halves<first, count, 1>(value);
    }
}
// Values that fall and then rise, or rise and then fall, the largest first.
template <int N>
__device__ void sort_bitonic(float (&value)[N]) {
#pragma unroll
    for (int step = N / 2; step >= 1; step /= 2)
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (i % (2 * step) < step) put_in_order(value[i], value[i + step]);
}

// The K-th largest of the values that a token's lanes hold in lists, sorted by then; the smallest of fewer.
template <int L, int K, int apart = 1, int N>
__device__ float least_of_best(const float (&value)[N]) {
    if constexpr (apart == L) {
        return value[N - 1];
    } else if constexpr (2 * N <= K) {
        float both[2 * N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            both[i] = value[i];
            both[2 * N - 1 - i] = __shfl_xor_sync(all_lanes, value[i], apart);
        }
        sort_bitonic(both);
        return least_of_best<L, K, 2 * apart>(both);
    } else {
        float best[N];
#pragma unroll
        for (int i = 0; i < N; ++i) best[i] = fmaxf(value[i], __shfl_xor_sync(all_lanes, value[N - 1 - i], apart));
        if constexpr (2 * apart < L) {
            sort_bitonic(best);
            return least_of_best<L, K, 2 * apart>(best);
        } else {
            float least = best[0];
#pragma unroll
            for (int i = 1; i < N; ++i) least = fminf(least, best[i]);
            return least;
        }
    }
}

// parts[p] = the largest of the p-th of N parts of a lane's values, as equal as can be.
template <int span, int N>
__device__ void largest_of_parts(const float (&x)[span], float (&parts)[N]) {
#pragma unroll
    for (int i = 0; i < span; ++i) { // One loop keeps a value from being found by an index.
        const int p = i * N / span;
        parts[p] = i == 0 || (i - 1) * N / span < p ? x[i] : fmaxf(parts[p], x[i]);
    }
}

// The number of parts of a lane's values. With 32 of a token few values are not below the K-th largest of their largest
// (8.8 of 128 in the mean for K = 8; 10.2 with 16). Where groups limit the choice half of them may be out.
template <int span, int L, int K, bool limited>
inline constexpr int parts_of = std::clamp((limited ? 8 * K : 32) / L, 1, std::min(2 * K, span));
// The number of its parts' largest values that a lane gives away: few lanes have more among the best, and without them
// the floor is only lower.
template <int L, int K, bool limited>
inline constexpr int given_of = std::clamp((limited || L > 4 ? 4 : 2) * K / L, 2, K);

// A value which K of a token's are not below, and few others: the K-th largest of the largest of their parts.
template <int L, int K, bool limited, int N>
__device__ float floor_of_best(float (&parts)[N]) {
    constexpr int given = given_of<L, K, limited>;
    if constexpr (N <= given) {
        sort<0, N>(parts);
        return least_of_best<L, K>(parts);
    } else {
        constexpr int half = N / 2, kept = half < given ? half : given;
        sort<0, half>(parts);
        sort<half, half>(parts);
        float best[kept];
#pragma unroll
        for (int i = 0; i < kept; ++i) best[i] = fmaxf(parts[i], parts[half + kept - 1 - i]);
        sort_bitonic(best);
        return least_of_best<L, K>(best);
    }
}

__device__ inline float next_below(float x) {
    const int bits = __float_as_int(x);
    return x == 0.0f ? __int_as_float(static_cast<int>(0x80000001u)) : __int_as_float(bits + (bits < 0 ? 1 : -1));
}

// The best two of a lane's values, whose number is a power of two, and the largest of each of N parts.
template <int span, int N>
__device__ void best_two(const float (&x)[span], float (&parts)[N], float& first, float& second) {
    constexpr int size = span / N;
    float high[span / 2], low[span / 2];
#pragma unroll
    for (int i = 0; i < span / 2; ++i) {
        high[i] = fmaxf(x[2 * i], x[2 * i + 1]);
        low[i] = fminf(x[2 * i], x[2 * i + 1]);
    }
#pragma unroll
    for (int apart = 1; apart <= span / 2; apart *= 2) {
#pragma unroll
        for (int p = 0; p < N && 2 * apart == size; ++p) parts[p] = high[p * apart];
#pragma unroll
        for (int i = 0; i + apart < span / 2; i += 2 * apart) {
            low[i] = fmaxf(fminf(high[i], high[i + apart]), fmaxf(low[i], low[i + apart]));
            high[i] = fmaxf(high[i], high[i + apart]);
        }
    }
#pragma unroll
    for (int p = 0; p < N && size == 1; ++p) parts[p] = x[p];
    first = high[0];
    second = low[0];
}

// True where the group of this lane, whose best two are known, is one of the groups_kept best; `lanes` hold a group.
// The best may be off by up to error * (1 + |best|) / 2 each: unclear is set where that may decide.
template <int L>
__device__ bool group_kept(const RouterShape& s, float first, float second, int lanes, int lane, float error,
                           bool& unclear) {
    for (int apart = 1; apart < lanes; apart *= 2) {
        const float other_first = __shfl_xor_sync(all_lanes, first, apart),
                    other_second = __shfl_xor_sync(all_lanes, second, apart);
        second = fmaxf(fminf(first, other_first), fmaxf(second, other_second));
        first = fmaxf(first, other_first);
    }
    const bool real = lane % L<s.groups * lanes, two = s.group_score_top> 1 && s.experts > s.groups;
    const float mine = !real ? -INFINITY : two ? first + second : first, near = 2.0f * error * (1.0f + fabsf(mine));
    // A group is before this one if it is above, as far as that is known; of equal ones, if its number is lower.
    const float above = error > 0.0f ? mine + near : mine, above_or_equal = error > 0.0f ? mine - near : mine,
                above_earlier = error > 0.0f ? mine - near : next_below(mine);
    float before = 0.0f, perhaps = 0.0f;
#pragma unroll
    for (int apart = 1; apart < L; ++apart) {
        if ((apart & (lanes - 1)) != 0) continue; // The other lane is of the same group.
        const float other = __shfl_xor_sync(all_lanes, mine, apart);
        before += other > above ? 1.0f : 0.0f;
        perhaps += other > ((lane ^ apart) < lane ? above_earlier : above_or_equal) ? 1.0f : 0.0f;
    }
    const auto kept = static_cast<float>(s.groups_kept);
    unclear = unclear || (error > 0.0f && before < kept && perhaps >= kept);
    return real && perhaps < kept;
}

// The experts of a token that may be among the best K, by number.
template <int span, int L, int K>
struct alignas(16) Shortlist {
    static constexpr int places = 2 * K < L * span ? 2 * K : L * span;
    static constexpr int each = (places + L - 1) / L;                // places of a lane: part, part + L, ..
    static constexpr int most = each % 4 == 0 ? each / 4 * 3 : each; // most places in use: seldom are there more
    float value[places];
    std::uint16_t expert[places];

    // Counts the experts whose bits are set, a bit for each of a lane's experts, the first of them the highest. Listed
    // if there are places for all.
    __device__ int fill(unsigned bits, int part) {
        const int mine = __popc(bits);
        int end = mine;
#pragma unroll
        for (int apart = 1; apart < L; apart *= 2) {
            const int before = __shfl_up_sync(all_lanes, end, apart, L);
            end += part >= apart ? before : 0;
        }
        const int count = L > 1 ? __shfl_sync(all_lanes, end, L - 1, L) : end;
        if (count <= places) {
            for (std::uint16_t* at = expert + end - mine; bits != 0; ++at) {
                const int i = __clz(static_cast<int>(bits));
                bits &= 0x7fffffffu >> i;
                *at = static_cast<std::uint16_t>(part * span + i);
            }
        }
        __syncwarp();
        return count;
    }

    // The places of this lane's entries among the first `rows` rows of L: by value, equal ones by number.
    template <int rows>
    __device__ void find_places(const float (&own)[each], int part, float (&place)[each]) const {
        float below[rows];
#pragma unroll
        for (int j = 0; j < rows; ++j) below[j] = next_below(own[j]);
#pragma unroll
        for (int first = 0; first < rows * L && first < places; first += 4) {
            const float4 four = *reinterpret_cast<const float4*>(&value[first]);
            const float other[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = (first + i) / L, lane = (first + i) % L;
#pragma unroll
                for (int j = 0; j < rows; ++j) {
                    const float least = row < j || (row == j && lane < part) ? below[j] : own[j];
                    place[j] += other[i] > least ? 1.0f : 0.0f;
                }
            }
        }
    }
    // Puts `count` listed ones, of which this lane's are number with the values own, in order, the best first. Values
    // are above -infinity; `none` where there is no entry.
    static constexpr float none = -FLT_MAX;
    __device__ void put_in_order(const int (&number)[each], const float (&own)[each], int count, int part) {
        float place[each];
#pragma unroll
        for (int j = 0; j < each; ++j) {
            if (part + L * j < places) value[part + L * j] = own[j];
            place[j] = 0.0f;
        }
        __syncwarp();
        if (most < each && __any_sync(all_lanes, count > most * L)) {
            find_places<each>(own, part, place);
        } else {
            find_places<most>(own, part, place);
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < each; ++j)
            if (part + L * j < count) expert[static_cast<int>(place[j])] = static_cast<std::uint16_t>(number[j]);
        __syncwarp();
    }
};

// The best top_k of a token's experts one after another, of which this lane has those with keys above 0.
template <int L, int span>
__device__ void take_in_turn(int top_k, unsigned (&key)[span], int part, std::uint16_t* expert) {
    for (int k = 0; k < top_k; ++k) {
        unsigned best = key[0];
#pragma unroll
        for (int i = 1; i < span; ++i) best = max(best, key[i]);
#pragma unroll
        for (int apart = 1; apart < L; apart *= 2) best = max(best, __shfl_xor_sync(all_lanes, best, apart));
        unsigned equal = 0;
#pragma unroll
        for (int i = 0; i < span; ++i) equal |= key[i] == best ? 1u << i : 0u;
        const int mine = equal != 0 ? part * span + __ffs(static_cast<int>(equal)) - 1 : L * span;
        int lowest = mine;
#pragma unroll
        for (int apart = 1; apart < L; apart *= 2) lowest = min(lowest, __shfl_xor_sync(all_lanes, lowest, apart));
        if (mine == lowest) {
            expert[k] = static_cast<std::uint16_t>(mine);
            equal &= -equal;
#pragma unroll
            for (int i = 0; i < span; ++i) key[i] = (equal >> i & 1) != 0 ? 0u : key[i];
        }
    }
    __syncwarp();
}

} // namespace moe::cuda
