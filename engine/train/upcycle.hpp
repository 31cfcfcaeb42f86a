// Upcycling: a mixture of experts that begins as the dense model it comes from.
#pragma once

#include "engine/train/huggingface.hpp"

#include <string>

namespace moe::train {

// Fills the trainer's parameters from DENSE_DIR, the Hugging Face folder of a dense model of the same widths, depth and
// names. Every MLP is cut into s shards along its inner width, s = its width / an expert's; experts i*s to i*s + s - 1
// hold one copy of all shards, and share a row of random gating, so that a token takes shards of whole copies alone:
// virtual groups and scaled weights of "Upcycling Large Language Models into Mixture of Experts" (arXiv 2410.07524).
// The output matrices are multiplied by s / routed_scaling_factor, which makes the first loss that of the dense model.
//
// Throws Error (bad_input) naming the field of the model's config that does not allow that (shared experts, routing
// weights that do not sum to one, groups of experts, widths that do not divide), or the tensor that is missing or has
// another shape. Nothing is changed before all are found.
LoadReport upcycle_weights(Trainer& trainer, const std::string& folder);

} // namespace moe::train
