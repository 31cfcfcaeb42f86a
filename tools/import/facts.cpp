// Facts of a model: an entry all of whose settings the file has says its placeholders and the words of its tests.
#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "planner/stack/plan_words.hpp"
#include "tools/import/reading.hpp"

#include <algorithm>
#include <set>

namespace moe::tools {
namespace {

using Json = nlohmann::ordered_json;
using Facts = std::map<std::string, std::string>;

// A test of a fact that is known, by the grammar of conditions.
bool passes(const std::string& fact, const Json& test) {
    if (test.is_object()) {
        for (const Json& part : test["all"])
            if (!passes(fact, part)) return false;
        return true;
    }
    if (test.is_array())
        return std::any_of(test.begin(), test.end(), [&fact](const Json& part) { return passes(fact, part); });
    const std::string text = test.get<std::string>();
    const auto value = number_of(fact);
    for (const char* sign : {"!=", ">=", "<=", ">", "<"}) {
        const std::string s = sign;
        if (text.rfind(s, 0) != 0) continue;
        const auto bound = number_of(text.substr(s.size()));
        if (!bound) break;
        if (!value) return s == "!=";
        if (s == "!=") return *value != *bound;
        if (s == ">=") return *value >= *bound;
        if (s == "<=") return *value <= *bound;
        return s == ">" ? *value > *bound : *value < *bound;
    }
    if (!text.empty() && text[0] == '!') return fact != text.substr(1);
    if (const auto other = number_of(text); other && value) return *other == *value;
    return fact == text;
}

std::string usual_fact(const ReaderTable& reader, const std::string& name) {
    for (const FactDefaults& usual : reader.facts)
        if (const auto found = usual.facts.find(name); usual.when.empty() && found != usual.facts.end())
            return found->second;
    return {};
}

// Tells whether all tests are of the one fact.
bool only_own(const Json& tests, const std::string& field) {
    return std::all_of(tests.items().begin(), tests.items().end(),
                       [&field](const auto& item) { return item.key() == field; });
}

bool contradicts(const Json& tests, const Facts& facts) {
    for (const auto& [name, test] : tests.items()) {
        const auto known = facts.find(name);
        if (known != facts.end() && !passes(known->second, test)) return true;
    }
    return false;
}

} // namespace

// The facts that one entry says of the model, and the settings that say them.
struct Reading::FactMatch {
    Facts captured, usual; // facts by placeholder: from the file's settings, and from what the engine takes without
    Facts tested,
        possible; // words of its tests, which hold where all settings are there; possible: the first of several
    std::set<std::string> settings;
    bool whole = false; // whether all of its settings are there, with its words
};

Reading::FactMatch Reading::match(const Line& line) const {
    FactMatch match;
    bool literal = true;
    std::size_t found = 0, counted = 0, explicitly = 0;
    for (const Phrase& phrase : line.phrases) {
        if (phrase.environment()) continue;
        ++counted;
        const std::vector<std::string>* values = given(phrase.name);
        std::vector<std::string> usual;
        if (values == nullptr) {
            const auto known = reader_.defaults.find(phrase.name);
            if (known == reader_.defaults.end()) continue;
            usual = known->second;
            values = &usual;
        }
        if (std::any_of(values->begin(), values->end(), has_unknown)) continue;
        ++found;
        const bool in_file = given(phrase.name) != nullptr;
        explicitly += in_file ? 1 : 0;
        match.settings.insert(phrase.name);
        const Capture capture = captured(phrase, *values, reader_);
        literal = literal && capture.literal;
        for (const auto& [placeholder, texts] : capture.values) {
            const std::string name = placeholder == "$value" ? line.entry->field : placeholder.substr(1);
            if (name.rfind("model.", 0) == 0 && !texts.empty())
                (in_file ? match.captured : match.usual)[name] = texts.front();
        }
    }
    match.whole = explicitly > 0 && found == counted && literal;
    for (const auto& [name, test] : line.entry->tests.items()) {
        if (name == line.entry->field && test.is_array() && !test.empty() && test[0].is_string())
            match.possible[name] = test[0].get<std::string>();
        if (name.rfind("model.", 0) != 0 || !test.is_string()) continue;
        const std::string word = test.get<std::string>();
        if (word.empty() || std::string("!<>+-").find(word[0]) != std::string::npos) continue;
        // Of another fact the entry only tells what is unusual: that attention is not latent follows from no setting.
        if (name == line.entry->field || usual_fact(reader_, name) != word) match.tested[name] = word;
    }
    return match;
}

// Facts whose own switch the file has and has off, where no entry of another fact or field writes that switch.
std::map<std::string, std::string> Reading::denied() const {
    Facts denied;
    for (const Line& line : lines_) {
        const std::string& field = line.entry->field;
        const std::string usual = usual_fact(reader_, field);
        if (field.rfind("model.", 0) != 0 || usual.empty()) continue;
        const Json tests = line.entry->tests;
        if (!tests.contains(field) || tests[field] != "on") continue;
        for (const Phrase& phrase : line.phrases) {
            const std::vector<std::string>* values = given(phrase.name);
            const bool off = values != nullptr && same_values(*values, {"false"}, reader_);
            const bool own = std::all_of(lines_.begin(), lines_.end(), [&](const Line& other) {
                return other.entry->field == field ||
                       std::none_of(other.phrases.begin(), other.phrases.end(),
                                    [&phrase](const Phrase& one) { return one.name == phrase.name; });
            });
            if (off && own) denied[field] = usual;
        }
    }
    return denied;
}

std::map<std::string, std::string> Reading::facts() const {
    struct Match {
        const Line* line;
        FactMatch found;
    };
    std::vector<Match> matches;
    for (const Line& line : lines_) {
        FactMatch found = match(line);
        const bool model = line.entry->field.rfind("model.", 0) == 0;
        if (model && (found.whole || !found.captured.empty() || !found.usual.empty()))
            matches.push_back({&line, std::move(found)});
    }
    // Entries of many settings first: a flag that one of them explains says nothing for an entry of that flag alone.
    std::stable_sort(matches.begin(), matches.end(),
                     [](const Match& a, const Match& b) { return a.found.settings.size() > b.found.settings.size(); });
    Facts facts = denied();
    std::set<std::string> explained;
    const auto tell = [&facts](const Facts& told) {
        for (const auto& [name, value] : told) facts.try_emplace(name, value);
    };
    for (const bool current : {true, false}) // The words of this release come first, then those of others.
        for (const Match& match : matches) {
            if (match.line->entry->in_force(release_) != current || !match.found.whole) continue;
            const bool new_word =
                std::any_of(match.found.settings.begin(), match.found.settings.end(),
                            [&explained](const std::string& name) { return explained.count(name) == 0; });
            if (!new_word) continue;
            if (match.found.captured.empty())
                explained.insert(match.found.settings.begin(), match.found.settings.end());
            if (contradicts(match.line->entry->tests, facts)) continue;
            tell(match.found.tested);
        }
    for (const Match& match : matches)
        if (match.found.whole && match.line->entry->in_force(release_)) tell(match.found.possible);
    // Captures that depend on no other fact, then what is usual, then those that depend on what is known by now.
    for (const bool own : {true, false}) {
        for (const bool current : {true, false})
            for (const Match& match : matches)
                if (match.line->entry->in_force(release_) == current &&
                    only_own(match.line->entry->tests, match.line->entry->field) == own &&
                    !contradicts(match.line->entry->tests, facts))
                    tell(match.found.captured);
        for (const FactDefaults& usual : reader_.facts)
            if (usual.when.empty() == own && (own || !contradicts(usual.when, facts))) tell(usual.facts);
    }
    for (const Match& match : matches)
        if (match.line->entry->in_force(release_) && !contradicts(match.line->entry->tests, facts))
            tell(match.found.usual);
    for (const FactTold& told : reader_.told) {
        const Setting* setting = file_.find(told.setting);
        const bool said = setting != nullptr && setting->values == std::vector{told.value};
        if (!said || contradicts(told.when, facts)) continue;
        for (const auto& [name, value] : told.facts) facts[name] = value;
    }
    return facts;
}

bool Reading::unclear(const std::string& fact) const {
    return std::any_of(lines_.begin(), lines_.end(), [&](const Line& line) {
        return line.entry->field == fact &&
               std::any_of(line.phrases.begin(), line.phrases.end(), [this](const Phrase& phrase) {
                   const std::vector<std::string>* values = given(phrase.name);
                   return values != nullptr && std::any_of(values->begin(), values->end(), has_unknown);
               });
    });
}

} // namespace moe::tools
