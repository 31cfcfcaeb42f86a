// The choice of a back end by name.
#include "engine/cpu/table.hpp"
#include "engine/cuda/backend.hpp"
#include "planner/error.hpp"

namespace moe {

const Backend& backend_named(const std::string& name) {
    if (name == "cpu") return cpu_backend();
    if (name == "cuda") return cuda_backend();
    refuse("--backend {}: unknown; use cpu or cuda", name);
}

} // namespace moe
