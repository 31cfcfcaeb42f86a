// Packs rounded operands into codes and scales for block-scaled tensor cores, and multiplies them piece by piece.
//
// A thread packs 32 contracted elements of a row: one block of mxfp8, two of nvfp4. For nvfp4 a pass before it finds
// the power of two that all scales share. kernels/block_scaled.hpp has the rules.
#include "kernels/cuda/products/block_scaled.hpp"

#include "kernels/cuda/precision/fp8.cuh"
#include "kernels/cuda/products/product.cuh"

#include <algorithm>
#include <map>
#include <mutex>

namespace moe {
namespace cuda {
namespace {

constexpr int threads = 256, together = packed_together;

bool whole_16(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

// What a thread packs.
struct Place {
    std::int64_t row, first; // first: contracted element
    __device__ Place(const BlockShape& s, std::int64_t i)
        : row(s.contracted_first ? i % s.rows : i / (s.k / together)),
          first((s.contracted_first ? i / s.rows : i % (s.k / together)) * together) {}
};

__device__ void take(const BlockShape& s, const __nv_bfloat16* x, const Place& p, float (&v)[together]) {
    if (s.contracted_first) {
#pragma unroll
        for (int i = 0; i < together; ++i) v[i] = __bfloat162float(x[(p.first + i) * s.stride + p.row]);
        return;
    }
    const Src rows{x, Type::bf16};
#pragma unroll
    for (int i = 0; i < together; i += 8) {
        const auto held = Access<__nv_bfloat16, 8>::take(rows, p.row * s.stride + p.first + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[i + j] = held[j];
    }
}

// scale_place() of kernels/block_scaled.hpp.
__device__ std::int64_t place_of_scale(std::int64_t row, int block, int tiles_across) {
    constexpr int rows = scale_tile_rows, blocks = scale_tile_blocks;
    const std::int64_t tile = row / rows * tiles_across + block / blocks;
    return tile * rows * blocks + row % 32 * 16 + row % rows / 32 * blocks + block % blocks;
}

template <int n>
__device__ unsigned largest_bits(const float* v) {
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < n; ++i) largest = max(largest, __float_as_uint(v[i]) & 0x7fffffffu);
    return largest;
}

__device__ float divisor(int i) { return i < 4 ? (i == 0 ? 6.0f : 5.0f - static_cast<float>(i)) : 0.5f * (7 - i); }

// e2m1_block_scale(), e2m1_code() and stands_for() of kernels/block_scaled.hpp.
__device__ float scale_by(float largest, int i) {
    const float scale = __uint_as_float((__float_as_uint(__fdiv_rn(largest, divisor(i))) + 0x80000u) & ~0xfffffu);
    return scale * divisor(i) == largest ? scale : 0.0f;
}
__device__ unsigned code_of(float magnitude, float scale) {
    constexpr E2m1Table values = e2m1_values;
    unsigned found = 8;
#pragma unroll
    for (unsigned code = 0; code < 8; ++code) found = values.of[code] * scale == magnitude ? code : found;
    return found;
}
__device__ bool stands_for_block(float scale, const float* v) {
    bool all = scale > 0.0f;
#pragma unroll
    for (int i = 0; i < nvfp4_values; ++i) all = all && code_of(fabsf(v[i]), scale) < 8;
    return all;
}

// Raises `t` to the largest of least_tensor_scale().
__global__ void __launch_bounds__(threads) tensor_scale_kernel(BlockShape s, const __nv_bfloat16* x, unsigned* t) {
    const std::int64_t i = std::int64_t{blockIdx.x} * threads + threadIdx.x;
    unsigned least = 0;
    if (i < s.rows * (s.k / together)) {
        float v[together];
        take(s, x, Place(s, i), v);
#pragma unroll
        for (int half = 0; half < together; half += nvfp4_values) {
            const unsigned bits = largest_bits<nvfp4_values>(v + half);
            float scale = 0.0f;
            for (int d = 0; d < 7 && scale == 0.0f && bits > 0; ++d) {
                const float asked = scale_by(__uint_as_float(bits), d);
                if (stands_for_block(asked, v + half)) scale = asked;
            }
            if (scale > 0.0f && __float_as_uint(scale) < 0x7f800000u)
                least = max(least, __float_as_uint(BlockScale(__float_as_uint(scale)).scale));
        }
    }
    raise_largest<threads>(least, reinterpret_cast<float*>(t));
}

// E2M1 and UE4M3. The two blocks are 16 bytes.
__device__ void pack_fp4(const BlockShape& s, const Place& p, const float (&v)[together], float t, std::uint8_t* codes,
                         std::uint8_t* scales) {
    unsigned word[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float* const block = v + half * nvfp4_values;
        const unsigned bits = largest_bits<nvfp4_values>(block);
        unsigned byte = bits < __float_as_uint(0x1p-100f) ? 0u : 0x7fu;
        float scale = 0.0f;
        for (int d = 0; d < 7 && scale == 0.0f && bits > 0; ++d) {
            const float asked = scale_by(__uint_as_float(bits), d);
            const unsigned code = __nv_cvt_float_to_fp8(__fdiv_rn(asked, t), __NV_SATFINITE, __NV_E4M3);
            if (widen(static_cast<std::uint8_t>(code)) * t == asked && stands_for_block(asked, block))
                scale = asked, byte = code;
        }
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            unsigned packed = 0;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float x = block[part * 8 + j];
                packed |= (code_of(fabsf(x), scale) | (__float_as_uint(x) >> 31) << 3) << 4 * j;
            }
            word[2 * half + part] = scale > 0.0f ? packed : 0u;
        }
        const int at = static_cast<int>(p.first / nvfp4_values) + half;
        scales[place_of_scale(p.row, at, static_cast<int>(ceil_div(s.k, std::int64_t{4 * nvfp4_values})))] =
            static_cast<std::uint8_t>(byte);
    }
    *reinterpret_cast<uint4*>(codes + (p.row * s.k + p.first) / 2) = uint4{word[0], word[1], word[2], word[3]};
}

// E4M3 and UE8M0. The block is 32 bytes.
__device__ void pack_fp8(const BlockShape& s, const Place& p, const float (&v)[together], std::uint8_t* codes,
                         std::uint8_t* scales) {
    const BlockScale scale(largest_bits<together>(v));
    unsigned word[together / 4];
    bool exact = true;
#pragma unroll
    for (int i = 0; i < together / 4; ++i) {
        word[i] = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const auto code = __nv_cvt_float_to_fp8(v[4 * i + j] * scale.inverse, __NV_SATFINITE, __NV_E4M3);
            exact = exact && widen(code) * scale.scale == v[4 * i + j];
            word[i] |= static_cast<unsigned>(code) << 8 * j;
        }
    }
    auto* const to = reinterpret_cast<uint4*>(codes + p.row * s.k + p.first);
    to[0] = uint4{word[0], word[1], word[2], word[3]};
    to[1] = uint4{word[4], word[5], word[6], word[7]};
    const int at = static_cast<int>(p.first / mxfp8_values);
    scales[place_of_scale(p.row, at, static_cast<int>(ceil_div(s.k, std::int64_t{4 * mxfp8_values})))] =
        static_cast<std::uint8_t>(exact ? __float_as_uint(scale.scale) >> 23 : 0xffu);
}

template <bool fp4>
__global__ void __launch_bounds__(threads)
    pack_kernel(BlockShape s, const __nv_bfloat16* x, std::uint8_t* codes, std::uint8_t* scales, const unsigned* t) {
    const std::int64_t i = std::int64_t{blockIdx.x} * threads + threadIdx.x;
    if (i >= s.rows * (s.k / together)) return;
    const Place place(s, i);
    float v[together];
    take(s, x, place, v);
    if constexpr (fp4)
        pack_fp4(s, place, v, fmaxf(__uint_as_float(*t), 0x1p-126f), codes, scales);
    else
        pack_fp8(s, place, v, codes, scales);
}

// alpha and beta of a product, for the library to read: both powers of two of its operands, 1 where there are none.
__global__ void scalars_kernel(const unsigned* t, bool fp4, bool accumulate, float* scalars) {
    scalars[0] = fp4 ? fmaxf(__uint_as_float(t[0]), 0x1p-126f) * fmaxf(__uint_as_float(t[1]), 0x1p-126f) : 1.0f;
    scalars[1] = accumulate ? 1.0f : 0.0f;
}

// The scratch of each device, kept: captured graphs hold it.
unsigned char* scratch_of_device() {
    static std::mutex guard;
    static std::map<int, unsigned char*> all;
    int device = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    const std::lock_guard<std::mutex> lock(guard);
    unsigned char*& memory = all[device];
    if (memory != nullptr) return memory;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed; // The first product may be one of a capture.
    CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
    const cudaError_t status = cudaMalloc(&memory, block_scaled_scratch);
    cudaThreadExchangeStreamCaptureMode(&mode);
    CUDA_CHECK(status);
    return memory;
}

constexpr std::int64_t scalar_bytes = 256, half_scratch = (block_scaled_scratch - scalar_bytes) / 512 * 256;

// An operand, and how many of its rows half the scratch has room for.
struct Packed {
    BlockShape shape;
    const __nv_bfloat16* x;
    std::int64_t most;

