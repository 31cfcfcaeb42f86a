// Collects what the entries of a table say, later ones over earlier ones.
#include "tools/engines/settings.hpp"

#include "planner/base/error.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/schedule.hpp"
#include "tools/engines/engine_value.hpp"

#include <algorithm>

namespace moe::tools {

using Json = nlohmann::ordered_json;

plan::Plan told(const plan::Plan& plan) {
    plan::Plan result = plan;
    const int stages = plan.pp * plan.vpp;
    if (stages == 1)
        result.layout.clear();
    else if (plan.layout.empty() && static_cast<int>(plan.model->layers.size()) % stages != 0)
        result.layout = plan::layout_to_string(plan::stages(plan));
    return result;
}

Json Settings::part(const std::string& name) const {
    Json result = Json::object();
    for (const EngineEntry* entry : entries_for(table, plan, release, name)) {
        const auto found = entry->parts.find(name);
        if (found == entry->parts.end()) continue;
        for (const auto& [key, value] : found->second.items()) result[key] = engine_value(*entry, plan, value);
    }
    return result;
}

std::string Settings::class_name() const {
    std::string name = "TransformerConfig";
    for (const EngineEntry* entry : entries_for(table, plan, release, "kwargs"))
        if (!entry->class_name.empty()) name = entry->class_name;
    return name;
}

std::map<std::string, std::string> Settings::environment(const std::string& with_part) const {
    std::map<std::string, std::string> result;
    for (const EngineEntry* entry : entries_for(table, plan, release, with_part)) {
        const auto found = entry->parts.find("env");
        if (found == entry->parts.end()) continue;
        for (const auto& [key, value] : found->second.items()) {
            const Json given = engine_value(*entry, plan, value);
            result[key] = given.is_string() ? given.get<std::string>() : given.dump();
        }
    }
    return result;
}

std::vector<Argument> arguments(const Settings& settings) {
    std::vector<Argument> list;
    for (const EngineEntry* entry : entries_for(settings.table, settings.plan, settings.release, "args")) {
        Argument* current = nullptr;
        for (const std::string& text : entry->args) {
            if (text.starts_with("--")) {
                const auto same = [&text](const Argument& argument) { return argument.flag == text; };
                auto found = std::find_if(list.begin(), list.end(), same);
                if (found == list.end()) found = list.insert(found, {text, {}, entry->field});
                current = &*found;
                current->values.clear();
            } else {
                if (current == nullptr) refuse("{}: {}: a value without a flag", settings.table.name, text);
                for (std::string& word : engine_words(*entry, settings.plan, text))
                    current->values.push_back(std::move(word));
            }
        }
    }
    return list;
}

} // namespace moe::tools
