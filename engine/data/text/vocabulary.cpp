// Bytes of token ids, and what of them can be shown.
#include "engine/data/text/vocabulary.hpp"

#include "engine/data/text/utf8.hpp"

namespace moe::data {
namespace {

constexpr std::string_view replacement = "\xEF\xBF\xBD"; // U+FFFD

} // namespace

std::size_t character(std::string_view text) {
    const auto byte = [&text](std::size_t i) { return static_cast<unsigned char>(i < text.size() ? text[i] : '\0'); };
    if (text.empty()) return 0;
    const unsigned char first = byte(0);
    if (first < 0x80) return 1;
    const std::size_t length = first >= 0xC2 && first < 0xE0   ? 2
                               : first >= 0xE0 && first < 0xF0 ? 3
                               : first >= 0xF0 && first < 0xF5 ? 4
                                                               : 0;
    for (std::size_t i = 1; i < length; ++i)
        if ((byte(i) & 0xC0) != 0x80) return 0;
    const bool sound = !(first == 0xE0 && byte(1) < 0xA0) && !(first == 0xED && byte(1) > 0x9F) &&
                       !(first == 0xF0 && byte(1) < 0x90) && !(first == 0xF4 && byte(1) > 0x8F);
    return sound ? length : 0;
}

std::string printable(std::string_view bytes) {
    std::string text;
    while (!bytes.empty()) {
        const std::size_t length = character(bytes);
        const unsigned char first = static_cast<unsigned char>(bytes.front());
        const bool control = (first < 0x20 && first != '\n' && first != '\t' && first != '\r') || first == 0x7F;
        const bool late_control = length == 2 && first == 0xC2 && static_cast<unsigned char>(bytes[1]) < 0xA0;
        if (length == 0 || control || late_control)
            text += replacement;
        else
            text += bytes.substr(0, length);
        bytes.remove_prefix(length == 0 ? 1 : length);
    }
    return text;
}

std::vector<std::int32_t> Vocabulary::ids(std::string_view text, const std::string& place) const {
    std::vector<std::int32_t> ids;
    if (words_) {
        Tokenizer::Known known;
        words_->encode(text, text.size(), {place, 0}, known, ids);
    } else {
        for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
    }
    return ids;
}

std::string Vocabulary::text(std::span<const std::int32_t> ids) const {
    if (words_) return printable(words_->bytes(ids));
    std::string bytes;
    for (const std::int32_t id : ids)
        if (id >= 0 && id < 256) bytes += static_cast<char>(id);
    return printable(bytes);
}

} // namespace moe::data
