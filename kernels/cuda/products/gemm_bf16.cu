// Products of BF16 operands on the tensor cores by mma.sync, summed in FP32: 128 x 128 tiles, two stages of 32 in k.
//
// Every operand is staged as it is stored; ldmatrix transposes on the way to registers where the contracted index is
// not the contiguous one, so that one kernel serves forward, dgrad and wgrad.
#include "kernels/cuda/products/product.cuh"

namespace moe::cuda {
namespace {

constexpr int tile = 128, depth = 32, threads = 256;
constexpr int frag_m = 4, frag_n = 4; // 16 x 8 fragments of a warp: 64 x 32 of the tile, the warps standing 2 x 4
constexpr int chunk = 8;              // elements of one 16-byte access
constexpr int chunks_per_thread = tile * depth / chunk / threads;

// A staged operand. Its rows are padded by 16 bytes, so that the eight rows of an ldmatrix lie in different banks.
template <bool contracted_first> // The operand is stored [k, free] if true, else [free, k].
struct Stage {
    static constexpr int outer = contracted_first ? depth : tile, inner = contracted_first ? tile : depth;
    static constexpr int pitch = inner + chunk;
    static constexpr int chunks_per_row = inner / chunk;
    __nv_bfloat16 data[outer * pitch];
};

__device__ inline unsigned address_of(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

template <bool transposed>
__device__ void load_matrices(unsigned address, unsigned (&r)[4]) {
    if constexpr (transposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    }
}

__device__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// One operand of a tile in device memory: its first element, and how far the free and the contracted index go.
struct Operand {
    const __nv_bfloat16* data;
    std::int64_t ld, free_start, free_limit, k_limit;
    bool aligned; // whether every row starts at a multiple of 16 bytes

    __device__ Operand(Src x, std::int64_t first, std::int64_t stride, std::int64_t start, std::int64_t limit,
                       std::int64_t k)
        : data(static_cast<const __nv_bfloat16*>(x.data) + first),
          ld(stride),
          free_start(start),
          free_limit(limit),
          k_limit(k),
          aligned(aligned16(data) && stride % chunk == 0) {}
};

// Eight elements, zero beyond the limits: what lies there may be another group's or nobody's.
__device__ uint4 fetch_chunk(const Operand& x, std::int64_t outer, std::int64_t inner, std::int64_t outer_limit,
                             std::int64_t inner_limit) {
    uint4 out = make_uint4(0, 0, 0, 0);
    if (outer >= outer_limit || inner >= inner_limit) return out;
    const __nv_bfloat16* from = x.data + outer * x.ld + inner;
    if (x.aligned && inner + chunk <= inner_limit) return *reinterpret_cast<const uint4*>(from);
    unsigned words[4] = {};
#pragma unroll
    for (int i = 0; i < chunk; ++i) {
        if (inner + i < inner_limit) words[i / 2] |= unsigned{__bfloat16_as_ushort(from[i])} << (i % 2 * 16);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

template <bool contracted_first>
__device__ void fetch(const Operand& x, std::int64_t k, uint4 (&chunks)[chunks_per_thread]) {
    using S = Stage<contracted_first>;
#pragma unroll
    for (int j = 0; j < chunks_per_thread; ++j) {
        const int index = static_cast<int>(threadIdx.x) + j * threads;
        const std::int64_t outer = index / S::chunks_per_row, inner = index % S::chunks_per_row * chunk;
        if constexpr (contracted_first) {
            chunks[j] = fetch_chunk(x, k + outer, x.free_start + inner, x.k_limit, x.free_limit);
        } else {
            chunks[j] = fetch_chunk(x, x.free_start + outer, k + inner, x.free_limit, x.k_limit);
        }
    }
}

template <bool contracted_first>
__device__ void put(Stage<contracted_first>& stage, const uint4 (&chunks)[chunks_per_thread]) {
    using S = Stage<contracted_first>;
#pragma unroll
    for (int j = 0; j < chunks_per_thread; ++j) {
        const int index = static_cast<int>(threadIdx.x) + j * threads;
        const int outer = index / S::chunks_per_row, inner = index % S::chunks_per_row * chunk;
        *reinterpret_cast<uint4*>(&stage.data[outer * S::pitch + inner]) = chunks[j];
    }
}

// The four 8 x 8 matrices at (free, k), (free + step, k) and so on of a 16 x 16 block of op(X): free_second says that
// the second matrix advances the free index (A) rather than k (B), as mma's register order has it.
template <bool contracted_first, bool free_second>
__device__ void load_block(const Stage<contracted_first>& stage, int free, int k, unsigned (&r)[4]) {
    const int lane = static_cast<int>(threadIdx.x % warp_size), matrix = lane / 8, line = lane % 8;
    const int low = matrix % 2 * 8, high = matrix / 2 * 8;
    const int free_at = free + (free_second ? low : high), k_at = k + (free_second ? high : low);
    const int outer = contracted_first ? k_at + line : free_at + line, inner = contracted_first ? free_at : k_at;
    load_matrices<contracted_first>(address_of(&stage.data[outer * Stage<contracted_first>::pitch + inner]), r);
}

template <bool ta, bool tb>
__device__ void multiply(const Stage<ta>& a, const Stage<!tb>& b, int row, int col, float (&sum)[frag_m][frag_n][4]) {
#pragma unroll
    for (int k = 0; k < depth; k += 16) {
        unsigned left[frag_m][4], right[frag_n / 2][4]; // right: two fragments of B in each entry
#pragma unroll
        for (int i = 0; i < frag_m; ++i) load_block<ta, true>(a, row + i * 16, k, left[i]);
#pragma unroll
        for (int j = 0; j < frag_n / 2; ++j) load_block<!tb, false>(b, col + j * 16, k, right[j]);
#pragma unroll
        for (int i = 0; i < frag_m; ++i) {
#pragma unroll
            for (int j = 0; j < frag_n; ++j) {
                multiply_add(sum[i][j], left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
            }
        }
    }
}

__device__ void write(const Product& p, const Tile& t, int row, int col, const float (&sum)[frag_m][frag_n][4]) {
    const int lane = static_cast<int>(threadIdx.x % warp_size);
#pragma unroll
    for (int i = 0; i < frag_m; ++i) {
#pragma unroll
        for (int j = 0; j < frag_n; ++j) {
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                const std::int64_t r = t.row + row + i * 16 + lane / 4 + v / 2 * 8;
                const std::int64_t c = t.col + col + j * 8 + lane % 4 * 2 + v % 2;
                if (r >= t.m || c >= t.n) continue;
                const std::int64_t at = t.c + r * p.ldc + c;
                store(p.c, at, p.accumulate ? load(read_back(p.c), at) + sum[i][j][v] : sum[i][j][v]);
            }
        }
    }
}

template <bool ta, bool tb>
__global__ void __launch_bounds__(threads) bf16_kernel(Product p) {
    __shared__ __align__(16) Stage<ta> a_stage[2];
    __shared__ __align__(16) Stage<!tb> b_stage[2];
    const int warp = static_cast<int>(threadIdx.x / warp_size);
    const int row = warp % 2 * frag_m * 16, col = warp / 2 * frag_n * 8;
    Walk walk(p, tile, tile);
    Tile t;
    while (walk.next(t)) {
        const Operand a(p.a, t.a, p.lda, t.row, t.m, t.k), b(p.b, t.b, p.ldb, t.col, t.n, t.k);
        float sum[frag_m][frag_n][4] = {};
        uint4 a_next[chunks_per_thread], b_next[chunks_per_thread];
        const auto steps = static_cast<int>(ceil_div(t.k, std::int64_t{depth}));
        for (int step = -1; step < steps; ++step) {
            // Step + 1 is on its way while step is multiplied; it is put where the step before last has been read.
            const bool more = step + 1 < steps;
            if (more) {
                fetch<ta>(a, std::int64_t{step + 1} * depth, a_next);
                fetch<!tb>(b, std::int64_t{step + 1} * depth, b_next);
            }
            if (step >= 0) multiply<ta, tb>(a_stage[step % 2], b_stage[step % 2], row, col, sum);
            if (more) {
                put<ta>(a_stage[(step + 1) % 2], a_next);
                put<!tb>(b_stage[(step + 1) % 2], b_next);
            }
            __syncthreads();
        }
        write(p, t, row, col, sum);
    }
}

template <bool ta, bool tb>
void launch_stored(const Product& p, cudaStream_t stream) {
    bf16_kernel<ta, tb><<<persistent_blocks(p, tile, tile, 1), threads, 0, stream>>>(p);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void launch_bf16(const Product& p, cudaStream_t stream) {
    if (p.transpose_a) {
        p.transpose_b ? launch_stored<true, true>(p, stream) : launch_stored<true, false>(p, stream);
    } else {
        p.transpose_b ? launch_stored<false, true>(p, stream) : launch_stored<false, false>(p, stream);
    }
}

} // namespace moe::cuda
