// The router for any shape: scores, group-limited top-k and weights, and the gradient of the chosen scores; one warp
// per token.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/router/mixer.hpp"
#include "kernels/cuda/router/router_lanes.hpp"
#include "kernels/cuda/router/scores.cuh"

namespace moe::cuda {
namespace {

constexpr int threads = 128, warps = threads / warp_size;

// A key that orders by value, equal values by lower index; 0 is below every key. A NaN counts as the lowest value, so
// that a broken logit still yields distinct experts inside the table.
using Key = unsigned long long;
__device__ Key key_of(float value, int index) {
    const unsigned bits = __float_as_uint(value + 0.0f); // -0 becomes +0: they are equal
    const unsigned order = isnan(value) ? 0u : (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
    return Key{order} << 32 | (0xffffffffu - static_cast<unsigned>(index));
}
__device__ int index_of(Key key) { return static_cast<int>(0xffffffffu - static_cast<unsigned>(key)); }

// Takes the best key out of keys[n]; a whole warp asks at once.
__device__ int take_best(Key* keys, int n) {
    Key best = 0;
    for (int i = lane_id(); i < n; i += warp_size) best = keys[i] > best ? keys[i] : best;
    for (int offset = warp_size / 2; offset > 0; offset /= 2) {
        const Key other = __shfl_xor_sync(all_lanes, best, offset);
        best = other > best ? other : best;
    }
    const int index = best != 0 ? index_of(best) : 0;
    if (lane_id() == 0 && best != 0) keys[index] = 0;
    __syncwarp();
    return index;
}

struct Work { // shared memory of one warp
    Key *keys, *group_keys;
    float* score;
    __device__ Work(const RouterShape& s, Key* shared) {
        const int warp = static_cast<int>(threadIdx.x) / warp_size;
        keys = shared + warp * (s.experts + s.groups);
        group_keys = keys + s.experts;
        score = reinterpret_cast<float*>(shared + warps * (s.experts + s.groups)) + warp * s.experts;
    }
};
std::size_t shared_bytes(const RouterShape& s) {
    const auto experts = static_cast<std::size_t>(s.experts), groups = static_cast<std::size_t>(s.groups);
    return warps * ((experts + groups) * sizeof(Key) + experts * sizeof(float));
}

__device__ void scores(const RouterShape& s, Src logits, std::int64_t token, float* score) {
    const std::int64_t start = token * s.experts;
    float largest = -INFINITY, sum = 0.0f;
    const bool softmax = s.score == Score::softmax && !s.softmax_after_top_k;
    for (int e = lane_id(); softmax && e < s.experts; e += warp_size) largest = fmaxf(largest, load(logits, start + e));
    largest = softmax ? warp_max(largest) : 0.0f;
    for (int e = lane_id(); e < s.experts; e += warp_size) {
        const float x = load(logits, start + e);
        if (softmax) {
            score[e] = expf(x - largest);
            sum += score[e];
        } else if (s.softmax_after_top_k) {
            score[e] = x;
        } else {
            score[e] = s.score == Score::sigmoid ? sigmoid(x) : sqrtf(softplus(x));
        }
    }
    sum = warp_sum(sum);
    for (int e = lane_id(); softmax && e < s.experts; e += warp_size) score[e] /= sum;
    __syncwarp();
}

// Clears the keys of all experts outside the groups_kept best groups.
__device__ void limit_groups(const RouterShape& s, const Work& w) {
    const int size = s.experts / s.groups, top = s.group_score_top < size ? s.group_score_top : size;
    for (int g = lane_id(); g < s.groups; g += warp_size) {
        float sum = 0.0f;
        Key last = ~Key{0};
        for (int i = 0; i < top; ++i) { // The next best is below the last: groups are small, and top is 1 or 2.
            Key best = 0;
            for (int e = g * size; e < (g + 1) * size; ++e)
                best = w.keys[e] < last && w.keys[e] > best ? w.keys[e] : best;
            const unsigned order = static_cast<unsigned>(best >> 32);
            sum += __uint_as_float((order & 0x80000000u) != 0 ? order & 0x7fffffffu : ~order);
            last = best;
        }
        w.group_keys[g] = key_of(sum, g);
    }
    __syncwarp();
    for (int i = 0; i < s.groups_kept; ++i) take_best(w.group_keys, s.groups);
    for (int e = lane_id(); e < s.experts; e += warp_size) {
        if (w.group_keys[e / size] != 0) w.keys[e] = 0; // A group that was kept was taken out.
    }
    __syncwarp();
}

// The chosen scores' softmax, as max and sum; top_k is small, every lane goes over all of it.
__device__ void chosen_softmax(const float* score, const std::int32_t* index, int top_k, float& largest, float& sum) {
    largest = -INFINITY;
    sum = 0.0f;
    for (int k = 0; k < top_k; ++k) largest = fmaxf(largest, score[index[k]]);
    for (int k = 0; k < top_k; ++k) sum += expf(score[index[k]] - largest);
}

// The token's experts by their scores, or by its position.
__device__ void choose(const RouterShape& s, const Work& w, Src logits, Src bias, const std::int32_t* positions,
                       std::int64_t token, std::int32_t* chosen) {
    const bool by_logits = by_logit(s, bias.data != nullptr);
    for (int e = lane_id(); e < s.experts; e += warp_size) {
        const float value = by_logits ? load(logits, token * s.experts + e) : w.score[e];
        w.keys[e] = key_of(value + (bias.data != nullptr ? load(bias, e) : 0.0f), e);
    }
    __syncwarp();
    if (limits_groups(s)) limit_groups(s, w);
    const int forced = positions != nullptr ? positions[(s.first + token) / s.batch] : 0;
    for (int k = 0; k < s.top_k; ++k) {
        const int best =
            positions != nullptr ? (forced + k * (s.experts / s.top_k)) % s.experts : take_best(w.keys, s.experts);
        if (lane_id() == 0) chosen[k] = best;
    }
}

__global__ void __launch_bounds__(threads)
    router_kernel(RouterShape s, Src logits, Src bias, GivenChoice given, std::int32_t* index, float* weight) {
    extern __shared__ Key shared[];
    const std::int64_t token = std::int64_t{blockIdx.x} * warps + threadIdx.x / warp_size;
    if (token >= s.tokens) return;
    const Work w(s, shared);
    scores(s, logits, token, w.score);
    std::int32_t* chosen = index + token * s.top_k;
    if (given.recorded != nullptr) {
        for (int k = lane_id(); k < s.top_k; k += warp_size) chosen[k] = given.recorded[token * s.top_k + k];
    } else {
        choose(s, w, logits, bias, given.positions, token, chosen);
    }
    __syncwarp();
    float largest = 0.0f, sum = 1.0f;
    if (s.softmax_after_top_k) {
        chosen_softmax(w.score, chosen, s.top_k, largest, sum);
    } else if (s.normalize) {
        sum = 0.0f;
        for (int k = 0; k < s.top_k; ++k) sum += w.score[chosen[k]];
        sum += tiny_sum;
    }
    for (int k = lane_id(); k < s.top_k; k += warp_size) {
        const float score = w.score[chosen[k]];
        weight[token * s.top_k + k] =
            (s.softmax_after_top_k ? expf(score - largest) : score) / sum * static_cast<float>(s.scale);
    }
}

// Slope of sigmoid and sqrt(softplus) at a logit whose score is known.
__device__ float score_slope(Score score, float logit, float value) {
    if (score == Score::sigmoid) return value * (1.0f - value);
    return value > 0.0f ? sigmoid(logit) / (2.0f * value) : 0.0f; // Where the score underflowed, its slope has, too.
}

// Gradient of the chosen score k, from the weights' gradients.
struct Chosen {
    float sum = tiny_sum, along = 0.0f, largest = 0.0f;
    __device__ Chosen(const RouterShape& s, const float* dweight, const float* score, const std::int32_t* index) {
        if (s.softmax_after_top_k) chosen_softmax(score, index, s.top_k, largest, sum);
        for (int k = 0; k < s.top_k; ++k) {
            const float value = score[index[k]];
            along += dweight[k] * (s.softmax_after_top_k ? expf(value - largest) / sum : value);
            if (!s.softmax_after_top_k) sum += value;
        }
    }
    __device__ float grad(const RouterShape& s, float dweight, float score) const {
        const auto scale = static_cast<float>(s.scale);
        if (s.softmax_after_top_k) return scale * expf(score - largest) / sum * (dweight - along);
        return scale * (s.normalize ? (dweight - along / sum) / sum : dweight);
    }
};

__global__ void __launch_bounds__(threads)
    router_grad_kernel(RouterShape s, const float* dweight, Src logits, const std::int32_t* index, Dst dlogits) {
    extern __shared__ Key shared[];
    const std::int64_t token = std::int64_t{blockIdx.x} * warps + threadIdx.x / warp_size;
    if (token >= s.tokens) return;
    const Work w(s, shared);
    float* grad = reinterpret_cast<float*>(w.keys);
    scores(s, logits, token, w.score);
    for (int e = lane_id(); e < s.experts; e += warp_size) grad[e] = 0.0f;
    __syncwarp();
    const std::int32_t* chosen = index + token * s.top_k;
    const float* dw = dweight + token * s.top_k;
    const Chosen all(s, dw, w.score, chosen);
    for (int k = lane_id(); k < s.top_k; k += warp_size) { // The chosen experts differ, so no two lanes meet.
        const int e = chosen[k];
        const float slope = s.softmax_after_top_k || s.score == Score::softmax
                                ? 1.0f
                                : score_slope(s.score, load(logits, token * s.experts + e), w.score[e]);
        grad[e] = all.grad(s, dw[k], w.score[e]) * slope;
    }
    __syncwarp();
    const bool softmax = s.score == Score::softmax && !s.softmax_after_top_k;
    float along = 0.0f;
    for (int e = lane_id(); softmax && e < s.experts; e += warp_size) along += grad[e] * w.score[e];
    along = warp_sum(along);
    for (int e = lane_id(); e < s.experts; e += warp_size) {
        store(dlogits, token * s.experts + e, softmax ? w.score[e] * (grad[e] - along) : grad[e]);
    }
}

// More experts than 48 KiB of shared memory hold: the limit is raised to what the shape needs.
template <class Kernel>
void allow_shared(Kernel* kernel, const RouterShape& s) {
    require(shared_bytes(s) <= 227 * 1024, "the router's number of experts", s.experts, 4600);
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes(s))));
}

