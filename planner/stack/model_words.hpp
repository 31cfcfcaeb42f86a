// The facts of a model, as words: those that rules speak of and those that an engine needs to build it.
#pragma once

#include "planner/stack/plan_words.hpp"

#include <vector>

namespace moe::stack {

// Sizes are numbers, choices names, and properties of every layer lists such as "[0,1,1]". What a model's layers have
// in common is told by the first of them that has it; model.uniform says whether they have it in common at all.
// profiles/engines/README.md lists the facts.
std::vector<PlanWord> model_words();

} // namespace moe::stack
