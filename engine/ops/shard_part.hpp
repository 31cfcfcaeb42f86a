// A run of a bucket's shard whose weights the optimizer treats alike.
#pragma once

#include <cstdint>

namespace moe::ops {

// Elements [first, first + count) of this rank's shard. Where a bucket has parts, they cover the whole shard in order.
struct ShardPart {
    std::int64_t first = 0, count = 0;
    bool frozen = false; // neither changed nor in the norm of the gradients
    float rate = 1.0f;   // multiplies the learning rate
    float decay = -1.0f; // in place of the run's weight decay, of norms and biases too; below 0: the run's

    bool alike(const ShardPart& other) const {
        return frozen == other.frozen && !(rate < other.rate) && !(other.rate < rate) && !(decay < other.decay) &&
               !(other.decay < decay);
    }
};

} // namespace moe::ops
