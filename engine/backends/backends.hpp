// The choice of a back end by name.
#pragma once

#include "engine/ops/backend.hpp"

#include <string>

namespace moe::backends {

// The back end of a --backend option. Throws Error: bad_input for an unknown name, a module that is not there or a
// device that this machine lacks, failure for a processor without the instructions that the kernels are compiled for.
const ops::Backend& backend_named(const std::string& name);

} // namespace moe::backends
