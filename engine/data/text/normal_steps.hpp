// What tokenizers of pieces do to a text before they look for pieces in it.
#pragma once

#include "engine/data/text/charsmap.hpp"
#include "engine/data/text/piece_trie.hpp"

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace moe::data {

// Text between two added tokens, and the place in it behind which it is only looked at.
struct Stretch {
    std::string text; // UTF-8, and between words that are kept apart piece_break
    std::size_t cut = 0;
    bool begins = true; // it begins here; else what is before it was cut off at such a place
    bool first = true;  // and the whole text does
};
inline constexpr char piece_break = '\xFF'; // never a byte of UTF-8

// Changes the stretch; false where it cannot be cut at its place.
using NormalStep = std::function<bool(Stretch& stretch)>;

enum class Prefix { always, first, never };

// Normalizers of a tokenizer.json by these names. Texts that they write have 64 bytes at most.
NormalStep prepend(const std::string& text);
NormalStep replace(const std::string& from, const std::string& to);
NormalStep replace_blanks(const std::string& to); // two or more in a row, by one text
NormalStep strip(bool left, bool right);
// By the charsmap's shortest keys: of a grapheme of less than six bytes, else of each character of it.
NormalStep precompiled(const std::shared_ptr<const Charsmap>& charsmap);

// Pre-tokenizers of a tokenizer.json by these names.
NormalStep metaspace(const std::string& blank, Prefix prefix, bool split);
NormalStep whitespace_split();
NormalStep split_behind(const std::string& pattern); // Split by a text with MergedWithPrevious

// The normalizer of a SentencePiece model, by the charsmap's longest keys.
struct SentencePieceRules {
    bool prefix = true;        // add_dummy_prefix
    bool remove_blanks = true; // remove_extra_whitespaces
    std::string blank;         // what a blank becomes
};
// `kept`: texts that stay as they are.
NormalStep sentencepiece(const SentencePieceRules& rules, const std::shared_ptr<const Charsmap>& charsmap,
                         const std::shared_ptr<const PieceTrie>& kept);

} // namespace moe::data
