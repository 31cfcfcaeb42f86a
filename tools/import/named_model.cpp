// Names of models and of tokenizers, as they are published, and the profiles that they stand for.
#include "tools/import/named_model.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "planner/base/profile.hpp"
#include "planner/model/families/load_model.hpp"
#include "tools/import/readers/bash_test.hpp"

#include <algorithm>
#include <cctype>
#include <filesystem>

namespace moe::tools {
namespace {

// Whether what follows a model's name tells of another model, made of it or beside it: "-Omni", "-PRM800K", "-EAGLE3".
bool names_another(const std::string& rest) {
    for (std::size_t at = 0; at < rest.size();) {
        const std::size_t end = std::min(rest.find_first_of("-_", at), rest.size());
        const std::string word = rest.substr(at, end - at);
        for (const char* whole : {"asr", "rm", "vl"})
            if (word == whole) return true;
        for (const char* start : {"audio", "classifi", "dflash", "distill", "draft", "eagle", "embed", "guard", "omni",
                                  "prm", "prun", "reap", "rerank", "reward", "vision"})
            if (word.starts_with(start)) return true;
        at = end + 1;
    }
    return false;
}

// The profile that a published name begins with, such as that of a tokenizer or a folder of weights:
// "Qwen/Qwen3-30B-A3B-Base", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16". Empty: none.
std::string profile_named_after(const std::string& published) {
    const auto lower = [](std::string text) {
        for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
        return text;
    };
    std::string text = lower(published);
    while (text.ends_with('/')) text.pop_back();
    text.erase(0, text.rfind('/') + 1);
    for (const char* maker : {"nvidia-", "meta-"})
        if (text.starts_with(maker)) text.erase(0, std::string(maker).size());
    if (text.starts_with("llama-")) text.erase(5, 1); // "Llama-3.1-405B" is the profile "Llama3.1-405B".
    std::string best;
    for (const std::string& name : profile_names("models")) {
        // "GLM-4.5V" and "MiniMax-M2.5" are other models than those of the shorter names.
        const bool whole = text.size() == name.size() || text[std::min(name.size(), text.size() - 1)] == '-';
        if (name.size() > best.size() && text.starts_with(lower(name)) && whole) best = name;
    }
    return names_another(text.substr(best.size())) ? std::string() : best;
}

// The config.json in a folder of weights, where the file's paths are those of this machine; empty: there is none.
std::string config_in(const std::string& folder, const std::string& file) {
    namespace fs = std::filesystem;
    std::error_code none;
    for (const fs::path& path : {fs::path(folder), fs::path(file).parent_path() / folder})
        if (fs::is_regular_file(path / "config.json", none)) return (path / "config.json").string();
    return {};
}

} // namespace

NamedModel named_model(const SettingsFile& file, const ReaderTable& reader, bool alone) {
    NamedModel named;
    for (const std::string& name : reader.names) {
        const Setting* setting = file.find(name);
        if (setting == nullptr || setting->values.size() != 1) continue;
        named.published = as_written(setting->values[0]);
        if (!alone && !setting->unknown()) named.model = config_in(named.published, setting->file);
        if (named.model.empty()) named.model = profile_named_after(named.published);
        if (named.model.empty()) continue;
        named.why = fmt::format("{}: {} is taken for {} by its name: --model gives another", setting->place(),
                                shown(named.published), named.model);
        break;
    }
    return named;
}

Facts likely_vocabulary(const SettingsFile& file, const ReaderTable& reader, std::string& why) {
    for (const TokenizerName& known : reader.tokenizers) {
        const Setting* setting = file.find(known.setting);
        if (setting == nullptr || setting->values.size() != 1) continue;
        const std::string tokenizer = as_written(setting->values[0]); // Folders before its name may be variables.
        if (!matches_pattern(tokenizer, known.value)) continue;
        const std::string name = known.vocab.empty() ? profile_named_after(tokenizer) : std::string();
        if (known.vocab.empty() && name.empty()) continue;
        const std::string vocab = name.empty() ? known.vocab : fmt::format("{}", families::load_model(name).vocab);
        why = fmt::format("{}: no size of the vocabulary is set: {} is taken{}, by {} {}", setting->place(), vocab,
                          name.empty() ? "" : ", that of " + name, setting->name, shown(setting->text()));
        return {{"model.vocab", vocab}};
    }
    return {};
}

} // namespace moe::tools
