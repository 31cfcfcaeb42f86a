// Nodes in chains, and for each node how far along every chain all has ended before it.
#include "engine/device/implied_edges.hpp"

#include <algorithm>

namespace moe::device {

namespace {

struct Node {
    std::vector<std::size_t> before, after; // numbers of edges
    std::size_t open = 0;                   // number of edges in `before` that come from nodes not seen yet
    std::size_t chain = 0;
    int place = 0;         // place of the node in its chain
    bool followed = false; // whether the next node of the chain is known
    std::vector<int> done; // last place of each chain that has ended before or with this node, -1 = none

    int done_of(std::size_t chain) const { return chain < done.size() ? done[chain] : -1; }
    void note(std::size_t chain, int place) {
        if (done.size() <= chain) done.resize(chain + 1, -1);
        done[chain] = std::max(done[chain], place);
    }
};

std::vector<Node> nodes_of(int nodes, std::span<const GraphEdge> edges) {
    std::vector<Node> all(static_cast<std::size_t>(nodes));
    for (std::size_t e = 0; e < edges.size(); ++e) {
        all[static_cast<std::size_t>(edges[e].from)].after.push_back(e);
        Node& to = all[static_cast<std::size_t>(edges[e].to)];
        to.before.push_back(e);
        ++to.open;
    }
    return all;
}

} // namespace

std::vector<std::size_t> implied_edges(int nodes, std::span<const GraphEdge> edges) {
    std::vector<Node> all = nodes_of(nodes, edges);
    const auto from = [&](std::size_t e) -> Node& { return all[static_cast<std::size_t>(edges[e].from)]; };
    std::vector<Node*> ready;
    for (Node& node : all)
        if (node.open == 0) ready.push_back(&node);
    std::vector<std::size_t> implied;
    std::size_t chains = 0;
    while (!ready.empty()) {
        Node& node = *ready.back();
        ready.pop_back();
        bool placed = false;
        for (const std::size_t e : node.before) {
            if (!edges[e].whole) continue;
            Node& before = from(e);
            if (std::any_of(node.before.begin(), node.before.end(), [&](std::size_t other) {
                    return edges[other].whole && &from(other) != &before &&
                           from(other).done_of(before.chain) >= before.place;
                })) {
                implied.push_back(e);
                continue;
            }
            for (std::size_t chain = 0; chain < before.done.size(); ++chain) node.note(chain, before.done[chain]);
            if (placed || before.followed) continue;
            placed = before.followed = true;
            node.chain = before.chain;
            node.place = before.place + 1;
        }
        if (!placed) node.chain = chains++;
        node.note(node.chain, node.place);
        for (const std::size_t e : node.after) {
            Node& next = all[static_cast<std::size_t>(edges[e].to)];
            if (--next.open == 0) ready.push_back(&next);
        }
    }
    std::sort(implied.begin(), implied.end());
    return implied;
}

} // namespace moe::device
