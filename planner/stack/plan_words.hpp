// The words of a plan that an engine's rules speak of: its fields by their --fix names, and facts that follow from it.
#pragma once

#include "planner/plan/fwd.hpp"

#include <functional>
#include <string>
#include <variant>
#include <vector>

namespace moe::stack {

// The way in which a word is read from a plan. Rules are tried on every plan of a search, so that a field or fact is
// read as what it is, a number or a set of modules, rather than as text.
struct NumberWord {
    double (*read)(const plan::Plan&);
    bool none_is_zero = false; // the word of 0 is "none", which is no number
};
struct SetWord { // modules as bits; the text of one module or of a set gives its bits
    unsigned (*read)(const plan::Plan&);
    unsigned (*parse)(const std::string&);
    std::string (*text)(unsigned);
};
struct NameWord {
    const char* (*read)(const plan::Plan&);
};
struct TextWord {
    std::function<std::string(const plan::Plan&)> read;
};

struct PlanWord {
    std::string name; // "ep_overlap", "model.experts", "derived.dispatcher"
    std::variant<NumberWord, SetWord, NameWord, TextWord> reader;
};

// Facts are named "model.", "hardware", "hardware.generation", "micro_batches" and "derived."; profiles/stacks/rules
// says what each means. The pointer holds for good; null for a name that is neither a field nor a fact.
const PlanWord* find_plan_word(const std::string& name);
std::vector<std::string> plan_word_names();

// The word as text, as --fix takes it. Throws Error (bad_input) for an unknown name.
std::string plan_word(const plan::Plan& plan, const std::string& name);

} // namespace moe::stack
