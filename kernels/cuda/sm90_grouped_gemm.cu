// Grouped products on Hopper: what the kernel takes, its tensor maps, and the choice of tiles.
#include "kernels/cuda/sm90/grouped_gemm.cuh"

#include "kernels/cuda/product.cuh"

#include <algorithm>
#include <climits>
#include <cmath>
#include <iterator>

namespace moe::cuda {
namespace {

using sm90::Config;
using sm90::Grouped;
using sm90::Maps;
using sm90::Pair;

// cuTensorMapEncodeTiled, through the runtime: the kernels link no driver library. Null where there is none.
auto map_encoder() {
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

// [planes, rows, inner] in boxes of 64 rows of 128 bytes, swizzled; zeros beyond.
CUtensorMap map_of(const void* data, Type type, std::int64_t inner, std::int64_t rows, std::int64_t planes) {
    const std::int64_t bytes = type == Type::bf16 ? 2 : 4;
    const cuuint64_t sizes[] = {static_cast<cuuint64_t>(inner), static_cast<cuuint64_t>(rows),
                                static_cast<cuuint64_t>(planes)};
    const cuuint64_t strides[] = {sizes[0] * static_cast<cuuint64_t>(bytes),
                                  sizes[0] * sizes[1] * static_cast<cuuint64_t>(bytes)};
    const cuuint32_t box[] = {static_cast<cuuint32_t>(128 / bytes), 64, 1}, steps[] = {1, 1, 1};
    CUtensorMap map;
    const CUresult status = map_encoder()(
        &map, type == Type::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 3,
        const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) {
        throw std::runtime_error("cuTensorMapEncodeTiled: status " + std::to_string(status) + " for a tensor of " +
                                 std::to_string(planes) + " x " + std::to_string(rows) + " x " + std::to_string(inner));
    }
    return map;
}

struct Call {
    const GroupedShape& shape;
    Src a, b;
    const std::int32_t* counts;
    Dst c;
    int multiprocessors;
    cudaStream_t stream;
};

Maps maps_of(const Call& call) {
    const GroupedShape& s = call.shape;
    switch (s.product) {
    case GroupedProduct::forward:
        return {map_of(call.a.data, Type::bf16, s.k, s.capacity, 1),
                map_of(call.b.data, Type::bf16, s.k, s.n, s.groups),
                map_of(call.c.data, Type::bf16, s.n, s.capacity, 1)};
    case GroupedProduct::dgrad:
        return {map_of(call.a.data, Type::bf16, s.n, s.capacity, 1),
                map_of(call.b.data, Type::bf16, s.k, s.n, s.groups),
                map_of(call.c.data, Type::bf16, s.k, s.capacity, 1)};
    default:
        return {map_of(call.a.data, Type::bf16, s.n, s.capacity, 1),
                map_of(call.b.data, Type::bf16, s.k, s.capacity, 1),
                map_of(call.c.data, Type::f32, s.k, s.n, s.groups)};
    }
}

Grouped grouped_of(const Call& call) {
    const GroupedShape& s = call.shape;
    const auto n = static_cast<int>(s.n), k = static_cast<int>(s.k), capacity = static_cast<int>(s.capacity);
    switch (s.product) {
    case GroupedProduct::forward:
        return {s.groups, 0, n, k, capacity, call.counts};
    case GroupedProduct::dgrad:
        return {s.groups, 0, k, n, capacity, call.counts};
    default:
        return {s.groups, n, k, 0, capacity, call.counts};
    }
}

template <class C>
void launch_as(const Call& call) {
    const Maps maps = maps_of(call);
    const Grouped p = grouped_of(call);
    CUDA_CHECK(
        cudaFuncSetAttribute(sm90::grouped_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::shared_bytes));
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = 2, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(call.multiprocessors / 2 * 2));
    config.blockDim = dim3(C::threads);
    config.dynamicSmemBytes = C::shared_bytes;
    config.stream = call.stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    CUDA_CHECK(cudaLaunchKernelEx(&config, sm90::grouped_kernel<C>, maps, p, call.c));
}

// Cycles of the tensor cores that a product takes on tiles of this kind, as far as the host can know: rows spread
// evenly over the groups, every wave as long as a whole tile. `start_cycles` is what a tile takes beside its products:
// filling the stages and writing the result.
template <class C>
double cycles(const Grouped& p, int clusters) {
    constexpr double start_cycles = 1500.0;
    const double rows = static_cast<double>(p.capacity) / p.groups;
    const double down = C::wgrad ? ceil_div(p.m, C::Walk::rows) : std::max(1.0, rows / C::Walk::rows + 0.5);
    const double tiles = p.groups * down * ceil_div(p.n, C::Walk::columns);
    const double steps = std::ceil((C::wgrad ? rows : static_cast<double>(p.depth)) / C::tile_k);
    constexpr double step_cycles = C::tile_n * 4.0 + 64.0; // 1,024 multiply-adds a cycle, and what issuing them costs
    return std::ceil(tiles / clusters) * (steps * step_cycles + start_cycles);
}

template <class... Configs>
void launch_fastest(const Call& call) {
    const Grouped p = grouped_of(call);
    const double costs[] = {cycles<Configs>(p, call.multiprocessors / 2)...};
    const auto best = std::min_element(std::begin(costs), std::end(costs)) - std::begin(costs);
    std::ptrdiff_t i = 0;
    ((i++ == best ? launch_as<Configs>(call) : void()), ...);
}

template <GroupedProduct form>
void launch_rows(const Call& call) {
    launch_fastest<Config<form, 256, 4, 2, Pair::along_n>, Config<form, 192, 4, 3, Pair::along_n>,
                   Config<form, 128, 6, 2, Pair::along_n>>(call);
}
void launch_gradient(const Call& call) {
    constexpr GroupedProduct form = GroupedProduct::wgrad;
    launch_fastest<Config<form, 256, 4, 2, Pair::along_m>, Config<form, 192, 4, 3, Pair::along_m>,
                   Config<form, 128, 6, 2, Pair::along_n>>(call);
}

bool takes(const GroupedShape& s, Src a, Src b, Dst c) {
    const auto aligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
    const Type result = s.product == GroupedProduct::wgrad ? Type::f32 : Type::bf16;
    return a.type == Type::bf16 && b.type == Type::bf16 && c.type == result && aligned(a.data) && aligned(b.data) &&
           aligned(c.data) && s.n % 8 == 0 && s.k % 8 == 0 && std::max({s.n, s.k, s.capacity}) < INT_MAX - 4096;
}

} // namespace

bool sm90_grouped_gemm(const GroupedShape& s, Src a, Src b, const std::int32_t* counts, Dst c, cudaStream_t stream) {
    if (!takes(s, a, b, c)) return false;
    int device = 0, major = 0, minor = 0, multiprocessors = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    if (major != 9 || minor != 0 || multiprocessors < 2 || map_encoder() == nullptr) return false;
    const Call call{s, a, b, counts, c, multiprocessors, stream};
    switch (s.product) {
    case GroupedProduct::forward:
        launch_rows<GroupedProduct::forward>(call);
        break;
    case GroupedProduct::dgrad:
        launch_rows<GroupedProduct::dgrad>(call);
        break;
    case GroupedProduct::wgrad:
        launch_gradient(call);
        break;
    }
    return true;
}

} // namespace moe::cuda
