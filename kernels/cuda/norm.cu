// RMSNorm, forward and backward: rows of whole packs stay in registers and are read once, others are read twice.
#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/ptx/barrier.cuh"
#include "kernels/cuda/rows.cuh"
#include "kernels/cuda/scratch.hpp"

namespace moe::cuda {
namespace {

constexpr int threads = 256;
constexpr int most_threads = 512; // of a block that holds a row

struct Norm {
    Src x, w;
    std::int64_t rows, cols, stride; // stride: of x, and of dx
};

__global__ void __launch_bounds__(threads) rmsnorm_kernel(Norm n, Dst y, float* rstd, float eps) {
    const std::int64_t row = blockIdx.x;
    float squares = 0.0f;
    for (std::int64_t c = threadIdx.x; c < n.cols; c += threads) {
        const float value = load(n.x, row * n.stride + c);
        squares += value * value;
    }
    const float scale = rsqrtf(block_sum(squares) / static_cast<float>(n.cols) + eps);
    if (threadIdx.x == 0) rstd[row] = scale;
    for (std::int64_t c = threadIdx.x; c < n.cols; c += threads) {
        store(y, row * n.cols + c, load(n.x, row * n.stride + c) * scale * load(n.w, c));
    }
}

// Sums over a block, one after another: two buffers in turn, so that one barrier per sum does.
struct RowSums {
    float part[2][most_threads / warp_size];
    __device__ float operator()(float value, int parity) {
        const int warps = static_cast<int>(blockDim.x) / warp_size;
        value = warp_sum(value);
        if (threadIdx.x % warp_size == 0) part[parity][threadIdx.x / warp_size] = value;
        __syncthreads();
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < most_threads / warp_size; ++w) sum += w < warps ? part[parity][w] : 0.0f;
        return sum;
    }
};

// The packs of one operand's row that a thread owns: every blockDim.x-th.
template <class A, int K>
struct Share {
    typename A::Held held[K];
    __device__ void read(Src x, std::int64_t start, int packs) {
#pragma unroll
        for (int k = 0; k < K; ++k) {
            const int p = static_cast<int>(threadIdx.x + k * blockDim.x);
            if (p < packs) held[k] = A::take(x, start + p * A::width);
        }
    }
};
// run(k, first column) for the packs of a row that this thread owns.
template <class A, int K, class Run>
__device__ void for_own_packs(int packs, Run run) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const int p = static_cast<int>(threadIdx.x + k * blockDim.x);
        if (p < packs) run(k, p * A::width);
    }
}

// A block steps through rows, K packs of each in every thread; the next row is on its way while this one is summed.
template <class A, int K>
__global__ void __launch_bounds__(most_threads) rmsnorm_rows_kernel(Norm n, Dst y, float* rstd, float eps) {
    constexpr int W = A::width;
    const int packs = static_cast<int>(n.cols / W);
    typename A::Held weight[K];
    for_own_packs<A, K>(packs, [&](int k, int c) { weight[k] = A::take(n.w, c); });
    Share<A, K> next;
    next.read(n.x, blockIdx.x * n.stride, packs);
    __shared__ RowSums sums;
    const float share = 1.0f / static_cast<float>(n.cols);
    int parity = 0;
    for (std::int64_t row = blockIdx.x; row < n.rows; row += gridDim.x, parity ^= 1) {
        const Share<A, K> x = next;
        if (row + gridDim.x < n.rows) next.read(n.x, (row + gridDim.x) * n.stride, packs);
        float squares = 0.0f;
        for_own_packs<A, K>(packs, [&](int k, int) {
#pragma unroll
            for (int j = 0; j < W; ++j) squares += x.held[k][j] * x.held[k][j];
        });
        const float scale = rsqrtf(sums(squares, parity) * share + eps);
        if (threadIdx.x == 0) rstd[row] = scale;
        for_own_packs<A, K>(packs, [&](int k, int c) {
            float value[W];
#pragma unroll
            for (int j = 0; j < W; ++j) value[j] = x.held[k][j] * scale * weight[k][j];
            A::put(y, row * n.cols + c, value);
        });
    }
}

