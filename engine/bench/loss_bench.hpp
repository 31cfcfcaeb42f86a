// The costs of each rank for the loss of a vocabulary that ranks share: ops that no step of one rank has.
#pragma once

#include "engine/ops/backend.hpp"
#include "planner/machine/hardware.hpp"

#include <map>
#include <string>
#include <vector>

namespace moe::bench {

// Measures on the first device of a back end with queues; adds calls by measured_key(). Logits take up to `most_bytes`.
// Throws Error (failure) where it has not three times as much free.
void measure_split_loss(const ops::Backend& backend, std::int64_t most_bytes,
                        std::map<std::string, std::vector<machine::MeasuredCall>>& measured);

} // namespace moe::bench
