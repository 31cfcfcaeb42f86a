// The one way from text to a JSON tree and back: bounded in size and depth, every fault one line that names the place.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <cstddef>
#include <string>
#include <string_view>

namespace moe {

struct JsonLimits {
    std::size_t bytes = std::size_t{64} << 20; // of the text; a tree takes up to sixteen times as much
    int depth = 100; // of nesting: beyond any real file, and shallow enough for code that recurses over the tree
};
// Of documents that list tensors or words: an index of a checkpoint, a tokenizer's vocabulary.
inline constexpr JsonLimits long_json{std::size_t{512} << 20, 100};

// Parses RFC 8259 and, as Python's json writes them, NaN, Infinity and -Infinity. `Json` is nlohmann::json or
// nlohmann::ordered_json. Throws Error (bad_input) "PLACE: not valid JSON: reason at line L, column C" for text that is
// no JSON, is no UTF-8, names a field twice in one object, holds a number beyond a double's range, or passes `limits`.
// Whole numbers beyond 64 bits become doubles. A byte order mark in front is skipped.
template <class Json>
Json parse_json(std::string_view text, const std::string& place, const JsonLimits& limits = {});

// The same of a file, whose path is the place; no more of it is read than `limits` allow.
template <class Json>
Json load_json(const std::string& path, const JsonLimits& limits = {});

// Compact text of a tree, NaN and infinities as parse_json() reads them (nlohmann's dump() makes them null).
template <class Json>
std::string json_text(const Json& value);

// A value as messages show it: "an object of N fields", "an array of N elements", or its own text by shown().
template <class Json>
std::string shown_json(const Json& value);

// The number with so many significant digits, as documents of ours write it.
double rounded_to(double value, int digits);

} // namespace moe
