// Products of scaled E4M3 operands, or E5M2 by E4M3: dense ones by a library, grouped ones by Hopper's tensor cores,
// what neither takes element by element in FP32.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/precision/fp8.cuh"
#include "kernels/cuda/products/product.cuh"
#include "kernels/cuda/scratch.hpp"
#include "kernels/cuda/sm90/launch.cuh"
#include "kernels/cuda/sm90/scaled_gemm.cuh"

namespace moe::cuda {
namespace {

struct Operands {
    const std::uint8_t *a, *b;
    const float *a_scale, *b_scale;
    const std::int32_t* counts;
};

// A warp computes 32 elements of one row, each lane one.
__global__ void plain_kernel(ScaledShape s, Operands x, Dst c) {
    const std::int64_t rows = x.counts == nullptr ? s.capacity : routed_rows(x.counts, s.groups, s.capacity),
                       across = ceil_div(s.n, std::int64_t{32});
    const std::int64_t blocks = ceil_div(s.k, std::int64_t{scale_block});
    const std::int64_t b_blocks = ceil_div(s.n, std::int64_t{scale_block});
    const std::int64_t first = blockIdx.x * (blockDim.x / warp_size) + threadIdx.x / warp_size;
    for (std::int64_t i = first; i < rows * across; i += gridDim.x * (blockDim.x / warp_size)) {
        const std::int64_t row = i / across, col = i % across * 32 + threadIdx.x % warp_size;
        const int group = x.counts == nullptr ? 0 : group_of(x.counts, s.groups, row);
        if (col >= s.n) continue;
        const std::uint8_t *a = x.a + row * s.k, *b = x.b + (group * s.n + col) * s.k;
        const float* a_scale = x.a_scale + row * blocks;
        const float* b_scale = x.b_scale + (group * b_blocks + col / scale_block) * blocks;
        float sum = 0.0f;
        for (std::int64_t block = 0; block < blocks; ++block) {
            float part = 0.0f;
            const std::int64_t end = block * scale_block + scale_block < s.k ? block * scale_block + scale_block : s.k;
            for (std::int64_t k = block * scale_block; k < end; ++k) part += widen(a[k], s.e5m2) * widen(b[k]);
            sum += part * a_scale[block] * b_scale[block];
        }
        store(c, row * s.n + col, sum);
    }
}

bool nothing(const ScaledShape& s) { return s.groups <= 0 || s.n <= 0 || s.k <= 0 || s.capacity <= 0; }

void plain_scaled_gemm(const ScaledShape& s, const std::uint8_t* a, const float* a_scale, const std::uint8_t* b,
                       const float* b_scale, const std::int32_t* counts, Dst c, void* stream) {
    if (nothing(s)) return;
    constexpr int threads = 256;
    const unsigned blocks = blocks_for(s.capacity * ceil_div(s.n, std::int64_t{32}), threads / warp_size, 4096);
    plain_kernel<<<blocks, threads, 0, stream_of(stream)>>>(s, {a, b, a_scale, b_scale, counts}, c);
    CUDA_CHECK(cudaGetLastError());
}

template <bool e5m2>
void sm90_scaled_gemm(const ScaledShape& s, const Operands& x, Dst c, int multiprocessors, cudaStream_t stream) {
    const sm90::Maps maps{sm90::map_of<std::uint8_t>(x.a, s.k, s.capacity, 1),
                          sm90::map_of<std::uint8_t>(x.b, s.k, s.n, s.groups),
                          sm90::map_of<__nv_bfloat16>(c.data, s.n, s.capacity, 1)};
    const auto n = static_cast<int>(s.n), k = static_cast<int>(s.k), capacity = static_cast<int>(s.capacity);
    const sm90::Grouped p{s.groups, 0, n, k, capacity, x.counts, claims_of(stream)};
    using sm90::Pair;
    sm90::with_fastest<scaled_tiles, sm90::ScaledConfig<e5m2, 192, 4, 3, Pair::along_n>,
                       sm90::ScaledConfig<e5m2, 256, 4, 2, Pair::along_n>,
                       sm90::ScaledConfig<e5m2, 128, 6, 2, Pair::along_n>>(p, multiprocessors, [&](auto config) {
        using C = decltype(config);
        sm90::launch<C>(sm90::scaled_kernel<C>, multiprocessors, stream, maps, p, sm90::Scales{x.a_scale, x.b_scale},
                        c);
    });
}

void scaled_gemm(const ScaledShape& s, const std::uint8_t* a, const float* a_scale, const std::uint8_t* b,
                 const float* b_scale, const std::int32_t* counts, Dst c, void* stream) {
    if (nothing(s)) return;
    const bool dense = counts == nullptr && s.groups == 1 && c.type == Type::bf16;
    const ScaledProduct product{s.capacity, s.n, s.k, a, b, a_scale, b_scale, c.data, s.e5m2};
    if (dense && library_gemm(product, stream_of(stream))) return;
    const bool whole = c.type == Type::bf16 && s.n % 8 == 0 && s.k % 16 == 0 &&
                       sm90::within_reach({a, b, c.data}, {s.n, s.k, s.capacity});
    const int multiprocessors = whole ? sm90::multiprocessors() : 0;
    if (multiprocessors == 0) return plain_scaled_gemm(s, a, a_scale, b, b_scale, counts, c, stream);
    const Operands x{a, b, a_scale, b_scale, counts};
    s.e5m2 ? sm90_scaled_gemm<true>(s, x, c, multiprocessors, stream_of(stream))
           : sm90_scaled_gemm<false>(s, x, c, multiprocessors, stream_of(stream));
}

} // namespace

void add_scaled_gemm(Kernels& table) { table.scaled_gemm = scaled_gemm; }
void add_plain_scaled_gemm(Kernels& table) { table.scaled_gemm = plain_scaled_gemm; }

} // namespace moe::cuda
