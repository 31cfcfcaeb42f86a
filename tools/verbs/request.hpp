// The translation of a command line into a search request.
#pragma once

#include "planner/search/search.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/routing/routing.hpp"
#include "tools/print/console.hpp"
#include "tools/verbs/verbs.hpp"

#include <string>

namespace moe::tools {

struct Request {
    search::SearchRequest search; // its plans have `hardware` less the headroom
    std::shared_ptr<const machine::Hardware> hardware;
    double headroom = 0.0; // share of its memory
    stack::Stack stack;
    routing::SkewPoint point = routing::SkewPoint::mean;
};
// Throws Error (bad_input) naming the option.
Request request_of(const SearchOptions& options);
// Throws Error (bad_input) naming the option.
void check_spare_experts(std::int64_t spare_experts);
// --gpus auto: the fewest GPUs for which the request has a plan. Throws Error (no_plan) where there are none.
void settle_gpus(const SearchOptions& options, Request& request, search::Estimator& estimator);
// The hardware with as much less memory; a plan needs what the library and the driver take in any case. Throws Error
// (bad_input) naming --memory-headroom.
std::shared_ptr<const machine::Hardware> with_headroom(const std::shared_ptr<const machine::Hardware>& hardware,
                                                       double headroom);
// The stack of a name that a file holds in a field; empty: the hardware's. Throws Error as load_stack() does, naming
// both.
stack::Stack stack_in(const std::string& file, const char* field, const std::string& name,
                      const machine::Hardware& hardware);
// That of a plan, which the file holds.
stack::Stack stack_of_plan(const plan::Plan& plan, const std::string& file);
// Says which modules of the model's config are in no figure and which fields nothing was read from, where there are
// any.
void warn_left_out(Console& console, const model::Model& model);

} // namespace moe::tools
