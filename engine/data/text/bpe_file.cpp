// Reads a tokenizer.json of Hugging Face's `tokenizers` and refuses what byte-level encoding here does not do.
#include "engine/data/text/bpe.hpp"

#include "engine/data/text/tokenizer_json.hpp"
#include "planner/base/error.hpp"
#include "planner/base/names.hpp"

#include <nlohmann/json.hpp>

namespace moe::data {

namespace {

using Json = nlohmann::json;

// GPT-2's pieces, which a ByteLevel pre-tokenizer with use_regex stands for (Radford et al. 2019, encoder.py).
constexpr const char* gpt2_pattern = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

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

class BytePairFile {
public:
    BytePairFile(const Json& json, const std::string& path, BytePairEncoder& encoder) : path_(path), encoder_(encoder) {
        read_model(json["model"]);
        encoder.added_ = read_added_tokens(json, path, encoder.vocabulary_);
        std::vector<SplitStep> steps;
        if (given(json, "pre_tokenizer")) read_steps(json["pre_tokenizer"], steps);
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
            ids_[token] = id_of(id, path_, "model.vocab", token, encoder_.vocabulary_);
        }
        read_alphabet();
        read_merges(model);
        for (const auto& [token, id] : ids_) encoder_.whole_.emplace(bytes_of(token), id);
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
            const auto [left, right] = merged_pair(merge);
            const auto a = ids_.find(left), b = ids_.find(right), both = ids_.find(left + right);
            if (a == ids_.end() || b == ids_.end() || both == ids_.end())
                refuse("{}: model.merges: entry {} = {} joins what is not in the vocabulary", path_, rank,
                       shown(merge.dump()));
            encoder_.merges_.add(a->second, b->second, rank++, both->second);
        }
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
    std::unordered_map<std::string, std::int32_t> ids_; // ids of tokens as they are written
    std::unordered_map<std::string, char> byte_of_;
};

BytePairEncoder::BytePairEncoder(const Json& file, const std::string& path) { BytePairFile(file, path, *this); }

} // namespace moe::data