// A warp per row, P packs in every lane: no barrier, and the rows at work lie side by side in memory.
template <class A, int P>
__global__ void __launch_bounds__(row_threads) rmsnorm_lanes_kernel(Norm n, Dst y, float* rstd, float eps) {
    constexpr int W = A::width;
    const int packs = static_cast<int>(n.cols / W), lane = lane_of_warp();
    for_each_row(nullptr, 0, n.rows, [&](std::int64_t row) {
        typename A::Held x[P];
#pragma unroll
        for (int p = 0; p < P; ++p) {
            if (lane + p * warp_size < packs) x[p] = A::take(n.x, row * n.stride + (lane + p * warp_size) * W);
        }
        float squares = 0.0f;
#pragma unroll
        for (int p = 0; p < P; ++p) {
            if (lane + p * warp_size >= packs) break;
#pragma unroll
            for (int j = 0; j < W; ++j) squares += x[p][j] * x[p][j];
        }
        const float scale = rsqrtf(warp_sum(squares) / static_cast<float>(n.cols) + eps);
        if (lane == 0) rstd[row] = scale;
#pragma unroll
        for (int p = 0; p < P; ++p) {
            const int c = (lane + p * warp_size) * W;
            if (lane + p * warp_size >= packs) break;
            const typename A::Held weight = A::take(n.w, c);
            float value[W];
#pragma unroll
            for (int j = 0; j < W; ++j) value[j] = x[p][j] * scale * weight[j];
            A::put(y, row * n.cols + c, value);
        }
    });
}

struct Gradients {
    Src dy, dresidual;
    const float* rstd;
    Dst dx;
};

// With n = x rstd and g = dy w: dx = rstd (g - n mean(g n)), + dresidual.
__global__ void __launch_bounds__(threads) rmsnorm_grad_kernel(Norm n, Gradients d) {
    const std::int64_t row = blockIdx.x;
    const float scale = d.rstd[row];
    float along = 0.0f;
    for (std::int64_t c = threadIdx.x; c < n.cols; c += threads) {
        along += load(d.dy, row * n.cols + c) * load(n.w, c) * load(n.x, row * n.stride + c);
    }
    along = block_sum(along) * scale * scale * scale / static_cast<float>(n.cols);
    for (std::int64_t c = threadIdx.x; c < n.cols; c += threads) {
        float value = load(d.dy, row * n.cols + c) * load(n.w, c) * scale - load(n.x, row * n.stride + c) * along;
        if (d.dresidual.data != nullptr) value += load(d.dresidual, row * n.cols + c);
        store(d.dx, row * n.stride + c, value);
    }
}

struct NormTerm { // dw[c] = sum of dy x rstd
    Norm n;
    Gradients d;
    __device__ float operator()(std::int64_t r, std::int64_t c) const {
        return load(d.dy, r * n.cols + c) * load(n.x, r * n.stride + c) * d.rstd[r];
    }
};

// Rows on their way to a block: `ahead` of them in shared memory, K packs of each operand per thread. A thread reads
// only what it copied itself, so that rows need no barrier.
constexpr int ahead = 3;
template <class A, int K, int operands>
struct Ring {
    using Held = typename A::Held;
    Held* slots; // [ahead][operands][K][blockDim.x]

    static std::size_t bytes(int block) {
        return sizeof(Held) * ahead * operands * K * static_cast<std::size_t>(block);
    }
    __device__ Held& slot(int stage, int operand, int k) const {
        return slots[((stage * operands + operand) * K + k) * blockDim.x + threadIdx.x];
    }
    __device__ void fetch(const Norm& n, const Gradients& d, std::int64_t row, int stage, int packs) const {
        using T = typename A::Storage;
        for_own_packs<A, K>(packs, [&](int k, int c) {
            copy_async(&slot(stage, 0, k), static_cast<const T*>(d.dy.data) + row * n.cols + c);
            copy_async(&slot(stage, 1, k), static_cast<const T*>(n.x.data) + row * n.stride + c);
            if constexpr (operands > 2)
                copy_async(&slot(stage, 2, k), static_cast<const T*>(d.dresidual.data) + row * n.cols + c);
        });
    }
};

// Adds the sums of a cluster's second CTA to those of the first, by way of what its threads have copied to.
template <int K, int W>
__device__ void add_neighbour(uint4* slots, float (&sum)[K][W]) {
    static_assert(K * W / 4 <= ahead * 2 * K, "a thread's sums lie in its own slots of two operands");
    wait_for_groups<0>();
    const bool first = ptx::cluster_rank() == 0;
    for (int i = 0; i < K * W / 4 && !first; ++i) {
        const float* const s = &sum[i * 4 / W][i * 4 % W];
        slots[i * blockDim.x + threadIdx.x] = {__float_as_uint(s[0]), __float_as_uint(s[1]), __float_as_uint(s[2]),
                                               __float_as_uint(s[3])};
    }
    ptx::cluster_sync();
#pragma unroll
    for (int i = 0; i < K * W / 4; ++i) {
        if (!first) break;
        const unsigned there = ptx::in_cta(ptx::shared_address(slots + i * blockDim.x + threadIdx.x), 1);
        const float2 low = ptx::read_remote(there), high = ptx::read_remote(there + 8);
        float* const s = &sum[i * 4 / W][i * 4 % W];
        s[0] += low.x, s[1] += low.y, s[2] += high.x, s[3] += high.y;
    }
    ptx::cluster_sync(); // until when the second one's memory is read
}

