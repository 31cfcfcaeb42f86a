// Looks a back end up among those of this build.
#include "engine/backends/backends.hpp"

#include "engine/backends/cpu/table.hpp"
#include "engine/backends/cuda_module.hpp"
#include "planner/base/error.hpp"

namespace moe::backends {

const ops::Backend& backend_named(const std::string& name) {
    if (name == "cpu") return cpu_backend();
    if (name == "cuda") return cuda_backend();
    refuse("--backend {}: unknown; use cpu or cuda", name);
}

} // namespace moe::backends
