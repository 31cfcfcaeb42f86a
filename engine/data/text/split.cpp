// Normalization and splitting by ICU, whose regular expressions agree with Oniguruma's on what tokenizers use.
#include "engine/data/text/split.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"

#include <unicode/normalizer2.h>
#include <unicode/regex.h>
#include <unicode/unistr.h>
#include <unicode/ustring.h>

namespace moe::data {

struct Splitter::Rules {
    std::vector<std::unique_ptr<icu::RegexPattern>> patterns;
    std::vector<bool> keep_between;
    const icu::Normalizer2* normalizer = nullptr;
};

bool can_split(std::string& why) {
    why.clear();
    return true;
}

Splitter::Splitter(const std::vector<SplitStep>& steps, bool nfc, const std::string& place)
    : rules_(std::make_unique<Rules>()) {
    for (const SplitStep& step : steps) {
        UErrorCode status = U_ZERO_ERROR;
        UParseError where{};
        rules_->patterns.emplace_back(
            icu::RegexPattern::compile(icu::UnicodeString::fromUTF8(step.pattern), 0, where, status));
        if (U_FAILURE(status))
            refuse("{}: pattern {} is not understood at character {}: {}", place, shown(step.pattern), where.offset,
                   u_errorName(status));
        rules_->keep_between.push_back(step.keep_between);
    }
    if (!nfc) return;
    UErrorCode status = U_ZERO_ERROR;
    rules_->normalizer = icu::Normalizer2::getNFCInstance(status);
    if (U_FAILURE(status)) fail("ICU has no NFC normalization: {}", u_errorName(status));
}

Splitter::~Splitter() = default;

namespace {

icu::UnicodeString utf16(std::string_view text, const std::string& place) {
    UErrorCode status = U_ZERO_ERROR;
    std::int32_t length = 0;
    const auto bytes = static_cast<std::int32_t>(text.size());
    icu::UnicodeString out;
    UChar* buffer = out.getBuffer(bytes + 1);
    u_strFromUTF8(buffer, bytes + 1, &length, text.data(), bytes, &status);
    out.releaseBuffer(U_SUCCESS(status) ? length : 0);
    if (U_SUCCESS(status)) return out;
    std::int32_t at = 0;
    while (at < bytes) { // The loop ends at the first sequence that is cut or wrong.
        const std::int32_t before = at;
        UChar32 c = 0;
        U8_NEXT(text.data(), at, bytes, c);
        if (c < 0) refuse("{}: byte {} is not UTF-8: convert the file", place, before);
    }
    refuse("{}: cannot be read as UTF-8: {}", place, u_errorName(status));
}

std::string utf8(const icu::UnicodeString& text) {
    std::string out;
    text.toUTF8String(out);
    return out;
}

// The pieces that one step makes of a piece.
void split(const icu::RegexPattern& pattern, bool keep_between, const icu::UnicodeString& text,
           std::vector<icu::UnicodeString>& out) {
    UErrorCode status = U_ZERO_ERROR;
    const std::unique_ptr<icu::RegexMatcher> matcher(pattern.matcher(text, status));
    std::int32_t end = 0;
    const auto add = [&](std::int32_t from, std::int32_t to) {
        if (to > from) out.emplace_back(text, from, to - from);
    };
    while (U_SUCCESS(status) && matcher->find(status)) {
        const std::int32_t from = matcher->start(status), to = matcher->end(status);
        if (keep_between) add(end, from);
        add(from, to);
        end = to;
    }
    if (U_FAILURE(status)) fail("ICU cannot match the tokenizer's pattern: {}", u_errorName(status));
    if (keep_between) add(end, text.length());
}

} // namespace

std::vector<std::string> Splitter::pieces(std::string_view text, const std::string& place) const {
    icu::UnicodeString whole = utf16(text, place);
    if (rules_->normalizer != nullptr) {
        UErrorCode status = U_ZERO_ERROR;
        whole = rules_->normalizer->normalize(whole, status);
        if (U_FAILURE(status)) fail("{}: ICU cannot normalize: {}", place, u_errorName(status));
    }
    std::vector<icu::UnicodeString> now{whole}, next;
    if (whole.isEmpty()) now.clear();
    for (std::size_t i = 0; i < rules_->patterns.size(); ++i) {
        next.clear();
        for (const icu::UnicodeString& piece : now) split(*rules_->patterns[i], rules_->keep_between[i], piece, next);
        now.swap(next);
    }
    std::vector<std::string> pieces;
    pieces.reserve(now.size());
    for (const icu::UnicodeString& piece : now) pieces.push_back(utf8(piece));
    return pieces;
}

} // namespace moe::data
