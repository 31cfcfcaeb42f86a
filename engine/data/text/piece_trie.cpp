// Sorts texts by their bytes, and finds ranges of them by halves.
#include "engine/data/text/piece_trie.hpp"

namespace moe::data {

namespace {

unsigned char byte_at(const std::string& text, std::size_t depth) { return static_cast<unsigned char>(text[depth]); }

} // namespace

// std::string compares bytes as unsigned ones.
PieceTrie::PieceTrie(std::vector<std::pair<std::string, std::int32_t>> texts) : texts_(std::move(texts)) {
    std::stable_sort(texts_.begin(), texts_.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    texts_.erase(
        std::unique(texts_.begin(), texts_.end(), [](const auto& a, const auto& b) { return a.first == b.first; }),
        texts_.end());
    if (!texts_.empty() && texts_.front().first.empty()) texts_.erase(texts_.begin());
    first_.resize(257, texts_.size());
    for (std::size_t i = texts_.size(); i-- > 0;) first_[byte_at(texts_[i].first, 0)] = i;
    for (std::size_t byte = 256; byte-- > 0;) first_[byte] = std::min(first_[byte], first_[byte + 1]);
}

void PieceTrie::narrow(char byte, std::size_t depth, std::size_t& from, std::size_t& to) const {
    const auto wanted = static_cast<unsigned char>(byte);
    if (depth == 0) {
        if (first_.empty()) return;
        from = first_[wanted];
        to = first_[std::size_t{wanted} + 1];
        return;
    }
    using Entry = std::pair<std::string, std::int32_t>;
    const auto at = [this](std::size_t i) { return texts_.begin() + static_cast<std::ptrdiff_t>(i); };
    const auto low = std::lower_bound(at(from), at(to), wanted, [depth](const Entry& entry, unsigned char value) {
        return byte_at(entry.first, depth) < value;
    });
    const auto high = std::upper_bound(low, at(to), wanted, [depth](unsigned char value, const Entry& entry) {
        return value < byte_at(entry.first, depth);
    });
    from = static_cast<std::size_t>(low - texts_.begin());
    to = static_cast<std::size_t>(high - texts_.begin());
}

} // namespace moe::data
