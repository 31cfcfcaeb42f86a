// The stand-in for the CUDA back end in builds without nvcc.
#include "engine/backends/cuda/backend.hpp"

#include "planner/base/error.hpp"

namespace moe::backends {

const ops::Backend& cuda_backend() {
    refuse("--backend cuda: this build has no CUDA kernels: build it where nvcc is found, with -Dcuda=enabled, or use "
           "--backend cpu");
}

} // namespace moe::backends
