// Reads a tokenizer.json of pieces, Unigram or BPE over characters, and refuses what is not done here.
#include "engine/data/text/pieces.hpp"

#include "engine/data/text/split.hpp"
#include "engine/data/text/tokenizer_json.hpp"
#include "planner/base/error.hpp"
#include "planner/base/names.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>

namespace moe::data {

namespace {

using Json = nlohmann::json;

constexpr std::size_t longest_step = 64; // bytes

// RFC 4648, section 4; nothing where it is none.
std::optional<std::string> from_base64(const std::string& text) {
    constexpr std::string_view digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string out;
    std::uint32_t bits = 0;
    int held = 0;
    for (std::size_t i = 0; i < text.size(); ++i) {
        if (text[i] == '=' && i + 2 >= text.size()) continue;
        const std::size_t digit = digits.find(text[i]);
        if (digit == std::string_view::npos) return std::nullopt;
        bits = bits << 6 | static_cast<std::uint32_t>(digit);
        held += 6;
        if (held < 8) continue;
        held -= 8;
        out += static_cast<char>(bits >> held & 0xFF);
    }
    return out;
}

class PieceFile {
public:
    PieceFile(const Json& json, const std::string& path) : path_(path) {
        const Json& model = json["model"];
        const std::string type = word(model, "type", "BPE");
        if (type == "Unigram")
            read_unigram(model);
        else if (type == "BPE")
            read_pairs(model);
        else
            refuse("{}: model.type = {}: only BPE and Unigram are read", path_, shown(type));
        if (flag(model, "byte_fallback", false)) read_bytes();
        if (!model_.unknown && !model_.byte_id)
            refuse(
                "{}: model: has neither ByteLevel, byte_fallback nor an unknown token for characters without a token",
                path_);
        model_.added = read_added_tokens(json, path_, model_.vocabulary);
        for (const AddedTokens::Token& token : model_.added.all()) model_.texts[token.id] = token.text;
        if (given(json, "normalizer")) read_normalizer(json["normalizer"]);
        if (given(json, "pre_tokenizer")) read_pre_tokenizer(json["pre_tokenizer"]);
        if (given(json, "decoder")) read_decoder(json["decoder"]);
    }

    PieceModel take() { return std::move(model_); }

private:
    void add_piece(const std::string& text, std::int32_t id, double score) {
        if (text.size() > longest_piece)
            refuse("{}: model.vocab: a token of {} bytes: {} are read", path_, text.size(), longest_piece);
        ids_.emplace(text, id);
        model_.pieces.push_back({text, id, score, false});
    }

    void read_unigram(const Json& model) {
        model_.unigram = true;
        if (!model.contains("vocab") || !model["vocab"].is_array())
            refuse("{}: model.vocab must be a list of [token, score]", path_);
        double least = 0;
        std::int64_t n = 0;
        for (const Json& entry : model["vocab"]) {
            if (!entry.is_array() || entry.size() != 2 || !entry[0].is_string() || !entry[1].is_number() ||
                !std::isfinite(entry[1].get<double>()))
                refuse("{}: model.vocab: entry {} = {} is no [token, score]", path_, n, shown(entry.dump()));
            const auto text = entry[0].get<std::string>();
            const double score = entry[1].get<double>();
            least = std::min(least, score);
            add_piece(text, id_of(Json(n), path_, "model.vocab", text, model_.vocabulary), score);
            ++n;
        }
        if (!given(model, "unk_id")) refuse("{}: model.unk_id is missing", path_);
        std::int64_t size = 0;
        model_.unknown = id_of(model["unk_id"], path_, "model.unk_id", "unk_id", size);
        if (*model_.unknown >= n) refuse("{}: model.unk_id = {}: there are {} tokens", path_, *model_.unknown, n);
        model_.unknown_score = least - unknown_penalty;
    }

