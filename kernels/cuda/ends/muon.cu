// What Muon does element by element: its momentum, the matrix of unit norm, and the step along what was orthogonalized.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/vector.cuh"

namespace moe::cuda {
namespace {

constexpr int threads = 256, most_blocks = 4096;

// True in steps that change nothing; see Kernels::adamw.
__device__ bool skipped(const float* squares, const float* hyper, const float* overflow) {
    if (overflow != nullptr && *overflow > 0.0f) return true;
    return hyper[8] > 0.0f && !(*squares <= hyper[8]);
}

// Calls each(i) for the elements of this thread.
template <class Each>
__device__ void each_element(std::int64_t n, Each each) {
    const std::int64_t step = std::int64_t{gridDim.x} * threads;
    for (std::int64_t i = std::int64_t{blockIdx.x} * threads + threadIdx.x; i < n; i += step) each(i);
}

__global__ void __launch_bounds__(threads) momentum_kernel(float mu, float* g, const float* squares, const float* hyper,
                                                           const float* overflow, Dst m, std::int64_t n) {
    if (skipped(squares, hyper, overflow)) return;
    const float norm = sqrtf(*squares), clip = hyper[5];
    const float factor = clip > 0.0f && norm > clip ? clip / (norm + 1e-6f) : 1.0f;
    each_element(n, [&](std::int64_t i) {
        const float gradient = factor * g[i], first = mu * load(read_back(m), i) + gradient;
        store(m, i, first);
        g[i] = gradient + mu * first;
    });
}

__global__ void __launch_bounds__(threads)
    unit_kernel(Src x, const float* squares, const float* hyper, Dst y, std::int64_t n) {
    const float factor = 1.0f / fmaxf(sqrtf(*squares), hyper[3]);
    each_element(n, [&](std::int64_t i) { store(y, i, factor * load(x, i)); });
}

__global__ void __launch_bounds__(threads)
    step_kernel(AdamShape s, float factor, Src o, const float* squares, const float* hyper, const float* overflow,
                float* master, Dst w) {
    if (skipped(squares, hyper, overflow)) return;
    const float rate = hyper[0] * s.rate, along = rate * factor, decay = rate * (s.decay < 0.0f ? hyper[4] : s.decay);
    each_element(s.elements, [&](std::int64_t i) {
        const float moved = master[i] - (along * load(o, i) + decay * master[i]);
        master[i] = moved;
        if (w.data != nullptr) store(w, i, moved);
    });
}

unsigned blocks_of(std::int64_t n) { return blocks_for(n, threads, most_blocks); }

void momentum(double kept, float* g, const float* squares, const float* hyper, const float* overflow, Dst m,
              std::int64_t n, void* stream) {
    if (n <= 0) return;
    momentum_kernel<<<blocks_of(n), threads, 0, stream_of(stream)>>>(static_cast<float>(kept), g, squares, hyper,
                                                                     overflow, m, n);
    CUDA_CHECK(cudaGetLastError());
}

void unit(Src x, const float* squares, const float* hyper, Dst y, std::int64_t n, void* stream) {
    if (n <= 0) return;
    unit_kernel<<<blocks_of(n), threads, 0, stream_of(stream)>>>(x, squares, hyper, y, n);
    CUDA_CHECK(cudaGetLastError());
}

void orthogonal_step(const AdamShape& s, double factor, Src o, const float* squares, const float* hyper,
                     const float* overflow, float* master, Dst w, void* stream) {
    if (s.elements <= 0) return;
    step_kernel<<<blocks_of(s.elements), threads, 0, stream_of(stream)>>>(s, static_cast<float>(factor), o, squares,
                                                                          hyper, overflow, master, w);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_muon(Kernels& table) {
    table.momentum = momentum;
    table.unit = unit;
    table.orthogonal_step = orthogonal_step;
}

} // namespace moe::cuda
