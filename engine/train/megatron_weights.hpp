// Weights of Megatron-Core's distributed checkpoints into the ranks of any plan.
#pragma once

#include "engine/train/huggingface.hpp"

#include <string>

namespace moe::train {

// Fills every parameter of the trainer from a folder of torch_dist (weights::TorchDist), by the names of
// Megatron-Core's GPT models: layers one by one or in one tensor, queries, keys and values by groups, gates and values
// of MLPs in one tensor, experts by number, MLA and MTP. Rows of the vocabulary behind the plan's are padding. States
// of optimizers and what is no tensor are left where they are. Throws Error (bad_input), with nothing changed, naming
// folder and tensor: one that is missing, has another shape, or is of the model and taken by no parameter; and for
// parameters that Megatron-Core's GPT model has not.
LoadReport load_megatron_weights(Trainer& trainer, const std::string& folder);

} // namespace moe::train
