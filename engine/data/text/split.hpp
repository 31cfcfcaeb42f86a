// The part of a tokenizer that knows Unicode: normalization, and cutting text into pieces by regular expressions.
#pragma once

#include "engine/data/text/tokenizer.hpp"

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace moe::data {

// One step of a tokenizer's pre-tokenization, which cuts the pieces of a text.
struct SplitStep {
    std::string pattern; // regular expression, matched from left to right
    // Matches and what lies between them are pieces of their own; else only the matches are.
    bool keep_between = true;
};

// True where this build can cut text (it was made with ICU); if not, `why` says what is missing.
bool can_split(std::string& why);

// Bytes of the extended grapheme cluster at the start of UTF-8 text that is not empty (Unicode's UAX #29). Throws Error
// (failure) in a build without ICU.
std::size_t grapheme_bytes(std::string_view text);

// For several threads at once.
class Splitter {
public:
    // `file` is named in errors. Throws Error (bad_input) for a pattern that is no regular expression, (failure) in a
    // build without ICU.
    Splitter(const std::vector<SplitStep>& steps, bool nfc, const std::string& file);
    ~Splitter();
    Splitter(const Splitter&) = delete;
    Splitter& operator=(const Splitter&) = delete;

    // Hands the normalized pieces of text[0, end) to `take` in order, as UTF-8: those that the whole text has there.
    // What lies behind `end` is looked at as far as it is given; a match that needs to see more of it is not found.
    // False, with nothing handed over, where the text cannot be cut at `end`: a piece, or a match of an earlier step,
    // reaches over it. Throws Error (bad_input) naming file and byte where text is not UTF-8, and where a pattern takes
    // far longer than one that reads on.
    bool pieces(std::string_view text, std::size_t end, const Place& place,
                const std::function<void(std::string_view)>& take) const;
    // A byte in the first half of `text` at which it can most likely be cut; text.size() where there is none.
    std::size_t likely_cut(std::string_view text, const Place& place) const;

private:
    struct Rules;
    std::unique_ptr<Rules> rules_;
};

} // namespace moe::data
