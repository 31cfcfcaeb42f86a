// Byte-level byte-pair encoding as a Hugging Face tokenizer.json describes it.
#pragma once

#include "engine/data/text/split.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
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

    // The ids of pieces that one thread has seen, up to a limit: text repeats them.
    class Known {
    public:
        // most: pieces that are remembered, of 64 bytes each at most; natural text repeats a few hundred thousand.
        explicit Known(std::size_t most = std::size_t{1} << 19) : most_(most) {}

    private:
        friend class BytePairEncoder;
        struct Hash {
            using is_transparent = void;
            std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
        };
        struct Ids {
            std::uint32_t first, count; // in ids_
        };
        std::size_t most_;
        std::unordered_map<std::string, Ids, Hash, std::equal_to<>> pieces_;
        std::vector<std::int32_t> ids_;
    };

    std::int64_t vocabulary() const { return vocabulary_; } // number of ids: one more than the highest
    // Appends the ids of text[0, end): those that the whole text has there. What lies behind `end` is looked at as far
    // as it is given (Splitter::pieces). False, with nothing appended, where the text cannot be cut at `end`. For
    // several threads at once, each with what it knows.
    bool encode(std::string_view text, std::size_t end, const Place& place, Known& known,
                std::vector<std::int32_t>& ids) const;
    // A byte in the first half of `text` at which it can most likely be cut; text.size() where there is none.
    std::size_t likely_cut(std::string_view text, const Place& place) const {
        return splitter_->likely_cut(text, place);
    }
    // The bytes that ids stand for, added tokens as they are written; ids without a token give nothing.
    std::string bytes(std::span<const std::int32_t> ids) const;
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
    // The first added token in text[from, to); its place is `at`. Null where there is none.
    const Added* next_added(std::string_view text, std::size_t from, std::size_t to, std::size_t& at) const;
    void encode_piece(std::string_view piece, Known& known, std::vector<std::int32_t>& ids) const;
    void append_merged(std::string_view piece, std::vector<std::int32_t>& ids) const;

    std::int64_t vocabulary_ = 0;
    std::int32_t byte_id_[256] = {};
    // Ids by bytes of tokens, to look up whole pieces.
    std::unordered_map<std::string, std::int32_t, Known::Hash, std::equal_to<>> whole_;
    std::unordered_map<std::uint64_t, Merge> merges_; // merges by left id << 32 | right id
    std::vector<Added> added_;                        // added tokens, longest first
    bool begins_added_[256] = {};                     // by the first byte of added tokens
    bool ignore_merges_ = false;
    std::unique_ptr<Splitter> splitter_;
};

} // namespace moe::data
