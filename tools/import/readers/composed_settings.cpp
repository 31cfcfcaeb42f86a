// Settings that refer to others, as OmegaConf writes them, and which program's settings they are.
#include "planner/base/error.hpp"
#include "tools/import/readers/readers.hpp"

#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <optional>
#include <sstream>

namespace moe::tools {
namespace {

constexpr int most_references = 10'000;        // of all values
constexpr std::size_t longest_value = 1 << 12; // characters of a value that is made of others

std::string trimmed(std::string text) {
    const auto blank = [](char c) { return c == ' ' || c == '\'' || c == '"'; };
    while (!text.empty() && blank(text.back())) text.pop_back();
    while (!text.empty() && blank(text.front())) text.erase(0, 1);
    return text;
}

// The value of ${NAME} in a setting: from the top, or from the section of the setting where NAME begins with points.
// Files that others put in a section of their own name it too: its first word is left out then.
std::optional<std::string> referred(const SettingsFile& file, const std::string& setting, std::string name) {
    std::string section = setting;
    const bool relative = name.starts_with('.');
    for (; name.starts_with('.'); name.erase(0, 1)) {
        const std::size_t point = section.rfind('.');
        section.erase(point == std::string::npos ? 0 : point);
    }
    if (relative && !section.empty()) name = section + "." + name;
    const Setting* found = file.find(name);
    if (found == nullptr && name.find('.') != std::string::npos) found = file.find(name.substr(name.find('.') + 1));
    if (found == nullptr || found->values.size() != 1) return std::nullopt;
    return found->values[0];
}

std::optional<std::int64_t> whole(const std::string& text) {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size() || std::abs(value) > 1 << 30) return std::nullopt;
    return value;
}

// Arithmetic that NeMo's programs have in their files.
std::optional<std::string> calculated(const std::string& function, const std::string& arguments) {
    std::vector<std::int64_t> numbers;
    std::istringstream stream(arguments);
    for (std::string argument; std::getline(stream, argument, ',');) {
        const auto number = whole(trimmed(argument));
        if (!number) return std::nullopt;
        numbers.push_back(*number);
    }
    if (numbers.size() != 2) return std::nullopt;
    const std::int64_t a = numbers[0], b = numbers[1];
    if (function == "mul" || function == "multiply") return fmt::format("{}", a * b);
    if (function == "add" || function == "sum") return fmt::format("{}", a + b);
    if (function == "max") return fmt::format("{}", std::max(a, b));
    if (b == 0) return std::nullopt;
    if (function == "div" || function == "divide_floor") return fmt::format("{}", a / b);
    if (function == "divide_ceil") return fmt::format("{}", (a + b - 1) / b);
    return std::nullopt;
}

// `count`: references that were followed so far.
std::string filled(const SettingsFile& file, const std::string& setting, std::string text, int& count) {
    while (text.size() <= longest_value && ++count <= most_references) {
        const std::size_t begin = text.rfind("${"), end = text.find('}', begin);
        if (begin == std::string::npos || end == std::string::npos) return text;
        const std::string inside = text.substr(begin + 2, end - begin - 2);
        const std::size_t colon = inside.find(':');
        const auto value = colon == std::string::npos ? referred(file, setting, inside)
                                                      : calculated(inside.substr(0, colon), inside.substr(colon + 1));
        if (!value) break;
        text = text.substr(0, begin) + *value + text.substr(end + 1);
    }
    return unknown_mark + text + unknown_mark;
}

bool one_of(const std::string& word, std::initializer_list<const char*> list) {
    return std::any_of(list.begin(), list.end(), [&word](const char* other) { return word == other; });
}

// The program whose settings they are, by names of theirs; empty: none.
std::string program_of(const SettingsFile& file) {
    const auto any = [&file](const char* section) {
        return std::any_of(file.settings.begin(), file.settings.end(),
                           [section](const Setting& setting) { return setting.name.starts_with(section); });
    };
    if (any("actor_rollout_ref.")) {
        for (const char* name : {"actor_rollout_ref.actor.strategy", "model_engine"})
            if (const Setting* engine = file.find(name))
                return one_of(engine->text(), {"fsdp", "fsdp2", "dp"}) ? "verl-fsdp" : "verl";
        const Setting* config = file.find("--config-name");
        const bool megatron = any("actor@actor_rollout_ref.actor") || any("actor_rollout_ref.actor.megatron.") ||
                              (config != nullptr && config->text().find("megatron") != std::string::npos);
        return megatron ? "verl" : "verl-fsdp";
    }
    if (any("model.partial_pretrain")) return "verl-sft";
    if (any("--rollout-batch-size") || any("--actor-num-gpus-per-node")) return "slime";
    if (file.has("policy.dtensor_cfg.enabled") && !file.has("policy.megatron_cfg.enabled")) return "nemo-rl-dtensor";
    if (any("policy.megatron_cfg.") || any("policy.dtensor_cfg.")) return "nemo-rl";
    const bool trains = any("trainer.devices") || any("trainer.num_nodes") || any("exp_manager.");
    if (trains && any("model.tensor_model_parallel_size")) return "nemo";
    return {};
}

} // namespace

void fill_references(SettingsFile& file) {
    int count = 0;
    for (Setting& setting : file.settings)
        for (std::string& value : setting.values)
            if (value.find("${") != std::string::npos && !has_unknown(value))
                value = filled(file, setting.name, value, count);
}

void take_program_of(SettingsFile& file) {
    const std::string program = program_of(file);
    if (program.empty()) return;
    fill_references(file);
    file.program = program;
    // What FSDP trains is said in the words of the engine that shards transformers' models by it.
    file.format = one_of(program, {"verl-fsdp", "verl-sft", "nemo-rl-dtensor"}) ? "automodel" : "megatron-lm";
}

} // namespace moe::tools