// The same for a block's rows, and the sum of their dy x rstd, over all CTAs of a cluster, in partial[cluster][cols]:
// the columns of a thread are the same in every row, so that its sums stay in registers.
template <class A, int K, bool residual, int ctas>
__global__ void __launch_bounds__(most_threads) rmsnorm_grad_rows_kernel(Norm n, Gradients d, float* partial) {
    constexpr int W = A::width;
    extern __shared__ uint4 slots[];
    const Ring<A, K, residual ? 3 : 2> ring{reinterpret_cast<typename A::Held*>(slots)};
    const int packs = static_cast<int>(n.cols / W);
    typename A::Held weight[K];
    float dw[K][W];
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
        for (int j = 0; j < W; ++j) dw[k][j] = 0.0f;
    }
    for_own_packs<A, K>(packs, [&](int k, int c) { weight[k] = A::take(n.w, c); });
    for (int stage = 0; stage < ahead; ++stage) {
        const std::int64_t row = blockIdx.x + std::int64_t{stage} * gridDim.x;
        if (row < n.rows) ring.fetch(n, d, row, stage, packs);
        end_group();
    }
    __shared__ RowSums sums;
    const float share = 1.0f / static_cast<float>(n.cols);
    int stage = 0, parity = 0;
    float next_scale = d.rstd[blockIdx.x];
    for (std::int64_t row = blockIdx.x; row < n.rows; row += gridDim.x, parity ^= 1) {
        const float scale = next_scale;
        if (row + gridDim.x < n.rows) next_scale = d.rstd[row + gridDim.x];
        wait_for_groups<ahead - 1>();
        Share<A, K> dy, x, more;
        for_own_packs<A, K>(packs, [&](int k, int) {
            dy.held[k] = ring.slot(stage, 0, k), x.held[k] = ring.slot(stage, 1, k);
            if constexpr (residual) more.held[k] = ring.slot(stage, 2, k);
        });
        const std::int64_t next = row + std::int64_t{ahead} * gridDim.x;
        if (next < n.rows) ring.fetch(n, d, next, stage, packs);
        end_group();
        stage = stage + 1 < ahead ? stage + 1 : 0;
        float along = 0.0f;
        for_own_packs<A, K>(packs, [&](int k, int) {
#pragma unroll
            for (int j = 0; j < W; ++j) {
                const float product = dy.held[k][j] * x.held[k][j];
                along += product * weight[k][j];
                dw[k][j] += product * scale;
            }
        });
        along = sums(along, parity) * scale * scale * scale * share;
        for_own_packs<A, K>(packs, [&](int k, int c) {
            float value[W];
#pragma unroll
            for (int j = 0; j < W; ++j) {
                value[j] = dy.held[k][j] * weight[k][j] * scale - x.held[k][j] * along;
                if constexpr (residual) value[j] += more.held[k][j];
            }
            A::put(d.dx, row * n.stride + c, value);
        });
    }
    if constexpr (ctas > 1) {
        add_neighbour<K, W>(slots, dw);
        if (ptx::cluster_rank() > 0) return;
    }
    for_own_packs<A, K>(packs, [&](int k, int c) {
        Access<float, W>::put({partial, Type::f32}, blockIdx.x / ctas * n.cols + c, dw[k]);
    });
}

// run(K{}, threads) for rows of so many packs; false where no block holds one.
template <class Run>
bool with_share(std::int64_t packs, Run run) {
    const auto threads_of = [packs](std::int64_t k) {
        return static_cast<int>(ceil_div(packs, k * warp_size)) * warp_size;
    };
    if (packs <= 2 * most_threads) {
        run(std::integral_constant<int, 2>{}, threads_of(2));
    } else if (packs <= 4 * most_threads) {
        run(std::integral_constant<int, 4>{}, threads_of(4));
    } else {
        return false;
    }
    return true;
}

