// Rows in E4M3 or E5M2 with one scale for the tensor, which stands in every place of the scales of blocks.
//
// A warp has a row, a lane 16 bytes of it at a time. Without a window the tensor's largest magnitude is found before.
#include "kernels/cuda/precision/round_bytes.hpp"

#include "kernels/cuda/precision/fp8.cuh"

namespace moe::cuda {
namespace {

constexpr int together = 4; // packs of a lane in flight

template <class T>
__global__ void __launch_bounds__(row_threads)
    largest_row_kernel(RoundShape s, Src x, const std::int32_t* counts, float* largest) {
    constexpr int W = 16 / sizeof(T);
    using A = Access<T, W>;
    unsigned bits = 0;
    for_each_row(counts, s.groups, s.rows, [&](std::int64_t row) {
        for_each_pack<together>(
            static_cast<int>(s.cols / W), [&](int p) { return A::take(x, row * s.cols + p * W); },
            [&](int, const typename A::Held& held) { bits = max(bits, largest_of(held)); });
    });
    raise_largest<row_threads>(bits, largest);
}

template <class T, bool e5m2>
__global__ void __launch_bounds__(row_threads)
    bytes_kernel(RoundShape s, Src x, const std::int32_t* counts, float* largest, Dst values) {
    constexpr int W = 16 / sizeof(T), sharers = scale_block / W;
    using A = Access<T, W>;
    const BlockScale scale = scale_of_tensor<e5m2>(s.window, largest);
    const std::int64_t across = ceil_div(s.cols, std::int64_t{scale_block});
    unsigned bits = 0;
    for_each_row(counts, s.groups, s.rows, [&](std::int64_t row) {
        for_each_pack<together>(
            static_cast<int>(s.cols / W), [&](int p) { return A::take(x, row * s.cols + p * W); },
            [&](int p, const typename A::Held& held) {
                bits = max(bits, largest_of(held));
                const std::int64_t at = row * s.cols + p * W;
                unsigned word[W / 4];
#pragma unroll
                for (int i = 0; i < W / 4; ++i) word[i] = four_bytes<e5m2>(held, 4 * i, scale.inverse);
                if constexpr (W == 8)
                    *reinterpret_cast<uint2*>(s.codes.data + at) = uint2{word[0], word[1]};
                else
                    *reinterpret_cast<unsigned*>(s.codes.data + at) = word[0];
                if (p % sharers == 0) s.codes.scale[row * across + p / sharers] = scale.scale;
                if (values.data == nullptr) return;
                float wide[W];
#pragma unroll
                for (int i = 0; i < W / 4; ++i) widen_four<e5m2>(word[i], scale.scale, wide + 4 * i);
                Access<__nv_bfloat16, W>::put(values, at, wide);
            });
    });
    if (s.window != nullptr && largest != nullptr) raise_largest<row_threads>(bits, largest);
}

} // namespace

void round_to_bytes(const RoundShape& s, Src x, const std::int32_t* counts, float* largest, Dst values,
                    cudaStream_t stream) {
    demand_packs("round_operand", {x.data, s.codes.data, values.data}, 16, s.cols);
    with_storage(x.type, [&](auto element) {
        using T = decltype(element);
        if (s.window == nullptr) {
            CUDA_CHECK(cudaMemsetAsync(largest, 0, 2 * sizeof(float), stream));
            launch_rows<largest_row_kernel<T>>(s.rows, stream, s, x, counts, largest);
        }
        s.format == RoundFormat::e5m2
            ? launch_rows<bytes_kernel<T, true>>(s.rows, stream, s, x, counts, largest, values)
            : launch_rows<bytes_kernel<T, false>>(s.rows, stream, s, x, counts, largest, values);
    });
}

} // namespace moe::cuda
