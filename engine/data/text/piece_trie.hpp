// Finds which of many texts another text begins with.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace moe::data {

// Sorted texts, of which each next byte leaves a narrower range.
class PieceTrie {
public:
    PieceTrie() = default;
    // Of texts that occur twice the first one stands; empty ones are left out.
    explicit PieceTrie(std::vector<std::pair<std::string, std::int32_t>> texts);

    // Calls visit(bytes, value) for the texts that `text` begins with, from the shortest on.
    template <typename Visit>
    void prefixes(std::string_view text, const Visit& visit) const {
        std::size_t from = 0, to = texts_.size();
        for (std::size_t depth = 0; depth < text.size(); ++depth) {
            narrow(text[depth], depth, from, to);
            if (from == to) return;
            if (texts_[from].first.size() != depth + 1) continue;
            visit(depth + 1, texts_[from].second);
            if (++from == to) return;
        }
    }
    // Bytes of the longest of them, 0 where there is none.
    std::size_t longest(std::string_view text) const {
        std::size_t found = 0;
        prefixes(text, [&found](std::size_t bytes, std::int32_t) { found = bytes; });
        return found;
    }

private:
    // The part of [from, to) with this byte at `depth`; all of them are longer.
    void narrow(char byte, std::size_t depth, std::size_t& from, std::size_t& to) const;

    std::vector<std::pair<std::string, std::int32_t>> texts_;
    std::vector<std::size_t> first_; // where texts of each first byte begin, and the end
};

} // namespace moe::data
