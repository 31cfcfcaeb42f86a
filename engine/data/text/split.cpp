// Normalization and splitting by ICU, whose regular expressions agree with Oniguruma's on what tokenizers use.
#include "engine/data/text/split.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"

#include <unicode/normalizer2.h>
#include <unicode/regex.h>
#include <unicode/unistr.h>
#include <unicode/ustring.h>
#include <unicode/utf8.h>

#include <cstdint>
#include <optional>

namespace moe::data {

namespace {

struct Span {
    std::int32_t from, to; // in UTF-16 units
};

} // namespace

struct Splitter::Rules {
    // The spans of pieces of a text, whole as far as they begin before `end`; nothing where it cannot be cut there.
    std::optional<std::vector<Span>> spans(const icu::UnicodeString& text, std::int32_t end, const Place& place) const;

    std::string file;
    std::vector<SplitStep> steps;
    std::vector<std::unique_ptr<icu::RegexPattern>> patterns;
    const icu::Normalizer2* normalizer = nullptr;
    bool looks_behind = false; // a pattern's matches depend on what lies before them
};

bool can_split(std::string& why) {
    why.clear();
    return true;
}

namespace {

// Whether a pattern holds an anchor, a word boundary or a look behind, outside of sets of characters.
bool looks_behind(std::string_view pattern) {
    int sets = 0;
    for (std::size_t i = 0; i < pattern.size(); ++i) {
        const std::string_view rest = pattern.substr(i);
        if (pattern[i] == '[') ++sets;
        if (pattern[i] == ']' && sets > 0) --sets;
        const bool escape = pattern[i] == '\\';
        if (sets == 0 && (pattern[i] == '^' || rest.starts_with("(?<=") || rest.starts_with("(?<!") ||
                          (escape && rest.size() > 1 && std::string_view("AGbB").find(rest[1]) != rest.npos)))
            return true;
        if (escape) ++i;
    }
    return false;
}

} // namespace

Splitter::Splitter(const std::vector<SplitStep>& steps, bool nfc, const std::string& file)
    : rules_(std::make_unique<Rules>()) {
    rules_->file = file;
    rules_->steps = steps;
    for (const SplitStep& step : steps) {
        UErrorCode status = U_ZERO_ERROR;
        UParseError where{};
        rules_->patterns.emplace_back(
            icu::RegexPattern::compile(icu::UnicodeString::fromUTF8(step.pattern), 0, where, status));
        if (U_FAILURE(status))
            refuse("{}: pattern {} is not understood at character {}: {}", file, shown(step.pattern), where.offset,
                   u_errorName(status));
        rules_->looks_behind = rules_->looks_behind || looks_behind(step.pattern);
    }
    if (!nfc) return;
    UErrorCode status = U_ZERO_ERROR;
    rules_->normalizer = icu::Normalizer2::getNFCInstance(status);
    if (U_FAILURE(status)) fail("ICU has no NFC normalization: {}", u_errorName(status));
}

Splitter::~Splitter() = default;

namespace {

icu::UnicodeString utf16(std::string_view text, const Place& place) {
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
        if (c < 0)
            refuse("{}: byte {} is not UTF-8: convert the file", place.file,
                   place.byte + static_cast<std::size_t>(before));
    }
    refuse("{}: cannot be read as UTF-8: {}", place.file, u_errorName(status));
}

icu::UnicodeString normalized(std::string_view text, const Place& place, const icu::Normalizer2* normalizer) {
    icu::UnicodeString out = utf16(text, place);
    if (normalizer == nullptr) return out;
    UErrorCode status = U_ZERO_ERROR;
    const std::int32_t normal = normalizer->spanQuickCheckYes(out, status);
    if (U_SUCCESS(status) && normal == out.length()) return out;
    icu::UnicodeString changed = normalizer->normalize(out, status);
    if (U_FAILURE(status)) fail("{}: ICU cannot normalize: {}", place.file, u_errorName(status));
    return changed;
}

void append_utf8(std::string& out, const icu::UnicodeString& text, Span span) {
    const UChar* units = text.getBuffer();
    for (std::int32_t i = span.from; i < span.to;) {
        UChar32 c = units[i];
        if (c < 0x80) {
            out.push_back(static_cast<char>(c));
            ++i;
            continue;
        }
        U16_NEXT(units, i, span.to, c);
        char bytes[U8_MAX_LENGTH];
        std::int32_t length = 0;
        U8_APPEND_UNSAFE(bytes, length, c);
        out.append(bytes, static_cast<std::size_t>(length));
    }
}

// The pieces that a step makes of those that begin before `end`; false where a match reaches over it.
bool split(const SplitStep& step, icu::RegexMatcher& matcher, const std::vector<Span>& now, std::int32_t end,
           std::vector<Span>& next, UErrorCode& status) {
    for (const Span& piece : now) {
        if (piece.from >= end) break;
        // In units of ten thousand steps back. Patterns of tokenizers take a few steps for a character.
        matcher.setTimeLimit(200 + (piece.to - piece.from) / 50, status);
        matcher.region(piece.from, piece.to, status);
        std::int32_t done = piece.from;
        const auto add = [&](std::int32_t from, std::int32_t to) {
            if (to > from) next.push_back({from, to});
        };
        while (done < end && matcher.find(status)) {
            const std::int32_t from = matcher.start(status), to = matcher.end(status);
            if (from < end && end < to) return false;
            if (step.keep_between) add(done, from);
            add(from, to);
            done = to;
        }
        if (U_FAILURE(status)) return true;
        if (step.keep_between) add(done, piece.to);
    }
    return true;
}

} // namespace

