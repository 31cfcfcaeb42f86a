// The router for up to 512 experts, of which up to 16 are chosen. Groups, if they limit the choice, are scored by their
// best one or two and fit into 32 lanes, a power of two of them per group, of at most 32 experts each.
#pragma once

#include "kernels/kernels.hpp"

namespace moe::cuda {

// These do as router and router_grad of the table; false, with nothing done, for other shapes.
bool router_lanes(const RouterShape& shape, Src logits, Src bias, const std::int32_t* positions, std::int32_t* index,
                  float* weight, void* stream);
bool router_grad_lanes(const RouterShape& shape, const float* dweight, Src logits, const std::int32_t* index,
                       Dst dlogits, void* stream);

} // namespace moe::cuda
