// The gradient of RMSNorm: rows of whole packs are read once and their sums stay in registers, others are read twice.
#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/elementwise/norm.cuh"
#include "kernels/cuda/ptx/barrier.cuh"
#include "kernels/cuda/scratch.hpp"

namespace moe::cuda {
namespace {

constexpr int threads = 256;

struct Gradients {
    Src dy, dresidual;
    const float* rstd;
    Dst dx;
};

// Computes, with n = x rstd and g = dy w: dx = rstd (g - n mean(g n)), + dresidual.
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

struct NormTerm { // term of dw[c] = sum of dy x rstd
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
    ptx::cluster_sync(); // The memory of the second CTA is read until here.
}

// Computes these for a block's rows, and the sum of their dy x rstd, over all CTAs of a cluster, in
// partial[cluster][cols]: the columns of a thread are the same in every row, so that its sums stay in registers.
template <class A, int K, bool residual, int ctas>
__global__ void __launch_bounds__(norm_threads) rmsnorm_grad_rows_kernel(Norm n, Gradients d, float* partial) {
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
    let_next_come();
    if constexpr (ctas > 1) {
        add_neighbour<K, W>(slots, dw);
        if (ptx::cluster_rank() > 0) return;
    }
    for_own_packs<A, K>(packs, [&](int k, int c) {
        Access<float, W>::put({partial, Type::f32}, blockIdx.x / ctas * n.cols + c, dw[k]);
    });
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

// Blocks that bring what a multiprocessor needs on its way: with more, rows come slower out of memory. Rows of two
// warps follow each other too slowly for that, and there are as many as the scratch has room for.
std::int64_t wanted_blocks(int block, std::size_t shared, std::int64_t room) {
    constexpr std::size_t needed = 144 * 1024; // bytes of shared memory
    const auto bring = static_cast<std::int64_t>((needed + shared / 2) / shared);
    return block > 2 * warp_size ? multiprocessors() * (bring > 2 ? bring : 2) : room;
}

// Chooses as many blocks as are wanted and fit, and as the scratch has room for the sums of. Where it has much less,
// two of a cluster share them; with a residual one block of a multiprocessor brings enough. False where not even one
// block has room for the rows on their way.
template <class A, int K, bool residual>
bool choose_grad_rows(const Norm& n, const Gradients& d, float* dw, int block, void* stream) {
    const std::size_t shared = Ring < A, K, residual ? 3 : 2 > ::bytes(block);
    if (shared > 224 * 1024) return false;
    const std::int64_t room = scratch_floats / n.cols, each = multiprocessors();
    const std::int64_t wanted = wanted_blocks(block, shared, room);
    const auto held = [&](auto ctas) {
        constexpr auto kernel = rmsnorm_grad_rows_kernel<A, K, residual, ctas()>;
        const std::int64_t fit = resident_blocks<kernel>(block, n.rows, 1, shared);
        return fit < wanted ? fit : wanted;
    };
    std::int64_t blocks = held(std::integral_constant<int, 1>{});
    if constexpr (!residual) {
        const std::int64_t pairs = held(std::integral_constant<int, 2>{}) / 2;
        if ((room < 2 * each || 3 * blocks > 4 * room) && 2 * pairs > room) {
            launch_grad_rows<A, K, residual, 2>(n, d, dw, 2 * (pairs < room ? pairs : room), block, stream);
            return true;
        }
    }
    if (blocks > room) blocks = room;
    // Blocks with a multiprocessor to share would hold up the rest.
    if (blocks > each && blocks < 3 * each) blocks -= blocks % each;
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

} // namespace

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

} // namespace moe::cuda