std::optional<std::vector<Span>> Splitter::Rules::spans(const icu::UnicodeString& text, std::int32_t end,
                                                        const Place& place) const {
    std::vector<Span> now{{0, text.length()}}, next;
    for (std::size_t i = 0; i < steps.size(); ++i) {
        UErrorCode status = U_ZERO_ERROR;
        const std::unique_ptr<icu::RegexMatcher> matcher(patterns[i]->matcher(text, status));
        next.clear();
        const bool cut = split(steps[i], *matcher, now, end, next, status);
        if (status == U_REGEX_TIME_OUT || status == U_REGEX_STACK_OVERFLOW)
            refuse("{}: pattern {} takes steps without end in {}, behind byte {}", file, shown(steps[i].pattern),
                   place.file, place.byte);
        if (U_FAILURE(status))
            fail("{}: ICU cannot match pattern {}: {}", file, shown(steps[i].pattern), u_errorName(status));
        if (!cut) return {};
        now.swap(next);
    }
    for (const Span& piece : now)
        if (piece.from < end && end < piece.to) return {};
    return now;
}

bool Splitter::pieces(std::string_view text, std::size_t end, const Place& place,
                      const std::function<void(std::string_view)>& take) const {
    if (end == 0) return true;
    const std::string_view behind = text.substr(end);
    if (!behind.empty() && rules_->looks_behind) return false;
    icu::UnicodeString whole = normalized(text.substr(0, end), place, rules_->normalizer);
    const std::int32_t seam = whole.length();
    if (!behind.empty()) {
        const icu::UnicodeString rest = normalized(behind, {place.file, place.byte + end}, rules_->normalizer);
        if (rules_->normalizer != nullptr && !rules_->normalizer->hasBoundaryBefore(rest.char32At(0))) return false;
        whole.append(rest);
    }
    const std::optional<std::vector<Span>> spans = rules_->spans(whole, seam, place);
    if (!spans) return false;
    std::string piece;
    for (const Span& span : *spans) {
        if (span.from >= seam) break;
        piece.clear();
        append_utf8(piece, whole, span);
        take(piece);
    }
    return true;
}

// Pieces in the middle of a text are nearly always those that they would be had it begun elsewhere.
std::size_t Splitter::likely_cut(std::string_view text, const Place& place) const {
    const icu::UnicodeString whole = utf16(text, place);
    const std::optional<std::vector<Span>> spans = rules_->spans(whole, whole.length(), place);
    for (std::size_t i = spans->size(); i-- > 0;) {
        const Span& span = (*spans)[i];
        if (span.from == 0 || span.from > whole.length() / 2) continue;
        if (rules_->normalizer != nullptr && !rules_->normalizer->hasBoundaryBefore(whole.char32At(span.from)))
            continue;
        std::string before;
        append_utf8(before, whole, {0, span.from});
        return before.size();
    }
    return text.size();
}

} // namespace moe::data
