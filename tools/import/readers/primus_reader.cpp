// Configurations of Primus: a module's overrides over the files of its framework and of its model.
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/names.hpp"
#include "tools/import/readers/readers.hpp"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <filesystem>

namespace moe::tools {
namespace {

namespace fs = std::filesystem;

constexpr int most_ancestors = 8; // folders between a configuration and that of Primus
constexpr int most_files = 200;

// ${NAME:value} as a variable that an earlier file sets, or the value behind the colon.
std::string filled(std::string text, const BashValues& values) {
    for (std::size_t at = text.find("${"); at != std::string::npos; at = text.find("${", at)) {
        const std::size_t end = text.find('}', at);
        if (end == std::string::npos) break;
        const std::string inside = text.substr(at + 2, end - at - 2);
        const std::size_t colon = inside.find(':');
        const auto variable = values.variables().find(inside.substr(0, colon));
        std::string value = unknown_mark + text.substr(at, end + 1 - at) + unknown_mark;
        if (variable != values.variables().end() && variable->second.values.size() == 1)
            value = variable->second.values[0];
        else if (colon != std::string::npos)
            value = inside.substr(colon + 1);
        text.replace(at, end + 1 - at, value);
        at += value.size();
    }
    return text;
}

struct PrimusReader {
    const std::string& file;
    const BashValues& values;
    SettingsFile into;
    std::string framework;
    int files = 0;

    std::string text_of(const YAML::Node& node) const {
        return node && node.IsScalar() ? filled(node.Scalar(), values) : std::string();
    }

    void add(const YAML::Node& node, const std::string& from, bool stated) {
        SettingsFile one;
        add_yaml(one, node, "", from);
        for (Setting& setting : one.settings) {
            for (std::string& value : setting.values) value = filled(value, values);
            setting.dumped = stated;
            setting.named = framework == "megatron";
            into.set(std::move(setting));
        }
    }

    // `stated`: the file has all settings of the program, most at their defaults, as those do that it extends.
    void add_base(const fs::path& path, bool stated, int depth = 0) {
        if (depth > max_depth || ++files > most_files) refuse("{}: too many files under extends", path.string());
        YAML::Node root = YAML::Load(read_file(path.string(), max_file_bytes));
        if (root.IsNull()) return;
        if (!root.IsMap()) refuse("{}: must be a map of settings", path.string());
        for (const char* key : {"extends", "bases"}) {
            if (const YAML::Node below = root[key]; below && below.IsSequence())
                for (const auto& name : below) add_base(path.parent_path() / text_of(name), true, depth + 1);
            root.remove(key);
        }
        if (root.size() > 0) add(root, path.string(), stated || depth > 0);
    }

    // Adds the file of that name in primus/configs/KIND/FRAMEWORK; where there is none the name is left unread.
    bool add_config(const char* kind, const std::string& name, std::size_t line) {
        fs::path folder = fs::absolute(file).parent_path();
        std::error_code none;
        for (int above = 0; values.follows() && above < most_ancestors; ++above, folder = folder.parent_path()) {
            const fs::path path = folder / "primus" / "configs" / kind / framework / name;
            if (!fs::is_regular_file(path, none)) continue;
            add_base(path, std::string_view(kind) == "modules");
            return true;
        }
        into.unread.push_back({name,
                               fmt::format("no folder above the file has it in primus/configs/{}/{}", kind, framework),
                               file, line});
        return false;
    }
};

std::size_t line_of(const YAML::Node& node) { return static_cast<std::size_t>(std::max(node.Mark().line, 0)) + 1; }

} // namespace

bool is_primus(const YAML::Node& root) {
    const YAML::Node modules = root["modules"];
    if (!modules || !modules.IsMap()) return false;
    return std::any_of(modules.begin(), modules.end(),
                       [](const auto& item) { return item.second.IsMap() && item.second["framework"]; });
}

SettingsFile read_primus(const YAML::Node& root, const std::string& file, const BashValues& values) {
    PrimusReader reader{file, values, {}, "", 0};
    for (const auto& item : root["modules"]) {
        const YAML::Node module = item.second;
        if (!module.IsMap() || !module["framework"]) continue;
        reader.framework = reader.text_of(module["framework"]);
        if (reader.framework != "megatron" && reader.framework != "torchtitan")
            refuse("{}:{}: framework: {} is not read: megatron and torchtitan are", file, line_of(module["framework"]),
                   shown(reader.framework));
        const std::string model = reader.text_of(module["model"]);
        if (module["config"]) reader.add_config("modules", reader.text_of(module["config"]), line_of(module["config"]));
        if (!model.empty() && !reader.add_config("models", model, line_of(module["model"]))) {
            Setting name{"model", {fs::path(model).filename().string()}, file, line_of(module["model"])};
            std::string& words = name.values[0]; // "mixtral_8x7B_v0.1.yaml"
            if (words.ends_with(".yaml")) words.erase(words.size() - 5);
            std::replace(words.begin(), words.end(), '_', '-');
            name.named = true;
            if (reader.framework == "megatron") reader.into.set(std::move(name));
        }
        if (const YAML::Node overrides = module["overrides"]; overrides && overrides.IsMap() && overrides.size() > 0)
            reader.add(overrides, file, false);
        break; // Further modules are other trainings.
    }
    reader.into.format = reader.framework == "megatron" ? "megatron-lm" : "torchtitan";
    reader.into.program = "primus";
    return std::move(reader.into);
}

} // namespace moe::tools
