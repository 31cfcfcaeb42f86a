// Zeros 16 bytes at a time, four stores in flight per thread; the bytes before and behind whole packs go one by one.
#include "kernels/cuda/clear.hpp"

#include "kernels/cuda/cuda_kernels.hpp"
#include "kernels/cuda/device.cuh"

#include <algorithm>
#include <vector>

namespace moe::cuda {

namespace {

constexpr int threads = 256, packs_per_thread = 4;

__global__ void __launch_bounds__(threads) clear_kernel(char* data, std::int64_t head, std::int64_t bytes) {
    uint4* const whole = reinterpret_cast<uint4*>(data + head);
    const std::int64_t packs = (bytes - head) / 16, behind = head + packs * 16;
    const std::int64_t first = std::int64_t{blockIdx.x} * threads * packs_per_thread + threadIdx.x;
#pragma unroll
    for (int j = 0; j < packs_per_thread; ++j)
        if (first + j * threads < packs) whole[first + j * threads] = uint4{0, 0, 0, 0};
    if (blockIdx.x != 0) return;
    if (threadIdx.x < head) data[threadIdx.x] = 0;
    if (behind + threadIdx.x < bytes) data[behind + threadIdx.x] = 0;
}

struct Range {
    char* data;
    std::int64_t head, bytes; // head: bytes before the first aligned pack

    Range(void* begin, std::int64_t size) : data(static_cast<char*>(begin)), bytes(size) {
        const auto misplaced = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(begin) % 16);
        head = misplaced == 0 ? 0 : std::min(16 - misplaced, size);
    }
    unsigned blocks() const { return blocks_for(ceil_div(bytes, std::int64_t{16}), threads * packs_per_thread); }
};

std::vector<cudaGraphNode_t> nodes_of(cudaGraph_t graph) {
    std::size_t count = 0;
    CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &count));
    std::vector<cudaGraphNode_t> nodes(count);
    CUDA_CHECK(cudaGraphGetNodes(graph, nodes.data(), &count));
    return nodes;
}

struct Edges {
    std::vector<cudaGraphNode_t> nodes;
    std::vector<cudaGraphEdgeData> data;
};

// The edges to what `node` waits for, or to what waits for it.
template <class List>
Edges edges_of(cudaGraphNode_t node, List list) {
    Edges edges;
    std::size_t count = 0;
    CUDA_CHECK(list(node, nullptr, nullptr, &count));
    edges.nodes.resize(count);
    edges.data.resize(count);
    CUDA_CHECK(list(node, edges.nodes.data(), edges.data.data(), &count));
    return edges;
}

void replace(cudaGraph_t graph, cudaGraphNode_t fill, Range range) {
    const Edges before = edges_of(fill, cudaGraphNodeGetDependencies),
                after = edges_of(fill, cudaGraphNodeGetDependentNodes);
    void* arguments[] = {&range.data, &range.head, &range.bytes};
    cudaKernelNodeParams call{};
    call.func = reinterpret_cast<void*>(clear_kernel);
    call.gridDim = dim3(range.blocks());
    call.blockDim = dim3(threads);
    call.kernelParams = arguments;
    cudaGraphNode_t node = nullptr;
    CUDA_CHECK(cudaGraphAddKernelNode(&node, graph, nullptr, 0, &call));
    const std::vector<cudaGraphNode_t> to(before.nodes.size(), node), from(after.nodes.size(), node);
    CUDA_CHECK(cudaGraphAddDependencies(graph, before.nodes.data(), to.data(), before.data.data(), to.size()));
    CUDA_CHECK(cudaGraphAddDependencies(graph, from.data(), after.nodes.data(), after.data.data(), from.size()));
    CUDA_CHECK(cudaGraphDestroyNode(fill));
}

} // namespace

void clear(void* data, std::int64_t bytes, cudaStream_t stream) {
    if (bytes <= 0) return;
    const Range range(data, bytes);
    clear_kernel<<<range.blocks(), threads, 0, stream>>>(range.data, range.head, range.bytes);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace moe::cuda

namespace moe {

void cuda_replace_fills(void* captured) {
    const auto graph = static_cast<cudaGraph_t>(captured);
    for (const cudaGraphNode_t node : cuda::nodes_of(graph)) {
        cudaGraphNodeType type{};
        CUDA_CHECK(cudaGraphNodeGetType(node, &type));
        if (type != cudaGraphNodeTypeMemset) continue;
        cudaMemsetParams fill{};
        CUDA_CHECK(cudaGraphMemsetNodeGetParams(node, &fill));
        if (fill.value == 0 && fill.height == 1)
            cuda::replace(graph, node, {fill.dst, static_cast<std::int64_t>(fill.width * fill.elementSize)});
    }
}

} // namespace moe
