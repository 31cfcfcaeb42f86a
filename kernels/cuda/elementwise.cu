// Flat vector kernels: sums, casts, zero, and the reductions of in-process collectives.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/families.hpp"

namespace moe::cuda {
namespace {

constexpr int threads = 256;
constexpr int per_thread = 4; // independent loads in flight before the first use
constexpr int max_sources = 64;

// Calls run(i) for the elements of this block, neighbours in neighbouring threads.
template <class Run>
__device__ void for_each_element(std::int64_t n, Run run) {
    const std::int64_t base = std::int64_t{blockIdx.x} * threads * per_thread + threadIdx.x;
#pragma unroll
    for (int j = 0; j < per_thread; ++j) {
        if (base + j * threads < n) run(base + j * threads);
    }
}

__global__ void __launch_bounds__(threads) add_kernel(Src a, Src b, Dst y, std::int64_t n) {
    for_each_element(n, [&](std::int64_t i) { store(y, i, load(a, i) + load(b, i)); });
}

__global__ void __launch_bounds__(threads) bias_kernel(Src x, Src b, Dst y, std::int64_t n, std::int64_t cols) {
    for_each_element(n, [&](std::int64_t i) { store(y, i, load(x, i) + load(b, i % cols)); });
}

__global__ void __launch_bounds__(threads) columns_kernel(ColumnsShape s, Src x, Dst y) {
    for_each_element(s.rows * s.cols, [&](std::int64_t i) {
        const std::int64_t row = i / s.cols, col = i % s.cols, at = row * s.y_stride + s.to + col;
        store(y, at, load(x, row * s.x_stride + s.from + col) + (s.accumulate ? load(read_back(y), at) : 0.0f));
    });
}

__global__ void __launch_bounds__(threads) cast_kernel(Src x, Dst y, std::int64_t n) {
    for_each_element(n, [&](std::int64_t i) { store(y, i, load(x, i)); });
}

struct Sources {
    const void* data[max_sources];
};

__global__ void __launch_bounds__(threads)
    reduce_kernel(Dst y, Sources from, int sources, std::int64_t n, Type type, bool largest) {
    for_each_element(n, [&](std::int64_t i) {
        float value = load(Src{from.data[0], type}, i);
        for (int s = 1; s < sources; ++s) {
            const float next = load(Src{from.data[s], type}, i);
            value = largest ? fmaxf(value, next) : value + next;
        }
        store(y, i, value);
    });
}

unsigned grid(std::int64_t n) { return blocks_for(n, threads * per_thread); }

void add(Src a, Src b, Dst y, std::int64_t n, void* stream) {
    if (n <= 0) return;
    add_kernel<<<grid(n), threads, 0, stream_of(stream)>>>(a, b, y, n);
    CUDA_CHECK(cudaGetLastError());
}

void bias_add(Src x, Src b, Dst y, std::int64_t rows, std::int64_t cols, void* stream) {
    if (rows <= 0 || cols <= 0) return;
    bias_kernel<<<grid(rows * cols), threads, 0, stream_of(stream)>>>(x, b, y, rows * cols, cols);
    CUDA_CHECK(cudaGetLastError());
}

void copy_columns(const ColumnsShape& s, Src x, Dst y, void* stream) {
    if (s.rows <= 0 || s.cols <= 0) return;
    columns_kernel<<<grid(s.rows * s.cols), threads, 0, stream_of(stream)>>>(s, x, y);
    CUDA_CHECK(cudaGetLastError());
}

void zero(Dst x, std::int64_t n, void* stream) {
    if (n <= 0) return;
    CUDA_CHECK(cudaMemsetAsync(x.data, 0, static_cast<std::size_t>(n) * size_of(x.type), stream_of(stream)));
}

void cast(Src x, Dst y, std::int64_t n, void* stream) {
    if (n <= 0) return;
    cast_kernel<<<grid(n), threads, 0, stream_of(stream)>>>(x, y, n);
    CUDA_CHECK(cudaGetLastError());
}

void reduce(Dst dst, const void* const* srcs, int sources, std::int64_t n, Type type, bool largest, void* stream) {
    if (n <= 0 || sources <= 0) return;
    require(sources <= max_sources, "the number of sources of a reduction", sources, max_sources);
    Sources from{};
    for (int s = 0; s < sources; ++s) from.data[s] = srcs[s];
    reduce_kernel<<<grid(n), threads, 0, stream_of(stream)>>>(dst, from, sources, n, type, largest);
    CUDA_CHECK(cudaGetLastError());
}
void reduce_sum(Dst dst, const void* const* srcs, int sources, std::int64_t n, Type type, void* stream) {
    reduce(dst, srcs, sources, n, type, false, stream);
}
void reduce_max(Dst dst, const void* const* srcs, int sources, std::int64_t n, Type type, void* stream) {
    reduce(dst, srcs, sources, n, type, true, stream);
}

} // namespace

void add_elementwise(Kernels& table) {
    table.add = add;
    table.bias_add = bias_add;
    table.copy_columns = copy_columns;
    table.zero = zero;
    table.cast = cast;
    table.reduce_sum = reduce_sum;
    table.reduce_max = reduce_max;
}

} // namespace moe::cuda
