// Reads and checks the tables of profiles/engines: every field, fact and part by name.
#include "tools/engines/engine_table.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "planner/base/names.hpp"
#include "planner/stack/plan_words.hpp"
#include "planner/stack/rules.hpp"
#include "tools/engines/engine_value.hpp"

#include <algorithm>
#include <array>

namespace moe::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array parts{"kwargs", "optimizer", "ddp", "bridge", "provider", "config", "env"};

std::string text_of(const Json& value, const std::string& place, const std::string& key) {
    if (!value.is_string()) refuse("{}: \"{}\" must be text, found {}", place, key, value.type_name());
    return value.get<std::string>();
}

std::vector<std::string> texts_of(const Json& value, const std::string& place, const std::string& key) {
    if (!value.is_array()) refuse("{}: \"{}\" must be a list, found {}", place, key, value.type_name());
    std::vector<std::string> list;
    for (const Json& item : value) list.push_back(text_of(item, place, key));
    return list;
}

const Json& object_of(const Json& value, const std::string& place, const std::string& key) {
    if (!value.is_object()) refuse("{}: \"{}\" must be an object, found {}", place, key, value.type_name());
    return value;
}

// Every placeholder inside of a value must be a word of a plan, or one that engine_value() makes.
void check_placeholders(const Json& value, const std::string& place) {
    if (value.is_array() || value.is_object()) {
        for (const Json& item : value) check_placeholders(item, place);
    } else if (value.is_string()) {
        const std::string text = value.get<std::string>();
        if (text.starts_with("$") && !known_placeholder(text.substr(0, text.find(','))))
            refuse("{}: {}: unknown plan field or fact", place, shown(text));
    }
}

void check_version(const std::string& version, const std::string& place) {
    try {
        stack::compare_versions(version, "0");
    } catch (const Error& error) {
        refuse("{}: {}", place, error.what());
    }
}

// One reason for each part of "kwargs+args"; "" = every part.
void add_refusal(EngineEntry& entry, const std::string& of, const std::string& reason) {
    for (std::size_t begin = 0; begin <= of.size();) {
        const std::size_t end = std::min(of.find('+', begin), of.size());
        entry.refusals[of.substr(begin, end - begin)] = reason;
        begin = end + 1;
    }
}

void read_member(EngineEntry& entry, const std::string& key, const Json& value, const std::string& place) {
    if (key == "field") {
        entry.field = text_of(value, place, key);
    } else if (key == "from" || key == "until") {
        (key == "from" ? entry.from : entry.until) = text_of(value, place, key);
        check_version(value.get<std::string>(), place);
    } else if (key == "when") {
        entry.when = stack::Condition(nlohmann::json(value), place);
        entry.tests = value;
    } else if (key == "args") {
        entry.args = texts_of(value, place, key);
        check_placeholders(value, place);
    } else if (std::find(parts.begin(), parts.end(), key) != parts.end()) {
        entry.parts[key] = object_of(value, place, key);
        check_placeholders(value, place);
    } else if (key == "words") {
        for (const auto& [name, word] : object_of(value, place, key).items())
            entry.words.emplace_back(name, text_of(word, place, key));
    } else if (key == "refuse" || key.starts_with("refuse_")) {
        add_refusal(entry, key == "refuse" ? "" : key.substr(7), text_of(value, place, key));
    } else if (key == "class") {
        entry.class_name = text_of(value, place, key);
    } else if (key != "note" && key != "needs_transformer_engine") {
        refuse("{}: unknown member \"{}\"", place, shown(key));
    }
}

EngineEntry read_entry(const Json& json, const std::string& place) {
    EngineEntry entry;
    for (const auto& [key, value] : object_of(json, place, "entry").items()) read_member(entry, key, value, place);
    if (!entry.field.empty() && stack::find_plan_word(entry.field) == nullptr)
        refuse("{}: unknown plan field or fact '{}'{}", place, shown(entry.field),
               did_you_mean(entry.field, stack::plan_word_names()));
    return entry;
}

void read_list(EngineTable& table, const Json& json, const std::string& path, const std::string& list) {
    if (!json.contains(list) || !json[list].is_array()) refuse("{}: must have a list \"{}\"", path, list);
    for (std::size_t i = 0; i < json[list].size(); ++i)
        table.entries.push_back(read_entry(json[list][i], fmt::format("{}: {}[{}]", path, list, i)));
}

void read_recipes(EngineTable& table, const Json& list, const std::string& path) {
    if (!list.is_array()) refuse("{}: \"recipes\" must be a list", path);
    for (std::size_t i = 0; i < list.size(); ++i) {
        const std::string place = fmt::format("{}: recipes[{}]", path, i);
        const Json& json = list[i];
        object_of(json, place, "recipe"); // refuses anything else
        for (const char* key : {"name", "from", "when"})
            if (!json.contains(key)) refuse("{}: \"{}\" is missing", place, key);
        check_version(text_of(json["from"], place, "from"), place);
        table.recipes.push_back({text_of(json["name"], place, "name"), json["from"].get<std::string>(),
                                 stack::Condition(nlohmann::json(json["when"]), place)});
    }
}

// "$value" and the like inside of a message.
std::string filled(const std::string& message, const EngineEntry& entry, const plan::Plan& plan) {
    const std::string mark = "$value";
    const std::size_t at = message.find(mark);
    if (at == std::string::npos || entry.field.empty()) return message;
    return message.substr(0, at) + stack::plan_word(plan, entry.field) + message.substr(at + mark.size());
}

} // namespace

bool EngineEntry::in_force(const std::string& release) const {
    if (!from.empty() && stack::compare_versions(release, from) < 0) return false;
    return until.empty() || stack::compare_versions(release, until) < 0;
}

EngineTable load_engine_table(const std::string& name) {
    const std::string path = profiles_folder() + "/engines/" + name + ".json";
    const Json json = load_json<Json>(path);
    if (!json.is_object()) refuse("{}: must be an object", path);
    EngineTable table;
    table.name = name;
    if (json.contains("release")) table.release = text_of(json["release"], path, "release");
    if (json.contains("source")) table.source = text_of(json["source"], path, "source");
    read_list(table, json, path, "fields");
    read_list(table, json, path, "implied");
    if (json.contains("recipes")) read_recipes(table, json["recipes"], path);
    if (json.contains("mixed_precision")) table.mixed_precision = json["mixed_precision"];
    return table;
}

std::vector<const EngineEntry*> entries_for(const EngineTable& table, const plan::Plan& plan,
                                            const std::string& release, const std::string& part) {
    std::vector<const EngineEntry*> list;
    for (const EngineEntry& entry : table.entries) {
        if (!entry.in_force(release) || !entry.when.holds(plan)) continue;
        for (const std::string& of : {std::string(), part})
            if (const auto refusal = entry.refusals.find(of); refusal != entry.refusals.end())
                refuse("{}", filled(refusal->second, entry, plan));
        list.push_back(&entry);
    }
    return list;
}

} // namespace moe::tools
