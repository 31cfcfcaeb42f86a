// Steps of normalization that keep track of the place at which a text is cut.
#include "engine/data/text/normal_steps.hpp"

#include "engine/data/text/split.hpp"
#include "engine/data/text/utf8.hpp"

#include <algorithm>
#include <utility>

namespace moe::data {

namespace {

// Bytes of the next character, a break among them.
std::size_t step(std::string_view text) {
    const std::size_t length = character(text);
    return length == 0 ? 1 : length;
}

// Rewrites a stretch unit by unit: unit(rest, out) appends what the rest begins with becomes, and returns its bytes.
// False where a unit reaches over the cut.
template <typename Unit>
bool rewrite(Stretch& stretch, const Unit& unit) {
    std::string out;
    out.reserve(stretch.text.size() + stretch.text.size() / 8);
    std::size_t cut = 0;
    for (std::size_t at = 0; at < stretch.text.size();) {
        if (at == stretch.cut) cut = out.size();
        const std::size_t bytes = unit(std::string_view(stretch.text).substr(at), out);
        if (at < stretch.cut && stretch.cut < at + bytes) return false;
        at += bytes;
    }
    if (stretch.cut == stretch.text.size()) cut = out.size();
    stretch.text = std::move(out);
    stretch.cut = cut;
    return true;
}

std::size_t copy(std::string_view rest, std::string& out) {
    const std::size_t bytes = step(rest);
    out += rest.substr(0, bytes);
    return bytes;
}

std::size_t white_bytes(std::string_view text) {
    const std::size_t length = character(text);
    return length > 0 && white_space(code_point(text, length)) ? length : 0;
}

bool strip_left(Stretch& stretch) {
    std::size_t gone = 0;
    while (const std::size_t bytes = white_bytes(std::string_view(stretch.text).substr(gone))) gone += bytes;
    if (gone >= stretch.cut && stretch.cut < stretch.text.size()) return false;
    stretch.text.erase(0, gone);
    stretch.cut -= gone;
    return true;
}

// Leaves the first `kept` bytes.
bool shorten(Stretch& stretch, std::size_t kept) {
    if (stretch.cut == stretch.text.size()) stretch.cut = kept;
    stretch.text.resize(kept);
    return stretch.cut <= kept;
}

bool strip_right(Stretch& stretch) {
    std::size_t kept = stretch.text.size();
    while (kept > 0) {
        std::size_t begin = kept - 1;
        while (begin > 0 && (stretch.text[begin] & 0xC0) == 0x80) --begin;
        if (white_bytes(std::string_view(stretch.text).substr(begin)) != kept - begin) break;
        kept = begin;
    }
    return shorten(stretch, kept);
}

} // namespace

NormalStep prepend(const std::string& text) {
    return [text](Stretch& stretch) {
        if (!stretch.begins || stretch.text.empty()) return true;
        stretch.text.insert(0, text);
        stretch.cut += text.size();
        return true;
    };
}

NormalStep replace(const std::string& from, const std::string& to) {
    return [from, to](Stretch& stretch) {
        return rewrite(stretch, [&](std::string_view rest, std::string& out) {
            if (!rest.starts_with(from)) return copy(rest, out);
            out += to;
            return from.size();
        });
    };
}

NormalStep replace_blanks(const std::string& to) {
    return [to](Stretch& stretch) {
        return rewrite(stretch, [&](std::string_view rest, std::string& out) {
            const std::size_t blanks = std::min(rest.find_first_not_of(' '), rest.size());
            if (blanks < 2) return copy(rest, out);
            out += to;
            return blanks;
        });
    };
}

NormalStep strip(bool left, bool right) {
    return [left, right](Stretch& stretch) {
        if (left && stretch.begins && !strip_left(stretch)) return false;
        return !right || strip_right(stretch);
    };
}

NormalStep precompiled(const std::shared_ptr<const Charsmap>& charsmap) {
    return [charsmap](Stretch& stretch) {
        return rewrite(stretch, [&](std::string_view rest, std::string& out) {
            const std::string_view grapheme = rest.substr(0, grapheme_bytes(rest));
            if (grapheme.size() < 6) {
                if (const auto match = charsmap->shortest(grapheme)) {
                    out += match->text;
                    return grapheme.size();
                }
            }
            for (std::size_t at = 0; at < grapheme.size();) {
                const std::string_view one = grapheme.substr(at, step(grapheme.substr(at)));
                const auto match = charsmap->shortest(one);
                out += match ? match->text : one;
                at += one.size();
            }
            return grapheme.size();
        });
    };
}

NormalStep metaspace(const std::string& blank, Prefix prefix, bool split) {
    return [=](Stretch& stretch) {
        bool word_begins = stretch.begins; // a prefix may stand here
        return rewrite(stretch, [&](std::string_view rest, std::string& out) {
            if (rest.front() == piece_break) {
                word_begins = true;
                out += piece_break;
                return std::size_t{1};
            }
            const std::size_t blank_bytes = rest.front() == ' ' ? 1 : rest.starts_with(blank) ? blank.size() : 0;
            const bool wants = prefix == Prefix::always || (prefix == Prefix::first && stretch.first);
            if (word_begins && wants && blank_bytes == 0) out += blank;
            word_begins = false;
            if (blank_bytes == 0) return copy(rest, out);
            if (split) out += piece_break;
            out += blank;
            return blank_bytes;
        });
    };
}

NormalStep whitespace_split() {
    return [](Stretch& stretch) {
        // Words are cut only before white space, so that the next one begins behind it.
        if (stretch.cut < stretch.text.size() && white_bytes(std::string_view(stretch.text).substr(stretch.cut)) == 0)
            return false;
        bool between = true;
        return rewrite(stretch, [&](std::string_view rest, std::string& out) {
            if (const std::size_t white = white_bytes(rest)) {
                between = true;
                return white;
            }
            if (between) out += piece_break;
            between = false;
            return copy(rest, out);
        });
    };
}

NormalStep split_behind(const std::string& pattern) {
    return [pattern](Stretch& stretch) {
        return rewrite(stretch, [&](std::string_view rest, std::string& out) {
            if (!rest.starts_with(pattern)) return copy(rest, out);
            out += pattern;
            out += piece_break;
            return pattern.size();
        });
    };
}

NormalStep sentencepiece(const SentencePieceRules& rules, const std::shared_ptr<const Charsmap>& charsmap,
                         const std::shared_ptr<const PieceTrie>& kept) {
    return [=](Stretch& stretch) {
        const auto next = [&](std::string_view rest) -> Charsmap::Match {
            if (const std::size_t bytes = kept->longest(rest)) return {bytes, rest.substr(0, bytes)};
            if (const auto match = charsmap->longest(rest)) return *match;
            return {step(rest), rest.substr(0, step(rest))};
        };
        std::size_t leading = 0;
        while (rules.remove_blanks && stretch.begins && leading < stretch.text.size()) {
            const Charsmap::Match match = next(std::string_view(stretch.text).substr(leading));
            if (match.text != " ") break;
            leading += match.length;
        }
        if (leading >= stretch.cut && stretch.cut < stretch.text.size()) return false;
        stretch.text.erase(0, leading);
        stretch.cut -= leading;
        bool after_blank = rules.remove_blanks && stretch.begins, cut_in_blanks = false;
        const std::size_t cut = stretch.cut;
        std::size_t at = 0;
        const bool any = !stretch.text.empty(), ends = cut == stretch.text.size();
        const bool sound = rewrite(stretch, [&](std::string_view rest, std::string& out) {
            if (at == cut && !ends && rules.remove_blanks && after_blank) cut_in_blanks = true;
            if (at == 0 && rules.prefix && stretch.begins) out += rules.blank;
            const Charsmap::Match match = next(rest);
            std::string_view text = match.text;
            while (after_blank && text.starts_with(' ')) text.remove_prefix(1);
            for (const char byte : text)
                if (byte == ' ')
                    out += rules.blank;
                else
                    out += byte;
            if (!text.empty()) after_blank = rules.remove_blanks && text.ends_with(' ');
            at += match.length;
            return match.length;
        });
        if (!any || !sound || cut_in_blanks) return sound && !cut_in_blanks;
        std::size_t size = stretch.text.size();
        while (rules.remove_blanks && std::string_view(stretch.text).substr(0, size).ends_with(rules.blank))
            size -= rules.blank.size();
        return shorten(stretch, size);
    };
}

} // namespace moe::data
