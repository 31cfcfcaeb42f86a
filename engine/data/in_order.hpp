// A dataset read once from its first token to its last, for evaluation.
#pragma once

#include "engine/data/data.hpp"

#include <cstdint>
#include <span>
#include <string>

namespace moe::data {

// Sample k holds the tokens [k seq, k seq + seq] of the concatenated documents, so that every token but the first is a
// label once. The last sample may be shorter.
class InOrder {
public:
    // Throws Error (bad_input) as IndexedDataset does, and for fewer than two tokens.
    InOrder(const std::string& prefix, std::int64_t seq, std::int64_t vocab);

    std::int64_t tokens() const { return data_.tokens(); }
    std::int64_t samples() const { return (data_.tokens() - 1 + seq_ - 1) / seq_; }
    // Writes seq + 1 tokens of a sample below samples(), -1 behind the dataset's last.
    void read(std::int64_t sample, std::span<std::int32_t> out) const;
    // Writes where the document of each of those tokens begins in the sample.
    void read_documents(std::int64_t sample, std::span<std::int32_t> starts);
    bool has_loss_mask() const { return data_.has_loss_mask(); }
    // Writes 1 for each of those tokens that is a label where it stands, else 0.
    void read_counts(std::int64_t sample, std::span<std::int32_t> counts) const;

private:
    IndexedDataset data_;
    std::int64_t seq_, vocab_;
};

} // namespace moe::data