    void read_pairs(const Json& model) {
        for (const char* key : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"})
            if (given(model, key) && model[key] != "") // NOLINT(readability-container-size-empty): no container
                refuse("{}: model.{} = {}: only null is read", path_, key, shown(model[key].dump()));
        if (flag(model, "ignore_merges", false))
            refuse("{}: model.ignore_merges = true: only ByteLevel tokenizers are read with it", path_);
        if (!model.contains("vocab") || !model["vocab"].is_object()) refuse("{}: model.vocab is missing", path_);
        for (const auto& [token, id] : model["vocab"].items())
            add_piece(token, id_of(id, path_, "model.vocab", token, model_.vocabulary), 0);
        if (const std::string unknown = word(model, "unk_token", ""); !unknown.empty()) {
            const auto id = ids_.find(unknown);
            if (id == ids_.end()) refuse("{}: model.unk_token = {}: is not in the vocabulary", path_, shown(unknown));
            model_.unknown = id->second;
        }
        model_.fuse_unknown = flag(model, "fuse_unk", false);
        if (!model.contains("merges") || !model["merges"].is_array()) refuse("{}: model.merges is missing", path_);
        std::int32_t rank = 0;
        for (const Json& merge : model["merges"]) {
            const auto [left, right] = merged_pair(merge);
            const auto a = ids_.find(left), b = ids_.find(right), both = ids_.find(left + right);
            if (a == ids_.end() || b == ids_.end() || both == ids_.end())
                refuse("{}: model.merges: entry {} = {} joins what is not in the vocabulary", path_, rank,
                       shown(merge.dump()));
            model_.merges.add(a->second, b->second, rank++, both->second);
        }
    }

    // Bytes are merged with nothing: texts come apart where no piece joins their characters.
    void read_bytes() {
        std::array<std::int32_t, 256> bytes{};
        for (std::size_t byte = 0; byte < bytes.size(); ++byte) {
            const std::string token = fmt::format("<0x{:02X}>", byte);
            const auto id = ids_.find(token);
            if (id == ids_.end()) refuse("{}: model.byte_fallback = true: {} is not in the vocabulary", path_, token);
            if (model_.merges.joins(id->second)) refuse("{}: model.merges: joins the byte {}", path_, token);
            bytes[byte] = id->second;
            model_.texts[id->second] = std::string(1, static_cast<char>(byte));
        }
        model_.byte_id = bytes;
    }

    // A text that is written for another, so short that none grows without end.
    std::string short_text(const Json& step, const char* place, const char* key) const {
        std::string text = word(step, key, "");
        if (text.size() > longest_step)
            refuse("{}: {}.{}: has {} bytes: {} are read", path_, place, key, text.size(), longest_step);
        return text;
    }

    void read_normalizer(const Json& step) {
        const std::string type = word(step, "type", "");
        if (type == "Sequence" && step.contains("normalizers") && step["normalizers"].is_array()) {
            for (const Json& part : step["normalizers"]) read_normalizer(part);
        } else if (type == "Prepend") {
            model_.steps.push_back(prepend(short_text(step, "normalizer", "prepend")));
        } else if (type == "Replace") {
            const Json pattern = step.value("pattern", Json::object());
            const std::string from = short_text(pattern, "normalizer", "String"), regex = word(pattern, "Regex", "");
            const std::string to = short_text(step, "normalizer", "content");
            if (regex == " {2,}")
                model_.steps.push_back(replace_blanks(to));
            else if (!from.empty())
                model_.steps.push_back(replace(from, to));
            else
                refuse("{}: normalizer: Replace of {}: only a text and the pattern \" {{2,}}\" are read", path_,
                       shown(pattern.dump()));
        } else if (type == "Strip") {
            model_.steps.push_back(strip(flag(step, "strip_left", true), flag(step, "strip_right", true)));
        } else if (type == "Precompiled") {
            std::string why;
            if (!can_split(why)) refuse("{}: normalizer Precompiled needs characters' properties: {}", path_, why);
            const auto blob = from_base64(word(step, "precompiled_charsmap", ""));
            const std::string place = path_ + ": normalizer.precompiled_charsmap";
            if (!blob) refuse("{}: is not base64", place);
            model_.steps.push_back(precompiled(std::make_shared<const Charsmap>(*blob, place)));
        } else {
            refuse("{}: normalizer.type = {}: only Prepend, Replace, Strip, Precompiled and Sequence are read", path_,
                   shown(type));
        }
    }

    void read_pre_tokenizer(const Json& step) {
        const std::string type = word(step, "type", "");
        if (type == "Sequence" && step.contains("pretokenizers") && step["pretokenizers"].is_array()) {
            for (const Json& part : step["pretokenizers"]) read_pre_tokenizer(part);
        } else if (type == "Metaspace") {
            read_metaspace(step);
        } else if (type == "WhitespaceSplit") {
            model_.steps.push_back(whitespace_split());
            words_ = true;
        } else if (type == "Split") {
            const std::string literal =
                short_text(step.value("pattern", Json::object()), "pre_tokenizer.pattern", "String");
            const std::string behavior = word(step, "behavior", "");
            if (literal.empty() || behavior != "MergedWithPrevious" || flag(step, "invert", false))
                refuse("{}: pre_tokenizer: Split with behavior = {}: only of a text, with MergedWithPrevious and no "
                       "invert, is read",
                       path_, shown(behavior));
            model_.steps.push_back(split_behind(literal));
        } else {
            refuse("{}: pre_tokenizer.type = {}: only ByteLevel, Metaspace, WhitespaceSplit, Split and Sequence are "
                   "read",
                   path_, shown(type));
        }
    }

    void read_metaspace(const Json& step) {
        const std::string blank = short_text(step, "pre_tokenizer", "replacement");
        const std::string scheme =
            word(step, "prepend_scheme", flag(step, "add_prefix_space", true) ? "always" : "never");
        if (blank.empty()) refuse("{}: pre_tokenizer: Metaspace without a replacement", path_);
        if (scheme != "always" && scheme != "first" && scheme != "never")
            refuse("{}: pre_tokenizer: prepend_scheme = {}: must be always, first or never", path_, shown(scheme));
        if (scheme == "first" && words_)
            refuse("{}: pre_tokenizer: prepend_scheme = first behind WhitespaceSplit: only always and never are read",
                   path_);
        const Prefix prefix = scheme == "always" ? Prefix::always : scheme == "first" ? Prefix::first : Prefix::never;
        model_.steps.push_back(metaspace(blank, prefix, flag(step, "split", true)));
        model_.blank = blank;
    }

    // The blank at the beginning, which decoders strip, stays: texts are shown behind others.
    void read_decoder(const Json& step) {
        const std::string type = word(step, "type", "");
        if (type == "Sequence" && step.contains("decoders") && step["decoders"].is_array()) {
            for (const Json& part : step["decoders"]) read_decoder(part);
        } else if (type == "Metaspace") {
            model_.blank = word(step, "replacement", model_.blank);
        } else if (type == "Replace" && word(step, "content", "") == " ") {
            model_.blank = word(step.value("pattern", Json::object()), "String", model_.blank);
        } else if (type != "ByteFallback" && type != "Fuse" && type != "Strip") {
            refuse("{}: decoder.type = {}: only Metaspace, Replace by a blank, ByteFallback, Fuse, Strip and Sequence "
                   "are read",
                   path_, shown(type));
        }
    }

    std::string path_;
    PieceModel model_;
    IdOfText ids_;
    bool words_ = false;
};

} // namespace

PieceModel piece_model_of_json(const Json& json, const std::string& path) { return PieceFile(json, path).take(); }

} // namespace moe::data
