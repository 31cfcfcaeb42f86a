// Reads a tokenizer.json of Hugging Face's `tokenizers` and refuses what byte-level encoding here does not do.
#include "engine/data/text/bpe.hpp"

#include "planner/base/error.hpp"
#include "planner/base/json.hpp"
#include "planner/base/names.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>

namespace moe::data {

namespace {

using Json = nlohmann::json;

// GPT-2's pieces, which a ByteLevel pre-tokenizer with use_regex stands for (Radford et al. 2019, encoder.py).
constexpr const char* gpt2_pattern = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

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

// ICU's \s leaves out two of Unicode's white space characters, which the patterns' own engine counts in.
std::string with_white_space(const std::string& pattern) {
    std::string out;
    for (std::size_t i = 0; i < pattern.size(); ++i) {
        const char next = pattern[i] == '\\' && i + 1 < pattern.size() ? pattern[i + 1] : '\0';
        if (next == '\0') {
            out += pattern[i];
            continue;
        }
        out += next == 's' ? "\\p{White_Space}" : next == 'S' ? "\\P{White_Space}" : std::string{'\\', next};
        ++i;
    }
    return out;
}

} // namespace

class TokenizerFile {
public:
    TokenizerFile(const std::string& path, BytePairEncoder& encoder) : path_(path), encoder_(encoder) {
        const Json json = load_json<Json>(path, long_json);
        if (!json.is_object() || !json.contains("model") || !json["model"].is_object())
            refuse("{}: field \"model\" is missing: this is no tokenizer.json", path);
        read_model(json["model"]);
        read_added(json);
        std::vector<SplitStep> steps;
        if (given(json, "pre_tokenizer")) read_steps(json["pre_tokenizer"], steps);
        if (!byte_level_) refuse("{}: pre_tokenizer: has no ByteLevel; only byte-level tokenizers are read", path);
        encoder.splitter_ = std::make_unique<Splitter>(steps, reads_nfc(json), path);
    }

private:
    void read_model(const Json& model) {
        if (const std::string type = word(model, "type", "BPE"); type != "BPE")
            refuse("{}: model.type = {}: only BPE is read", path_, shown(type));
        for (const char* key : {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"})
            if (given(model, key) && model[key] != "") // NOLINT(readability-container-size-empty): no container
                refuse("{}: model.{} = {}: only null is read", path_, key, shown(model[key].dump()));
        if (flag(model, "byte_fallback", false))
            refuse("{}: model.byte_fallback = true: only byte-level BPE is read, not SentencePiece's", path_);
        encoder_.ignore_merges_ = flag(model, "ignore_merges", false);
        if (!model.contains("vocab") || !model["vocab"].is_object()) refuse("{}: model.vocab is missing", path_);
        for (const auto& [token, id] : model["vocab"].items()) {
            ids_[token] = id_of(id, "model.vocab", token);
        }
        read_alphabet();
        read_merges(model);
        for (const auto& [token, id] : ids_) encoder_.whole_.emplace(bytes_of(token), id);
    }

    // Vocabularies of today have up to 262,144 ids (Gemma 3), and a model a row of its embedding for each.
    std::int32_t id_of(const Json& id, const char* field, const std::string& token) {
        constexpr std::int64_t most = 1 << 24;
        const bool whole = id.is_number_integer() && (!id.is_number_unsigned() || id.get<std::uint64_t>() < most);
        if (!whole || id.get<std::int64_t>() < 0 || id.get<std::int64_t>() >= most)
            refuse("{}: {}: {} has the id {}: must be a whole number from 0 to {}", path_, field, shown(token),
                   shown(id.dump()), most - 1);
        encoder_.vocabulary_ = std::max(encoder_.vocabulary_, id.get<std::int64_t>() + 1);
        return id.get<std::int32_t>();
    }

    // The characters that GPT-2 writes bytes as: printable Latin-1 as itself, the others from U+0100 on.
    void read_alphabet() {
        int shifted = 0;
        for (int byte = 0; byte < 256; ++byte) {
            const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
            const int code = printable ? byte : 256 + shifted++;
            const std::string text =
                code < 128 ? std::string(1, static_cast<char>(code))
                           : std::string{static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
            byte_of_[text] = static_cast<char>(byte);
            const auto id = ids_.find(text);
            if (id == ids_.end())
                refuse("{}: model.vocab has no token for byte {}: this is no byte-level BPE", path_, byte);
            encoder_.byte_id_[byte] = id->second;
        }
    }

    // The bytes that a token stands for; the token itself where it is not written in that alphabet.
    std::string bytes_of(const std::string& token) const {
        std::string bytes;
        for (std::size_t i = 0; i < token.size();) {
            const std::size_t length = static_cast<unsigned char>(token[i]) < 0x80 ? 1 : 2;
            const auto byte = byte_of_.find(token.substr(i, length));
            if (byte == byte_of_.end()) return token;
            bytes += byte->second;
            i += length;
        }
        return bytes;
    }

    void read_merges(const Json& model) {
        if (!model.contains("merges") || !model["merges"].is_array()) refuse("{}: model.merges is missing", path_);
        std::int32_t rank = 0;
        for (const Json& merge : model["merges"]) {
            std::string left, right;
            if (merge.is_string()) {
                const auto text = merge.get<std::string>();
                const std::size_t blank = text.find(' ');
                left = text.substr(0, blank);
                right = blank == std::string::npos ? "" : text.substr(blank + 1);
            } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
                left = merge[0].get<std::string>();
                right = merge[1].get<std::string>();
            }
            const auto a = ids_.find(left), b = ids_.find(right), both = ids_.find(left + right);
            if (a == ids_.end() || b == ids_.end() || both == ids_.end())
                refuse("{}: model.merges: entry {} = {} joins what is not in the vocabulary", path_, rank,
                       shown(merge.dump()));
            encoder_.merges_.emplace(static_cast<std::uint64_t>(a->second) << 32 |
                                         static_cast<std::uint32_t>(b->second),
                                     BytePairEncoder::Merge{rank, both->second});
            ++rank;
        }
    }

    void read_added(const Json& json) {
        if (!given(json, "added_tokens")) return;
        for (const Json& token : json["added_tokens"]) {
            const std::string text = token.is_object() ? word(token, "content", "") : "";
            if (text.empty() || !token.contains("id"))
                refuse("{}: added_tokens: an entry without content or id", path_);
            const std::int32_t id = id_of(token["id"], "added_tokens", text);
            for (const char* key : {"lstrip", "rstrip", "single_word"})
                if (flag(token, key, false))
                    refuse("{}: added_tokens: {}: {} = true: only false is read", path_, shown(text), key);
            encoder_.added_.push_back({text, id});
            encoder_.begins_added_[static_cast<unsigned char>(text[0])] = true;
        }
        std::stable_sort(encoder_.added_.begin(), encoder_.added_.end(),
                         [](const auto& a, const auto& b) { return a.text.size() > b.text.size(); });
    }

    bool reads_nfc(const Json& json) const {
        if (!given(json, "normalizer")) return false;
        const Json& normalizer = json["normalizer"];
        const std::string type = word(normalizer, "type", "");
        if (type == "NFC") return true;
        if (type == "Sequence" && normalizer.contains("normalizers") && normalizer["normalizers"].empty()) return false;
        refuse("{}: normalizer.type = {}: only NFC is read", path_, shown(type));
    }

    void read_steps(const Json& step, std::vector<SplitStep>& steps) {
        const std::string type = word(step, "type", "");
        if (type == "Sequence" && step.contains("pretokenizers") && step["pretokenizers"].is_array()) {
            for (const Json& part : step["pretokenizers"]) read_steps(part, steps);
        } else if (type == "ByteLevel") {
            if (flag(step, "add_prefix_space", true))
                refuse("{}: pre_tokenizer: ByteLevel with add_prefix_space = true: only false is read", path_);
            byte_level_ = true;
            if (flag(step, "use_regex", true)) steps.push_back({with_white_space(gpt2_pattern), true});
        } else if (type == "Digits") {
            steps.push_back({flag(step, "individual_digits", false) ? "\\p{N}" : "\\p{N}+", true});
        } else if (type == "Split") {
            read_split(step, steps);
        } else {
            refuse("{}: pre_tokenizer.type = {}: only ByteLevel, Split, Digits and Sequence are read", path_,
                   shown(type));
        }
    }

    void read_split(const Json& step, std::vector<SplitStep>& steps) const {
        const Json pattern = step.value("pattern", Json::object());
        const std::string regex = word(pattern, "Regex", ""), literal = word(pattern, "String", "");
        const std::string behavior = word(step, "behavior", "");
        const bool invert = flag(step, "invert", false);
        const bool between = behavior == "Isolated" && !invert;
        if (!between && !(behavior == "Removed" && invert))
            refuse(
                "{}: pre_tokenizer: Split with behavior = {}, invert = {}: only Isolated, and Removed with invert, are "
                "read",
                path_, shown(behavior), invert);
        if (regex.empty() && literal.empty()) refuse("{}: pre_tokenizer: Split without a pattern", path_);
        steps.push_back({regex.empty() ? "\\Q" + literal + "\\E" : with_white_space(regex), between});
    }

    std::string path_;
    BytePairEncoder& encoder_;
    bool byte_level_ = false;
    std::unordered_map<std::string, std::int32_t> ids_; // ids of tokens as they are written
    std::unordered_map<std::string, char> byte_of_;
};

BytePairEncoder::BytePairEncoder(const std::string& path) { TokenizerFile(path, *this); }

} // namespace moe::data
