// SentencePiece's table of characters and what they are written as, from a model's precompiled_charsmap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace moe::data {

// The table: bytes of a trie as a 32-bit number, the trie (a double array of 32-bit units as Darts-clone lays it out),
// and texts that end with a zero byte, to which values of the trie are offsets. All little-endian.
class Charsmap {
public:
    // An empty blob maps nothing. Throws Error (bad_input) "PLACE: ..." for what is no such table.
    Charsmap(std::string_view blob, const std::string& place);

    struct Match {
        std::size_t length = 0; // bytes of the key
        std::string_view text;  // what they become
    };
    // The longest and the shortest key that `text` begins with; keys end within 256 bytes.
    std::optional<Match> longest(std::string_view text) const { return match(text, true); }
    std::optional<Match> shortest(std::string_view text) const { return match(text, false); }

private:
    std::optional<Match> match(std::string_view text, bool longest) const;
    std::vector<std::uint32_t> units_;
    std::string texts_;
};

} // namespace moe::data
