// A tokenizer as a file describes it: text to ids and back.
#pragma once

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

// Where a text stands: its file, and the byte there at which it begins. Byte 0 is the beginning of a text, where some
// tokenizers put a blank before it.
struct Place {
    std::string file;
    std::size_t byte = 0;
};

struct TextHash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
};
using IdOfText = std::unordered_map<std::string, std::int32_t, TextHash, std::equal_to<>>;

// The ids of pieces that one thread has seen, up to a limit: text repeats them.
class KnownPieces {
public:
    // most: pieces that are remembered, of 64 bytes each at most; natural text repeats a few hundred thousand.
    explicit KnownPieces(std::size_t most = std::size_t{1} << 19) : most_(most) {}

    // Appends the ids of a piece: the remembered ones, else those that encode(piece, ids) appends.
    template <typename Encode>
    void append(std::string_view piece, const Encode& encode, std::vector<std::int32_t>& ids) {
        if (piece.size() > longest) return encode(piece, ids);
        auto seen = pieces_.find(piece);
        if (seen == pieces_.end()) {
            if (pieces_.size() >= most_) {
                pieces_.clear();
                ids_.clear();
            }
            const auto first = static_cast<std::uint32_t>(ids_.size());
            encode(piece, ids_);
            const auto count = static_cast<std::uint32_t>(ids_.size()) - first;
            seen = pieces_.emplace(piece, Ids{first, count}).first;
        }
        const auto first = ids_.begin() + seen->second.first;
        ids.insert(ids.end(), first, first + seen->second.count);
    }

private:
    static constexpr std::size_t longest = 64; // bytes of a piece that is remembered
    struct Ids {
        std::uint32_t first, count; // in ids_
    };
    std::size_t most_;
    std::unordered_map<std::string, Ids, TextHash, std::equal_to<>> pieces_;
    std::vector<std::int32_t> ids_;
};

// What kinds of tokenizers do each in their way.
class Encoder {
public:
    virtual ~Encoder() = default;
    virtual std::int64_t vocabulary() const = 0;
    virtual bool encode(std::string_view text, std::size_t end, const Place& place, KnownPieces& known,
                        std::vector<std::int32_t>& ids) const = 0;
    virtual std::size_t likely_cut(std::string_view text, const Place& place) const = 0;
    virtual std::string bytes(std::span<const std::int32_t> ids) const = 0;
    virtual std::optional<std::int32_t> added_token(std::string_view text) const = 0;
};

// Text to ids without special tokens around it; those that stand in the text become one id.
class Tokenizer {
public:
    using Known = KnownPieces;

    // Of a Hugging Face tokenizer.json or a SentencePiece model: BytePairEncoder and PieceEncoder say which. Throws
    // Error (bad_input) naming the file and the field.
    explicit Tokenizer(const std::string& path);

    std::int64_t vocabulary() const { return encoder_->vocabulary(); } // number of ids: one more than the highest
    // Appends the ids of text[0, end): those that the whole text has there. What lies behind `end` is looked at as far
    // as it is given. False, with nothing appended, where the text cannot be cut at `end`. For several threads at once,
    // each with what it knows.
    bool encode(std::string_view text, std::size_t end, const Place& place, Known& known,
                std::vector<std::int32_t>& ids) const {
        return encoder_->encode(text, end, place, known, ids);
    }
    // A byte in the first half of `text` at which it can most likely be cut; text.size() where there is none.
    std::size_t likely_cut(std::string_view text, const Place& place) const {
        return encoder_->likely_cut(text, place);
    }
    // The bytes that ids stand for, added tokens as they are written; ids without a token give nothing.
    std::string bytes(std::span<const std::int32_t> ids) const { return encoder_->bytes(ids); }
    // Id of the added token with this text, if there is one.
    std::optional<std::int32_t> added_token(std::string_view text) const { return encoder_->added_token(text); }

private:
    std::unique_ptr<const Encoder> encoder_;
};

} // namespace moe::data
