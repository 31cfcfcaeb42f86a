// The costs of dispatch and combine over peers' memory, over numbers and widths of tokens.
#pragma once

#include "engine/ops/backend.hpp"
#include "planner/machine/hardware.hpp"

#include <map>
#include <string>
#include <vector>

namespace moe::bench {

// Among one rank on each of the first `ranks` devices of a back end whose ranks reach each other's memory: adds calls
// by group_key() of tokens_key(), with bytes and sides as cost_point() says. Choices are balanced as a forced router's
// are. Rows of a call take up to `most_bytes`. Throws Error (failure) where a device has not four times as much free.
void measure_tokens(const ops::Backend& backend, int ranks, std::int64_t most_bytes,
                    std::map<std::string, std::vector<machine::MeasuredCall>>& measured);

} // namespace moe::bench
