// Reads a SentencePiece model (tokenizer.model): a protobuf message of pieces and of rules of normalization.
#include "engine/data/text/pieces.hpp"

#include "engine/data/text/tokenizer_json.hpp"
#include "engine/data/text/utf8.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "planner/base/names.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <bit>
#include <cfloat>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>

namespace moe::data {

namespace {

using Json = nlohmann::json;

constexpr std::size_t longest_file = std::size_t{512} << 20; // bytes
constexpr std::size_t most_pieces = std::size_t{1} << 24;

// One field of a protobuf message in its wire format.
struct Field {
    std::uint32_t number = 0, wire = 0; // wire: 0 a number, 1 and 5 eight and four bytes, 2 a text or message
    std::uint64_t value = 0;
    std::string_view text;
};

class Message {
public:
    Message(std::string_view bytes, const std::string& path) : bytes_(bytes), path_(path) {}

    // The next field; false at the end.
    bool next(Field& field) {
        if (at_ == bytes_.size()) return false;
        const std::uint64_t tag = number();
        field = {static_cast<std::uint32_t>(tag >> 3), static_cast<std::uint32_t>(tag & 7), 0, {}};
        if (tag >> 3 == 0 || tag >> 3 > 0x1FFFFFFF) fault();
        if (field.wire == 0)
            field.value = number();
        else if (field.wire == 1)
            field.text = take(8);
        else if (field.wire == 2)
            field.text = take(number());
        else if (field.wire == 5)
            field.text = take(4);
        else
            fault();
        return true;
    }

private:
    [[noreturn]] void fault() const { refuse("{}: is no SentencePiece model, or a damaged one", path_); }
    std::uint64_t number() {
        std::uint64_t value = 0;
        for (int shift = 0; shift < 64; shift += 7) {
            if (at_ == bytes_.size()) fault();
            const auto byte = static_cast<unsigned char>(bytes_[at_++]);
            value |= std::uint64_t{byte & 0x7Fu} << shift;
            if (byte < 0x80) return value;
        }
        fault();
    }
    std::string_view take(std::uint64_t size) {
        if (size > bytes_.size() - at_) fault();
        const std::string_view taken = bytes_.substr(at_, size);
        at_ += size;
        return taken;
    }

    std::string_view bytes_;
    const std::string& path_;
    std::size_t at_ = 0;
};

float float_of(std::string_view bytes) {
    std::uint32_t bits = 0;
    for (std::size_t i = 0; i < 4; ++i)
        bits |= static_cast<std::uint32_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
    return std::bit_cast<float>(bits);
}

// Numbers and types of sentencepiece_model.proto.
enum class Type { normal = 1, unknown = 2, control = 3, user_defined = 4, unused = 5, byte = 6 };

class SentencePieceFile {
public:
    explicit SentencePieceFile(const std::string& path) : path_(path) {
        const std::string bytes = read_file(path, longest_file);
        Message message(bytes, path_);
        for (Field field; message.next(field);) {
            if (field.wire != 2) continue;
            if (field.number == 1) read_piece(field.text);
            if (field.number == 2) read_trainer(field.text);
            if (field.number == 3) read_normalizer(field.text);
        }
        read_added();
        finish();
        for (const AddedTokens::Token& token : model_.added.all()) model_.texts[token.id] = token.text;
    }

    PieceModel take() { return std::move(model_); }

private:
    void read_piece(std::string_view bytes) {
        PieceModel::Piece piece;
        auto type = static_cast<std::uint64_t>(Type::normal);
        Message message(bytes, path_);
        for (Field field; message.next(field);) {
            if (field.number == 1 && field.wire == 2) piece.text = field.text;
            if (field.number == 2 && field.wire == 5) piece.score = float_of(field.text);
            if (field.number == 3 && field.wire == 0) type = field.value;
        }
        const std::int64_t n = model_.vocabulary++;
        piece.id = static_cast<std::int32_t>(n);
        const std::string place = fmt::format("{}: piece {}", path_, n);
        if (static_cast<std::size_t>(n) >= most_pieces) refuse("{}: more than {} pieces", path_, most_pieces);
        if (piece.text.empty() || piece.text.size() > longest_piece)
            refuse("{}: has {} bytes: must be 1 to {}", place, piece.text.size(), longest_piece);
        for (std::size_t at = 0; at < piece.text.size();) {
            const std::size_t length = character(std::string_view(piece.text).substr(at));
            if (length == 0) refuse("{}: is not UTF-8", place);
            at += length;
        }
        if (!std::isfinite(piece.score)) refuse("{}: {}: its score is no finite number", place, shown(piece.text));
        if (!ids_.emplace(piece.text, piece.id).second) refuse("{}: {}: occurs twice", place, shown(piece.text));
        add(std::move(piece), type, place);
    }

