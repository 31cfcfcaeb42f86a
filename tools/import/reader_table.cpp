// Reads and checks the files of profiles/engines/readers.
#include "tools/import/reader_table.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "planner/base/names.hpp"
#include "planner/base/profile.hpp"
#include "planner/stack/plan_words.hpp"
#include "tools/import/readers/bash_test.hpp"

#include <algorithm>

namespace moe::tools {
namespace {

using Json = nlohmann::ordered_json;

std::vector<std::string> members_of(const Json& list, const std::string& place) {
    std::vector<std::string> all;
    if (!list.is_array()) refuse("{}: must be a list of texts", place);
    for (const Json& item : list) {
        if (!item.is_string()) refuse("{}: must be a list of texts", place);
        all.push_back(item.get<std::string>());
    }
    return all;
}

class Members {
public:
    Members(const Json& json, std::string place) : json_(json), place_(std::move(place)) {}

    std::string text(const char* key) const {
        if (!json_.contains(key) || !json_[key].is_string()) refuse("{}: {}: must be text", place_, key);
        return json_[key].get<std::string>();
    }
    std::string text_or(const char* key) const { return json_.contains(key) ? text(key) : std::string(); }
    const Json& list(const char* key) const {
        static const Json none = Json::array();
        if (!json_.contains(key)) return none;
        if (!json_[key].is_array()) refuse("{}: {}: must be a list", place_, key);
        return json_[key];
    }
    const Json& object(const char* key) const {
        static const Json none = Json::object();
        if (!json_.contains(key)) return none;
        if (!json_[key].is_object()) refuse("{}: {}: must be an object", place_, key);
        return json_[key];
    }
    std::vector<std::string> texts(const char* key) const { return members_of(list(key), place_ + ": " + key); }
    const std::string& place() const { return place_; }

private:
    const Json& json_;
    std::string place_;
};

std::map<std::string, std::string> facts_in(const Members& members) {
    std::map<std::string, std::string> facts;
    for (const auto& [name, value] : members.object("facts").items()) {
        if (stack::find_plan_word(name) == nullptr) refuse("{}: facts: unknown fact {}", members.place(), shown(name));
        if (!value.is_string()) refuse("{}: facts: {}: must be text", members.place(), name);
        facts[name] = value.get<std::string>();
    }
    return facts;
}

// "default_sources": {file and release: [patterns of settings' names]}; each default has one.
void check_sources(const ReaderTable& table, const Members& members) {
    std::map<std::string, int> sources;
    for (const auto& [source, patterns] : members.object("default_sources").items())
        for (const Json& pattern : patterns.is_array() ? patterns : Json::array({patterns})) {
            if (!pattern.is_string())
                refuse("{}: default_sources: {}: must be a list of texts", members.place(), source);
            for (const auto& [name, values] : table.defaults)
                sources[name] += matches_pattern(name, pattern.get<std::string>()) ? 1 : 0;
        }
    for (const auto& [name, values] : table.defaults)
        if (sources[name] != 1)
            refuse("{}: default_sources: {} sources for the default of {}: name one", members.place(), sources[name],
                   name);
}

void read_defaults(ReaderTable& table, const Members& members) {
    for (const auto& [name, value] : members.object("defaults").items()) {
        std::vector<std::string>& values = table.defaults[name];
        for (const Json& item : value.is_array() ? value : Json::array({value})) {
            if (!item.is_string()) refuse("{}: defaults: {}: must be text or a list of texts", members.place(), name);
            values.push_back(item.get<std::string>());
            const std::string& text = values.back();
            if (text.rfind('$', 0) == 0 && stack::find_plan_word(text.substr(1)) == nullptr)
                refuse("{}: defaults: {}: unknown word {}", members.place(), name, shown(text));
        }
    }
    check_sources(table, members);
}

// A member of texts by name.
std::map<std::string, std::string> texts_in(const Members& members, const char* member) {
    std::map<std::string, std::string> texts;
    for (const auto& [name, value] : members.object(member).items()) {
        if (!value.is_string()) refuse("{}: {}: {}: must be text", members.place(), member, name);
        texts[name] = value.get<std::string>();
    }
    return texts;
}

std::vector<Caution> cautions_in(const Members& members, const char* member) {
    std::vector<Caution> all;
    for (const Json& item : members.list(member)) {
        const Members one(item, members.place() + ": " + member);
        all.push_back({one.text("setting"), one.text("value"), one.text("says"), one.text_or("with")});
    }
    return all;
}

std::vector<StandIn> stand_ins_in(const Members& members) {
    std::vector<StandIn> all;
    for (const Json& item : members.list("read_as")) {
        const Members one(item, members.place() + ": read_as");
        all.push_back(
            {one.text("setting"), one.text("value"), one.text_or("with"), texts_in(one, "as"), one.text_or("says")});
    }
    return all;
}

std::vector<ProgramField> fields_in(const Members& members) {
    std::vector<ProgramField> all;
    for (const Json& item : members.list("fields")) {
        const Members one(item, members.place() + ": fields");
        all.push_back(
            {one.text("field"), one.text("value"), stack::Condition(nlohmann::json(one.object("when")), one.place())});
    }
    return all;
}

void read_lists(ReaderTable& table, const Members& members) {
    for (const Json& item : members.list("model")) {
        const Members one(item, members.place() + ": model");
        table.facts.push_back({one.object("when"), facts_in(one)});
    }
    for (const Json& item : members.list("told")) {
        const Members one(item, members.place() + ": told");
        table.told.push_back({one.text("setting"), one.text("value"), one.object("when"), facts_in(one)});
    }
    for (const Json& item : members.list("tokenizers")) {
        const Members one(item, members.place() + ": tokenizers");
        table.tokenizers.push_back({one.text("setting"), one.text("value"), one.text_or("vocab")});
    }
    for (const Json& item : members.list("beside")) {
        const Members one(item, members.place() + ": beside");
        table.beside.push_back(
            {one.texts("settings"), stack::Condition(nlohmann::json(one.object("when")), one.place())});
    }
    for (const Json& item : members.list("frequencies")) {
        const Members one(item, members.place() + ": frequencies");
        table.frequencies.push_back({one.text("setting"), one.text("layers"), one.text("marks")});
    }
    table.read_as = stand_ins_in(members);
    for (const auto& [name, item] : members.object("idle_words").items())
        table.idle_words[name] = members_of(item, members.place() + ": idle_words: " + name);
    table.cautions = cautions_in(members, "cautions");
    table.refused = cautions_in(members, "refused");
    for (const auto& [name, item] : members.object("programs").items()) {
        const Members one(item, members.place() + ": programs: " + name);
        table.programs[name] = {cautions_in(one, "refused"), cautions_in(one, "cautions"), stand_ins_in(one),
                                one.texts("sections"),       texts_in(one, "names"),       texts_in(one, "computed"),
                                texts_in(one, "defaults"),   texts_in(one, "own"),         fields_in(one),
                                one.text_or("nodes"),        one.text_or("processes"),     one.texts("harmless")};
    }
    for (const Json& item : members.list("same")) table.same.push_back(members_of(item, members.place() + ": same"));
}

bool any_pattern(const std::vector<std::string>& patterns, const std::string& text) {
    return std::any_of(patterns.begin(), patterns.end(),
                       [&text](const std::string& pattern) { return matches_pattern(text, pattern); });
}

} // namespace

bool ReaderTable::is_harmless(const std::string& setting) const {
    return any_pattern(harmless, setting) && !any_pattern(read, setting);
}
bool ReaderTable::is_weak(const std::string& setting) const { return any_pattern(weak, setting); }
bool ReaderTable::is_cosmetic(const std::string& fact) const { return any_pattern(cosmetic, fact); }

std::vector<std::string> reader_formats() { return profile_names("engines/readers"); }

ReaderTable load_reader_table(const std::string& format) {
    const std::vector<std::string> known = reader_formats();
    if (std::find(known.begin(), known.end(), format) == known.end())
        refuse("--from {}: must be one of {}", shown(format), fmt::join(known, ", "));
    const std::string path = profiles_folder() + "/engines/readers/" + format + ".json";
    const Json json = load_json<Json>(path);
    const Members members(json, path);
    ReaderTable table;
    table.format = format;
    table.engine = members.text("engine");
    table.part = members.text("part");
    table.harmless = members.texts("harmless");
    table.read = members.texts("read");
    table.weak = members.texts("weak");
    table.cosmetic = members.texts("cosmetic");
    table.names = members.texts("names");
    table.recipe = members.texts("recipe");
    read_defaults(table, members);
    table.asked_with = texts_in(members, "asked_with");
    table.absent = texts_in(members, "absent");
    table.dumped = texts_in(members, "dumped");
    table.dumped_defaults = texts_in(members, "dumped_defaults");
    read_lists(table, members);
    const Members stages(members.object("stages"), path + ": stages");
    table.stages = {stages.text_or("layers_per_chunk"), stages.text_or("first"), stages.text_or("last"),
                    stages.text_or("embedding"),        stages.text_or("loss"),  stages.text_or("pattern")};
    return table;
}

} // namespace moe::tools
