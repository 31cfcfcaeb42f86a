// Training data: Megatron's indexed datasets (PREFIX.bin and PREFIX.idx), and samples drawn from them.
#pragma once

#include "engine/base/source_file.hpp"
#include "engine/data/position.hpp"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace moe::data {

// Index, little endian: "MMIDIDX\0\0", u64 version 1, u8 element type (1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 u16), u64
// sequences S, u64 entries D of the document index, i32[S] lengths, i64[S] byte offsets in .bin, i64[D] first sequence
// of each document. Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py. Nothing in the file is aligned.
class IndexedDataset {
public:
    // Checks the index completely, and that the .bin is of it: every sequence lies within, and where they lie back to
    // back nothing lies behind. Where PREFIX.loss.idx exists, that dataset of 0 and 1 says which tokens are labels; it
    // must have the same tokens and documents. Throws Error (bad_input) that names the file and the numbers that
    // disagree.
    explicit IndexedDataset(const std::string& prefix);

    const std::string& prefix() const { return prefix_; }
    std::int64_t tokens() const { return tokens_; }
    std::int64_t documents() const { return documents_; }
    std::uint32_t mark() const; // DatasetPosition::mark
    // Tokens [first, first + out.size()) of the concatenated documents. Throws Error (bad_input) for an id that is
    // negative or not below `vocab`, and where the .bin has been cut off since it was opened.
    void read(std::int64_t first, std::span<std::int32_t> out, std::int64_t vocab) const;
    // First token of the document that each of the tokens [first, first + out.size()) is of. The first call reads where
    // all documents begin; it throws Error (bad_input) where they are not in order.
    void read_documents(std::int64_t first, std::span<std::int64_t> out);
    const std::vector<std::int64_t>& first_of_document(); // first token of each document; as above
    bool has_loss_mask() const { return loss_ != nullptr; }
    // 1 for each of the tokens [first, first + out.size()) that is a label where it stands, else 0; all 1 without mask.
    void read_counts(std::int64_t first, std::span<std::int32_t> out) const;

private:
    void index_documents();
    void read_index(std::size_t sequences);
    // Tokens that lie one behind the other in the .bin, from this byte on; `first` counts in messages.
    void read_run(std::int64_t byte, std::int64_t first, std::span<std::int32_t> out, std::int64_t vocab) const;

    std::string prefix_;
    engine::SourceFile index_, data_;
    std::unique_ptr<IndexedDataset> loss_; // null: every token is a label
    std::int64_t tokens_ = 0, documents_ = 0;
    int type_ = 0;
    std::size_t width_ = 0;
    // Empty where sequences lie back to back in the .bin, which is the rule; else the first token of each sequence and
    // its byte in the .bin, and the end of the last.
    std::vector<std::int64_t> first_token_, first_byte_;
    std::vector<std::int64_t> first_of_document_; // empty until it is asked for
};

struct BlendEntry {
    std::string prefix;
    double weight = 1.0;
};

// Samples of seq + 1 tokens: seq tokens of a pass through a dataset, and the token behind the last. Past its last whole
// sample a dataset starts its next pass. Several datasets are drawn from by weight: always the one furthest behind its
// share.
class SampleData {
public:
    // shuffle: each pass through a dataset takes its blocks of seq tokens in a new order, a permutation keyed by (seed,
    // pass). Throws Error (bad_input) when a dataset holds fewer than global_batch * seq + 1 tokens.
    SampleData(const std::vector<BlendEntry>& blend, std::int64_t seq, std::int64_t global_batch, std::int64_t vocab,
               bool shuffle, std::uint64_t seed);

    std::int64_t seq() const { return seq_; }
    std::int64_t tokens() const; // tokens of all datasets
    const IndexedDataset& dataset(std::size_t i) const { return *entries_[i].data; }
    // Writes seq + 1 tokens of sample `sample` of the blend; samples are numbered from 0 over the whole run.
    void read(std::int64_t sample, std::span<std::int32_t> out);
    // Writes where the document of each of those tokens begins in the sample. Blocks that are no neighbours in the data
    // are of different documents.
    void read_documents(std::int64_t sample, std::span<std::int32_t> starts);
    // Writes 1 for each of those tokens that is a label where it stands, else 0.
    void read_counts(std::int64_t sample, std::span<std::int32_t> counts);
    bool has_loss_mask() const; // some dataset has one
    // Documents by their tokens, each dataset's as often as the blend draws its tokens; empty ones left out.
    std::map<std::int64_t, double> document_lengths();
    // Where every dataset stands when sample `sample` is the next.
    DataPosition position(std::int64_t sample);
    // Makes `sample` the next behind that position. A dataset that was there goes on where it stood, in blocks as long
    // as they were to the end of its pass; another one begins. Where `same_order` is false and blocks have an order,
    // every pass that has begun is left. The blend counts anew unless it is the same.
    void start(std::int64_t sample, const DataPosition& position, bool same_order);
    // Entropy in nats of the distribution of single tokens: what a model that ignores context can reach.
    double unigram_entropy(std::int64_t most_tokens = 1 << 24) const;

private:
    struct Entry {
        std::unique_ptr<IndexedDataset> data;
        double share = 1.0;    // share of the samples
        DatasetPosition start; // at sample first_
    };
    // Where a dataset stands after `taken` samples of it since its start.
    DatasetPosition behind(const Entry& entry, std::int64_t taken) const;
    void walk_to(std::int64_t sample);
    std::size_t next_entry() const;
    // Calls run(dataset, first token, offset in the sample, tokens) for the sample's pieces of seq tokens in all.
    template <class Run>
    void for_each_piece(std::int64_t sample, Run run);

    std::vector<Entry> entries_;
    std::int64_t seq_, global_batch_, vocab_;
    bool shuffle_;
    std::uint64_t seed_;
    std::int64_t first_ = 0; // sample at which the entries' positions hold
    // The walk through the blend stands here, so that samples in order cost O(1).
    std::int64_t walked_ = 0, all_drawn_ = 0;
    std::vector<std::int64_t> drawn_;
};

// Position of `index` in the permutation of [0, size) with this key: a Feistel network on the next power of four,
// walked until it lands inside (Black and Rogaway, CT-RSA 2002).
std::int64_t permuted(std::int64_t index, std::int64_t size, std::uint64_t key);

} // namespace moe::data
