// Characters of UTF-8 text.
#pragma once

#include <cstddef>
#include <string_view>

namespace moe::data {

// Bytes of the character at the start, 0 where there is none (RFC 3629, section 4).
std::size_t character(std::string_view text);

// The code point of the character of `length` bytes at the start.
inline char32_t code_point(std::string_view text, std::size_t length) {
    const auto byte = [&text](std::size_t i) { return static_cast<unsigned char>(text[i]); };
    if (length <= 1) return byte(0);
    char32_t code = byte(0) & (0x7Fu >> length);
    for (std::size_t i = 1; i < length; ++i) code = code << 6 | (byte(i) & 0x3Fu);
    return code;
}

// White space by Unicode's property of this name, which has not changed since Unicode 6.3.
inline bool white_space(char32_t c) {
    return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
           c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

} // namespace moe::data
