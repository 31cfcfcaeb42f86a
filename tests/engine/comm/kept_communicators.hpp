// The CUDA back end with communicators that outlive their run: making one takes longer than a small model's steps.
#pragma once

#include "engine/ops/backend.hpp"

// Communicators that a rank leaves, the next ranks of this process on the same GPUs, in the same order, get again when
// they join. Runs come one after another. windows: whether its library has any, or messages carry slots. Throws Error
// (bad_input) where there is no such back end.
const moe::ops::Backend& cuda_keeping(bool windows = true);
