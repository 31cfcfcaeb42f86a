// The part of a tokenizer that knows Unicode: normalization, and cutting text into pieces by regular expressions.
#pragma once

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

class Splitter {
public:
    // `place` names the file in errors. Throws Error (bad_input) for a pattern that is no regular expression, (failure)
    // in a build without ICU.
    Splitter(const std::vector<SplitStep>& steps, bool nfc, const std::string& place);
    ~Splitter();
    Splitter(const Splitter&) = delete;
    Splitter& operator=(const Splitter&) = delete;

    // Normalized pieces in order, as UTF-8. Throws Error (bad_input) naming `place` and the byte where text is not
    // UTF-8.
    std::vector<std::string> pieces(std::string_view text, const std::string& place) const;

private:
    struct Rules;
    std::unique_ptr<Rules> rules_;
};

} // namespace moe::data
