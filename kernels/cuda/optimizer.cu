// AdamW on a shard, and the squared norm in two stages whose order does not depend on the launch.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/families.hpp"

#include <mutex>
#include <unordered_map>

namespace moe::cuda {
namespace {

constexpr int threads = 256;
constexpr int partial_blocks = 1024;
constexpr int stream_slots = 64;

// The first stage's sums. The signature carries no scratch, and streams of one device must not share one: each stream
// that ever asked has a row of this array, of which every device holds its own copy (512 KiB).
__device__ double partial_squares[stream_slots][partial_blocks];

int slot_of(cudaStream_t stream) {
    static std::mutex guard;
    static std::unordered_map<cudaStream_t, int> slots;
    const std::lock_guard<std::mutex> lock(guard);
    const auto [at, added] = slots.try_emplace(stream, static_cast<int>(slots.size()));
    require(at->second < stream_slots, "the number of streams that summed squares", at->second + 1, stream_slots);
    return at->second;
}

__global__ void __launch_bounds__(threads) squares_kernel(Src x, std::int64_t n, int slot) {
    double sum = 0.0;
    for (std::int64_t i = std::int64_t{blockIdx.x} * threads + threadIdx.x; i < n;
         i += std::int64_t{gridDim.x} * threads) {
        const float value = load(x, i);
        sum += static_cast<double>(value) * static_cast<double>(value);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial_squares[slot][blockIdx.x] = sum;
}

__global__ void __launch_bounds__(partial_blocks) add_squares_kernel(int slot, int blocks, float* s) {
    const double sum = block_sum(static_cast<int>(threadIdx.x) < blocks ? partial_squares[slot][threadIdx.x] : 0.0);
    if (threadIdx.x == 0) *s += static_cast<float>(sum);
}

struct Hyper {
    float lr, beta1, beta2, eps, decay, clip, correction1, correction2;
    __device__ explicit Hyper(const float* h)
        : lr(h[0]),
          beta1(h[1]),
          beta2(h[2]),
          eps(h[3]),
          decay(h[4]),
          clip(h[5]),
          correction1(h[6]),
          correction2(h[7]) {}
};

__global__ void __launch_bounds__(threads)
    adamw_kernel(AdamShape shape, const float* g, const float* squares, const float* hyper, const float* overflow,
                 float* master, Dst m, Dst v, Dst w) {
    const std::int64_t i = std::int64_t{blockIdx.x} * threads + threadIdx.x;
    if (i >= shape.elements || (overflow != nullptr && *overflow > 0.0f)) return;
    const Hyper h(hyper);
    const float norm = sqrtf(*squares);
    const float factor = h.clip > 0.0f && norm > h.clip ? h.clip / (norm + 1e-6f) : 1.0f;
    const float grad = factor * g[i];
    const float first = h.beta1 * load(read_back(m), i) + (1.0f - h.beta1) * grad;
    const float second = h.beta2 * load(read_back(v), i) + (1.0f - h.beta2) * grad * grad;
    const float decay = shape.offset + i < shape.decayed ? h.decay : 0.0f;
    const float old = master[i];
    const float step = first / h.correction1 / (sqrtf(second / h.correction2) + h.eps);
    const float updated = old - h.lr * (decay * old + step);
    store(m, i, first);
    store(v, i, second);
    master[i] = updated;
    store(w, i, updated);
}

void sum_squares(Src x, float* s, std::int64_t n, void* stream) {
    if (n <= 0) return;
    const int slot = slot_of(stream_of(stream));
    const unsigned blocks = blocks_for(n, threads * 8, partial_blocks);
    squares_kernel<<<blocks, threads, 0, stream_of(stream)>>>(x, n, slot);
    CUDA_CHECK(cudaGetLastError());
    add_squares_kernel<<<1, partial_blocks, 0, stream_of(stream)>>>(slot, static_cast<int>(blocks), s);
    CUDA_CHECK(cudaGetLastError());
}

void adamw(const AdamShape& s, const float* g, const float* squares, const float* hyper, const float* overflow,
           float* master, Dst m, Dst v, Dst w, void* stream) {
    if (s.elements <= 0) return;
    adamw_kernel<<<blocks_for(s.elements, threads), threads, 0, stream_of(stream)>>>(s, g, squares, hyper, overflow,
                                                                                     master, m, v, w);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_optimizer(Kernels& table) {
    table.sum_squares = sum_squares;
    table.adamw = adamw;
}

} // namespace moe::cuda
