// Products with FP32 multiply-adds, for operands of any type: 64 x 64 tiles, 4 x 4 of them in each thread's registers.
//
// A router's weight gradient has few tiles and contracts over all tokens: its contraction is cut into parts that run
// side by side, and the parts' sums are added in their order.
#include "kernels/cuda/products/product.cuh"
#include "kernels/cuda/scratch.hpp"

namespace moe::cuda {
namespace {

constexpr int tile = 64, depth = 16, threads = 256, side = 4;
constexpr int pitch = tile + 4; // floats of whole float4s that put neighbouring k on other banks

// Stages op(X)[start.., k..] with the free index running along a row of shared memory. Element (i, l) of X lies at
// i * step_i + l * step_l; threads follow the direction that is contiguous in memory.
struct Operand {
    Src data;
    std::int64_t start, step_i, step_l, limit_i;

    __device__ void fetch(std::int64_t i0, std::int64_t l0, std::int64_t limit_l, float (&values)[side]) const {
#pragma unroll
        for (int j = 0; j < side; ++j) {
            int i, l;
            place(j, i, l);
            const bool inside = i0 + i < limit_i && l0 + l < limit_l;
            values[j] = inside ? load(data, start + (i0 + i) * step_i + (l0 + l) * step_l) : 0.0f;
        }
    }
    __device__ void put(float (*to)[pitch], const float (&values)[side]) const {
#pragma unroll
        for (int j = 0; j < side; ++j) {
            int i, l;
            place(j, i, l);
            to[l][i] = values[j];
        }
    }
    __device__ void place(int j, int& i, int& l) const {
        const int e = static_cast<int>(threadIdx.x) + j * threads;
        i = step_l == 1 ? e / depth : e % tile;
        l = step_l == 1 ? e % depth : e / tile;
    }
};

__device__ void multiply(const float (*a)[pitch], const float (*b)[pitch], int ty, int tx, float (&sum)[side][side]) {
#pragma unroll
    for (int l = 0; l < depth; ++l) {
        const float4 x = *reinterpret_cast<const float4*>(&a[l][ty * side]);
        const float4 y = *reinterpret_cast<const float4*>(&b[l][tx * side]);
        const float left[side] = {x.x, x.y, x.z, x.w}, right[side] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < side; ++i) {
#pragma unroll
            for (int j = 0; j < side; ++j) sum[i][j] += left[i] * right[j];
        }
    }
}

__global__ void __launch_bounds__(threads) f32_kernel(Product p) {
    __shared__ __align__(16) float a_tile[depth][pitch], b_tile[depth][pitch];
    const int ty = static_cast<int>(threadIdx.x) / (tile / side), tx = static_cast<int>(threadIdx.x) % (tile / side);
    Walk walk(p, tile, tile);
    Tile t;
    while (walk.next(t)) {
        const Operand a{p.a, t.a, p.transpose_a ? 1 : p.lda, p.transpose_a ? p.lda : 1, t.m};
        const Operand b{p.b, t.b, p.transpose_b ? p.ldb : 1, p.transpose_b ? 1 : p.ldb, t.n};
        float sum[side][side] = {}, a_next[side], b_next[side];
        a.fetch(t.row, 0, t.k, a_next);
        b.fetch(t.col, 0, t.k, b_next);
        for (std::int64_t l = 0; l < t.k; l += depth) {
            __syncthreads(); // The previous step has been read.
            a.put(a_tile, a_next);
            b.put(b_tile, b_next);
            __syncthreads();
            a.fetch(t.row, l + depth, t.k, a_next);
            b.fetch(t.col, l + depth, t.k, b_next);
            multiply(a_tile, b_tile, ty, tx, sum);
        }
#pragma unroll
        for (int i = 0; i < side; ++i) {
#pragma unroll
            for (int j = 0; j < side; ++j) {
                const std::int64_t row = t.row + ty * side + i, col = t.col + tx * side + j;
                if (row >= t.m || col >= t.n) continue;
                const std::int64_t at = t.c + row * p.ldc + col;
                store(p.c, at, p.accumulate ? load(read_back(p.c), at) + sum[i][j] : sum[i][j]);
            }
        }
    }
}

__global__ void __launch_bounds__(threads) sum_parts_kernel(Product p, const float* sums, int parts) {
    const std::int64_t size = p.m * p.n, i = std::int64_t{blockIdx.x} * threads + threadIdx.x;
    if (i >= size) return;
    float sum = sums[i];
    for (int part = 1; part < parts; ++part) sum += sums[part * size + i];
    const std::int64_t at = i / p.n * p.ldc + i % p.n;
    store(p.c, at, p.accumulate ? load(read_back(p.c), at) + sum : sum);
}

// The parts of a contraction: as many as fill an H200 twice over, have room for their sums and are long enough to be
// worth it.
int parts_of(const Product& p) {
    constexpr std::int64_t enough_blocks = 264, shortest = 128;
    if (p.routed != Product::Routed::none || p.groups != 1) return 1;
    const std::int64_t tiles = ceil_div(p.m, std::int64_t{tile}) * ceil_div(p.n, std::int64_t{tile});
    std::int64_t parts = 1;
    while (parts * tiles < enough_blocks && p.k % (2 * parts) == 0 && p.k / (2 * parts) >= shortest &&
           2 * parts * p.m * p.n <= scratch_floats)
        parts *= 2;
    return static_cast<int>(parts);
}

void launch_tiles(const Product& product, cudaStream_t stream) {
    f32_kernel<<<persistent_blocks(product, tile, tile, 4), threads, 0, stream>>>(product);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void launch_f32(const Product& product, cudaStream_t stream) {
    const int parts = parts_of(product);
    if (parts == 1) return launch_tiles(product, stream);
    float* const sums = scratch_of(stream);
    Product part = product; // The part is a group of its own.
    part.groups = parts;
    part.k = product.k / parts;
    part.a_group = part.k * (product.transpose_a ? product.lda : 1);
    part.b_group = part.k * (product.transpose_b ? 1 : product.ldb);
    part.c = {sums, Type::f32};
    part.c_group = product.m * product.n;
    part.ldc = product.n;
    part.accumulate = false;
    launch_tiles(part, stream);
    sum_parts_kernel<<<blocks_for(product.m * product.n, threads), threads, 0, stream>>>(product, sums, parts);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace moe::cuda
