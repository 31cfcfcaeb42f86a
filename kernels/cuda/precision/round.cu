// Operands of products rounded to the values of a narrow format, by rows and by columns in one pass.
//
// A thread holds one or two neighbouring columns of as many rows as a block has. The largest magnitude of a column is
// its own; that of a row's block it finds with the lanes beside it.
#include "kernels/rounding.hpp"

#include "kernels/cuda/families.hpp"
#include "kernels/cuda/noise.cuh"
#include "kernels/cuda/precision/fp8.cuh"
#include "kernels/cuda/precision/round_bytes.hpp"
#include "kernels/cuda/precision/row_blocks.cuh"

namespace moe::cuda {
namespace {

constexpr int threads = 256;

constexpr int rows_of_block(RoundFormat format) { return format == RoundFormat::mxfp8 ? mxfp8_values : nvfp4_values; }

// The operands of a call.
struct RoundArguments {
    RoundShape s;
    Src x;
    const std::int32_t* counts;
    const std::int32_t* positions;
    const std::int32_t* noise;
    unsigned* largest; // bits of magnitudes
    Dst by_row, by_column;
};

__device__ unsigned magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// A scale and its inverse, from bits of the largest magnitude: fp8_scale(), e5m2_scale(), nvfp4_tensor_scale().
struct Scale {
    float scale, inverse;
};
__device__ Scale power_of_two(unsigned largest) {
    const BlockScale block(largest);
    return {block.scale, block.inverse};
}
template <RoundFormat format>
__device__ Scale tensor_scale(unsigned largest) {
    if constexpr (format == RoundFormat::mxfp8) return {1.0f, 1.0f};
    if constexpr (format == RoundFormat::nvfp4) return power_of_two(__float_as_uint(__uint_as_float(largest) * sixth));
    const Scale s = power_of_two(largest);
    if constexpr (format == RoundFormat::e4m3) return s;
    const BlockScale block = e5m2_block(largest);
    return {block.scale, block.inverse};
}

// The scale of the whole tensor, of what its rows or its columns hold.
template <RoundFormat format>
__device__ Scale scale_of(const RoundArguments& a, int by) {
    if constexpr (format == RoundFormat::mxfp8) return {1.0f, 1.0f};
    if (a.s.window == nullptr) return tensor_scale<format>(a.largest[by]);
    return *a.s.window > 0.0f ? tensor_scale<format>(__float_as_uint(*a.s.window)) : Scale{1.0f, 1.0f};
}

template <RoundFormat format>
__device__ Scale block_scale(unsigned largest, const Scale& tensor) {
    if constexpr (format == RoundFormat::mxfp8) return power_of_two(largest);
    if constexpr (format != RoundFormat::nvfp4) return tensor;
    const float part = __uint_as_float(largest) * sixth * tensor.inverse;
    float wide[4];
    widen_four(__nv_cvt_float_to_fp8(part, __NV_SATFINITE, __NV_E4M3), 1.0f, wide);
    return {wide[0] * tensor.scale, 0.0f};
}

__device__ int nearest_code(float magnitude, float scale) {
    constexpr E2m1Table bounds = e2m1_bounds;
    int code = 0;
#pragma unroll
    for (int i = 0; i < 7; ++i) {
        const float bound = bounds.of[i] * scale;
        code += (i % 2 == 0 ? magnitude > bound : magnitude >= bound) ? 1 : 0;
    }
    return code;
}
// The magnitude of a code.
__device__ float e2m1(int code) {
    return code < 4 ? 0.5f * static_cast<float>(code) : code < 7 ? static_cast<float>(code - 2) : 6.0f;
}
__device__ int stochastic_code(float magnitude, float scale, unsigned n) {
    constexpr E2m1Table values = e2m1_values;
    int code = 0;
#pragma unroll
    for (int i = 1; i < 8; ++i) code += magnitude >= values.of[i] * scale ? 1 : 0;
    if (code == 7) return code;
    const float lower = e2m1(code) * scale, gap = (e2m1(code + 1) - e2m1(code)) * scale;
    return code + ((magnitude - lower) * 0x1p16f > static_cast<float>(n) * gap ? 1 : 0);
}

template <RoundFormat format>
__device__ float rounded(float x, const Scale& s, bool stochastic, unsigned n) {
    if constexpr (format == RoundFormat::nvfp4) {
        const float magnitude = fabsf(x);
        const int code = stochastic ? stochastic_code(magnitude, s.scale, n) : nearest_code(magnitude, s.scale);
        return copysignf(e2m1(code) * s.scale, x);
    } else {
        constexpr auto kind = format == RoundFormat::e5m2 ? __NV_E5M2 : __NV_E4M3;
        const auto byte = __nv_cvt_float_to_fp8(x * s.inverse, __NV_SATFINITE, kind);
        return __half2float(__half(__nv_cvt_fp8_to_halfraw(byte, kind))) * s.scale;
    }
}

// hadamard() of kernels/rounding.hpp, in its order.
template <int rows, int W>
__device__ void transform(float (&v)[rows][W], int w) {
    static_assert(rows == nvfp4_values);
#pragma unroll
    for (int i = 0; i < rows; ++i)
        if ((hadamard_signs >> i & 1) != 0) v[i][w] = -v[i][w];
#pragma unroll
    for (int half = 1; half < rows; half *= 2) {
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            if ((i & half) != 0) continue;
            const float sum = v[i][w] + v[i + half][w], difference = v[i][w] - v[i + half][w];
            v[i][w] = sum, v[i + half][w] = difference;
        }
    }
#pragma unroll
    for (int i = 0; i < rows; ++i) v[i][w] *= 0.25f;
}

// What a block of threads has of the operand.
template <RoundFormat format, class T, int W>
struct Tile {
    static constexpr int rows = rows_of_block(format), lanes = rows / W; // lanes: of a row's block
    RowBlock block;
    std::int64_t col;
    bool within;

