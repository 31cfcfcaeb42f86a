// The embedding table's slice of the vocabulary: look-up and deterministic gradient.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/families.hpp"

namespace moe::cuda {
namespace {

constexpr int threads = 256;

__global__ void __launch_bounds__(threads)
    embedding_kernel(const std::int32_t* ids, Src table, Dst x, std::int64_t cols, std::int64_t first,
                     std::int64_t vocab_local) {
    const std::int64_t row = blockIdx.x, id = ids[row] - first;
    if (id >= 0 && id < vocab_local) {
        copy_row(table, id * cols, x, row * cols, cols, static_cast<int>(threadIdx.x), threads);
        return;
    }
    for (std::int64_t c = threadIdx.x; c < cols; c += threads) store(x, row * cols + c, 0.0f);
}

// The block of an id's first row adds all rows of that id, in order: no two blocks write the same place, so the sum
// needs no atomics and is the same every time. The search costs rows^2 / 2 comparisons at worst, out of the L2 cache.
__global__ void __launch_bounds__(threads)
    embedding_grad_kernel(const std::int32_t* ids, Src dx, float* dtable, std::int64_t rows, std::int64_t cols,
                          std::int64_t first, std::int64_t vocab_local) {
    __shared__ std::int32_t window[threads];
    const std::int64_t row = blockIdx.x, id = ids[row] - first;
    if (id < 0 || id >= vocab_local) return;
    for (std::int64_t base = 0; base < row; base += threads) {
        const std::int64_t r = base + threadIdx.x;
        if (__syncthreads_or(r < row && ids[r] == ids[row])) return;
    }
    const std::int64_t c = std::int64_t{blockIdx.y} * threads + threadIdx.x;
    float sum = c < cols ? dtable[id * cols + c] : 0.0f;
    for (std::int64_t base = row; base < rows; base += threads) {
        const std::int64_t r = base + threadIdx.x;
        __syncthreads(); // the window before has been read
        window[threadIdx.x] = r < rows && ids[r] == ids[row] ? 1 : 0;
        if (!__syncthreads_or(window[threadIdx.x])) continue;
        for (int i = 0; i < threads; ++i) {
            if (window[i] != 0 && c < cols) sum += load(dx, (base + i) * cols + c);
        }
    }
    if (c < cols) dtable[id * cols + c] = sum;
}

void embedding(const std::int32_t* ids, Src table, Dst x, std::int64_t rows, std::int64_t cols, std::int64_t first,
               std::int64_t vocab_local, void* stream) {
    if (rows <= 0 || cols <= 0) return;
    embedding_kernel<<<blocks_for(rows, 1), threads, 0, stream_of(stream)>>>(ids, table, x, cols, first, vocab_local);
    CUDA_CHECK(cudaGetLastError());
}

void embedding_grad(const std::int32_t* ids, Src dx, float* dtable, std::int64_t rows, std::int64_t cols,
                    std::int64_t first, std::int64_t vocab_local, void* stream) {
    if (rows <= 0 || cols <= 0) return;
    const dim3 grid(blocks_for(rows, 1), blocks_for(cols, threads));
    embedding_grad_kernel<<<grid, threads, 0, stream_of(stream)>>>(ids, dx, dtable, rows, cols, first, vocab_local);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_embedding(Kernels& table) {
    table.embedding = embedding;
    table.embedding_grad = embedding_grad;
}

} // namespace moe::cuda
