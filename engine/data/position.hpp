// The place in the data that a run stands at, as a checkpoint keeps it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moe::data {

// A dataset is taken in passes, a pass in blocks of `block` tokens, in their order or permuted.
struct DatasetPosition {
    std::string prefix; // as it was given; the three numbers below say whether another path holds the same tokens
    std::int64_t tokens = 0, documents = 0;
    std::uint32_t mark = 0;    // CRC-32C of the first and the last 64 KiB of its .bin
    double weight = 1.0;       // in the blend
    std::int64_t order = 0;    // keys the permutations, so that they stay when the blend changes
    std::int64_t pass = 0;     // from 0
    std::int64_t block = 0;    // tokens: the samples' length when the pass began
    std::int64_t consumed = 0; // tokens of this pass that samples have taken
    std::int64_t drawn = 0;    // samples since the blend was last changed

    bool same_tokens(const DatasetPosition& o) const {
        return tokens == o.tokens && documents == o.documents && mark == o.mark;
    }
};

struct DataPosition {
    bool shuffled = false;
    std::int64_t seq = 0, global_batch = 0; // tokens of a sample, samples of a step
    std::vector<DatasetPosition> datasets;  // in the order of the blend; empty: the data have no position
};

} // namespace moe::data
