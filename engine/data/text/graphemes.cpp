// Extended grapheme clusters by ICU's properties of characters: its own iterator needs data that a static link leaves
// out.
#include "engine/data/text/split.hpp"

#include "engine/data/text/utf8.hpp"

#include <unicode/uchar.h>

namespace moe::data {

namespace {

int kind(UChar32 c) { return u_getIntPropertyValue(c, UCHAR_GRAPHEME_CLUSTER_BREAK); }

bool is_control(int kind) { return kind == U_GCB_CONTROL || kind == U_GCB_CR || kind == U_GCB_LF; }

// Rules GB3 to GB9b, which look at two characters.
bool joined(int left, int right) {
    if (left == U_GCB_CR && right == U_GCB_LF) return true;
    if (is_control(left) || is_control(right)) return false;
    if (left == U_GCB_L) {
        if (right == U_GCB_L || right == U_GCB_V || right == U_GCB_LV || right == U_GCB_LVT) return true;
    } else if (left == U_GCB_LV || left == U_GCB_V) {
        if (right == U_GCB_V || right == U_GCB_T) return true;
    } else if ((left == U_GCB_LVT || left == U_GCB_T) && right == U_GCB_T) {
        return true;
    }
    return right == U_GCB_EXTEND || right == U_GCB_ZWJ || right == U_GCB_SPACING_MARK || left == U_GCB_PREPEND;
}

} // namespace

std::size_t grapheme_bytes(std::string_view text) {
    const auto length_at = [&text](std::size_t at) {
        const std::size_t length = character(text.substr(at));
        return length == 0 ? std::size_t{1} : length;
    };
    const auto code_at = [&](std::size_t at) {
        return static_cast<UChar32>(code_point(text.substr(at), length_at(at)));
    };
    UChar32 now = code_at(0);
    std::size_t bytes = length_at(0);
    int left = kind(now), flags = left == U_GCB_REGIONAL_INDICATOR ? 1 : 0;
    // GB11: a picture, what extends it, a joiner, a picture.
    bool picture = u_hasBinaryProperty(now, UCHAR_EXTENDED_PICTOGRAPHIC) != 0, picture_joins = false;
    while (bytes < text.size()) {
        now = code_at(bytes);
        const int right = kind(now);
        const bool next_picture = u_hasBinaryProperty(now, UCHAR_EXTENDED_PICTOGRAPHIC) != 0;
        const bool pair = right == U_GCB_REGIONAL_INDICATOR && left == right && flags % 2 == 1;
        if (!joined(left, right) && !pair && !(picture_joins && next_picture)) return bytes;
        flags = right == U_GCB_REGIONAL_INDICATOR ? flags + 1 : 0;
        picture_joins = picture && right == U_GCB_ZWJ;
        picture = next_picture || (picture && (right == U_GCB_EXTEND || right == U_GCB_ZWJ));
        left = right;
        bytes += length_at(bytes);
    }
    return bytes;
}

} // namespace moe::data
