// Byte-level byte-pair encoding as a Hugging Face tokenizer.json describes it.
#pragma once

#include "engine/data/text/split.hpp"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace moe::data {

// Text to ids like the `tokenizers` package without special tokens around it: added tokens that stand in the text are
// taken out first, the rest is normalized, cut into pieces and merged pair by pair (Sennrich et al., arXiv:1508.07909,
// over bytes as in GPT-2). Understood are the models, normalizers (none, NFC) and pre-tokenizers (ByteLevel, Split,
// Digits, sequences of them) of GPT-2, Llama 3, Qwen, DeepSeek-V3 and GPT-OSS; everything else is refused by its name.
class BytePairEncoder {
public:
    // Throws Error (bad_input) naming the file and the field.
    explicit BytePairEncoder(const std::string& path);

    std::int64_t vocabulary() const { return vocabulary_; } // number of ids: one more than the highest
    // Appends the ids of a text. `place` names its file in errors. Not for several threads at once: pieces are
    // remembered.
    void encode(std::string_view text, const std::string& place, std::vector<std::int32_t>& ids);
    // Id of the added token with this text, if there is one.
    std::optional<std::int32_t> added_token(std::string_view text) const;

private:
    struct Merge {
        std::int32_t rank = 0, id = 0;
    };
    struct Added {
        std::string text;
        std::int32_t id = 0;
    };
    friend class TokenizerFile;
    void encode_plain(std::string_view text, const std::string& place, std::vector<std::int32_t>& ids);
    void encode_piece(const std::string& piece, std::vector<std::int32_t>& ids);
    std::vector<std::int32_t> merged(const std::string& piece) const;

    std::int64_t vocabulary_ = 0;
    std::int32_t byte_id_[256] = {};
    std::unordered_map<std::string, std::int32_t> whole_; // ids by bytes of tokens, to look up whole pieces
    std::unordered_map<std::uint64_t, Merge> merges_;     // merges by left id << 32 | right id
    std::vector<Added> added_;                            // added tokens, longest first
    bool ignore_merges_ = false;
    std::unique_ptr<Splitter> splitter_;
    std::unordered_map<std::string, std::vector<std::int32_t>> known_; // ids of pieces seen, up to a limit
};

} // namespace moe::data
