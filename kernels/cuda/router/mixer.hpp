// The router that picks experts one after another (RouterShape::mixer), and its gradient; as router and router_grad.
#pragma once

#include "kernels/kernels.hpp"

namespace moe::cuda {

void mixer(const RouterShape& shape, Src logits, GivenChoice given, std::int32_t* index, float* weight, void* stream);
void mixer_grad(const RouterShape& shape, const float* dweight, Src logits, const std::int32_t* index, Dst dlogits,
                void* stream);

} // namespace moe::cuda
