// Conditions of rules: tests of a plan's words that are compiled once and tried on many plans.
#pragma once

#include "planner/plan/fwd.hpp"
#include "planner/stack/plan_words.hpp"

#include <nlohmann/json_fwd.hpp>

#include <memory>
#include <string>
#include <vector>

namespace moe::stack {

// {FIELD: VALUE, ...}: every entry holds. A value is a word that the field's text equals, "!word", ">N" ">=N" "<N"
// "<=N"
// "!=N" of a number, "+module" or "-module" of a set, a list (any of them) or {"all": [..]} (every one of them). The
// word "none" is no number, so that of such tests it passes "!=N" alone.
class Condition {
public:
    Condition() = default; // holds always
    // Throws Error (bad_input) "PLACE: FIELD: why" for unknown fields and for tests that the field cannot take.
    Condition(const nlohmann::json& entries, const std::string& place);

    bool holds(const plan::Plan& plan) const;
    std::vector<std::string> fields() const; // that it reads, in the order of its entries

private:
    struct Test;
    struct Entry {
        const PlanWord* word;
        std::shared_ptr<const Test> test;
    };
    static Test compile(const nlohmann::json& value, const PlanWord& word, const std::string& place);
    std::vector<Entry> entries_;
};

} // namespace moe::stack
