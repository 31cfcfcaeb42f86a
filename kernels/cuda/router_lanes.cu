// The router with a warp per token: scores and keys of the experts stay in the lanes' registers.
#include "kernels/cuda/router_lanes.hpp"

#include "kernels/cuda/rows.cuh"
#include "kernels/cuda/scores.cuh"

namespace moe::cuda {
namespace {

constexpr int most_entries = 16; // experts per lane

// Numbers that order as the values do, from 2 up; 1 for NaN, which is the lowest value, 0 for what is out of the
// choice.
__device__ unsigned order_of(float value) {
    const unsigned bits = __float_as_uint(value + 0.0f); // -0 becomes +0: they are equal
    return isnan(value) ? 1u : (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ float value_of(unsigned order) {
    return __uint_as_float((order & 0x80000000u) != 0 ? order & 0x7fffffffu : ~order);
}

// Expert e of a token lies in lane e % 32, entry e / 32 of a lane's arrays.
template <int N>
__device__ void remove(int index, unsigned (&order)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) order[i] = index == i * warp_size + lane_id() ? 0u : order[i];
}

// Takes the best out of entries [begin, end); equal ones by lower index. The whole warp gets index and order.
template <int N>
__device__ int take_best(unsigned (&order)[N], int begin, int end, unsigned& best) {
    unsigned mine = 0;
    int at = begin;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const bool better = i >= begin && i < end && order[i] > mine;
        mine = better ? order[i] : mine;
        at = better ? i : at;
    }
    best = __reduce_max_sync(all_lanes, mine);
    const unsigned candidate = mine == best ? static_cast<unsigned>(at * warp_size + lane_id()) : ~0u;
    const auto index = static_cast<int>(__reduce_min_sync(all_lanes, candidate));
    remove(index, order);
    return index;
}

// The score of any expert, in every lane.
template <int N>
__device__ float score_of(const float (&score)[N], int index) {
    float value = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) value = index / warp_size == i ? score[i] : value;
    return __shfl_sync(all_lanes, value, index % warp_size);
}

template <int N>
__device__ void fill_scores(const RouterShape& s, Src logits, std::int64_t token, float (&score)[N]) {
    const std::int64_t start = token * s.experts;
    const bool softmax = s.score == Score::softmax && !s.softmax_after_top_k;
    float largest = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int e = i * warp_size + lane_id();
        score[i] = e < s.experts ? load(logits, start + e) : -INFINITY;
        largest = fmaxf(largest, score[i]);
    }
    if (s.softmax_after_top_k) return;
    if (softmax) largest = warp_max(largest);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float logit = score[i];
        if (softmax) {
            score[i] = expf(logit - largest);
            sum += i * warp_size + lane_id() < s.experts ? score[i] : 0.0f;
        } else {
            score[i] = s.score == Score::sigmoid ? sigmoid(logit) : sqrtf(softplus(logit));
        }
    }
    if (!softmax) return;
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < N; ++i) score[i] /= sum;
}

// Takes all experts outside the groups_kept best groups out of the choice; a group is `entries` entries of every lane.
template <int N>
__device__ void limit_groups(const RouterShape& s, unsigned (&order)[N]) {
    const int size = s.experts / s.groups, entries = size / warp_size;
    const int top = s.group_score_top < size ? s.group_score_top : size;
    unsigned left[N];
#pragma unroll
    for (int i = 0; i < N; ++i) left[i] = order[i];
    unsigned of_group = 0; // lane g: the group's score as a number that orders
    for (int g = 0; g < s.groups; ++g) {
        float sum = 0.0f;
        for (int i = 0; i < top; ++i) {
            unsigned best = 0;
            take_best(left, g * entries, (g + 1) * entries, best);
            sum += value_of(best);
        }
        if (lane_id() == g) of_group = order_of(sum);
    }
    unsigned kept = 0; // a bit per group
    for (int i = 0; i < s.groups_kept; ++i) {
        const unsigned best = __reduce_max_sync(all_lanes, of_group);
        const int group = __ffs(static_cast<int>(__ballot_sync(all_lanes, of_group == best))) - 1;
        kept |= 1u << group;
        if (lane_id() == group) of_group = 0;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int group = i / entries;
        if (group < s.groups && (kept >> group & 1u) == 0) order[i] = 0;
    }
}

template <int N>
__global__ void __launch_bounds__(row_threads)
    router_lanes_kernel(RouterShape s, Src logits, Src bias, const std::int32_t* positions, std::int32_t* index,
                        float* weight) {
    const std::int64_t token = std::int64_t{blockIdx.x} * row_warps + threadIdx.x / warp_size;
    if (token >= s.tokens) return;
    float scores[N];
    unsigned order[N];
    fill_scores(s, logits, token, scores);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int e = i * warp_size + lane_id();
        order[i] = e < s.experts ? order_of(scores[i] + (bias.data != nullptr ? load(bias, e) : 0.0f)) : 0u;
    }
    if (s.groups > 1 && s.groups_kept < s.groups) limit_groups(s, order);
    const int forced = positions != nullptr ? positions[(s.first + token) / s.batch] : 0;
    int chosen = 0; // of lane k: the k-th choice and its score
    float mine = 0.0f, sum = 0.0f, largest = -INFINITY;
    for (int k = 0; k < s.top_k; ++k) {
        unsigned best = 0;
        const int e =
            positions != nullptr ? (forced + k * (s.experts / s.top_k)) % s.experts : take_best(order, 0, N, best);
        const float score = score_of(scores, e);
        if (lane_id() == k) chosen = e, mine = score;
        sum += score;
        largest = fmaxf(largest, score);
    }
    if (s.softmax_after_top_k) {
        sum = 0.0f;
        for (int k = 0; k < s.top_k; ++k) sum += expf(__shfl_sync(all_lanes, mine, k) - largest);
        mine = expf(mine - largest);
    } else {
        sum = s.normalize ? sum + tiny_sum : 1.0f;
    }
    if (lane_id() >= s.top_k) return;
    index[token * s.top_k + lane_id()] = chosen;
    weight[token * s.top_k + lane_id()] = mine / sum * static_cast<float>(s.scale);
}

