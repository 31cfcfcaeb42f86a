// E4M3 with a scale per block: activations by rows, weights in squares as they are and transposed, and back.
//
// A thread holds 16 neighbouring elements, eight threads a block of 128: what they need of each other is its largest
// magnitude. Magnitudes are compared by their bits, where NaN lies above all numbers.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/vector.cuh"

#include <cuda_fp8.h>

#include <stdexcept>
#include <string>

namespace moe::cuda {
namespace {

constexpr int held = 16;                    // elements of a thread
constexpr int sharers = scale_block / held; // threads of a block of 128
constexpr int threads = 256;
constexpr int square_rows = threads / sharers; // rows of a square that are read at a time

__device__ unsigned magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// fp8_scale() of kernels/fp8.hpp, from the bits of the largest magnitude.
__device__ float scale_of(unsigned largest) {
    if (largest >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
    const unsigned exponent = (largest >> 23) + ((largest & 0x7fffffu) > 0x600000u ? 1 : 0); // 448 = 1.75 * 2^8
    return __uint_as_float((exponent < 9 ? 1 : exponent - 8) << 23);
}

struct Values {
    float x[held];

    __device__ unsigned largest() const {
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < held; ++i) bits = max(bits, magnitude_bits(x[i]));
        return bits;
    }
    __device__ uint4 rounded(float inverse) const {
        unsigned word[held / 4];
#pragma unroll
        for (int w = 0; w < held / 4; ++w) {
            word[w] = 0;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 two{x[4 * w + 2 * half] * inverse, x[4 * w + 2 * half + 1] * inverse};
                word[w] |= static_cast<unsigned>(__nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3)) << 16 * half;
            }
        }
        return {word[0], word[1], word[2], word[3]};
    }
};

template <class T>
__device__ Values values_at(const T* x) {
    const auto pack = Access<T, held>::take({x, Type::f32}, 0);
    Values out;
#pragma unroll
    for (int i = 0; i < held; ++i) out.x[i] = pack[i];
    return out;
}

__device__ unsigned largest_of_sharers(unsigned bits) {
#pragma unroll
    for (int offset = sharers / 2; offset > 0; offset /= 2) bits = max(bits, __shfl_xor_sync(all_lanes, bits, offset));
    return bits;
}

// What a thread of for_each_part() holds: `held` elements from `at` on, of the block whose scale is number `block`.
struct Part {
    std::int64_t at, block;
    bool within; // the row; false for threads behind the end of a partial block
};

// A block of 128 columns for eight threads. All threads of a warp come together, with work or without.
template <class Body>
__device__ void for_each_part(const FilledRows& s, const std::int32_t* counts, Body body) {
    const std::int64_t rows = counts == nullptr ? s.rows : routed_rows(counts, s.groups, s.rows);
    const std::int64_t across = ceil_div(s.cols, std::int64_t{scale_block}), blocks = rows * across;
    const int lane = static_cast<int>(threadIdx.x) % sharers;
    const std::int64_t step = std::int64_t{gridDim.x} * (threads / sharers);
    std::int64_t block = std::int64_t{blockIdx.x} * (threads / sharers) + threadIdx.x / sharers;
    for (; block - threadIdx.x % warp_size / sharers < blocks; block += step) {
        const std::int64_t row = block / across, col = block % across * scale_block + lane * held;
        body(Part{row * s.cols + col, block, block < blocks && col < s.cols});
    }
}

template <class T>
__global__ void __launch_bounds__(threads)
    quantize_kernel(FilledRows s, const T* x, const std::int32_t* counts, std::uint8_t* q, float* scales) {
    for_each_part(s, counts, [&](const Part& part) {
        const Values values = part.within ? values_at(x + part.at) : Values{};
        const float scale = scale_of(largest_of_sharers(values.largest()));
        if (!part.within) return;
        if (threadIdx.x % sharers == 0) scales[part.block] = scale;
        *reinterpret_cast<uint4*>(q + part.at) = values.rounded(1.0f / scale);
    });
}

