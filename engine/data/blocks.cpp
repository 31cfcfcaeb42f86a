// Where blocks end, and what is done when one cannot end there.
#include "engine/data/blocks.hpp"

#include "planner/base/error.hpp"
#include "planner/base/parallel.hpp"

#include <algorithm>
#include <string_view>
#include <utility>

namespace moe::data {

namespace {

constexpr std::size_t blocks_of_thread = 4; // in a batch: threads whose blocks were easy take more of them
constexpr std::size_t most_threads = 16;    // bound what is in memory
constexpr std::size_t known_pieces = std::size_t{1} << 19; // of all threads

// The next byte at or before `at` with which a character begins, in UTF-8.
std::size_t character_at(std::string_view text, std::size_t at) {
    for (int i = 0; i < 3 && at > 0 && at < text.size() && (text[at] & 0xC0) == 0x80; ++i) --at;
    return at;
}

} // namespace

BlockEncoder::BlockEncoder(const Tokenizer& encoder, std::size_t threads, BlockSizes sizes)
    : encoder_(encoder), sizes_(sizes) {
    threads = std::min(threads, most_threads);
    for (std::size_t t = 0; t < threads; ++t) known_.emplace_back(known_pieces / threads);
}

void BlockEncoder::fill(std::size_t bytes) {
    while (!whole_ && text_.size() < bytes) whole_ = !file_->next(text_, bytes - text_.size());
}

// A place to end a block, close behind `at`; the end of the text where that is near.
std::size_t BlockEncoder::end_near(std::size_t at) const {
    if (at + sizes_.window >= text_.size()) return text_.size();
    at = character_at(text_, at);
    const std::size_t window = character_at(text_, at + sizes_.window) - at;
    const std::string_view text = std::string_view(text_).substr(at, window);
    return at + encoder_.likely_cut(text, {file_->path(), byte_ + at});
}

void BlockEncoder::encode_block(Block& block, std::size_t begin, Tokenizer::Known& known) const {
    const std::size_t stop = character_at(text_, std::min(text_.size(), block.end + sizes_.behind));
    const std::string_view text = std::string_view(text_).substr(begin, stop - begin);
    block.cut = encoder_.encode(text, block.end - begin, {file_->path(), byte_ + begin}, known, block.ids);
}

// The first block takes in more and more text, until it can be cut.
void BlockEncoder::lengthen(Block& block) {
    for (std::size_t more = sizes_.window; !block.cut; more *= 2) {
        const std::size_t end = block.end + more;
        if (end > sizes_.block + sizes_.longest)
            refuse("{}: byte {}: no place to cut the text in the {} MiB that follow: break it into lines, or split the "
                   "file",
                   file_->path(), byte_, end >> 20);
        fill(end + sizes_.window + sizes_.behind);
        block.end = end_near(std::min(end, text_.size()));
        encode_block(block, 0, known_.front());
    }
}

void BlockEncoder::encode(engine::SourceFile& file, std::string text,
                          const std::function<void(const std::vector<std::int32_t>&)>& take) {
    file_ = &file;
    text_ = std::move(text);
    byte_ = 0;
    whole_ = false;
    const std::size_t batch = known_.size() * blocks_of_thread;
    while (true) {
        fill(batch * sizes_.block + sizes_.window + sizes_.behind);
        if (text_.empty()) return;
        std::vector<Block> blocks;
        for (std::size_t end = 0; blocks.size() < batch && end < text_.size();) {
            if (!whole_ && end + sizes_.block + sizes_.window + sizes_.behind > text_.size()) break;
            end = end_near(end + sizes_.block);
            blocks.emplace_back().end = end;
        }
        in_parallel(blocks.size(), known_.size(), [&](std::size_t thread, std::size_t i) {
            encode_block(blocks[i], i == 0 ? 0 : blocks[i - 1].end, known_[thread]);
        });
        if (!blocks.front().cut) {
            lengthen(blocks.front());
            blocks.resize(1);
        }
        std::size_t done = 0;
        for (const Block& block : blocks) {
            if (!block.cut) break; // It is the first of the next batch.
            take(block.ids);
            done = block.end;
        }
        text_.erase(0, done);
        byte_ += done;
    }
}

} // namespace moe::data
