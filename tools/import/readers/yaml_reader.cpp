// YAML by yaml-cpp. Sections become names with points; the recipes of Megatron-LM become flags.
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/names.hpp"
#include "tools/import/readers/readers.hpp"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <filesystem>
#include <sstream>

namespace moe::tools {
namespace {

constexpr int most_files = 200; // that one file stands over

std::size_t line_of(const YAML::Node& node) {
    const int line = node.Mark().line;
    return line < 0 ? 0 : static_cast<std::size_t>(line) + 1;
}

struct Reader {
    SettingsFile& into;
    const std::string& file;
    bool dumped = false; // a whole configuration, as Megatron-Bridge writes one beside its checkpoints
    bool base = false;   // a file below another, or above one: what has no value there may have one in the other
    std::size_t nodes = 0;

    void count(int depth) {
        if (depth > max_depth) refuse("{}: sections nested more than {} deep", file, max_depth);
        if (++nodes > max_settings * 4) refuse("{}: more than {} values", file, max_settings * 4);
    }

    static std::string scalar(const YAML::Node& node) {
        if (node.IsNull()) return "null";
        return node.Scalar();
    }

    // {_target_: torch.bfloat16, _call_: false}: a name of Python.
    static bool names_object(const YAML::Node& node) {
        return node.IsMap() && node["_target_"] && node["_target_"].IsScalar() && node["_call_"] &&
               node["_call_"].IsScalar() && (node["_call_"].Scalar() == "false" || node["_call_"].Scalar() == "False");
    }

    // {_target_: megatron.core.transformer.enums.AttnBackend, _name_: auto, ..}: a member of an enumeration.
    static bool names_member(const YAML::Node& node) {
        return node.IsMap() && node["_target_"] && node["_name_"] && node["_name_"].IsScalar();
    }

    std::string member(const YAML::Node& node, int depth) {
        count(depth);
        if (names_object(node)) return node["_target_"].Scalar();
        if (names_member(node)) return node["_name_"].Scalar();
        if (node.IsScalar() || node.IsNull()) return scalar(node);
        std::string text; // list of lists, as Python writes it
        for (const auto& item : node) {
            if (node.IsMap()) {
                text +=
                    (text.empty() ? "" : ",") + member(item.first, depth + 1) + ":" + member(item.second, depth + 1);
            } else {
                text += (text.empty() ? "" : ",") + member(item, depth + 1);
            }
        }
        return (node.IsMap() ? "{" : "[") + text + (node.IsMap() ? "}" : "]");
    }

