// Conditions of rules: tests of a plan's words that are compiled once and tried on many plans.
#pragma once

#include "planner/plan/fwd.hpp"
#include "planner/stack/plan_words.hpp"

#include <nlohmann/json_fwd.hpp>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
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

    // What is left to ask of plans that agree with `plan` in the words which `same` holds of: the other entries;
    // nothing where one of those words fails it for all of them.
    using Words = std::function<bool(const std::string&)>;
    std::optional<Condition> among(const plan::Plan& plan, const Words& same) const;
    bool always() const { return entries_.empty(); } // holds always

private:
    friend class Conditions;
    struct Test;
    struct Value;
    struct Entry {
        const PlanWord* word;
        std::shared_ptr<const Test> test;
    };
    static Test compile(const nlohmann::json& value, const PlanWord& word, const std::string& place);
    // The value points into the plan, or into `storage`.
    static Value read(const PlanWord& word, const plan::Plan& plan, std::string& storage);
    std::vector<Entry> entries_;
};

// Conditions that are tried on the same plans. Most fail at their first entry, which many have in common: each word of
// these is read once, and each test of it made once.
class Conditions {
public:
    Conditions() = default;
    explicit Conditions(const std::vector<Condition>& all);

    // Calls visit(i) for each condition i that holds, in any order.
    void each_that_holds(const plan::Plan& plan, const std::function<void(std::size_t)>& visit) const;

private:
    struct Rest { // of condition `index`, its first entry aside
        std::size_t index;
        Condition entries;
    };
    struct Gate { // conditions with one first entry
        std::shared_ptr<const Condition::Test> test;
        std::vector<Rest> behind;
    };
    struct Group { // first entries with one word
        const PlanWord* word;
        std::vector<Gate> gates;
    };
    std::vector<std::size_t> always_; // conditions without entries
    std::vector<Group> groups_;
};

} // namespace moe::stack
