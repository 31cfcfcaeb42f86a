// Names that users write: how messages show them, and the known name that was probably meant.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace moe {

// Text of a file or command line as one line of a message: control characters replaced by '?', cut after 80 characters.
std::string shown(std::string_view text);

// Number of single-character insertions, deletions and replacements that turn `a` into `b`, letter case ignored.
int edit_distance(std::string_view a, std::string_view b);
// The first of `known` that begins with `name`, else the nearest one when at most a third of its letters differ, else
// empty.
std::string nearest_name(std::string_view name, const std::vector<std::string>& known);
// ": did you mean X?" or "", to be put behind a message.
std::string did_you_mean(std::string_view name, const std::vector<std::string>& known);

} // namespace moe
