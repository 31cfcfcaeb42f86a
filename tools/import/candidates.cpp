// Values that a field may have by what a file says: those that the table's tests name, and those that stand in the
// file.
#include "planner/plan/plan_fields.hpp"
#include "planner/stack/plan_words.hpp"
#include "tools/import/lists.hpp"
#include "tools/import/reading.hpp"
#include "tools/import/stage_settings.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>

namespace moe::tools {
namespace {

using Json = nlohmann::ordered_json;

// The words of a test that are values: "mxfp8" of "mxfp8" and of ["mxfp8", "nvfp4"], none of "!none" and ">1".
void plain_words(const Json& test, std::vector<std::string>& words) {
    if (test.is_array()) {
        for (const Json& item : test) plain_words(item, words);
    } else if (test.is_string()) {
        const std::string text = test.get<std::string>();
        if (!text.empty() && std::string("!<>+-").find(text[0]) == std::string::npos) add_once(words, text);
    }
}

} // namespace

// Values that a line's tests name, each with what they ask of other fields in one word.
void Reading::add_tests(const Line& line, const std::string& field, std::vector<Choice>& tests) {
    std::vector<std::string> values;
    for (const std::string& name : {field, "derived." + field})
        if (line.entry->tests.contains(name)) plain_words(line.entry->tests[name], values);
    for (const std::string& value : values) {
        Choice choice{{field, value}};
        if (line.entry->field == field)
            for (const auto& [other, test] : line.entry->tests.items()) {
                std::vector<std::string> words;
                plain_words(test, words);
                if (other != field && test.is_string() && words.size() == 1 && contains(plan::field_names(), other))
                    choice.emplace_back(other, words[0]);
            }
        if (std::find(tests.begin(), tests.end(), choice) == tests.end()) tests.push_back(std::move(choice));
    }
}

// Values that its settings have in the file.
void Reading::add_captures(const Line& line, const plan::Plan& plan, const std::string& field,
                           std::vector<Choice>& captures) const {
    std::map<std::string, std::string> edges;
    const auto add = [&](const std::string& value) {
        const Choice choice{{field, value}};
        if (std::find(captures.begin(), captures.end(), choice) == captures.end()) captures.push_back(choice);
    };
    const bool own = line.entry->field == field;
    for (const Phrase& phrase : line.phrases) {
        const auto values = value(phrase.name, plan);
        if (!values || phrase.environment()) continue;
        for (const auto& [placeholder, texts] : captured(phrase, *values, reader_).values) {
            if (placeholder == "$modules" && own) {
                std::string set;
                for (const auto& [module, word] : line.entry->words)
                    if (!word.empty() && contains(texts, word)) set += (set.empty() ? "" : "+") + module;
                add(set.empty() ? "none" : set);
            } else if (placeholder.ends_with("_parts") && own) {
                add(layout_of_parts(texts, plan));
            } else if ((placeholder == "$first" || placeholder == "$last") && own) {
                edges[placeholder] = texts.front();
            } else if ((placeholder == "$value" && own) || placeholder == "$" + field ||
                       placeholder == "$derived." + field) {
                add(texts.front());
            }
        }
    }
    if (edges.size() == 2) add(edges["$first"] + "+" + edges["$last"]);
}

// Modules that an entry asks for (+module), and what is found beside what the set has already.
void Reading::add_unions(const plan::Plan& plan, const std::string& field, std::vector<Choice>& all) const {
    if (field != "recompute" && field != "offload") return;
    for (const Line& line : lines_) {
        if (line.entry->field != field || !line.entry->tests.contains(field)) continue;
        const Json& test = line.entry->tests[field];
        if (test.is_string() && test.get<std::string>().rfind('+', 0) == 0)
            all.push_back({{field, test.get<std::string>().substr(1)}});
    }
    const std::string now = stack::plan_word(plan, field);
    const std::size_t count = all.size();
    for (std::size_t i = 0; now != "none" && i < count; ++i)
        if (all[i].size() == 1 && all[i][0].second != "none") all.push_back({{field, now + "+" + all[i][0].second}});
}

std::vector<Reading::Choice> Reading::candidates(const plan::Plan& plan, const std::string& field) const {
    std::vector<Choice> all, captures;
    for (const Line& line : lines_) {
        add_tests(line, field, all);
        add_captures(line, plan, field, captures);
    }
    all.insert(all.end(), captures.begin(), captures.end());
    add_unions(plan, field, all);
    return all;
}

} // namespace moe::tools
