// Merging of byte pairs, by rank, over the pieces of a text.
#include "engine/data/text/bpe.hpp"

#include "planner/base/error.hpp"

#include <algorithm>
#include <queue>
#include <tuple>

namespace moe::data {

namespace {

constexpr std::size_t most_known = 1 << 20; // number of pieces remembered; natural text repeats a few hundred thousand

std::uint64_t pair_key(std::int32_t left, std::int32_t right) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 | static_cast<std::uint32_t>(right);
}

} // namespace

// A list of symbols and a heap of the pairs that can be merged: lowest rank first, then leftmost. Entries that a merge
// beside them has made stale no longer find their two ids.
std::vector<std::int32_t> BytePairEncoder::merged(const std::string& piece) const {
    struct Symbol {
        std::int32_t id, before, behind; // -1 at the ends
    };
    using Candidate = std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int32_t>; // (rank, place, left, right)
    const auto n = static_cast<std::int32_t>(piece.size());
    std::vector<Symbol> symbols;
    for (std::int32_t i = 0; i < n; ++i)
        symbols.push_back(
            {byte_id_[static_cast<unsigned char>(piece[static_cast<std::size_t>(i)])], i - 1, i + 1 < n ? i + 1 : -1});
    std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> heap;
    const auto at = [&symbols](std::int32_t i) -> Symbol& { return symbols[static_cast<std::size_t>(i)]; };
    const auto offer = [&](std::int32_t left) {
        if (left < 0 || at(left).behind < 0) return;
        const std::int32_t a = at(left).id, b = at(at(left).behind).id;
        if (const auto merge = merges_.find(pair_key(a, b)); merge != merges_.end())
            heap.emplace(merge->second.rank, left, a, b);
    };
    for (std::int32_t i = 0; i + 1 < n; ++i) offer(i);
    while (!heap.empty()) {
        const auto [rank, left, a, b] = heap.top();
        heap.pop();
        Symbol& one = at(left);
        if (one.id != a || one.behind < 0 || at(one.behind).id != b) continue;
        Symbol& other = at(one.behind);
        one.id = merges_.at(pair_key(a, b)).id;
        other.id = -1;
        one.behind = other.behind;
        if (one.behind >= 0) at(one.behind).before = left;
        offer(one.before);
        offer(left);
    }
    std::vector<std::int32_t> ids;
    for (const Symbol& symbol : symbols)
        if (symbol.id >= 0) ids.push_back(symbol.id);
    return ids;
}

void BytePairEncoder::encode_piece(const std::string& piece, std::vector<std::int32_t>& ids) {
    if (ignore_merges_) {
        if (const auto token = whole_.find(piece); token != whole_.end()) {
            ids.push_back(token->second);
            return;
        }
    }
    auto known = known_.find(piece);
    if (known == known_.end()) {
        if (known_.size() >= most_known) known_.clear();
        known = known_.emplace(piece, merged(piece)).first;
    }
    ids.insert(ids.end(), known->second.begin(), known->second.end());
}

void BytePairEncoder::encode_plain(std::string_view text, const std::string& place, std::vector<std::int32_t>& ids) {
    if (text.empty()) return;
    for (const std::string& piece : splitter_->pieces(text, place)) encode_piece(piece, ids);
}

void BytePairEncoder::encode(std::string_view text, const std::string& place, std::vector<std::int32_t>& ids) {
    bool first[256] = {};
    for (const Added& token : added_) first[static_cast<unsigned char>(token.text[0])] = true;
    std::size_t done = 0;
    for (std::size_t at = 0; at < text.size();) {
        const Added* found = nullptr;
        if (first[static_cast<unsigned char>(text[at])])
            for (const Added& token : added_)
                if (text.substr(at, token.text.size()) == token.text) {
                    found = &token;
                    break;
                }
        if (found == nullptr) {
            ++at;
            continue;
        }
        encode_plain(text.substr(done, at - done), place, ids);
        ids.push_back(found->id);
        done = at += found->text.size();
    }
    encode_plain(text.substr(done), place, ids);
}

std::optional<std::int32_t> BytePairEncoder::added_token(std::string_view text) const {
    for (const Added& token : added_)
        if (token.text == text) return token.id;
    return std::nullopt;
}

} // namespace moe::data