template <class T>
__global__ void __launch_bounds__(threads)
    dequantize_kernel(FilledRows s, const std::uint8_t* q, const float* scales, const std::int32_t* counts, Dst y) {
    for_each_part(s, counts, [&](const Part& part) {
        if (!part.within) return;
        const uint4 four = *reinterpret_cast<const uint4*>(q + part.at);
        const unsigned word[] = {four.x, four.y, four.z, four.w};
        const float scale = scales[part.block];
        float wide[held];
#pragma unroll
        for (int i = 0; i < held; i += 2) {
            const auto two = static_cast<__nv_fp8x2_storage_t>(word[i / 4] >> (i % 4 * 8));
            const float2 values = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
            wide[i] = values.x * scale, wide[i + 1] = values.y * scale;
        }
        Access<T, held>::put(y, part.at, wide);
    });
}

struct WeightForms {
    std::uint8_t* q;
    float* scale;
    std::uint8_t* qt;
    float* qt_scale;
};

// The square's bytes by rows of 128, each row's eight packs of 16 exchanged by the row's number over 16: then neither
// the rows that are written nor the columns that are read meet in a bank.
struct Square {
    uint4 pack[scale_block * sharers];
    __device__ uint4& at(int row, int pack_of_row) { return pack[row * sharers + (pack_of_row ^ (row / held))]; }
    __device__ unsigned word(int row, int word_of_row) {
        return reinterpret_cast<const unsigned*>(&at(row, word_of_row / 4))[word_of_row % 4];
    }
};

// Four bytes of four rows each as four rows of four bytes.
__device__ void transpose(const unsigned (&row)[4], unsigned (&column)[4]) {
    const unsigned low01 = __byte_perm(row[0], row[1], 0x5140), high01 = __byte_perm(row[0], row[1], 0x7362);
    const unsigned low23 = __byte_perm(row[2], row[3], 0x5140), high23 = __byte_perm(row[2], row[3], 0x7362);
    column[0] = __byte_perm(low01, low23, 0x5410), column[1] = __byte_perm(low01, low23, 0x7632);
    column[2] = __byte_perm(high01, high23, 0x5410), column[3] = __byte_perm(high01, high23, 0x7632);
}

// Columns 4 * (threadIdx.x / 8) and three more, rows 16 * (threadIdx.x % 8) and 15 more.
__device__ void put_transposed(Square& square, std::uint8_t* to, std::int64_t stride, int rows, int cols) {
    const int row = static_cast<int>(threadIdx.x) % sharers * held, col = static_cast<int>(threadIdx.x) / sharers * 4;
    if (row >= rows || col >= cols) return;
    unsigned out[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned in[] = {square.word(row + 4 * i, col / 4), square.word(row + 4 * i + 1, col / 4),
                               square.word(row + 4 * i + 2, col / 4), square.word(row + 4 * i + 3, col / 4)};
        unsigned turned[4];
        transpose(in, turned);
#pragma unroll
        for (int c = 0; c < 4; ++c) out[c][i] = turned[c];
    }
#pragma unroll
    for (int c = 0; c < 4; ++c)
        *reinterpret_cast<uint4*>(to + (col + c) * stride + row) = uint4{out[c][0], out[c][1], out[c][2], out[c][3]};
}

template <class T>
__global__ void __launch_bounds__(threads) weights_kernel(QuantizedWeights s, const T* w, WeightForms to) {
    constexpr int passes = scale_block / square_rows;
    __shared__ Square square;
    __shared__ unsigned found[threads / warp_size];
    const std::int64_t down = ceil_div(s.n, std::int64_t{scale_block}),
                       across = ceil_div(s.k, std::int64_t{scale_block});
    const std::int64_t group = blockIdx.x / (down * across), i = blockIdx.x / across % down, j = blockIdx.x % across;
    const std::int64_t first_row = i * scale_block, first_col = j * scale_block;
    const int rows = static_cast<int>(min(std::int64_t{scale_block}, s.n - first_row));
    const int cols = static_cast<int>(min(std::int64_t{scale_block}, s.k - first_col));
    const std::int64_t corner = (group * s.n + first_row) * s.k + first_col;
    const int pack = static_cast<int>(threadIdx.x) % sharers, top = static_cast<int>(threadIdx.x) / sharers;

    Values values[passes];
    unsigned bits = 0;
#pragma unroll
    for (int p = 0; p < passes; ++p) {
        const int row = p * square_rows + top;
        values[p] = row < rows && pack * held < cols ? values_at(w + corner + row * s.k + pack * held) : Values{};
    }
#pragma unroll
    for (int p = 0; p < passes; ++p) {
        if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (float& x : values[p].x) x = __bfloat162float(__float2bfloat16_rn(x));
        }
        bits = max(bits, values[p].largest());
    }
    bits = __reduce_max_sync(all_lanes, bits);
    if (threadIdx.x % warp_size == 0) found[threadIdx.x / warp_size] = bits;
    __syncthreads();
    for (const unsigned other : found) bits = max(bits, other);
    const float scale = scale_of(bits);
    if (threadIdx.x == 0)
        to.scale[(group * down + i) * across + j] = to.qt_scale[(group * across + j) * down + i] = scale;