    void add(PieceModel::Piece piece, std::uint64_t type, const std::string& place) {
        switch (static_cast<Type>(type)) {
        case Type::normal: {
            model_.pieces.push_back(std::move(piece));
            return;
        }
        case Type::user_defined: {
            piece.kept = true;
            kept_.emplace_back(piece.text, piece.id);
            model_.pieces.push_back(std::move(piece));
            return;
        }
        case Type::unknown: {
            if (model_.unknown) refuse("{}: {}: a second unknown piece", place, shown(piece.text));
            model_.unknown = piece.id;
            model_.added.add({piece.text, piece.id});
            return;
        }
        case Type::control: {
            model_.added.add({piece.text, piece.id});
            return;
        }
        case Type::byte: {
            unsigned value = 0;
            const char* begin = piece.text.data() + 3;
            if (piece.text.size() != 6 || !piece.text.starts_with("<0x") ||
                std::from_chars(begin, begin + 2, value, 16).ptr != begin + 2 || piece.text[5] != '>')
                refuse("{}: {}: a byte is written <0x00> to <0xFF>", place, shown(piece.text));
            byte_ids_[value] = piece.id;
            model_.texts[piece.id] = std::string(1, static_cast<char>(value));
            return;
        }
        default:
            refuse("{}: {}: type {}: unused pieces are not read", place, shown(piece.text), type);
        }
    }

    void read_trainer(std::string_view bytes) {
        Message message(bytes, path_);
        for (Field field; message.next(field);) {
            if (field.wire != 0) continue;
            if (field.number == 3) kind_ = field.value;
            if (field.number == 24 && field.value != 0)
                refuse("{}: trainer_spec.treat_whitespace_as_suffix = true: only false is read", path_);
            if (field.number == 35) byte_fallback_ = field.value != 0;
        }
    }

    void read_normalizer(std::string_view bytes) {
        Message message(bytes, path_);
        for (Field field; message.next(field);) {
            if (field.number == 2 && field.wire == 2) charsmap_ = field.text;
            if (field.wire != 0) continue;
            if (field.number == 3) rules_.prefix = field.value != 0;
            if (field.number == 4) rules_.remove_blanks = field.value != 0;
            if (field.number == 5 && field.value == 0) rules_.blank = std::string(1, ' ');
        }
    }

    void finish() {
        if (!model_.unknown) refuse("{}: has no unknown piece: is no SentencePiece model, or a damaged one", path_);
        if (kind_ != 1 && kind_ != 2)
            refuse("{}: trainer_spec.model_type = {}: only unigram (1) and BPE (2) are read", path_, kind_);
        model_.unigram = kind_ == 1;
        model_.blank = rules_.blank;
        if (byte_fallback_) read_bytes();
        const auto kept = std::make_shared<const PieceTrie>(kept_);
        model_.steps.push_back(
            sentencepiece(rules_, std::make_shared<const Charsmap>(charsmap_, path_ + ": precompiled_charsmap"), kept));
        if (model_.unigram)
            score_pieces();
        else
            find_merges();
    }

    void read_bytes() {
        std::array<std::int32_t, 256> bytes{};
        if (byte_ids_.size() != bytes.size())
            refuse("{}: trainer_spec.byte_fallback = true: {} of 256 bytes are pieces", path_, byte_ids_.size());
        for (const auto& [byte, id] : byte_ids_) bytes[byte] = id;
        model_.byte_id = bytes;
    }

    // The library starts its search for the highest score from the least positive float.
    void score_pieces() {
        double least = FLT_MAX, most = FLT_MIN;
        for (const PieceModel::Piece& piece : model_.pieces) {
            if (piece.kept) continue;
            least = std::min(least, piece.score);
            most = std::max(most, piece.score);
        }
        for (PieceModel::Piece& piece : model_.pieces)
            if (piece.kept) piece.score = static_cast<double>(piece.text.size()) * most - 0.1;
        model_.unknown_score = least - unknown_penalty;
    }

