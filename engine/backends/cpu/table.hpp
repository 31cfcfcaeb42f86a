// The CPU back end: op kinds on the CPU kernels, any number of ranks.
#pragma once

#include "engine/ops/backend.hpp"

namespace moe::backends {

// Every op kind that plans of the stack "moe-plan" contain. Throws Error (failure) on a processor that lacks the
// instructions the kernels are compiled for.
const ops::Backend& cpu_backend();

} // namespace moe::backends
