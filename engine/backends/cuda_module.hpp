// The CUDA engine's shared module, opened when it is asked for.
#pragma once

#include "engine/backends/cuda/module.hpp"

#include <string>
#include <vector>

namespace moe::backends {

// This program's own.
CudaHost cuda_host();

// Where the module is looked for, the first place first: the file that MOE_PLAN_CUDA names, and no other; else beside
// the executable, as in a build tree, and in the library folder of its installation.
std::vector<std::string> cuda_module_places();

// The door of the first of these files that is there; it stays open. Throws Error (bad_input): none is there, it cannot
// be opened, or it is of another build.
CudaEngine open_cuda_module(const std::vector<std::string>& places);

// The back end that the module at the usual places fills in, opened once. Throws Error (bad_input) as
// open_cuda_module() does, and where this machine has no GPU that the module is compiled for.
const ops::Backend& cuda_backend();

} // namespace moe::backends
