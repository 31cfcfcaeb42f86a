// Reads tables of kernel names and finds the rule of a name.
#include "tools/measured/kernel_table.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json_object.hpp"
#include "planner/base/names.hpp"
#include "planner/base/place.hpp"
#include "planner/base/profile.hpp"

#include <algorithm>

namespace moe::tools {

namespace {

constexpr int most_bases = 8;

std::vector<std::string> kind_names() {
    std::vector<std::string> names;
    for (int i = 0; i <= static_cast<int>(program::OpKind::copy_from_host); ++i)
        names.emplace_back(program::to_string(static_cast<program::OpKind>(i)));
    return names;
}

program::OpKind kind_of(const JsonObject& rule, const std::string& name) {
    static const std::vector<std::string> names = kind_names();
    const auto at = std::find(names.begin(), names.end(), name);
    if (at == names.end())
        refuse("{}: kinds: unknown op kind '{}'{}", rule.place(), shown(name), did_you_mean(name, names));
    return static_cast<program::OpKind>(at - names.begin());
}

KernelRule read_rule(const JsonObject& json, const std::string& label) {
    json.only({"names", "collectives", "kinds", "rest"});
    KernelRule rule;
    rule.label = label;
    rule.names = json.strings("names");
    if (json.has("collectives")) rule.collectives = json.strings("collectives");
    for (const std::string& kind : json.strings("kinds")) rule.kinds.push_back(kind_of(json, kind));
    rule.rest = json.boolean_or("rest", false);
    if (rule.kinds.empty()) refuse("{}: kinds is empty: name at least one op kind", json.place());
    if (rule.names.empty()) refuse("{}: names is empty: no kernel would fit", json.place());
    for (const std::string& name : rule.names)
        if (name.find_first_not_of("*^") == std::string::npos)
            refuse("{}: names: '{}' fits every kernel", json.place(), shown(name));
    for (const program::OpKind kind : rule.kinds)
        if (program::is_communication(kind) != program::is_communication(rule.kinds.front()))
            refuse("{}: kinds: {} is communication and {} is not, or the other way round", json.place(),
                   program::to_string(kind), program::to_string(rule.kinds.front()));
    return rule;
}

bool fits_any(const std::vector<std::string>& patterns, std::string_view text) {
    return std::any_of(patterns.begin(), patterns.end(),
                       [text](const std::string& pattern) { return fits(pattern, text); });
}

void read_table(const std::string& name_or_path, int depth, KernelTable& table) {
    const ProfileFile file = find_profile(name_or_path, "kernels", "kernel table", "");
    if (depth > most_bases) refuse("{}: base: more than {} tables on top of each other", file.path, most_bases);
    const JsonObject json = JsonObject::parse(read_file(file.path), file.path);
    json.only({"name", "base", "stacks", "source", "rules"});
    if (depth == 0) {
        table.name = json.string("name");
        if (json.has("stacks")) table.stacks = json.strings("stacks");
    }
    const JsonObject rules = json.object("rules");
    for (const std::string& label : rules.keys()) table.rules.push_back(read_rule(rules.object(label), label));
    if (const std::string base = json.string_or("base", ""); !base.empty())
        at_place(file.path + ": base", [&] { read_table(base, depth + 1, table); });
}

} // namespace

bool fits(std::string_view pattern, std::string_view text) {
    const bool anchored = pattern.starts_with('^');
    if (anchored) pattern.remove_prefix(1);
    std::size_t from = 0;
    for (bool first = true; !pattern.empty(); first = false) {
        const std::size_t star = pattern.find('*');
        const std::string_view part = pattern.substr(0, star);
        const std::size_t at = text.find(part, from);
        if (at == std::string_view::npos || (anchored && first && at != 0)) return false;
        from = at + part.size();
        pattern.remove_prefix(star == std::string_view::npos ? pattern.size() : star + 1);
    }
    return true;
}

std::optional<std::size_t> KernelTable::rule_of(const EventName& name) const {
    for (std::size_t i = 0; i < rules.size(); ++i) {
        const KernelRule& rule = rules[i];
        if (!rule.collectives.empty() && (name.collective.empty() || !fits_any(rule.collectives, name.collective)))
            continue;
        if (fits_any(rule.names, name.kernel)) return i;
    }
    return std::nullopt;
}

KernelTable load_kernel_table(const std::string& name_or_path) {
    KernelTable table;
    read_table(name_or_path, 0, table);
    return table;
}

KernelTable kernel_table_of(const std::string& stack) {
    for (const std::string& name : profile_names("kernels")) {
        KernelTable table = load_kernel_table(name);
        if (fits_any(table.stacks, stack)) return table;
    }
    return load_kernel_table("pytorch");
}

} // namespace moe::tools
