// What a plan's checkpoint weighs.
#pragma once

#include "planner/plan/fwd.hpp"

namespace moe::goodput {

// Bytes that the rank which writes most puts into one checkpoint. Ranks share the writing of what they hold alike, so
// that every element is written once (Megatron-LM: --ckpt-fully-parallel-save, its default; our engine likewise).
// Written are FP32 masters and both moments in the precision that the optimizer keeps them in; published stacks write
// the weights in BF16 beside them (Megatron-LM, megatron/training/checkpointing.py: model and optimizer).
double checkpoint_bytes(const plan::Plan& plan);

} // namespace moe::goodput
