// Text as token ids and back, by bytes or by a tokenizer's file.
#pragma once

#include "engine/data/text/tokenizer.hpp"

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace moe::data {

class Vocabulary {
public:
    Vocabulary() = default; // ids 0-255 are bytes
    // Throws Error (bad_input) as Tokenizer does.
    explicit Vocabulary(const std::string& tokenizer) : words_(std::in_place, tokenizer) {}

    std::int64_t size() const { return words_ ? words_->vocabulary() : 256; } // one more than the highest id
    // `place` is named in errors.
    std::vector<std::int32_t> ids(std::string_view text, const std::string& place) const;
    // What ids stand for, added tokens as they are written. Bytes that are no UTF-8 become U+FFFD, as do control
    // characters beside tabs and ends of lines; ids that the vocabulary has not give nothing.
    std::string text(std::span<const std::int32_t> ids) const;

private:
    std::optional<Tokenizer> words_;
};

// The text with U+FFFD in place of every byte that is no UTF-8 and of control characters beside tabs and ends of lines.
std::string printable(std::string_view bytes);

} // namespace moe::data
