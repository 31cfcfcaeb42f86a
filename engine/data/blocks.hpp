// Ids of a text of any length, by blocks of it on several threads.
#pragma once

#include "engine/base/source_file.hpp"
#include "engine/data/text/tokenizer.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace moe::data {

struct BlockSizes { // in bytes
    std::size_t block = std::size_t{1} << 20;
    std::size_t behind = std::size_t{1} << 15;  // looked at behind a block's end
    std::size_t window = std::size_t{1} << 13;  // searched for a place to end a block
    std::size_t longest = std::size_t{1} << 22; // of text without a place to cut it
};

// A block ends where the encoder can most likely cut; then blocks are encoded at once, each with a look at what lies
// behind it. One that cannot be cut at its end after all takes in what follows, and the blocks behind it begin anew. So
// the ids are those of the text in one piece.
class BlockEncoder {
public:
    BlockEncoder(const Tokenizer& encoder, std::size_t threads, BlockSizes sizes = {});

    // Hands the ids of the rest of `file` to `take` in order. `text`: what has been read of it. Throws Error
    // (bad_input) for text that is not UTF-8 or has no place to cut it.
    void encode(engine::SourceFile& file, std::string text,
                const std::function<void(const std::vector<std::int32_t>&)>& take);

private:
    struct Block {
        std::size_t end = 0; // in text_
        bool cut = false;    // its text could be cut there
        std::vector<std::int32_t> ids;
    };
    void fill(std::size_t bytes);
    std::size_t end_near(std::size_t at) const;
    void encode_block(Block& block, std::size_t begin, Tokenizer::Known& known) const;
    void lengthen(Block& block);

    const Tokenizer& encoder_;
    BlockSizes sizes_;
    std::vector<Tokenizer::Known> known_; // by thread
    engine::SourceFile* file_ = nullptr;
    std::string text_;     // what has been read and not been handed over
    std::size_t byte_ = 0; // place of text_ in the file
    bool whole_ = false;   // text_ goes to the file's end
};

} // namespace moe::data
