// Compiles the tests of a condition against the kinds of words that they read.
#include "planner/stack/condition.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"

#include <nlohmann/json.hpp>

#include <optional>
#include <string_view>

namespace moe::stack {
namespace {

enum class Op : std::uint8_t { equal, differs, above, at_least, below, at_most, holds, lacks, any, all };

struct Compare {
    const char* sign;
    Op op;
};
constexpr Compare comparisons[] = {
    {"!=", Op::differs}, {">=", Op::at_least}, {"<=", Op::at_most}, {">", Op::above}, {"<", Op::below}};

} // namespace

struct Condition::Value { // one word of one plan, as its kind has it
    double number = 0.0;
    bool none = false; // a number whose word is "none"
    unsigned set = 0;
    std::string_view text;
};

struct Condition::Test {
    enum class Kind : std::uint8_t { number, set, text };
    Op op = Op::equal;
    Kind kind = Kind::text;
    double number = 0.0;
    bool none = false;
    unsigned set = 0;
    std::string text;
    std::vector<Test> parts;

    bool operator==(const Test&) const = default;

    bool equals(const Value& value) const {
        if (kind == Kind::number) return none == value.none && (none || number == value.number);
        return kind == Kind::set ? set == value.set : text == value.text;
    }

    bool passes(const Value& value) const {
        switch (op) {
        case Op::equal:
            return equals(value);
        case Op::differs:
            return !equals(value);
        case Op::above:
            return !value.none && value.number > number;
        case Op::at_least:
            return !value.none && value.number >= number;
        case Op::below:
            return !value.none && value.number < number;
        case Op::at_most:
            return !value.none && value.number <= number;
        case Op::holds:
            return (value.set & set) == set;
        case Op::lacks:
            return (value.set & set) != set;
        case Op::any:
            for (const Test& part : parts)
                if (part.passes(value)) return true;
            return false;
        case Op::all:
            for (const Test& part : parts)
                if (!part.passes(value)) return false;
            return true;
        }
        return false;
    }

