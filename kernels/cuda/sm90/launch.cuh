// Launching the persistent kernels of Hopper: what they can run on, tensor maps, the choice of tiles, clusters.
#pragma once

#include "kernels/cuda/sm90/config.cuh"

#include <algorithm>
#include <climits>
#include <cmath>
#include <initializer_list>
#include <iterator>

namespace moe::cuda::sm90 {

// cuTensorMapEncodeTiled, through the runtime: the kernels link no driver library. Null where there is none.
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

// [planes, rows, inner] in boxes of 64 rows of 128 bytes, swizzled; zeros beyond. Elements are bytes, BF16 or FP32.
template <class T>
CUtensorMap map_of(const void* data, std::int64_t inner, std::int64_t rows, std::int64_t planes) {
    const cuuint64_t sizes[] = {static_cast<cuuint64_t>(inner), static_cast<cuuint64_t>(rows),
                                static_cast<cuuint64_t>(planes)};
    const cuuint64_t strides[] = {sizes[0] * sizeof(T), sizes[0] * sizes[1] * sizeof(T)};
    const cuuint32_t box[] = {128 / sizeof(T), 64, 1}, steps[] = {1, 1, 1};
    constexpr CUtensorMapDataType type = sizeof(T) == 4   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                         : sizeof(T) == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                          : CU_TENSOR_MAP_DATA_TYPE_UINT8;
    CUtensorMap map;
    const CUresult status = map_encoder()(&map, type, 3, const_cast<void*>(data), sizes, strides, box, steps,
                                          CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) {
        throw std::runtime_error("cuTensorMapEncodeTiled: status " + std::to_string(status) + " for a tensor of " +
                                 std::to_string(planes) + " x " + std::to_string(rows) + " x " + std::to_string(inner));
    }
    return map;
}

// Of the current device; 0 where the kernels do not run on it.
inline int multiprocessors() {
    int device = 0, major = 0, minor = 0, count = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return major == 9 && minor == 0 && map_encoder() != nullptr ? count / 2 * 2 : 0;
}

// Whether the copy engine reaches operands at these addresses and the kernels' indices these sizes.
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

// Cycles of the tensor cores that a product takes on tiles of this kind, as far as the host can know: rows spread
// evenly over the groups, every wave as long as a whole tile. Fitted to an H200's times: a step of the ring takes what
// its products do and what issuing them costs, and a tile what nothing hides of its start and its results.
template <class C>
double cycles(const Grouped& p, int clusters) {
    constexpr double step_cycles = C::tile_n * 4.0 + (C::in_turn ? 104.0 : 64.0); // 1,024 multiply-adds of BF16 each
    constexpr double tile_cycles = C::in_turn ? 0.0 : 2700.0;
    const double rows = static_cast<double>(p.capacity) / p.groups;
    const double down = C::wgrad ? ceil_div(p.m, C::Walk::rows) : std::max(1.0, rows / C::Walk::rows + 0.5);
    const double tiles = p.groups * down * ceil_div(p.n, C::Walk::columns);
    const double steps = std::ceil((C::wgrad ? rows : static_cast<double>(p.depth)) / C::tile_k);
    return std::ceil(tiles / clusters) * (steps * step_cycles + tile_cycles);
}

// Calls with a value of the kind of tile that should be the fastest.
template <class... Configs, class Call>
void with_fastest(const Grouped& p, int multiprocessors, const Call& call) {
    const double costs[] = {cycles<Configs>(p, multiprocessors / Configs::ctas)...};
    const auto best = std::min_element(std::begin(costs), std::end(costs)) - std::begin(costs);
    std::ptrdiff_t i = 0;
    ((i++ == best ? call(Configs{}) : void()), ...);
}

} // namespace moe::cuda::sm90