    __device__ explicit Tile(const RoundArguments& a) {
        const std::int64_t across = ceil_div(a.s.cols, std::int64_t{threads} * W), index = blockIdx.x / across;
        block = a.counts == nullptr ? block_of_runs<rows>(a.s.run, a.s.rows, index)
                                    : block_of_groups<rows>(a.counts, a.s.groups, a.s.rows, index);
        col = (blockIdx.x % across * threads + threadIdx.x) * W;
        within = col < a.s.cols;
    }
    __device__ std::int64_t at(const RoundArguments& a, int row) const { return (block.first + row) * a.s.cols + col; }
    __device__ void take(const RoundArguments& a, float (&v)[rows][W]) const {
        const T* const x = static_cast<const T*>(a.x.data);
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            const bool there = within && r < block.rows;
            if constexpr (W == 1) {
                v[r][0] = there ? static_cast<float>(x[at(a, r)]) : 0.0f;
            } else if constexpr (sizeof(T) == 2) {
                const unsigned two = there ? *reinterpret_cast<const unsigned*>(x + at(a, r)) : 0u;
                v[r][0] = __uint_as_float(two << 16), v[r][1] = __uint_as_float(two & 0xffff0000u);
            } else {
                const float2 two = there ? *reinterpret_cast<const float2*>(x + at(a, r)) : float2{0.0f, 0.0f};
                v[r][0] = two.x, v[r][1] = two.y;
            }
        }
    }
    __device__ void put(Dst y, const RoundArguments& a, int row, const float (&value)[W]) const {
        auto* const to = static_cast<__nv_bfloat16*>(y.data) + at(a, row);
        if constexpr (W == 1)
            *to = __float2bfloat16(value[0]);
        else
            *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(value[0], value[1]);
    }
};

// Whether columns are rounded behind a transform: blocks that lack rows are not.
template <RoundFormat format>
__device__ bool transforms(const RoundArguments& a, const RowBlock& block) {
    return format == RoundFormat::nvfp4 && a.s.transform && a.by_column.data != nullptr && block.rows == nvfp4_values;
}

// Raises n magnitudes to those that the block's threads have seen; all threads call.
template <int n>
__device__ void put_largest(const unsigned (&seen)[n], unsigned* to) {
    __shared__ unsigned found[n][threads / warp_size];
#pragma unroll
    for (int i = 0; i < n; ++i) {
        const unsigned of_warp = __reduce_max_sync(all_lanes, seen[i]);
        if (threadIdx.x % warp_size == 0) found[i][threadIdx.x / warp_size] = of_warp;
    }
    __syncthreads();
    if (threadIdx.x >= n) return;
    unsigned of_block = 0;
    for (const unsigned of_warp : found[threadIdx.x]) of_block = max(of_block, of_warp);
    atomicMax(to + threadIdx.x, of_block);
}

