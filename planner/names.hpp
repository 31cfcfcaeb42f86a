// Suggestions for mistyped names: the known name that lies nearest to what was written.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace moe {

// Number of single-character insertions, deletions and replacements that turn `a` into `b`, letter case ignored.
int edit_distance(std::string_view a, std::string_view b);
// The first of `known` that begins with `name`, else the nearest one when at most a third of its letters differ, else
// empty.
std::string nearest_name(std::string_view name, const std::vector<std::string>& known);
// ": did you mean X?" or "", to be put behind a message.
std::string did_you_mean(std::string_view name, const std::vector<std::string>& known);

} // namespace moe