    Packed(RoundFormat format, std::int64_t rows, std::int64_t k, std::int64_t stride, bool contracted_first, Src from)
        : shape{format, rows, k, stride, contracted_first}, x(static_cast<const __nv_bfloat16*>(from.data)) {
        const BlockShape tile{format, scale_tile_rows, k};
        most = half_scratch / (tile.code_bytes() + tile.scale_bytes()) * scale_tile_rows;
    }
    bool whole() const {
        const bool vectors = shape.contracted_first || (shape.stride % 8 == 0 && whole_16(x));
        return vectors && most > 0 && shape.rows % together == 0 && shape.k % together == 0;
    }
    std::int64_t rows_from(std::int64_t first) const { return std::min(most, shape.rows - first); }
    const std::uint8_t* pack(std::int64_t first, unsigned char* to, unsigned* t, cudaStream_t stream) const {
        BlockShape piece = shape;
        piece.rows = rows_from(first);
        const std::int64_t skipped = shape.contracted_first ? first : first * shape.stride;
        std::uint8_t* const scales = to + piece.code_bytes();
        cuda_pack_blocks(piece, x + skipped, to, scales, t, stream);
        return scales;
    }
};

} // namespace
} // namespace cuda

void cuda_pack_blocks(const BlockShape& s, const void* x, std::uint8_t* codes, std::uint8_t* scales, unsigned* t,
                      void* stream) {
    using namespace cuda;
    if (s.rows <= 0 || s.k <= 0) return;
    const cudaStream_t on = stream_of(stream);
    const auto* const from = static_cast<const __nv_bfloat16*>(x);
    const unsigned blocks = blocks_for(s.rows * (s.k / together), threads);
    CUDA_CHECK(cudaMemsetAsync(scales, 0, static_cast<std::size_t>(s.scale_bytes()), on));
    if (s.fp4()) {
        CUDA_CHECK(cudaMemsetAsync(t, 0, sizeof *t, on));
        tensor_scale_kernel<<<blocks, threads, 0, on>>>(s, from, t);
        CUDA_CHECK(cudaGetLastError());
        pack_kernel<true><<<blocks, threads, 0, on>>>(s, from, codes, scales, t);
    } else {
        pack_kernel<false><<<blocks, threads, 0, on>>>(s, from, codes, scales, t);
    }
    CUDA_CHECK(cudaGetLastError());
}

