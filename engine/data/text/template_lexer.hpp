// Words of a chat template: its text, and what stands in its tags.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace moe::data::chat {

struct Word {
    enum class Kind { text, open_print, open_block, close, name, string, integer, real, sign };
    Kind kind;
    std::string text; // of a string its value
    std::size_t line = 1;
};

// Text with the white space that trim_blocks, lstrip_blocks and the signs of tags take away; comments are left out.
// Throws Error (bad_input) that names `place` and the line.
std::vector<Word> words_of(const std::string& source, const std::string& place);

} // namespace moe::data::chat