    // Two neighbours merge where they make a piece, the best score first: equal scores have equal ranks.
    void find_merges() {
        std::map<double, std::int32_t, std::greater<>> ranks;
        for (const PieceModel::Piece& piece : model_.pieces) ranks.emplace(piece.score, 0);
        std::int32_t rank = 0;
        for (auto& [score, place] : ranks) place = rank++;
        IdOfText symbols;
        for (const PieceModel::Piece& piece : model_.pieces)
            if (!piece.kept) symbols.emplace(piece.text, piece.id);
        for (const PieceModel::Piece& piece : model_.pieces) name_characters(piece.text, symbols);
        for (const PieceModel::Piece& piece : model_.pieces)
            for (std::size_t at = 1; at < piece.text.size(); ++at) {
                if ((piece.text[at] & 0xC0) == 0x80) continue;
                const auto left = symbols.find(std::string_view(piece.text).substr(0, at)),
                           right = symbols.find(std::string_view(piece.text).substr(at));
                if (left != symbols.end() && right != symbols.end())
                    model_.merges.add(left->second, right->second, ranks[piece.score], piece.id);
            }
    }

    // Characters of pieces that are none themselves can be merged all the same.
    void name_characters(const std::string& text, IdOfText& symbols) {
        for (std::size_t at = 0; at < text.size();) {
            const std::size_t length = character(std::string_view(text).substr(at));
            const std::string one = text.substr(at, length);
            at += length;
            const auto id = static_cast<std::int32_t>(model_.vocabulary +
                                                      static_cast<std::int64_t>(model_.extra_characters.size()));
            if (symbols.emplace(one, id).second) model_.extra_characters.push_back(one);
        }
    }

    // Tokens that transformers adds to the model's own: added_tokens.json and tokenizer_config.json beside it.
    void read_added() {
        const std::filesystem::path folder = std::filesystem::path(path_).parent_path();
        std::int64_t extra = model_.vocabulary;
        if (const std::string file = (folder / "added_tokens.json").string(); std::filesystem::is_regular_file(file)) {
            const auto json = load_json<Json>(file);
            if (!json.is_object()) refuse("{}: must be a JSON object of ids by token", file);
            for (const auto& [text, id] : json.items()) add_token(text, id_of(id, file, "token", text, extra), file);
        }
        const std::string file = (folder / "tokenizer_config.json").string();
        if (std::filesystem::is_regular_file(file)) {
            const auto json = load_json<Json>(file);
            const Json tokens = json.is_object() ? json.value("added_tokens_decoder", Json::object()) : Json::object();
            if (!tokens.is_object()) refuse("{}: added_tokens_decoder: must be a JSON object of tokens by id", file);
            for (const auto& [number, token] : tokens.items()) {
                const std::string text = token.is_object() ? word(token, "content", "") : "";
                std::int64_t id = -1;
                std::from_chars(number.data(), number.data() + number.size(), id);
                for (const char* key : {"lstrip", "rstrip", "single_word"})
                    if (token.is_object() && flag(token, key, false))
                        refuse("{}: added_tokens_decoder: {}: {} = true: only false is read", file, shown(text), key);
                add_token(text, id_of(Json(id), file, "added_tokens_decoder", text, extra), file);
            }
        }
        model_.vocabulary = extra;
    }

    void add_token(const std::string& text, std::int32_t id, const std::string& file) {
        if (text.empty()) refuse("{}: token {}: has no text", file, id);
        const std::optional<std::int32_t> known = model_.added.id(text);
        const auto piece = ids_.find(text);
        if ((known && *known != id) || (piece != ids_.end() && piece->second != id))
            refuse("{}: token {} has the id {}, in {} another", file, shown(text), id, path_);
        if (!known) model_.added.add({text, id});
    }

    std::string path_;
    PieceModel model_;
    IdOfText ids_;
    std::vector<std::pair<std::string, std::int32_t>> kept_;
    std::map<unsigned, std::int32_t> byte_ids_;
    std::uint64_t kind_ = 1;
    bool byte_fallback_ = false;
    SentencePieceRules rules_{true, true, "\xE2\x96\x81"};
    std::string charsmap_;
};

} // namespace

PieceModel piece_model_of_sentencepiece(const std::string& path) { return SentencePieceFile(path).take(); }

} // namespace moe::data
