// Reads what every tokenizer.json has, and chooses the kind of tokenizer.
#include "engine/data/text/tokenizer_json.hpp"

#include "engine/base/source_file.hpp"
#include "engine/data/text/bpe.hpp"
#include "engine/data/text/pieces.hpp"
#include "engine/data/text/tokenizer.hpp"
#include "planner/base/error.hpp"
#include "planner/base/json.hpp"
#include "planner/base/names.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>

namespace moe::data {

using Json = nlohmann::json;

std::string word(const Json& json, const char* key, const std::string& fallback) {
    const auto at = json.find(key);
    return at != json.end() && at->is_string() ? at->get<std::string>() : fallback;
}
bool flag(const Json& json, const char* key, bool fallback) {
    const auto at = json.find(key);
    return at != json.end() && at->is_boolean() ? at->get<bool>() : fallback;
}
bool given(const Json& json, const char* key) {
    const auto at = json.find(key);
    return at != json.end() && !at->is_null();
}

std::pair<std::string, std::string> merged_pair(const Json& merge) {
    if (merge.is_string()) {
        const auto text = merge.get<std::string>();
        const std::size_t blank = text.find(' ');
        return {text.substr(0, blank), blank == std::string::npos ? "" : text.substr(blank + 1)};
    }
    if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string())
        return {merge[0].get<std::string>(), merge[1].get<std::string>()};
    return {};
}

bool has_step(const Json& pre_tokenizer, const std::string& type) {
    if (!pre_tokenizer.is_object()) return false;
    if (word(pre_tokenizer, "type", "") == type) return true;
    const auto steps = pre_tokenizer.find("pretokenizers");
    return steps != pre_tokenizer.end() && steps->is_array() &&
           std::any_of(steps->begin(), steps->end(), [&type](const Json& step) { return has_step(step, type); });
}

// Vocabularies of today have up to 262,144 ids (Gemma 3), and a model a row of its embedding for each.
std::int32_t id_of(const Json& id, const std::string& path, const char* field, const std::string& token,
                   std::int64_t& vocabulary) {
    constexpr std::int64_t most = 1 << 24;
    const bool whole = id.is_number_integer() && (!id.is_number_unsigned() || id.get<std::uint64_t>() < most);
    if (!whole || id.get<std::int64_t>() < 0 || id.get<std::int64_t>() >= most)
        refuse("{}: {}: {} has the id {}: must be a whole number from 0 to {}", path, field, shown(token),
               shown(id.dump()), most - 1);
    vocabulary = std::max(vocabulary, id.get<std::int64_t>() + 1);
    return id.get<std::int32_t>();
}

AddedTokens read_added_tokens(const Json& json, const std::string& path, std::int64_t& vocabulary) {
    AddedTokens added;
    if (!given(json, "added_tokens")) return added;
    for (const Json& token : json["added_tokens"]) {
        const std::string text = token.is_object() ? word(token, "content", "") : "";
        if (text.empty() || !token.contains("id")) refuse("{}: added_tokens: an entry without content or id", path);
        const std::int32_t id = id_of(token["id"], path, "added_tokens", text, vocabulary);
        for (const char* key : {"lstrip", "rstrip", "single_word"})
            if (flag(token, key, false))
                refuse("{}: added_tokens: {}: {} = true: only false is read", path, shown(text), key);
        added.add({text, id});
    }
    return added;
}

namespace {

std::unique_ptr<const Encoder> encoder_of_json(const std::string& path) {
    const auto json = load_json<Json>(path, long_json);
    if (!json.is_object() || !json.contains("model") || !json["model"].is_object())
        refuse("{}: field \"model\" is missing: this is no tokenizer.json", path);
    const bool bytes = word(json["model"], "type", "BPE") == "BPE" && given(json, "pre_tokenizer") &&
                       has_step(json["pre_tokenizer"], "ByteLevel");
    if (bytes) return std::make_unique<BytePairEncoder>(json, path);
    return std::make_unique<PieceEncoder>(piece_model_of_json(json, path));
}

// A SentencePiece model begins with the tag of its first piece, which is an end of line for JSON.
bool is_json(const std::string& path) {
    std::string head;
    engine::SourceFile(path).next(head, 64);
    const std::size_t first = head.find_first_not_of(" \t\r\n");
    return first != std::string::npos && head[first] == '{';
}

} // namespace

Tokenizer::Tokenizer(const std::string& path) {
    if (is_json(path))
        encoder_ = encoder_of_json(path);
    else
        encoder_ = std::make_unique<PieceEncoder>(piece_model_of_sentencepiece(path));
}

} // namespace moe::data
