// Merging of byte pairs, by rank, over the pieces of a text.
#include "engine/data/text/bpe.hpp"

#include "planner/base/error.hpp"

#include <algorithm>
#include <queue>
#include <tuple>

namespace moe::data {

namespace {

constexpr std::size_t longest_known = 64; // bytes of a piece that is remembered

std::uint64_t pair_key(std::int32_t left, std::int32_t right) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 | static_cast<std::uint32_t>(right);
}

} // namespace

// A list of symbols and a heap of the pairs that can be merged: lowest rank first, then leftmost. Entries that a merge
// beside them has made stale no longer find their two ids.
void BytePairEncoder::append_merged(std::string_view piece, std::vector<std::int32_t>& ids) const {
    struct Symbol {
        std::int32_t id, before, behind; // -1 at the ends
    };
    using Candidate = std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int32_t>; // (rank, place, left, right)
    const auto n = static_cast<std::int32_t>(piece.size());
    std::vector<Symbol> symbols;
    symbols.reserve(piece.size());
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
    for (const Symbol& symbol : symbols)
        if (symbol.id >= 0) ids.push_back(symbol.id);
}

void BytePairEncoder::encode_piece(std::string_view piece, Known& known, std::vector<std::int32_t>& ids) const {
    if (ignore_merges_) {
        if (const auto token = whole_.find(piece); token != whole_.end()) {
            ids.push_back(token->second);
            return;
        }
    }
    if (piece.size() > longest_known) return append_merged(piece, ids);
    auto seen = known.pieces_.find(piece);
    if (seen == known.pieces_.end()) {
        if (known.pieces_.size() >= known.most_) {
            known.pieces_.clear();
            known.ids_.clear();
        }
        const auto first = static_cast<std::uint32_t>(known.ids_.size());
        append_merged(piece, known.ids_);
        const auto count = static_cast<std::uint32_t>(known.ids_.size()) - first;
        seen = known.pieces_.emplace(piece, Known::Ids{first, count}).first;
    }
    const auto first = known.ids_.begin() + seen->second.first;
    ids.insert(ids.end(), first, first + seen->second.count);
}

const BytePairEncoder::Added* BytePairEncoder::next_added(std::string_view text, std::size_t from, std::size_t to,
                                                          std::size_t& at) const {
    if (added_.empty()) return nullptr;
    for (at = from; at < to; ++at)
        if (begins_added_[static_cast<unsigned char>(text[at])])
            for (const Added& token : added_)
                if (text.substr(at, token.text.size()) == token.text) return &token;
    return nullptr;
}

bool BytePairEncoder::encode(std::string_view text, std::size_t end, const Place& place, Known& known,
                             std::vector<std::int32_t>& ids) const {
    const std::size_t before = ids.size();
    const auto take = [&](std::string_view piece) { encode_piece(piece, known, ids); };
    std::size_t done = 0, at = 0;
    while (const Added* token = next_added(text, done, end, at)) {
        splitter_->pieces(text.substr(done, at - done), at - done, {place.file, place.byte + done}, take);
        ids.push_back(token->id);
        done = at + token->text.size();
    }
    // A token behind `end` parts what is before it from what is behind it, as the end of the text does.
    const std::size_t stop = next_added(text, end, text.size(), at) != nullptr ? at : text.size();
    if (done <= end &&
        splitter_->pieces(text.substr(done, stop - done), end - done, {place.file, place.byte + done}, take))
        return true;
    ids.resize(before);
    return false;
}

std::string BytePairEncoder::bytes(std::span<const std::int32_t> ids) const {
    std::unordered_map<std::int32_t, std::string_view> token;
    for (const auto& [text, id] : whole_) token.emplace(id, text);
    for (const Added& added : added_) token[added.id] = added.text;
    std::string text;
    for (const std::int32_t id : ids)
        if (const auto found = token.find(id); found != token.end()) text += found->second;
    return text;
}

std::optional<std::int32_t> BytePairEncoder::added_token(std::string_view text) const {
    for (const Added& token : added_)
        if (token.text == text) return token.id;
    return std::nullopt;
}

} // namespace moe::data