bool cuda_scales_blocks() {
    int device = 0, major = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    return major == 10 && cuda::library_is_open();
}

bool cuda_block_scaled_gemm(RoundFormat format, const GemmShape& s, Src a, Src b, Dst c, void* stream) {
    using namespace cuda;
    if (a.type != Type::bf16 || b.type != Type::bf16 || s.batch != 1 || s.m <= 0 || s.n <= 0 || s.k <= 0) return false;
    const Packed left(format, s.m, s.k, s.lda != 0 ? s.lda : (s.transpose_a ? s.m : s.k), s.transpose_a,
                      a + s.a_offset);
    const Packed right(format, s.n, s.k, s.ldb != 0 ? s.ldb : (s.transpose_b ? s.k : s.n), !s.transpose_b,
                       b + s.b_offset);
    const Dst to = c + s.c_offset;
    BlockScaledProduct p;
    p.k = s.k, p.ldc = s.ldc != 0 ? s.ldc : s.n, p.fp4 = left.shape.fp4();
    const bool lines = static_cast<std::size_t>(p.ldc) * size_of(c.type) % 16 == 0 && whole_16(to.data);
    if (!left.whole() || !right.whole() || !lines) return false;
    const auto each_piece = [&](auto visit) {
        bool all = true;
        for (std::int64_t col = 0; col < s.n && all; col += right.most) {
            for (std::int64_t row = 0; row < s.m && all; row += left.most) {
                p.rows = left.rows_from(row), p.n = right.rows_from(col);
                p.c = to + (row * p.ldc + col);
                all = visit(row, col);
            }
        }
        return all;
    };
    const cudaStream_t on = stream_of(stream);
    if (!each_piece([&](std::int64_t, std::int64_t) { return library_takes(p, on); })) return false;
    unsigned char* const memory = scratch_of_device();
    auto* const t = reinterpret_cast<unsigned*>(memory);
    auto* const scalars = reinterpret_cast<float*>(t + 2);
    p.a = memory + scalar_bytes, p.b = memory + scalar_bytes + half_scratch;
    p.scalars = scalars;
    return each_piece([&](std::int64_t row, std::int64_t col) {
        if (row == 0) p.b_scale = right.pack(col, memory + scalar_bytes + half_scratch, t + 1, on);
        p.a_scale = left.pack(row, memory + scalar_bytes, t, on);
        scalars_kernel<<<1, 1, 0, on>>>(t, p.fp4, s.accumulate, scalars);
        CUDA_CHECK(cudaGetLastError());
        return library_gemm(p, on);
    });
}

} // namespace moe
