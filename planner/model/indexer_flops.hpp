// FLOPs of indexers' gradients, which plans may leave out or take over more keys than the model's count has.
#pragma once

#include "planner/model/fwd.hpp"

#include <cstdint>

namespace moe::model {

// What model_flops_per_token() counts of the gradients of indexers alone, FLOP per token: of the weights of their
// projections, and of scores at the keys that are picked or, where their loss is over all of them, at all that a query
// sees.
double indexer_gradient_flops(const Model& model, std::int64_t seq, bool all_keys,
                              const DocumentLengths* documents = nullptr);

} // namespace moe::model