    // Fills what the word's text stands for. Throws Error (bad_input).
    void take(const std::string& word, const PlanWord& of, const std::string& place) {
        text = word;
        if (const auto* reader = std::get_if<NumberWord>(&of.reader)) {
            kind = Kind::number;
            none = reader->none_is_zero && word == "none";
            const std::optional<double> read = number_of(word);
            if (!none && !read) refuse("{}: {}: '{}' is no number", place, of.name, shown(word));
            number = read.value_or(0.0);
        } else if (const auto* modules = std::get_if<SetWord>(&of.reader)) {
            kind = Kind::set;
            try {
                set = modules->parse(word);
            } catch (const Error& error) {
                refuse("{}: {}", place, error.what());
            }
        }
    }
};

Condition::Test Condition::compile(const nlohmann::json& value, const PlanWord& word, const std::string& place) {
    Test test;
    const bool all = value.is_object() && value.size() == 1 && value.contains("all");
    const nlohmann::json& list = all ? value["all"] : value;
    if (list.is_array()) {
        test.op = all ? Op::all : Op::any;
        for (const nlohmann::json& part : list) test.parts.push_back(compile(part, word, place));
        return test;
    }
    if (!value.is_string())
        refuse("{}: {}: must be a word, a list or {{\"all\": [..]}}, found {}", place, word.name, value.type_name());
    const std::string text = value.get<std::string>();
    const bool number = std::holds_alternative<NumberWord>(word.reader);
    const bool set = std::holds_alternative<SetWord>(word.reader);
    if (number)
        for (const auto& [sign, op] : comparisons)
            if (text.rfind(sign, 0) == 0) {
                test.op = op;
                test.take(text.substr(std::string_view(sign).size()), word, place);
                return test;
            }
    if (text.empty()) refuse("{}: {}: an empty word", place, word.name);
    const bool module = set && (text[0] == '+' || text[0] == '-');
    if (module) test.op = text[0] == '+' ? Op::holds : Op::lacks;
    if (text[0] == '!') test.op = Op::differs;
    test.take(module || text[0] == '!' ? text.substr(1) : text, word, place);
    return test;
}

Condition::Condition(const nlohmann::json& entries, const std::string& place) {
    if (!entries.is_object()) refuse("{}: must be an object of fields, found {}", place, entries.type_name());
    for (const auto& item : entries.items()) {
        const PlanWord* word = find_plan_word(item.key());
        if (word == nullptr)
            refuse("{}: unknown plan field or fact '{}'{}", place, shown(item.key()),
                   did_you_mean(item.key(), plan_word_names()));
        entries_.push_back({word, std::make_shared<const Test>(compile(item.value(), *word, place))});
    }
    // Facts of the model are searched for in its layers: a plan's own fields are asked first.
    std::stable_partition(entries_.begin(), entries_.end(),
                          [](const Entry& entry) { return entry.word->name.find('.') == std::string::npos; });
}

Condition::Value Condition::read(const PlanWord& word, const plan::Plan& plan, std::string& storage) {
    Value value;
    if (const auto* number = std::get_if<NumberWord>(&word.reader)) {
        value.number = number->read(plan);
        value.none = number->none_is_zero && value.number == 0.0;
    } else if (const auto* set = std::get_if<SetWord>(&word.reader)) {
        value.set = set->read(plan);
    } else if (const auto* name = std::get_if<NameWord>(&word.reader)) {
        value.text = name->read(plan);
    } else {
        storage = std::get<TextWord>(word.reader).read(plan);
        value.text = storage;
    }
    return value;
}

bool Condition::holds(const plan::Plan& plan) const {
    std::string storage;
    for (const Entry& entry : entries_)
        if (!entry.test->passes(read(*entry.word, plan, storage))) return false;
    return true;
}

std::vector<std::string> Condition::fields() const {
    std::vector<std::string> names;
    for (const Entry& entry : entries_) names.push_back(entry.word->name);
    return names;
}

std::optional<Condition> Condition::among(const plan::Plan& plan, const Words& same) const {
    std::string storage;
    Condition rest;
    for (const Entry& entry : entries_)
        if (!same(entry.word->name))
            rest.entries_.push_back(entry);
        else if (!entry.test->passes(read(*entry.word, plan, storage)))
            return std::nullopt;
    return rest;
}

Conditions::Conditions(const std::vector<Condition>& all) {
    for (std::size_t i = 0; i < all.size(); ++i) {
        if (all[i].entries_.empty()) {
            always_.push_back(i);
            continue;
        }
        const Condition::Entry& first = all[i].entries_.front();
        auto group = std::find_if(groups_.begin(), groups_.end(),
                                  [&first](const Group& known) { return known.word == first.word; });
        if (group == groups_.end()) group = groups_.insert(groups_.end(), {first.word, {}});
        auto gate = std::find_if(group->gates.begin(), group->gates.end(),
                                 [&first](const Gate& known) { return *known.test == *first.test; });
        if (gate == group->gates.end()) gate = group->gates.insert(group->gates.end(), {first.test, {}});
        Rest rest{i, all[i]};
        rest.entries.entries_.erase(rest.entries.entries_.begin());
        gate->behind.push_back(std::move(rest));
    }
}

void Conditions::each_that_holds(const plan::Plan& plan, const std::function<void(std::size_t)>& visit) const {
    for (const std::size_t i : always_) visit(i);
    std::string storage;
    for (const Group& group : groups_) {
        const Condition::Value value = Condition::read(*group.word, plan, storage);
        for (const Gate& gate : group.gates) {
            if (!gate.test->passes(value)) continue;
            for (const Rest& rest : gate.behind)
                if (rest.entries.holds(plan)) visit(rest.index);
        }
    }
}

} // namespace moe::stack