// Largest magnitudes of x, and of what is rounded in columns where that is something else.
template <RoundFormat format, class T, int W>
__global__ void __launch_bounds__(threads) largest_kernel(RoundArguments a) {
    using Tile = Tile<format, T, W>;
    const Tile tile(a);
    if (tile.block.rows == 0) return;
    float v[Tile::rows][W];
    tile.take(a, v);
    unsigned largest[2] = {0, 0};
    const auto take_largest = [&](unsigned& to) {
#pragma unroll
        for (int r = 0; r < Tile::rows; ++r) {
#pragma unroll
            for (int w = 0; w < W; ++w) to = max(to, magnitude_bits(v[r][w]));
        }
    };
    take_largest(largest[0]);
    if constexpr (format == RoundFormat::nvfp4) {
        if (transforms<format>(a, tile.block)) {
#pragma unroll
            for (int w = 0; w < W; ++w) transform(v, w);
        }
    }
    take_largest(largest[1]);
    put_largest(largest, a.largest);
}

// Keys of the block's rows, one for what is rounded in rows and one for columns.
template <int rows>
struct RowKeys {
    std::uint64_t of[2][rows];

    __device__ void fill(const RoundArguments& a, const RowBlock& block) {
        const int r = static_cast<int>(threadIdx.x) % rows, by = static_cast<int>(threadIdx.x) / rows;
        if (by < 2 && r < block.rows) {
            const std::uint64_t key = mixed(step_key(a.noise) ^ mixed(a.s.tensor + by));
            const auto placed = [&](std::int64_t row) {
                const std::int64_t at = a.s.first + row;
                const auto sequence = static_cast<std::uint64_t>(a.noise[2] + at % a.s.batch);
                return mixed(key ^ mixed(sequence << 32 | static_cast<std::uint32_t>(a.positions[at / a.s.batch])));
            };
            const auto in_group = static_cast<std::uint64_t>(a.s.first_group + block.group) << 32 |
                                  static_cast<std::uint64_t>(block.from + r);
            of[by][r] = a.counts == nullptr ? placed(block.first + r) : mixed(placed(0) ^ mixed(in_group));
        }
        __syncthreads();
    }
    __device__ unsigned bits(const RoundArguments& a, int by, int row, std::int64_t c) const {
        const std::int64_t col = a.s.first_col + c;
        const std::uint64_t four = mixed(of[by][row] + static_cast<std::uint64_t>(col / noise_columns) * splitmix_step);
        return static_cast<unsigned>(four >> noise_bits * (col % noise_columns)) & ((1u << noise_bits) - 1);
    }
};

template <RoundFormat format, class T, int W>
__global__ void __launch_bounds__(threads) round_kernel(RoundArguments a) {
    using Tile = Tile<format, T, W>;
    constexpr int rows = Tile::rows;
    constexpr bool blocks = format == RoundFormat::mxfp8 || format == RoundFormat::nvfp4;
    __shared__ RowKeys<rows> keys;
    const Tile tile(a);
    if (tile.block.rows == 0) return;
    const bool stochastic = format == RoundFormat::nvfp4 && a.s.stochastic;
    if (stochastic) keys.fill(a, tile.block);
    float v[rows][W];
    tile.take(a, v);
    const auto put = [&](Dst y, int by, int r, const Scale(&scales)[W]) {
        float value[W];
#pragma unroll
        for (int w = 0; w < W; ++w)
            value[w] =
                rounded<format>(v[r][w], scales[w], stochastic, stochastic ? keys.bits(a, by, r, tile.col + w) : 0u);
        tile.put(y, a, r, value);
    };
    const auto along_row = [](unsigned largest) {
#pragma unroll
        for (int offset = Tile::lanes / 2; offset > 0; offset /= 2)
            largest = max(largest, __shfl_xor_sync(all_lanes, largest, offset));
        return largest;
    };
    const auto largest_of_row = [&](int r) {
        unsigned largest = 0;
#pragma unroll
        for (int w = 0; w < W; ++w) largest = max(largest, magnitude_bits(v[r][w]));
        return largest;
    };
    if constexpr (!blocks) {
        if (a.s.window != nullptr && a.largest != nullptr) { // Of a history: nothing has read x before.
            unsigned largest[1] = {0};
#pragma unroll
            for (int r = 0; r < rows; ++r) largest[0] = max(largest[0], largest_of_row(r));
            put_largest(largest, a.largest);
        }
    }
    if (a.by_row.data != nullptr) {
        const Scale tensor = scale_of<format>(a, 0);
        unsigned of_square = 0;
        if (format == RoundFormat::nvfp4 && a.s.square) {
#pragma unroll
            for (int r = 0; r < rows; ++r) of_square = max(of_square, largest_of_row(r));
            of_square = along_row(of_square);
        }
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            unsigned largest = of_square;
            if (blocks && !(format == RoundFormat::nvfp4 && a.s.square)) largest = along_row(largest_of_row(r));
            Scale scales[W];
            scales[0] = block_scale<format>(largest, tensor);
            if constexpr (W == 2) scales[1] = scales[0];
            if (tile.within && r < tile.block.rows) put(a.by_row, 0, r, scales);
        }
    }
    if (a.by_column.data == nullptr) return;
    if constexpr (format == RoundFormat::nvfp4) {
        if (transforms<format>(a, tile.block)) {
#pragma unroll
            for (int w = 0; w < W; ++w) transform(v, w);
        }
    }
    const Scale tensor = scale_of<format>(a, 1);
    Scale scales[W];