    void flatten(const YAML::Node& node, const std::string& name, int depth) {
        count(depth);
        if (node.IsMap() && !names_object(node) && !names_member(node)) {
            for (const auto& item : node) {
                if (!item.first.IsScalar()) refuse("{}:{}: a name that is no text", file, line_of(item.first));
                const std::string key = item.first.Scalar();
                if (dumped && !base && (key == "_target_" || item.second.IsNull())) continue;
                flatten(item.second, name.empty() ? key : fmt::format("{}.{}", name, key), depth + 1);
            }
            return;
        }
        if (name.empty()) refuse("{}: no sections of settings", file);
        Setting setting{name, {}, file, line_of(node), dumped};
        if (node.IsSequence()) {
            for (const auto& item : node) setting.values.push_back(member(item, depth + 1));
            if (setting.values.empty()) setting.values.emplace_back("[]");
        } else {
            setting.values.push_back(member(node, depth));
        }
        if (node.IsNull()) // The section goes that a file below has there.
            std::erase_if(into.settings, [&name](const Setting& one) { return one.name.starts_with(name + "."); });
        into.set(std::move(setting));
    }
};

std::string flag_of(std::string key) {
    if (key.rfind("--", 0) == 0) return key;
    std::replace(key.begin(), key.end(), '_', '-');
    return "--" + key;
}

bool is(const std::string& text, const char* lower) {
    std::string folded = text;
    for (char& c : folded) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return folded == lower;
}

// ARGS of a recipe: true is a flag that is there, false and null one that is not, texts are words of a command line.
void read_recipe(Reader& reader, const YAML::Node& args, BashValues& values) {
    if (!args.IsMap()) refuse("{}:{}: ARGS must be a map of arguments", reader.file, line_of(args));
    for (const auto& item : args) {
        reader.count(1);
        if (!item.first.IsScalar()) refuse("{}:{}: a name that is no text", reader.file, line_of(item.first));
        Setting setting{flag_of(item.first.Scalar()), {}, reader.file, line_of(item.first)};
        const auto add = [&](const std::string& text) {
            std::istringstream stream(text);
            for (std::string word; stream >> word;) setting.values.push_back(word);
        };
        if (item.second.IsSequence()) {
            for (const auto& member : item.second) add(values.text(reader.member(member, 2), setting.line));
        } else {
            const std::string text = values.text(reader.member(item.second, 1), setting.line);
            const bool quoted = item.second.Tag() == "!";
            if (!quoted && (is(text, "false") || is(text, "null") || text.empty())) continue;
            if (quoted || !is(text, "true")) add(text);
        }
        reader.into.set(std::move(setting));
    }
}

void read_environment(Reader& reader, const YAML::Node& node, BashValues& values) {
    if (!node.IsMap()) refuse("{}:{}: variables must be a map of names and values", reader.file, line_of(node));
    for (const auto& item : node) {
        reader.count(1);
        if (!item.first.IsScalar() || !(item.second.IsScalar() || item.second.IsNull())) continue;
        reader.into.environment[item.first.Scalar()] = values.text(Reader::scalar(item.second), line_of(item.second));
    }
}

std::string format_of(const YAML::Node& root) {
    for (const char* section : {"mixed_precision", "ddp", "comm_overlap", "train", "rerun_state_machine"})
        if (root[section]) return "megatron-bridge";
    for (const char* section : {"step_scheduler", "dist_env", "distributed", "packed_sequence"})
        if (root[section]) return "automodel";
    return {};
}

// The files below which this one lies by its `defaults`, then its own sections over them.
void add_sections(Reader& reader, const YAML::Node& root, BashValues& values, int depth, int& files) {
    if (depth > max_depth || ++files > most_files) refuse("{}: too many files under defaults", reader.file);
    const YAML::Node below = root["defaults"];
    std::vector<std::string> names;
    if (below && below.IsScalar()) names.push_back(below.Scalar());
    if (below && below.IsSequence())
        for (const auto& item : below)
            if (item.IsScalar() && item.Scalar() != "_self_") names.push_back(item.Scalar());
    for (const std::string& name : names) {
        std::filesystem::path path = std::filesystem::path(reader.file).parent_path() / name;
        if (!path.has_extension()) path += ".yaml";
        std::error_code none;
        if (!values.follows() || !std::filesystem::is_regular_file(path, none)) {
            reader.into.unread.push_back({name, "no such file beside it", reader.file, line_of(below)});
            continue;
        }
        const std::string file = path.lexically_normal().string();
        const YAML::Node base = YAML::Load(read_file(file, max_file_bytes));
        if (!base.IsMap()) refuse("{}: must be a map of sections", file);
        Reader lower{reader.into, file, true, true};
        add_sections(lower, base, values, depth + 1, files);
    }
    for (const auto& item : root) {
        if (!item.first.IsScalar()) refuse("{}:{}: a name that is no text", reader.file, line_of(item.first));
        const std::string name = item.first.Scalar();
        if (name != "env_vars" && name != "_target_" && name != "defaults") reader.flatten(item.second, name, 1);
    }
}

} // namespace

void add_yaml(SettingsFile& into, const YAML::Node& node, const std::string& name, const std::string& file) {
    Reader{into, file}.flatten(node, name, name.empty() ? 0 : 1);
}

SettingsFile read_yaml(const std::string& text, const std::string& file, BashValues& values) {
    SettingsFile result;
    Reader reader{result, file};
    try {
        const YAML::Node root = YAML::Load(text);
        if (!root.IsMap()) refuse("{}: must be a map of sections", file);
        if (is_primus(root)) return read_primus(root, file, values);
        const YAML::Node args = root["ARGS"] ? root["ARGS"] : root["MODEL_ARGS"];
        for (const char* section : {"ENV_VARS", "env_vars"})
            if (root[section] && root[section].IsMap()) read_environment(reader, root[section], values);
        if (args) {
            result.format = "megatron-lm";
            read_recipe(reader, args, values);
            return result;
        }
        if (root["_target_"] && root["_target_"].IsScalar() && root["_target_"].Scalar().starts_with("nemo."))
            refuse(
                "{}:{}: a recipe of NeMo 2 is not read: give the script that starts it with Megatron-LM's arguments, "
                "or a log of them",
                file, line_of(root["_target_"]));
        result.format = format_of(root);
        reader.dumped = root["_target_"].IsDefined();
        int files = 0;
        add_sections(reader, root, values, 0, files);
        fill_references(result);
        take_program_of(result);
    } catch (const YAML::Exception& error) {
        refuse("{}:{}: not valid YAML: {}", file, error.mark.line + 1, shown(error.msg));
    }
    return result;
}

} // namespace moe::tools
