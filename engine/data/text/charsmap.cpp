// Reads and searches the double array; offsets of a damaged one are checked at every step.
#include "engine/data/text/charsmap.hpp"

#include "engine/data/text/utf8.hpp"
#include "planner/base/error.hpp"

#include <algorithm>

namespace moe::data {

namespace {

constexpr std::size_t longest_key = 256, longest_text = 256; // bytes; NFKC needs 33 at most

std::uint32_t number(std::string_view bytes, std::size_t at) {
    std::uint32_t value = 0;
    for (std::size_t i = 0; i < 4; ++i)
        value |= static_cast<std::uint32_t>(static_cast<unsigned char>(bytes[at + i])) << (8 * i);
    return value;
}

// Fields of a unit (Darts-clone: darts.h, class DoubleArrayUnit).
bool has_leaf(std::uint32_t unit) { return (unit >> 8 & 1) != 0; }
std::uint32_t value(std::uint32_t unit) { return unit & 0x7FFFFFFFu; }
std::uint32_t label(std::uint32_t unit) { return unit & 0x800000FFu; }
std::uint32_t offset(std::uint32_t unit) { return (unit >> 10) << ((unit & 0x200u) >> 6); }

} // namespace

Charsmap::Charsmap(std::string_view blob, const std::string& place) {
    if (blob.empty()) return;
    if (blob.size() < 4) refuse("{}: has {} bytes: too short for its own size", place, blob.size());
    const std::size_t bytes = number(blob, 0), rest = blob.size() - 4;
    if (bytes % 4 != 0 || bytes == 0 || bytes > rest)
        refuse("{}: says that {} of its {} bytes are a trie of 32-bit units", place, bytes, rest);
    for (std::size_t i = 0; i < bytes; i += 4) units_.push_back(number(blob, 4 + i));
    texts_ = blob.substr(4 + bytes);
    for (std::size_t begin = 0; begin < texts_.size();) {
        const std::size_t end = texts_.find('\0', begin);
        if (end == std::string::npos) refuse("{}: its last text does not end", place);
        if (end - begin > longest_text)
            refuse("{}: a text has {} bytes: {} are read", place, end - begin, longest_text);
        for (std::size_t at = begin; at < end;) {
            const std::size_t length = character(std::string_view(texts_).substr(at, end - at));
            if (length == 0) refuse("{}: a text is not UTF-8", place);
            at += length;
        }
        begin = end + 1;
    }
}

std::optional<Charsmap::Match> Charsmap::match(std::string_view text, bool longest) const {
    std::optional<Match> found;
    if (units_.empty()) return found;
    std::size_t node = offset(units_[0]);
    const std::size_t most = std::min(text.size(), longest_key);
    for (std::size_t i = 0; i < most; ++i) {
        const auto byte = static_cast<unsigned char>(text[i]);
        node ^= byte;
        if (node >= units_.size() || label(units_[node]) != byte) break;
        const std::uint32_t unit = units_[node];
        node ^= offset(unit);
        if (!has_leaf(unit) || node >= units_.size()) continue;
        const std::size_t at = value(units_[node]);
        // Only whole texts, for whole characters.
        if (at >= texts_.size() || (at > 0 && texts_[at - 1] != '\0')) continue;
        if (i + 1 < text.size() && (text[i + 1] & 0xC0) == 0x80) continue;
        found = Match{i + 1, std::string_view(texts_.c_str() + at)};
        if (!longest) break;
    }
    return found;
}

} // namespace moe::data
