// Reads the rules of an engine from profiles/stacks/rules and keeps those of one release.
#include "planner/stack/rules.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "planner/base/names.hpp"
#include "planner/base/profile.hpp"
#include "planner/stack/stack_reader.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <set>

namespace moe::stack {
namespace {

using Json = nlohmann::json;

std::vector<std::int64_t> numbers_of(const std::string& version, const std::string& place) {
    std::vector<std::int64_t> numbers;
    const char* at = version.data();
    const char* end = at + version.size();
    while (true) {
        std::int64_t number = 0;
        const auto [last, error] = std::from_chars(at, end, number);
        if (error != std::errc{} || number < 0 || (last != end && *last != '.'))
            refuse("{}: version '{}': must be numbers joined by points", place, shown(version));
        numbers.push_back(number);
        if (last == end) return numbers;
        at = last + 1;
    }
}

RuleKind kind_from_string(const std::string& text, const std::string& place) {
    if (text == "conflict") return RuleKind::conflict;
    if (text == "absent") return RuleKind::absent;
    refuse("{}: kind = '{}': must be conflict or absent", place, shown(text));
}

void check_asserted_by(const std::string& text, const std::string& place) {
    static const std::set<std::string> known{"class", "arguments", "runtime", "documentation", "bridge", "translation"};
    if (!known.contains(text))
        refuse("{}: asserted_by = '{}': must be one of {}", place, shown(text), fmt::join(known, ", "));
}

bool in_force(StackReader& in, const std::string& release) {
    const bool from = in.find("from") == nullptr || compare_versions(release, in.text("from")) >= 0;
    const bool until = in.find("until") == nullptr || compare_versions(release, in.text("until")) < 0;
    return from && until;
}

Rule read_rule(const Json& json, const std::string& file, const std::string& release, bool& in_release) {
    static const machine::Coefficients none; // rules hold no costs
    if (!json.is_object() || !json.contains("name") || !json["name"].is_string())
        refuse("{}: rules: each must be an object with a \"name\"", file);
    StackReader in(json, fmt::format("{}: rule \"{}\"", file, shown(json["name"].get<std::string>())), none);
    Rule rule;
    rule.name = in.text("name");
    rule.kind = kind_from_string(in.text("kind"), in.place());
    rule.asserted_by = in.text("asserted_by");
    check_asserted_by(rule.asserted_by, in.place());
    rule.message = in.text("message");
    rule.source = in.text("source");
    rule.when = Condition(in.at("when"), in.place());
    rule.needs = in.find("needs") != nullptr;
    if (rule.needs == (in.find("excludes") != nullptr))
        refuse("{}: must have either \"needs\" or \"excludes\"", in.place());
    rule.test = Condition(in.at(rule.needs ? "needs" : "excludes"), in.place());
    in_release = in_force(in, release);
    in.finish();
    return rule;
}

// "recompute: AutoModel recomputes ..." of "recompute $value: AutoModel recomputes ...".
std::string without_value(std::string message) {
    constexpr std::string_view value = " $value";
    if (const std::size_t at = message.find(value); at != std::string::npos) message.erase(at, value.size());
    return message;
}

// What an engine's table of settings (profiles/engines/README.md) refuses of plans. What it refuses of models alone is
// no rule: another plan would not mend it.
std::vector<Rule> rules_of_table(const std::string& file) {
    const Json table = load_json<Json>(file);
    if (!table.is_object() || !table.contains("fields") || !table["fields"].is_array() || !table.contains("source"))
        refuse("{}: must be an object with \"source\" and a list \"fields\"", file);
    std::vector<Rule> rules;
    for (const Json& entry : table["fields"]) {
        if (!entry.contains("refuse") || !entry.contains("when")) continue;
        Rule rule;
        rule.name = entry["field"].get<std::string>();
        const std::string place = fmt::format("{}: {}", file, shown(rule.name));
        rule.kind = RuleKind::absent;
        rule.asserted_by = "translation";
        rule.message = without_value(entry["refuse"].get<std::string>());
        rule.source = table["source"].get<std::string>();
        rule.when = Condition(entry["when"], place);
        rule.needs = false;
        if (rule.name.starts_with("model.")) continue;
        for (const std::string& field : rule.when.fields())
            if (field != rule.name) rule.name += (rule.name.find(':') == std::string::npos ? ": " : ", ") + field;
        rules.push_back(std::move(rule));
    }
    return rules;
}

} // namespace

RuleList::RuleList(std::vector<Rule> rules) : rules_(std::move(rules)) {
    std::vector<Condition> conditions;
    for (const Rule& rule : rules_) conditions.push_back(rule.when);
    when_ = Conditions(conditions);
}

const Rule* RuleList::first_broken(const plan::Plan& plan) const {
    std::size_t first = rules_.size();
    when_.each_that_holds(plan, [&](std::size_t i) {
        if (i < first && rules_[i].test.holds(plan) != rules_[i].needs) first = i;
    });
    return first < rules_.size() ? &rules_[first] : nullptr;
}

std::vector<const Rule*> RuleList::broken_by(const plan::Plan& plan) const {
    std::vector<std::size_t> places;
    when_.each_that_holds(plan, [&](std::size_t i) {
        if (rules_[i].test.holds(plan) != rules_[i].needs) places.push_back(i);
    });
    std::sort(places.begin(), places.end());
    std::vector<const Rule*> broken;
    for (const std::size_t i : places) broken.push_back(&rules_[i]);
    return broken;
}

OpenRules::OpenRules(const RuleList& all, const plan::Plan& plan, const Condition::Words& same) {
    for (const Rule& rule : all.rules()) {
        std::optional<Condition> when = rule.when.among(plan, same);
        if (!when) continue;
        std::optional<Condition> test = rule.test.among(plan, same);
        const bool kept = rule.needs ? test && test->always() : !test;
        if (!kept) open_.push_back({&rule, std::move(*when), std::move(test)});
    }
}

const Rule* OpenRules::first_broken(const plan::Plan& plan) const {
    for (const Open& open : open_)
        if (open.when.holds(plan) && (open.test && open.test->holds(plan)) != open.rule->needs) return open.rule;
    return nullptr;
}

Rule read_rule(const Json& json, const std::string& place) {
    bool in_release = false;
    Rule rule = read_rule(json, place, "", in_release);
    return rule;
}

int compare_versions(const std::string& a, const std::string& b) {
    const std::vector<std::int64_t> x = numbers_of(a, "release"), y = numbers_of(b, "release");
    if (x == y) return 0;
    return x < y ? -1 : 1;
}

std::vector<Rule> load_rules(const Engine& engine) {
    std::vector<Rule> rules;
    if (engine.name.empty() || engine.name.find('/') != std::string::npos) return rules;
    const std::string folder = profiles_folder(), file = folder + "/stacks/rules/" + engine.name + ".json";
    const std::string table = folder + "/engines/" + engine.name + ".json";
    std::error_code unreadable; // such as a name that is too long
    if (!std::filesystem::is_regular_file(file, unreadable))
        return std::filesystem::is_regular_file(table, unreadable) ? rules_of_table(table) : rules;
    const Json json = load_json<Json>(file);
    if (!json.is_object() || !json.contains("rules") || !json["rules"].is_array())
        refuse("{}: must be an object with a list \"rules\"", file);
    for (const Json& one : json["rules"]) {
        bool in_release = false;
        Rule rule = read_rule(one, file, engine.release, in_release);
        if (in_release) rules.push_back(std::move(rule));
    }
    return rules;
}

} // namespace moe::stack
