// Choices that would multiply the space that is explored, and are tried one by one on the plans that it has.
#pragma once

#include "planner/plan/plan.hpp"
#include "planner/search/pricing.hpp"
#include "planner/stack/fwd.hpp"

#include <optional>
#include <set>
#include <string>
#include <vector>

namespace moe::search {

// Values of a plan's field by its --fix name.
struct Variation {
    std::string field;
    std::vector<std::string> values;
};

// The fields that are varied with any plan of the stack: what its recipes name (Stack::recipe_choices), delayed weight
// gradients, and FSDP in a pipeline, where explored plans have the distributed optimizer.
std::vector<Variation> variations(const stack::Stack& stack);

// The plan with its layers cut as recipe_cuts() says: into as many chunks as it has, and into every number with which
// embedding, layers and head make equal parts. Sound plans, without the plan itself; empty where pp is 1.
std::vector<plan::Plan> recut(const plan::Plan& plan, const stack::Stack& stack, const std::set<std::string>& pinned);

// The sound plans that are one of these choices away, and those without a capacity where the plan has one, whose rows
// are as routed (no paged stash and no graph of the whole step, which need it). Fields in `pinned` stay as they are.
std::vector<plan::Plan> variants(const plan::Plan& plan, const stack::Stack& stack,
                                 const std::set<std::string>& pinned);

// The sound plans with the stack's schedules of split backwards, which fill what stages wait for each other and keep
// more, in the cuts of sound_cuts(). Empty where pp is 1.
std::vector<plan::Plan> split_backwards(const plan::Plan& plan, const stack::Stack& stack,
                                        const std::set<std::string>& pinned);

// The plan that comes of taking, again and again, the variant of the lowest bound: each of them fits into memory and
// gains `gain` of the bound or more. Empty where no variant does. Throws Error as bounds do, but for plans of no price.
std::optional<plan::Plan> best_variant(const plan::Plan& plan, const stack::Stack& stack,
                                       const std::set<std::string>& pinned, Estimator& estimator, BoundModel& bounds,
                                       double gain);

} // namespace moe::search
