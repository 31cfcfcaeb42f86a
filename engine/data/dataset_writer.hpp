// Writes Megatron's indexed datasets (their table is in data.hpp), with a loss mask beside them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace moe::data {

struct TokenizeResult {
    std::int64_t documents = 0, tokens = 0;
};

class DatasetWriter {
public:
    // Ids of the document that is being written, labels or not. Throws Error (bad_input) naming `place` where a
    // document has more than 2^31 - 1 tokens.
    void add(const std::vector<std::int32_t>& ids, const std::string& place, bool counts = true);
    void end_document();

private:
    friend TokenizeResult write_dataset(const std::string&, bool, bool, const std::function<void(DatasetWriter&)>&);
    DatasetWriter(bool wide, bool masked, const std::function<void(std::string_view)>& write)
        : wide_(wide), masked_(masked), write_(write) {}

    bool wide_, masked_;
    const std::function<void(std::string_view)>& write_;
    std::vector<std::int64_t> lengths_;
    std::int64_t count_ = 0; // tokens of the document
    std::string bytes_, mask_;
};

// Writes PREFIX.bin, PREFIX.loss.bin and PREFIX.loss.idx where `masked`, and PREFIX.idx last: 32-bit elements where
// `wide`, else 16-bit ones. A mask that lies there of an earlier dataset is removed. Throws Error (failure) when
// writing fails; nothing half-written is left.
TokenizeResult write_dataset(const std::string& prefix, bool wide, bool masked,
                             const std::function<void(DatasetWriter&)>& fill);

} // namespace moe::data
