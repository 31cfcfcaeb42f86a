// The router for up to 512 experts, of which up to 16 are chosen, and whose groups, if any limit the choice, have 8
// experts (32 where more than 8 are chosen) or that times a power of two, and are scored by their best one or two.
#pragma once

#include "kernels/kernels.hpp"

namespace moe::cuda {

// As router and router_grad of the table; false, with nothing done, for other shapes.
bool router_lanes(const RouterShape& shape, Src logits, Src bias, const std::int32_t* positions, std::int32_t* index,
                  float* weight, void* stream);
bool router_grad_lanes(const RouterShape& shape, const float* dweight, Src logits, const std::int32_t* index,
                       Dst dlogits, void* stream);

} // namespace moe::cuda
