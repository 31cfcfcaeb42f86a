// Dropped edges: by hand, and on random graphs that keep exactly their reachability.
#include "engine/device/implied_edges.hpp"
#include "tests/support/draws.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>

using namespace moe;

namespace {

// The nodes that end before each begins, by paths of the edges that are left; numbers run along the edges.
std::vector<std::vector<bool>> reached(int nodes, const std::vector<device::GraphEdge>& edges,
                                       const std::vector<std::size_t>& dropped) {
    std::vector<std::vector<bool>> before(static_cast<std::size_t>(nodes),
                                          std::vector<bool>(static_cast<std::size_t>(nodes)));
    for (int to = 0; to < nodes; ++to)
        for (std::size_t e = 0; e < edges.size(); ++e) {
            if (edges[e].to != to || std::binary_search(dropped.begin(), dropped.end(), e)) continue;
            const auto from = static_cast<std::size_t>(edges[e].from), at = static_cast<std::size_t>(to);
            before[at][from] = true;
            for (std::size_t n = 0; n < before.size(); ++n)
                if (before[from][n]) before[at][n] = true;
        }
    return before;
}

} // namespace

TEST_CASE("edges that paths of others imply are dropped, partial ones and all others stay") {
    CHECK(device::implied_edges(3, std::vector<device::GraphEdge>{{0, 1}, {1, 2}, {0, 2}}) ==
          std::vector<std::size_t>{2});
    CHECK(device::implied_edges(3, std::vector<device::GraphEdge>{{0, 1, false}, {1, 2}, {0, 2}}).empty());
    CHECK(device::implied_edges(3, std::vector<device::GraphEdge>{{0, 1}, {1, 2}, {0, 2, false}}).empty());
    CHECK(device::implied_edges(4, std::vector<device::GraphEdge>{{0, 1}, {0, 2}, {1, 3}, {2, 3}}).empty());
    CHECK(device::implied_edges(4, std::vector<device::GraphEdge>{{0, 3}, {2, 3}, {1, 2}, {0, 1}}) ==
          std::vector<std::size_t>{0});
    CHECK(device::implied_edges(2, std::vector<device::GraphEdge>{}).empty());
}

TEST_CASE("random graphs keep what their nodes wait for, and nothing that could still go") {
    std::mt19937 dice(7);
    for (std::size_t i = 0; i < draws(200); ++i) {
        const int nodes = 2 + static_cast<int>(dice() % 30);
        std::vector<device::GraphEdge> edges;
        for (int to = 1; to < nodes; ++to)
            for (int from = 0; from < to; ++from)
                if (dice() % 5 == 0) edges.push_back({from, to});
        std::shuffle(edges.begin(), edges.end(), dice);
        const std::vector<std::size_t> dropped = device::implied_edges(nodes, edges);
        CHECK(reached(nodes, edges, dropped) == reached(nodes, edges, {}));
        for (std::size_t e = 0; e < edges.size(); ++e) {
            if (std::binary_search(dropped.begin(), dropped.end(), e)) continue;
            std::vector<std::size_t> more = dropped;
            more.insert(std::lower_bound(more.begin(), more.end(), e), e);
            CHECK(reached(nodes, edges, more) != reached(nodes, edges, {}));
        }
    }
}
