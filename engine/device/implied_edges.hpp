// Edges of a graph of work that follow from its other edges.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace moe::device {

struct GraphEdge {
    int from = 0, to = 0; // numbers of the nodes
    bool whole = true;    // whether `to` begins when all of `from` has ended, not only a part of it
};

// The edges between `nodes` nodes, without a cycle, that say nothing that paths of other whole edges do not: indices in
// order. All of them may be dropped at once.
std::vector<std::size_t> implied_edges(int nodes, std::span<const GraphEdge> edges);

} // namespace moe::device
