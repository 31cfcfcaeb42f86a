// Timelines as text that goes elsewhere than straight to a file or comes from elsewhere, such as compressed ones.
#pragma once

#include "planner/program/timeline.hpp"

#include <functional>
#include <iosfwd>
#include <string>
#include <string_view>

namespace moe::program {

// The text of write_trace(), piece by piece. Throws Error (failure) for rows that are no timeline's.
void append_trace(const Timeline& timeline, const std::function<void(std::string_view)>& append);

// read_trace() of a stream; place: what messages call it.
Timeline read_trace(std::istream& text, const std::string& place);

} // namespace moe::program