void router(const RouterShape& s, Src logits, Src bias, GivenChoice given, std::int32_t* index, float* weight,
            void* stream) {
    if (s.mixer > 0.0) return mixer(s, logits, given, index, weight, stream);
    if (s.tokens <= 0) return;
    if (given.recorded == nullptr && router_lanes(s, logits, bias, given.positions, index, weight, stream)) return;
    allow_shared(router_kernel, s);
    router_kernel<<<blocks_for(s.tokens, warps), threads, shared_bytes(s), stream_of(stream)>>>(s, logits, bias, given,
                                                                                                index, weight);
    CUDA_CHECK(cudaGetLastError());
}

void router_grad(const RouterShape& s, const float* dweight, Src logits, const std::int32_t* index, Dst dlogits,
                 void* stream) {
    if (s.mixer > 0.0) return mixer_grad(s, dweight, logits, index, dlogits, stream);
    if (s.tokens <= 0 || router_grad_lanes(s, dweight, logits, index, dlogits, stream)) return;
    allow_shared(router_grad_kernel, s);
    router_grad_kernel<<<blocks_for(s.tokens, warps), threads, shared_bytes(s), stream_of(stream)>>>(s, dweight, logits,
                                                                                                     index, dlogits);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_router(Kernels& table) {
    table.router = router;
    table.router_grad = router_grad;
}

} // namespace moe::cuda