void rmsnorm(Src x, Src w, Dst y, float* rstd, std::int64_t rows, std::int64_t cols, std::int64_t stride, double eps,
             void* stream) {
    if (rows <= 0 || cols <= 0) return;
    const Norm n{x, w, rows, cols, stride != 0 ? stride : cols};
    const auto small = static_cast<float>(eps);
    bool done = false;
    with_access({x, y, w}, {cols, n.stride}, [&](auto access) {
        using A = decltype(access);
        if constexpr (A::width > 1) {
            constexpr int most = 16; // packs of a lane; with half of them a block per row is as fast
            if (cols / A::width > most / 2 * warp_size && cols / A::width <= most * warp_size) {
                done = true;
                return launch_rows<rmsnorm_lanes_kernel<A, most>>(rows, stream, n, y, rstd, small);
            }
            done = with_share(cols / A::width, [&](auto share, int block) {
                constexpr auto kernel = rmsnorm_rows_kernel<A, share()>;
                kernel<<<resident_blocks<kernel>(block, rows, 1), block, 0, stream_of(stream)>>>(n, y, rstd, small);
            });
        }
    });
    if (!done) rmsnorm_kernel<<<blocks_for(rows, 1), threads, 0, stream_of(stream)>>>(n, y, rstd, small);
    CUDA_CHECK(cudaGetLastError());
}

template <class A, int K, bool residual, int ctas>
void launch_grad_rows(const Norm& n, const Gradients& d, float* dw, std::int64_t blocks, int block, void* stream) {
    constexpr auto kernel = rmsnorm_grad_rows_kernel<A, K, residual, ctas>;
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = ctas;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(block));
    config.dynamicSmemBytes = Ring < A, K, residual ? 3 : 2 > ::bytes(block);
    config.stream = stream_of(stream);
    config.attrs = &cluster;
    config.numAttrs = ctas > 1 ? 1 : 0;
    float* const partial = scratch_of(config.stream);
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, n, d, partial));
    launch_sum_columns(PartialTerm{partial, n.cols}, dw, blocks / ctas, n.cols, stream);
}

// As many blocks as fit, and as the scratch has room for the sums of. Wide rows leave room for those of few: one block
// on a multiprocessor waits for its own sums, so that two of a cluster share them where both fit.
// False where not even one block has room for the rows on their way.
template <class A, int K, bool residual>
bool choose_grad_rows(const Norm& n, const Gradients& d, float* dw, int block, void* stream) {
    const std::size_t shared = Ring < A, K, residual ? 3 : 2 > ::bytes(block);
    if (shared > 224 * 1024) return false;
    const std::int64_t room = scratch_floats / n.cols, each = multiprocessors();
    const std::int64_t held = resident_blocks<rmsnorm_grad_rows_kernel<A, K, residual, 1>>(block, n.rows, 1, shared);
    if (room >= each && room < 2 * each && held >= 2 * each &&
        resident_blocks<rmsnorm_grad_rows_kernel<A, K, residual, 2>>(block, n.rows, 1, shared) >= 2 * each) {
        launch_grad_rows<A, K, residual, 2>(n, d, dw, 2 * each, block, stream);
        return true;
    }
    std::int64_t blocks = held < room ? held : room;
    // Those with a multiprocessor to share would hold up the rest.
    if (blocks > each && blocks < 2 * each) blocks = each;
    launch_grad_rows<A, K, residual, 1>(n, d, dw, blocks, block, stream);
    return true;
}

// False where the rows are no whole packs, or too long.
bool rmsnorm_grad_rows(const Norm& n, const Gradients& d, float* dw, void* stream) {
    bool done = false;
    with_access({n.x, d.dy, d.dresidual, d.dx, n.w}, {n.cols, n.stride}, [&](auto access) {
        using A = decltype(access);
        if constexpr (A::width > 1) {
            with_share(n.cols / A::width, [&](auto share, int block) {
                done = d.dresidual.data != nullptr ? choose_grad_rows<A, share(), true>(n, d, dw, block, stream)
                                                   : choose_grad_rows<A, share(), false>(n, d, dw, block, stream);
            });
        }
    });
    return done;
}

void rmsnorm_grad(Src dy, Src x, Src w, const float* rstd, Src dresidual, Dst dx, float* dw, std::int64_t rows,
                  std::int64_t cols, std::int64_t stride, void* stream) {
    if (rows <= 0 || cols <= 0) return;
    const Norm n{x, w, rows, cols, stride != 0 ? stride : cols};
    const Gradients d{dy, dresidual, rstd, dx};
    if (rmsnorm_grad_rows(n, d, dw, stream)) return;
    // dw first: dx may be written over dy.
    launch_sum_columns(NormTerm{n, d}, dw, rows, cols, stream);
    rmsnorm_grad_kernel<<<blocks_for(rows, 1), threads, 0, stream_of(stream)>>>(n, d);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_norm(Kernels& table) {
    table.rmsnorm = rmsnorm;
    table.rmsnorm_grad = rmsnorm_grad;
}

} // namespace moe::cuda
