// Rules of an engine: settings that need or exclude each other, or that a release lacks, as data with their sources.
#pragma once

#include "planner/plan/fwd.hpp"
#include "planner/stack/condition.hpp"

#include <nlohmann/json_fwd.hpp>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace moe::stack {

// A software whose releases a stack stands for. Versions are numbers joined by points, "" where none is known.
struct Engine {
    std::string name;               // "megatron-core"; names the rules (load_rules()). "" = a stack without rules
    std::string release;            // whose rules hold
    std::string transformer_engine; // shipped beside it
    std::string bridge;             // the Megatron-Bridge of the same release
};

enum class RuleKind : std::uint8_t {
    conflict, // settings that exclude each other
    absent,   // the release lacks the setting
};

struct Rule {
    std::string name; // "delay_wgrad: ep_overlap"; search counts rejections under it
    RuleKind kind = RuleKind::conflict;
    std::string asserted_by; // class, arguments, runtime, documentation, bridge, translation
    std::string message;     // what is wrong and what to set
    std::string source;      // file and release that asserts it
    Condition when;          // the plans that it speaks of
    bool needs = true;       // its test must hold; else must not
    Condition test;

    bool broken_by(const plan::Plan& plan) const { return when.holds(plan) && test.holds(plan) != needs; }
};

// Rules that are asked of every plan of a search.
class RuleList {
public:
    explicit RuleList(std::vector<Rule> rules);
    const Rule* first_broken(const plan::Plan& plan) const;           // null where the plan keeps all of them
    std::vector<const Rule*> broken_by(const plan::Plan& plan) const; // in their order
    const std::vector<Rule>& rules() const { return rules_; }

private:
    std::vector<Rule> rules_;
    Conditions when_; // of the rules
};

// The rules that plans can break which agree in some words. `all` must outlive it.
class OpenRules {
public:
    OpenRules() = default;
    // Of plans that agree with `plan` in the words which `same` holds of.
    OpenRules(const RuleList& all, const plan::Plan& plan, const Condition::Words& same);
    const Rule* first_broken(const plan::Plan& plan) const; // as RuleList::first_broken()

private:
    struct Open {
        const Rule* rule;
        Condition when;
        std::optional<Condition> test; // nothing: fails in any case
    };
    std::vector<Open> open_;
};

// Rules of the engine that are in force for its release, in the file's order. The grammar stands in the file. Of an
// engine without a file, what its table of settings (profiles/engines) refuses of plans; none without either. Throws
// Error (bad_input) "FILE: rule NAME: why".
std::vector<Rule> load_rules(const Engine& engine);

// One rule as a stack states it of the machines that it runs on. Throws Error (bad_input) "PLACE: rule NAME: why".
Rule read_rule(const nlohmann::json& json, const std::string& place);

// Less than 0, 0 or more, comparing number by number: 0.9 < 0.15.99 < 0.16.0.
int compare_versions(const std::string& a, const std::string& b);

} // namespace moe::stack
