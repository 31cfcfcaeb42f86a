// Names of precisions are looked up in the table of words, where launch finds them too.
#include "tools/import/bridge_settings.hpp"

#include "planner/base/profile.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan.hpp"
#include "tools/engines/engine_value.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace moe::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* section = "mixed_precision";

const std::string* value_of(const SettingsFile& file, const std::string& name) {
    const Setting* setting = file.find(name);
    return setting != nullptr && setting->values.size() == 1 ? &setting->values.front() : nullptr;
}

// How many of the fields that tell formats apart have the value in the file that the name stands for.
int agreeing(const SettingsFile& file, const Json& fields) {
    int count = 0;
    for (const char* key : {"fp8", "fp8_recipe", "fp4", "fp8_amax_history_len"}) {
        const std::string* value = value_of(file, fmt::format("{}.{}", section, key));
        const std::string usual = fields.contains(key) ? text_of_json(fields[key]) : "null";
        count += value != nullptr && *value == usual ? 4 : 0;
        if (value == nullptr && std::string(key) != "fp8_amax_history_len") count += usual == "null" ? 4 : 0;
    }
    return count;
}

// [[embedding, decoder], [decoder, loss]] as one letter for each layer and a bar between stages, as scripts write it.
// Empty where a member is none that layouts have.
std::string layout_of_lists(const std::vector<std::string>& stages) {
    static const std::map<std::string, char> letters{{"embedding", 'E'}, {"decoder", 't'}, {"mtp", 'm'}, {"loss", 'L'}};
    std::string layout;
    for (const std::string& stage : stages) {
        if (!stage.starts_with('[') || !stage.ends_with(']')) return {};
        layout += layout.empty() ? "" : "|";
        const std::string inside = stage.substr(1, stage.size() - 2);
        for (std::size_t at = 0; at < inside.size();) {
            const std::size_t comma = std::min(inside.find(',', at), inside.size());
            const auto letter = letters.find(inside.substr(at, comma - at));
            if (letter == letters.end()) return {};
            layout += letter->second;
            at = comma + 1;
        }
    }
    return layout;
}

// What the classes make of fields that a configuration leaves to them.
void complete_fields(SettingsFile& file) {
    const auto set = [&file](const std::string& name, const Setting& like, std::vector<std::string> values) {
        Setting setting = like;
        setting.name = name;
        setting.values = std::move(values);
        file.set(std::move(setting));
    };
    const Setting* granularity = file.find("model.recompute_granularity");
    if (granularity != nullptr && granularity->text() == "selective" && file.find("model.recompute_modules") == nullptr)
        set("model.recompute_modules", *granularity, {"core_attn"});
    // The older name of the modules that graphs hold; where both have their defaults, they are the word "full".
    const Setting* scope = file.find("model.cuda_graph_scope");
    if (const Setting* modules = file.find("model.cuda_graph_modules"); modules != nullptr && modules->dumped &&
                                                                        modules->text() == "full" && scope != nullptr &&
                                                                        scope->text() != "full") {
        set("model.cuda_graph_modules", *scope, scope->values);
        set("model.cuda_graph_scope", *scope, {"null"});
    }
    if (const Setting* lists = file.find("model.pipeline_model_parallel_layout"))
        if (const std::string layout = layout_of_lists(lists->values); !layout.empty())
            set(lists->name, *lists, {layout});
}

} // namespace

void expand_bridge(SettingsFile& file, const EngineTable& table) {
    complete_fields(file);
    const Json& known = table.mixed_precision;
    if (!known.is_object()) return;
    const auto fields_of = [&known](const std::string& name) {
        Json fields = known["fields"];
        fields.update(known["names"][name]);
        return fields;
    };
    std::string name;
    if (const std::string* given = value_of(file, section)) {
        name = *given;
    } else {
        int best = -1;
        for (const auto& [candidate, own] : known["names"].items())
            if (const int count = agreeing(file, fields_of(candidate)); count > best) {
                best = count;
                name = candidate;
            }
        bool any = false;
        for (const Setting& setting : file.settings) any = any || setting.name.rfind("mixed_precision.", 0) == 0;
        if (!any) return;
        file.set({section, {name}, file.settings.front().file, 0});
    }
    if (!known["names"].contains(name)) return;
    const Json fields = fields_of(name);
    for (const auto& [key, value] : fields.items()) {
        const std::string whole = fmt::format("{}.{}", section, key);
        if (file.find(whole) == nullptr && file.settings.size() < max_settings)
            file.set({whole, {text_of_json(value)}, file.find(section)->file, file.find(section)->line});
    }
}

std::string model_of_recipe(const EngineTable& table, const std::string& recipe) {
    for (const EngineRecipe& known : table.recipes) {
        if (known.name != recipe) continue;
        for (const std::string& name : profile_names("models")) {
            plan::Plan plan;
            plan.model = std::make_shared<const model::Model>(families::load_model(name));
            if (known.when.holds(plan)) return name;
        }
    }
    return {};
}

} // namespace moe::tools
