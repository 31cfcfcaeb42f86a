// Byte-level byte-pair encoding as a Hugging Face tokenizer.json describes it.
#pragma once

#include "engine/data/text/added_tokens.hpp"
#include "engine/data/text/merging.hpp"
#include "engine/data/text/split.hpp"
#include "engine/data/text/tokenizer.hpp"

#include <nlohmann/json_fwd.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace moe::data {

// Text to ids like the `tokenizers` package without special tokens around it: added tokens that stand in the text are
// taken out first, the rest is normalized, cut into pieces and merged pair by pair (Sennrich et al., arXiv:1508.07909,
// over bytes as in GPT-2). Understood are the models, normalizers (none, NFC) and pre-tokenizers (ByteLevel, Split,
// Digits, sequences of them) of GPT-2, Llama 3, Qwen, DeepSeek-V3 and GPT-OSS; everything else is refused by its name.
class BytePairEncoder : public Encoder {
public:
    // `file`: the content of the tokenizer.json at `path`. Throws Error (bad_input) naming the file and the field.
    BytePairEncoder(const nlohmann::json& file, const std::string& path);

    std::int64_t vocabulary() const override { return vocabulary_; }
    bool encode(std::string_view text, std::size_t end, const Place& place, KnownPieces& known,
                std::vector<std::int32_t>& ids) const override;
    std::size_t likely_cut(std::string_view text, const Place& place) const override {
        return splitter_->likely_cut(text, place);
    }
    std::string bytes(std::span<const std::int32_t> ids) const override;
    std::optional<std::int32_t> added_token(std::string_view text) const override { return added_.id(text); }

private:
    friend class BytePairFile;
    void encode_piece(std::string_view piece, KnownPieces& known, std::vector<std::int32_t>& ids) const;

    std::int64_t vocabulary_ = 0;
    std::int32_t byte_id_[256] = {};
    IdOfText whole_; // ids by bytes of tokens, to look up whole pieces
    Merges merges_;
    AddedTokens added_;
    bool ignore_merges_ = false;
    std::unique_ptr<Splitter> splitter_;
};

} // namespace moe::data
