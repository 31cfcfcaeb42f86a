// A heap of the pairs that can be merged, over a list of symbols.
#include "engine/data/text/merging.hpp"

#include <functional>
#include <queue>
#include <tuple>

namespace moe::data {

// Lowest rank first, then leftmost. Entries that a merge beside them has made stale no longer find their two ids.
void Merges::append_merged(std::span<const std::int32_t> given, std::vector<std::int32_t>& ids) const {
    struct Symbol {
        std::int32_t id, before, behind; // -1 at the ends
    };
    using Candidate = std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int32_t>; // (rank, place, left, right)
    const auto n = static_cast<std::int32_t>(given.size());
    std::vector<Symbol> symbols;
    symbols.reserve(given.size());
    for (std::int32_t i = 0; i < n; ++i)
        symbols.push_back({given[static_cast<std::size_t>(i)], i - 1, i + 1 < n ? i + 1 : -1});
    std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> heap;
    const auto at = [&symbols](std::int32_t i) -> Symbol& { return symbols[static_cast<std::size_t>(i)]; };
    const auto offer = [&](std::int32_t left) {
        if (left < 0 || at(left).behind < 0) return;
        const std::int32_t a = at(left).id, b = at(at(left).behind).id;
        if (const auto merge = merges_.find(key(a, b)); merge != merges_.end())
            heap.emplace(merge->second.rank, left, a, b);
    };
    for (std::int32_t i = 0; i + 1 < n; ++i) offer(i);
    while (!heap.empty()) {
        const auto [rank, left, a, b] = heap.top();
        heap.pop();
        Symbol& one = at(left);
        if (one.id != a || one.behind < 0 || at(one.behind).id != b) continue;
        Symbol& other = at(one.behind);
        one.id = merges_.at(key(a, b)).id;
        other.id = -1;
        one.behind = other.behind;
        if (one.behind >= 0) at(one.behind).before = left;
        offer(one.before);
        offer(left);
    }
    for (const Symbol& symbol : symbols)
        if (symbol.id >= 0) ids.push_back(symbol.id);
}

} // namespace moe::data
