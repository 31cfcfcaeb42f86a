// Tokenizers whose pieces are texts of characters: SentencePiece's, as a model of its own or as a tokenizer.json.
#pragma once

#include "engine/data/text/added_tokens.hpp"
#include "engine/data/text/merging.hpp"
#include "engine/data/text/normal_steps.hpp"
#include "engine/data/text/piece_trie.hpp"
#include "engine/data/text/tokenizer.hpp"

#include <nlohmann/json_fwd.hpp>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace moe::data {

inline constexpr std::size_t longest_piece = 1024; // bytes
inline constexpr double unknown_penalty = 10;      // below the least likely piece (sentencepiece: unigram_model.cc)

struct PieceModel {
    struct Piece {
        std::string text; // UTF-8, of longest_piece bytes at most
        std::int32_t id = 0;
        double score = 0;  // logarithm of its probability (Unigram)
        bool kept = false; // stands for itself in a text and is merged with nothing
    };
    std::int64_t vocabulary = 0;               // one more than the highest id
    bool unigram = false;                      // the likeliest sequence of pieces; else pairs are merged
    std::vector<Piece> pieces;                 // what a text can become, beside bytes and the unknown piece
    Merges merges;                             // of ids; characters without an id have those behind the vocabulary
    std::vector<std::string> extra_characters; // the characters that have
    std::optional<std::int32_t> unknown;       // the id of a character without a piece
    bool fuse_unknown = true;                  // one for several of them in a row
    double unknown_score = 0;                  // of each (Unigram)
    std::optional<std::array<std::int32_t, 256>> byte_id; // such a character becomes its bytes instead
    AddedTokens added;
    std::vector<NormalStep> steps;
    std::string blank;                                   // what stands for a blank in pieces
    std::unordered_map<std::int32_t, std::string> texts; // of ids that stand for other text than their piece's
};

// Throw Error (bad_input) naming the file and the field, for all that is not read as well.
PieceModel piece_model_of_json(const nlohmann::json& json, const std::string& path);
PieceModel piece_model_of_sentencepiece(const std::string& path);

// Added tokens that stand in the text are taken out first. What lies between two of them is a text of its own, as for
// the libraries: it is normalized, and becomes the likeliest sequence of pieces (Kudo, arXiv:1804.10959) or is merged
// pair by pair (Sennrich et al., arXiv:1508.07909, over characters). Between two characters that stand beside each
// other in no piece every text comes apart; there it is cut, and the ids between are remembered.
class PieceEncoder : public Encoder {
public:
    explicit PieceEncoder(PieceModel model);

    std::int64_t vocabulary() const override { return model_.vocabulary; }
    bool encode(std::string_view text, std::size_t end, const Place& place, KnownPieces& known,
                std::vector<std::int32_t>& ids) const override;
    std::size_t likely_cut(std::string_view text, const Place& place) const override;
    std::string bytes(std::span<const std::int32_t> ids) const override;
    std::optional<std::int32_t> added_token(std::string_view text) const override { return model_.added.id(text); }

private:
    bool encode_stretch(Stretch stretch, KnownPieces& known, std::vector<std::int32_t>& ids) const;
    bool comes_apart(char32_t left, char32_t right) const;
    bool is_known(char32_t c) const { return characters_.contains(c); }
    void encode_word(std::string_view word, std::vector<std::int32_t>& ids) const;
    void append_likeliest(std::string_view word, std::vector<std::int32_t>& ids) const;
    void append_merged(std::string_view word, std::vector<std::int32_t>& ids) const;
    void append_unknown(std::string_view character, std::size_t first, std::vector<std::int32_t>& ids) const;

    PieceModel model_;
    PieceTrie trie_;                             // places in model_.pieces; of BPE the kept ones
    IdOfText symbols_;                           // ids of characters (BPE)
    std::unordered_set<char32_t> characters_;    // that are pieces
    std::unordered_set<std::uint64_t> adjacent_; // pairs of characters in pieces
    std::array<std::array<bool, 128>, 128> adjacent_ascii_{};
};

} // namespace moe::data
