// Merging of pairs of symbols by rank, as every byte-pair encoding does.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace moe::data {

class Merges {
public:
    // The pair becomes `id`; lower ranks come first, then pairs further left. The first merge of a pair stands.
    void add(std::int32_t left, std::int32_t right, std::int32_t rank, std::int32_t id) {
        merges_.emplace(key(left, right), Merge{rank, id});
        joined_.insert(left);
        joined_.insert(right);
    }
    bool joins(std::int32_t id) const { return joined_.contains(id); } // whether it is a half of any pair
    // Appends what is left of the symbols once no pair can be merged.
    void append_merged(std::span<const std::int32_t> symbols, std::vector<std::int32_t>& ids) const;

private:
    struct Merge {
        std::int32_t rank = 0, id = 0;
    };
    static std::uint64_t key(std::int32_t left, std::int32_t right) {
        return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 | static_cast<std::uint32_t>(right);
    }
    std::unordered_map<std::uint64_t, Merge> merges_;
    std::unordered_set<std::int32_t> joined_;
};

} // namespace moe::data
