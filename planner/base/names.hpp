// Names that users write: how messages show them, and the known name that was probably meant.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace moe {

// Bytes of the UTF-8 character at the front of `text` (Unicode 15, table 3-7), 0 where there is none.
std::size_t utf8_length(std::string_view text);
// Text with '?' for every control character (C0, C1, DEL), every mark that turns the direction of writing (U+202A to
// U+202E, U+2066 to U+2069) and every byte that is no UTF-8.
std::string printable(std::string_view text);
// Text of a file or command line as one line of a message: printable, cut after 80 bytes.
std::string shown(std::string_view text);

// The number that the whole text is, as std::from_chars reads it.
std::optional<double> number_of(std::string_view text);

// Number of single-character insertions, deletions and replacements that turn `a` into `b`, letter case ignored.
int edit_distance(std::string_view a, std::string_view b);
// The first of `known` that begins with `name`, else the nearest one when at most a third of its letters differ, else
// empty.
std::string nearest_name(std::string_view name, const std::vector<std::string>& known);
// ": did you mean X?" or "", to be put behind a message.
std::string did_you_mean(std::string_view name, const std::vector<std::string>& known);

} // namespace moe
