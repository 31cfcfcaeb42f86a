// E4M3 with a scale per block: activations by rows, weights in squares as they are and transposed, and back. Weights
// with one scale, too.
//
// A thread holds 16 neighbouring elements, eight threads a block of 128: what they need of each other is its largest
// magnitude.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/precision/fp8_square.cuh"

namespace moe::cuda {
namespace {

constexpr int together = 4; // packs of a lane in flight

template <class T>
__global__ void __launch_bounds__(row_threads)
    quantize_kernel(FilledRows s, Src x, const std::int32_t* counts, Fp8Rows q) {
    constexpr int W = 16 / sizeof(T);
    using A = Access<T, W>;
    for_each_row(counts, s.groups, s.rows, [&](std::int64_t row) {
        for_packs_of_warp<together>(
            static_cast<int>(s.cols / W), [&](int p) { return A::take(x, row * s.cols + p * W); },
            [&](int p, const typename A::Held& held, bool within) { put_quantized(q, row, s.cols, p, within, held); });
    });
}

// A lane widens eight bytes.
template <class T>
__global__ void __launch_bounds__(row_threads)
    dequantize_kernel(FilledRows s, Fp8Rows q, const std::int32_t* counts, Dst y) {
    constexpr int W = 8;
    const std::int64_t across = ceil_div(s.cols, std::int64_t{scale_block});
    struct Eight {
        uint2 words;
        float scale;
    };
    for_each_row(counts, s.groups, s.rows, [&](std::int64_t row) {
        for_each_pack<together>(
            static_cast<int>(s.cols / W),
            [&](int p) {
                return Eight{*reinterpret_cast<const uint2*>(q.data + row * s.cols + p * W),
                             q.scale[row * across + p / (scale_block / W)]};
            },
            [&](int p, const Eight& held) {
                float wide[W];
                widen_four(held.words.x, held.scale, wide);
                widen_four(held.words.y, held.scale, wide + W / 2);
                Access<T, W>::put(y, row * s.cols + p * W, wide);
            });
    });
}

struct WeightForms {
    std::uint8_t* q;
    float* scale;
    std::uint8_t* qt;
    float* qt_scale;
};

// Raises a magnitude to the largest of the block's threads; all of them call.
__device__ unsigned raise(unsigned bits, float* largest) {
    __shared__ unsigned found[square_threads / warp_size];
    bits = __reduce_max_sync(all_lanes, bits);
    if (threadIdx.x % warp_size == 0) found[threadIdx.x / warp_size] = bits;
    __syncthreads();
    for (const unsigned other : found) bits = max(bits, other);
    if (largest != nullptr && threadIdx.x == 0) atomicMax(reinterpret_cast<unsigned*>(largest), bits);
    return bits;
}

template <class T>
__global__ void __launch_bounds__(square_threads)
    largest_weight_kernel(std::int64_t packs, const T* w, float* largest) {
    unsigned bits = 0;
    const std::int64_t threads = std::int64_t{gridDim.x} * square_threads;
    for (std::int64_t i = std::int64_t{blockIdx.x} * square_threads + threadIdx.x; i < packs; i += threads)
        bits = max(bits, largest_of(values_at(w + i * square_pack)));
    raise(bits, largest);
}

// The scale of a square: its own, or that of all weights.
__device__ BlockScale scale_of(const QuantizedWeights& s, unsigned bits) {
    if (s.one_scale) bits = __float_as_uint(s.window != nullptr ? *s.window : *s.largest);
    BlockScale block(bits);
    if (s.one_scale && s.window != nullptr && bits == 0) block.scale = block.inverse = 1.0f;
    return block;
}

template <class T>
__global__ void __launch_bounds__(square_threads, 4) weights_kernel(QuantizedWeights s, const T* w, WeightForms to) {
    constexpr int passes = scale_block / square_rows;
    __shared__ Square square;
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
        values[p] =
            row < rows && pack * square_pack < cols ? values_at(w + corner + row * s.k + pack * square_pack) : Values{};
    }
#pragma unroll
    for (int p = 0; p < passes; ++p) bits = max(bits, largest_of(values[p]));
    bits = raise(bits, s.one_scale && s.window != nullptr ? s.largest : nullptr);
    const BlockScale block = scale_of(s, bits);
    if (threadIdx.x == 0)
        to.scale[(group * down + i) * across + j] = to.qt_scale[(group * across + j) * down + i] = block.scale;
#pragma unroll
    for (int p = 0; p < passes; ++p) {
        const int row = p * square_rows + top;
        const uint4 bytes = rounded(values[p], block.inverse);
        square.at(row, pack) = bytes;
        if (row < rows && pack * square_pack < cols)
            *reinterpret_cast<uint4*>(to.q + corner + row * s.k + pack * square_pack) = bytes;
    }
    __syncthreads();
    put_transposed(square, to.qt + (group * s.k + first_col) * s.n + first_row, s.n, rows, cols);
}

void quantize_rows(const FilledRows& s, Src x, const std::int32_t* counts, std::uint8_t* q, float* scale,
                   void* stream) {
    if (s.rows <= 0 || s.cols <= 0) return;
    demand_packs("quantize_rows", {x.data, q}, square_pack, s.cols);
    with_storage(x.type, [&](auto element) {
        launch_rows<quantize_kernel<decltype(element)>>(s.rows, stream, s, x, counts, Fp8Rows{q, scale});
    });
}

void dequantize_rows(const FilledRows& s, const std::uint8_t* q, const float* scale, const std::int32_t* counts, Dst y,
                     void* stream) {
    if (s.rows <= 0 || s.cols <= 0) return;
    demand_packs("dequantize_rows", {q, y.data}, square_pack, s.cols);
    const Fp8Rows from{const_cast<std::uint8_t*>(q), const_cast<float*>(scale)};
    with_storage(y.type, [&](auto element) {
        launch_rows<dequantize_kernel<decltype(element)>>(s.rows, stream, s, from, counts, y);
    });
}

void quantize_weights(const QuantizedWeights& s, Src w, std::uint8_t* q, float* scale, std::uint8_t* qt,
                      float* qt_scale, void* stream) {
    const std::int64_t squares =
        s.groups * ceil_div(s.n, std::int64_t{scale_block}) * ceil_div(s.k, std::int64_t{scale_block});
    if (squares <= 0) return;
    demand_packs("quantize_weights", {w.data, q, qt}, s.n, s.k);
    with_storage(w.type, [&](auto element) {
        using T = decltype(element);
        if (s.one_scale && s.window == nullptr) {
            CUDA_CHECK(cudaMemsetAsync(s.largest, 0, sizeof(float), stream_of(stream)));
            const std::int64_t packs = s.groups * s.n * s.k / square_pack;
            largest_weight_kernel<T>
                <<<blocks_for(packs, 4 * square_threads, 4096), square_threads, 0, stream_of(stream)>>>(
                    packs, static_cast<const T*>(w.data), s.largest);
        }
        weights_kernel<T><<<static_cast<unsigned>(squares), square_threads, 0, stream_of(stream)>>>(
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
