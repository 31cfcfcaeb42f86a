// Cross-entropy and its gradient in one reading of the logits, for vocabularies that the registers of a cluster hold.
#pragma once

#include "kernels/kernels.hpp"

namespace moe::cuda {

// Computes what the table's cross_entropy does; false, with nothing done, for other widths and odd addresses.
bool cross_entropy_rows(const LossShape& shape, double gradient_scale, Src logits, const std::int32_t* labels,
                        float* max, float* stat, Dst dlogits, void* stream);

} // namespace moe::cuda
