// Launching the persistent kernels of Hopper: what they can run on, tensor maps, the choice of tiles, clusters.
#pragma once

#include "kernels/cuda/ptx/tma.cuh"
#include "kernels/cuda/sm90/config.cuh"
#include "kernels/tiles.hpp"

#include <algorithm>
#include <array>
#include <climits>
#include <initializer_list>
#include <iterator>
#include <utility>

namespace moe::cuda::sm90 {

// Finds cuTensorMapEncodeTiled through the runtime: the kernels link no driver library. Null where there is none.
inline auto map_encoder() {
    using Encoder = decltype(&cuTensorMapEncodeTiled);
    static const Encoder found = [] {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult result{};
        const cudaError_t status =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
        if (status != cudaSuccess) cudaGetLastError();
        return status == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encoder>(entry)
                                                                              : nullptr;
    }();
    return found;
}

// Boxes of rows of 128 bytes, swizzled; zeros beyond. Elements are bytes, BF16 or FP32; strides in bytes, but of the
// innermost dimension. L2 fetches what a box has: with 256 bytes at once two fifths more crossed between its halves,
// and deep products took up to 8 % longer (docs/notes/kernels-grouped-gemm.md).
template <class T, int dimensions>
CUtensorMap map_of(const void* data, const cuuint64_t (&sizes)[dimensions], const cuuint64_t (&strides)[dimensions - 1],
                   int box_rows) {
    cuuint32_t box[dimensions] = {128 / sizeof(T), static_cast<cuuint32_t>(box_rows)}, steps[dimensions];
    std::fill(box + 2, box + dimensions, 1u);
    std::fill(steps, steps + dimensions, 1u);
    constexpr CUtensorMapDataType type = sizeof(T) == 4   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                         : sizeof(T) == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                          : CU_TENSOR_MAP_DATA_TYPE_UINT8;
    CUtensorMap map;
    const CUresult status = map_encoder()(&map, type, dimensions, const_cast<void*>(data), sizes, strides, box, steps,
                                          CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                          CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) {
        throw std::runtime_error("cuTensorMapEncodeTiled: status " + std::to_string(status) + " for a tensor of " +
                                 std::to_string(sizes[2]) + " x " + std::to_string(sizes[1]) + " x " +
                                 std::to_string(sizes[0]));
    }
    return map;
}

// [planes, rows, inner]
template <class T>
CUtensorMap map_of(const void* data, std::int64_t inner, std::int64_t rows, std::int64_t planes, int box_rows = 64) {
    const cuuint64_t row = static_cast<cuuint64_t>(inner) * sizeof(T), count = static_cast<cuuint64_t>(rows);
    return map_of<T, 3>(data, {static_cast<cuuint64_t>(inner), count, static_cast<cuuint64_t>(planes)},
                        {row, row * count}, box_rows);
}

// Rows of `inner` elements, in groups that only the device knows. The map has one tensor, but bounds that fit any
// group: row x of its second dimension ends at GroupBox::span, where the group shall end, the third says where that is,
// and the last, always at GroupBox::span, takes the span off again: span times its stride is 2^64 bytes less span rows.
template <class T>
CUtensorMap group_map_of(const void* data, std::int64_t inner, int box_rows) {
    constexpr cuuint64_t span = ptx::GroupBox::span, most = 0x7fff0000;
    const cuuint64_t row = static_cast<cuuint64_t>(inner) * sizeof(T);
    return map_of<T, 4>(data, {static_cast<cuuint64_t>(inner), span, most, most}, {row, row, (1ull << 34) - row},
                        box_rows);
}

// The multiprocessors of the current device; 0 where the kernels do not run on it.
inline int multiprocessors() {
    int device = 0, major = 0, minor = 0, count = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return major == 9 && minor == 0 && map_encoder() != nullptr ? count / 2 * 2 : 0;
}

// True where the copy engine reaches operands at these addresses and the kernels' indices these sizes.
inline bool within_reach(std::initializer_list<const void*> operands, std::initializer_list<std::int64_t> sizes) {
    return std::all_of(operands.begin(), operands.end(),
                       [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }) &&
           std::all_of(sizes.begin(), sizes.end(), [](std::int64_t size) { return size < INT_MAX - 4096; });
}

template <class C, class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int multiprocessors, cudaStream_t stream, const Arguments&... arguments) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::shared_bytes));
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = C::ctas, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(multiprocessors));
    config.blockDim = dim3(C::threads);
    config.dynamicSmemBytes = C::shared_bytes;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
}

template <class C>
constexpr TileKind kind_of = tile_kind(C::Walk::rows, C::Walk::columns, C::tile_n, C::tile_k, C::work, C::swapped);

// Calls with a value of the kind of tile that should be the fastest, as far as the host can know, of those of `kinds`.
template <const auto& kinds, class... Configs, class Call>
void with_fastest(const Grouped& p, int multiprocessors, const Call& call) {
    static_assert(kinds == std::array{kind_of<Configs>...}, "the simulator prices other kinds of tiles");
    const TiledProduct product{p.groups, static_cast<double>(p.capacity) / p.groups, double(p.m), double(p.n),
                               double(p.depth)};
    std::ptrdiff_t best = 0, i = 0;
    for (std::ptrdiff_t at = 1; at < std::ssize(kinds); ++at) {
        const auto cycles = [&](std::ptrdiff_t kind) {
            return tiled_cycles(kinds[static_cast<std::size_t>(kind)], product, multiprocessors / 2);
        };
        if (cycles(at) < cycles(best)) best = at;
    }
    ((i++ == best ? call(Configs{}) : void()), ...);
}

} // namespace moe::cuda::sm90
