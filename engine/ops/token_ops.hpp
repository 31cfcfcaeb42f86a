// Tokens to experts and back as one op: over peers' memory, or as rows where ranks share none.
#pragma once

#include "engine/ops/op_context.hpp"

namespace moe::ops {

// The ops dispatch_tokens and combine_tokens.
void exchange_tokens(const OpContext& context);

} // namespace moe::ops
