// Cross-entropy over a vocabulary that may be cut into slices: the pieces between the reductions over the slices.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/families.hpp"

namespace moe::cuda {
namespace {

constexpr int threads = 512;
constexpr int sum_threads = 1024;

// Columns of the slice that are real vocabulary entries.
__host__ __device__ std::int64_t real_columns(const LossShape& s) {
    const std::int64_t left = s.vocab - s.first;
    return left < 0 ? 0 : left < s.vocab_local ? left : s.vocab_local;
}

__global__ void __launch_bounds__(threads) max_kernel(LossShape s, Src logits, float* max) {
    const std::int64_t row = blockIdx.x, columns = real_columns(s);
    float best = -INFINITY;
    for (std::int64_t c = threadIdx.x; c < columns; c += threads) {
        best = fmaxf(best, load(logits, row * s.vocab_local + c));
    }
    best = block_max(best);
    if (threadIdx.x == 0) max[row] = best;
}

__global__ void __launch_bounds__(threads)
    sum_kernel(LossShape s, Src logits, const float* max, const std::int32_t* labels, float* stat) {
    const std::int64_t row = blockIdx.x, columns = real_columns(s);
    const float largest = max[row];
    float sum = 0.0f;
    for (std::int64_t c = threadIdx.x; c < columns; c += threads) {
        sum += expf(load(logits, row * s.vocab_local + c) - largest);
    }
    sum = block_sum(sum);
    if (threadIdx.x != 0) return;
    const std::int64_t label = labels[row] - s.first;
    stat[2 * row] = labels[row] < 0 ? 0.0f : sum;
    stat[2 * row + 1] =
        labels[row] >= 0 && label >= 0 && label < columns ? load(logits, row * s.vocab_local + label) : 0.0f;
}

// One block: some thousand rows, and a fixed order.
__global__ void __launch_bounds__(sum_threads)
    loss_kernel(LossShape s, const float* max, const float* stat, float* loss) {
    double sum = 0.0;
    for (std::int64_t row = threadIdx.x; row < s.rows; row += sum_threads) {
        if (stat[2 * row] == 0.0f) continue; // no label
        sum += log(static_cast<double>(stat[2 * row])) + static_cast<double>(max[row]) -
               static_cast<double>(stat[2 * row + 1]);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) *loss += static_cast<float>(s.scale * sum);
}

__global__ void __launch_bounds__(threads)
    grad_kernel(LossShape s, Src logits, const float* max, const float* stat, const std::int32_t* labels, Dst dlogits) {
    const std::int64_t row = blockIdx.x, columns = real_columns(s), label = labels[row] - s.first;
    const auto scale = static_cast<float>(s.scale);
    const bool counts = labels[row] >= 0;
    const float largest = max[row], factor = counts ? scale / stat[2 * row] : 0.0f;
    for (std::int64_t c = threadIdx.x; c < s.vocab_local; c += threads) {
        const std::int64_t at = row * s.vocab_local + c;
        float value = 0.0f;
        if (c < columns) value = expf(load(logits, at) - largest) * factor - (counts && c == label ? scale : 0.0f);
        store(dlogits, at, value);
    }
}

void ce_max(const LossShape& s, Src logits, float* max, void* stream) {
    if (s.rows <= 0) return;
    max_kernel<<<blocks_for(s.rows, 1), threads, 0, stream_of(stream)>>>(s, logits, max);
    CUDA_CHECK(cudaGetLastError());
}

void ce_sum(const LossShape& s, Src logits, const float* max, const std::int32_t* labels, float* stat, void* stream) {
    if (s.rows <= 0) return;
    sum_kernel<<<blocks_for(s.rows, 1), threads, 0, stream_of(stream)>>>(s, logits, max, labels, stat);
    CUDA_CHECK(cudaGetLastError());
}

void ce_loss(const LossShape& s, const float* max, const float* stat, float* loss, void* stream) {
    if (s.rows <= 0) return;
    loss_kernel<<<1, sum_threads, 0, stream_of(stream)>>>(s, max, stat, loss);
    CUDA_CHECK(cudaGetLastError());
}

void ce_grad(const LossShape& s, Src logits, const float* max, const float* stat, const std::int32_t* labels,
             Dst dlogits, void* stream) {
    if (s.rows <= 0) return;
    grad_kernel<<<blocks_for(s.rows, 1), threads, 0, stream_of(stream)>>>(s, logits, max, stat, labels, dlogits);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_loss(Kernels& table) {
    table.ce_max = ce_max;
    table.ce_sum = ce_sum;
    table.ce_loss = ce_loss;
    table.ce_grad = ce_grad;
}

} // namespace moe::cuda