#pragma unroll
    for (int w = 0; w < W; ++w) {
        unsigned largest = 0;
#pragma unroll
        for (int r = 0; r < rows; ++r) largest = max(largest, magnitude_bits(v[r][w]));
        scales[w] = block_scale<format>(largest, tensor);
    }
#pragma unroll
    for (int r = 0; r < rows; ++r)
        if (tile.within && r < tile.block.rows) put(a.by_column, 1, r, scales);
}

template <RoundFormat format, class T, int W>
void launch(const RoundArguments& a, cudaStream_t stream) {
    constexpr std::int64_t rows = rows_of_block(format);
    const std::int64_t groups = a.s.groups < a.s.rows ? a.s.groups : a.s.rows;
    const std::int64_t tiles =
        a.counts == nullptr ? ceil_div(a.s.rows, a.s.run) * ceil_div(a.s.run, rows) : a.s.rows / rows + groups;
    const auto grid = static_cast<unsigned>(tiles * ceil_div(a.s.cols, std::int64_t{threads} * W));
    if (format != RoundFormat::mxfp8 && a.s.window == nullptr) {
        CUDA_CHECK(cudaMemsetAsync(a.largest, 0, 2 * sizeof(unsigned), stream));
        largest_kernel<format, T, W><<<grid, threads, 0, stream>>>(a);
        CUDA_CHECK(cudaGetLastError());
    }
    round_kernel<format, T, W><<<grid, threads, 0, stream>>>(a);
    CUDA_CHECK(cudaGetLastError());
}

template <RoundFormat format>
void launch_format(const RoundArguments& a, cudaStream_t stream) {
    const auto packed = [](const void* p, std::size_t bytes) {
        return reinterpret_cast<std::uintptr_t>(p) % bytes == 0;
    };
    const bool two = a.s.cols % 2 == 0 && packed(a.x.data, 2 * size_of(a.x.type)) && packed(a.by_row.data, 4) &&
                     packed(a.by_column.data, 4);
    with_storage(a.x.type, [&](auto element) {
        using T = decltype(element);
        two ? launch<format, T, 2>(a, stream) : launch<format, T, 1>(a, stream);
    });
}

void round_operand(const RoundShape& s, Src x, const std::int32_t* counts, const std::int32_t* positions,
                   const std::int32_t* noise, float* largest, Dst by_row, Dst by_column, void* stream) {
    if (s.rows <= 0 || s.cols <= 0) return;
    for (const Dst& y : {by_row, by_column})
        if (y.data != nullptr && y.type != Type::bf16) throw std::runtime_error("round_operand: results are BF16");
    if (s.codes.data != nullptr) return round_to_bytes(s, x, counts, largest, by_row, stream_of(stream));
    const RoundArguments a{s, x, counts, positions, noise, reinterpret_cast<unsigned*>(largest), by_row, by_column};
    switch (s.format) {
    case RoundFormat::e4m3:
        return launch_format<RoundFormat::e4m3>(a, stream_of(stream));
    case RoundFormat::e5m2:
        return launch_format<RoundFormat::e5m2>(a, stream_of(stream));
    case RoundFormat::mxfp8:
        return launch_format<RoundFormat::mxfp8>(a, stream_of(stream));
    case RoundFormat::nvfp4:
        return launch_format<RoundFormat::nvfp4>(a, stream_of(stream));
    }
}

} // namespace

void add_round(Kernels& table) { table.round_operand = round_operand; }

} // namespace moe::cuda
