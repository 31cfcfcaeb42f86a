// Edges of a CUDA graph as numbers, and those dropped that say nothing.
#include "engine/backends/cuda/graph.hpp"

#include "engine/device/implied_edges.hpp"
#include "planner/base/error.hpp"

#include <unordered_map>
#include <vector>

namespace moe::backends {

namespace {

void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess) fail("cuda: {}: {}", what, cudaGetErrorString(status));
}

} // namespace

void drop_implied_edges(cudaGraph_t graph) {
    std::size_t count = 0;
    check(cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &count), "counting a graph's edges");
    if (count == 0) return;
    std::vector<cudaGraphNode_t> from(count), to(count);
    std::vector<cudaGraphEdgeData> data(count);
    check(cudaGraphGetEdges(graph, from.data(), to.data(), data.data(), &count), "listing a graph's edges");
    std::unordered_map<cudaGraphNode_t, int> numbers;
    const auto number = [&](cudaGraphNode_t node) {
        return numbers.try_emplace(node, static_cast<int>(numbers.size())).first->second;
    };
    std::vector<device::GraphEdge> edges;
    for (std::size_t e = 0; e < count; ++e)
        edges.push_back(
            {number(from[e]), number(to[e]), data[e].from_port == 0 && data[e].type == cudaGraphDependencyTypeDefault});
    const std::vector<std::size_t> implied = device::implied_edges(static_cast<int>(numbers.size()), edges);
    if (implied.empty()) return;
    for (std::size_t i = 0; i < implied.size(); ++i) {
        from[i] = from[implied[i]];
        to[i] = to[implied[i]];
        data[i] = data[implied[i]];
    }
    check(cudaGraphRemoveDependencies(graph, from.data(), to.data(), data.data(), implied.size()),
          "dropping edges of a graph");
}

} // namespace moe::backends