// Slope of sigmoid and sqrt(softplus) at a logit whose score is known.
__device__ float slope_of(Score score, float logit, float value) {
    if (score == Score::softmax) return 1.0f;
    if (score == Score::sigmoid) return value * (1.0f - value);
    return value > 0.0f ? sigmoid(logit) / (2.0f * value) : 0.0f; // underflowed: the slope has, too
}

// Gradient of a chosen score from that of its weight, one per lane; `mine`: whether this lane has one.
__device__ float grad_of_score(const RouterShape& s, bool mine, float dweight, float score) {
    const auto scale = static_cast<float>(s.scale);
    if (s.softmax_after_top_k) {
        const float largest = warp_max(mine ? score : -INFINITY);
        const float part = mine ? expf(score - largest) : 0.0f, share = part / warp_sum(part);
        return scale * share * (dweight - warp_sum(mine ? dweight * share : 0.0f));
    }
    if (!s.normalize) return scale * dweight;
    const float sum = warp_sum(mine ? score : 0.0f) + tiny_sum, along = warp_sum(mine ? dweight * score : 0.0f);
    return scale * (dweight - along / sum) / sum;
}

template <int N>
__global__ void __launch_bounds__(row_threads)
    router_grad_lanes_kernel(RouterShape s, const float* dweight, Src logits, const std::int32_t* index, Dst dlogits) {
    const std::int64_t token = std::int64_t{blockIdx.x} * row_warps + threadIdx.x / warp_size;
    if (token >= s.tokens) return;
    const std::int64_t start = token * s.experts;
    float scores[N], grads[N] = {};
    fill_scores(s, logits, token, scores);
    const bool has = lane_id() < s.top_k; // lane k: the k-th choice
    const int chosen = has ? index[token * s.top_k + lane_id()] : 0;
    float score = 0.0f;
    for (int k = 0; k < s.top_k; ++k) {
        const float found = score_of(scores, __shfl_sync(all_lanes, chosen, k));
        if (lane_id() == k) score = found;
    }
    float grad = grad_of_score(s, has, has ? dweight[token * s.top_k + lane_id()] : 0.0f, score);
    if (has && !s.softmax_after_top_k && s.score != Score::softmax)
        grad *= slope_of(s.score, load(logits, start + chosen), score);
    const bool softmax = s.score == Score::softmax && !s.softmax_after_top_k;
    const float along = softmax ? warp_sum(has ? grad * score : 0.0f) : 0.0f;
    for (int k = 0; k < s.top_k; ++k) { // the chosen experts differ: no two come to one place
        const int e = __shfl_sync(all_lanes, chosen, k);
        const float value = __shfl_sync(all_lanes, grad, k);
#pragma unroll
        for (int i = 0; i < N; ++i) grads[i] = e == i * warp_size + lane_id() ? value : grads[i];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int e = i * warp_size + lane_id();
        if (e < s.experts) store(dlogits, start + e, softmax ? scores[i] * (grads[i] - along) : grads[i]);
    }
}

// run(N) with entries per lane for that many experts, as a constant.
template <class Run>
void with_entries(int experts, Run run) {
    if (experts <= 4 * warp_size) {
        run(std::integral_constant<int, 4>{});
    } else if (experts <= 8 * warp_size) {
        run(std::integral_constant<int, 8>{});
    } else {
        run(std::integral_constant<int, most_entries>{});
    }
}

} // namespace

bool router_lanes(const RouterShape& s, Src logits, Src bias, const std::int32_t* positions, std::int32_t* index,
                  float* weight, void* stream) {
    const bool limited = s.groups > 1 && s.groups_kept < s.groups;
    const bool whole = !limited || (s.groups <= warp_size && s.experts % (s.groups * warp_size) == 0);
    if (!whole || s.top_k > warp_size || s.experts > most_entries * warp_size) return false;
    with_entries(s.experts, [&](auto entries) {
        router_lanes_kernel<entries()><<<blocks_for(s.tokens, row_warps), row_threads, 0, stream_of(stream)>>>(
            s, logits, bias, positions, index, weight);
    });
    CUDA_CHECK(cudaGetLastError());
    return true;
}

bool router_grad_lanes(const RouterShape& s, const float* dweight, Src logits, const std::int32_t* index, Dst dlogits,
                       void* stream) {
    if (s.top_k > warp_size || s.experts > most_entries * warp_size) return false;
    with_entries(s.experts, [&](auto entries) {
        router_grad_lanes_kernel<entries()><<<blocks_for(s.tokens, row_warps), row_threads, 0, stream_of(stream)>>>(
            s, dweight, logits, index, dlogits);
    });
    CUDA_CHECK(cudaGetLastError());
    return true;
}

} // namespace moe::cuda
