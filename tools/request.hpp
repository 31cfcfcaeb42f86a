// From the words of a command line to a search request.
#pragma once

#include "planner/search.hpp"
#include "simulator/routing.hpp"
#include "tools/verbs.hpp"

namespace moe::tools {

struct Request {
    SearchRequest search;
    Stack stack;
    SkewPoint point = SkewPoint::mean;
};
// Throws Error (bad_input) naming the option.
Request request_of(const SearchOptions& options);

} // namespace moe::tools