#pragma unroll
    for (int p = 0; p < passes; ++p) {
        const int row = p * square_rows + top;
        const uint4 rounded = values[p].rounded(1.0f / scale);
        square.at(row, pack) = rounded;
        if (row < rows && pack * held < cols)
            *reinterpret_cast<uint4*>(to.q + corner + row * s.k + pack * held) = rounded;
    }
    __syncthreads();
    put_transposed(square, to.qt + (group * s.k + first_col) * s.n + first_row, s.n, rows, cols);
}

void demand_packs(const char* kernel, std::initializer_list<const void*> operands, std::int64_t rows,
                  std::int64_t cols) {
    for (const void* p : operands) {
        if (!aligned(p)) throw std::runtime_error(std::string(kernel) + ": an operand is not aligned to 16 bytes");
    }
    if (rows % held != 0 || cols % held != 0)
        throw std::runtime_error(std::string(kernel) + ": " + std::to_string(rows) + " x " + std::to_string(cols) +
                                 " are no multiples of 16");
}

unsigned blocks_of(const FilledRows& s) {
    return blocks_for(s.rows * ceil_div(s.cols, std::int64_t{scale_block}), threads / sharers,
                      std::int64_t{multiprocessors()} * 2048 / threads * 4);
}

void quantize_rows(const FilledRows& s, Src x, const std::int32_t* counts, std::uint8_t* q, float* scale,
                   void* stream) {
    if (s.rows <= 0 || s.cols <= 0) return;
    demand_packs("quantize_rows", {x.data, q}, held, s.cols);
    with_storage(x.type, [&](auto element) {
        using T = decltype(element);
        quantize_kernel<T>
            <<<blocks_of(s), threads, 0, stream_of(stream)>>>(s, static_cast<const T*>(x.data), counts, q, scale);
    });
    CUDA_CHECK(cudaGetLastError());
}

void dequantize_rows(const FilledRows& s, const std::uint8_t* q, const float* scale, const std::int32_t* counts, Dst y,
                     void* stream) {
    if (s.rows <= 0 || s.cols <= 0) return;
    demand_packs("dequantize_rows", {q, y.data}, held, s.cols);
    with_storage(y.type, [&](auto element) {
        dequantize_kernel<decltype(element)><<<blocks_of(s), threads, 0, stream_of(stream)>>>(s, q, scale, counts, y);
    });
    CUDA_CHECK(cudaGetLastError());
}

void quantize_weights(const QuantizedWeights& s, Src w, std::uint8_t* q, float* scale, std::uint8_t* qt,
                      float* qt_scale, void* stream) {
    const std::int64_t squares =
        s.groups * ceil_div(s.n, std::int64_t{scale_block}) * ceil_div(s.k, std::int64_t{scale_block});
    if (squares <= 0) return;
    demand_packs("quantize_weights", {w.data, q, qt}, s.n, s.k);
    with_storage(w.type, [&](auto element) {
        using T = decltype(element);
        weights_kernel<T><<<static_cast<unsigned>(squares), threads, 0, stream_of(stream)>>>(
            s, static_cast<const T*>(w.data), {q, scale, qt, qt_scale});
    });
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_quantize(Kernels& table) {
    table.quantize_rows = quantize_rows;
    table.dequantize_rows = dequantize_rows;
    table.quantize_weights = quantize_weights;
}

} // namespace moe::cuda
