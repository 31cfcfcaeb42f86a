// The CUDA back end's table, made once a GPU has been found.
#include "engine/cuda/backend.hpp"

#include "kernels/cuda/cuda_kernels.hpp"
#include "planner/error.hpp"

namespace moe {

namespace {

Backend make() {
    std::string why;
    if (!cuda_supported(why)) refuse("--backend cuda: {}; use --backend cpu", why);
    Backend b;
    b.name = "cuda";
    b.kernels = cuda_kernels();
    b.open = open_cuda;
    b.most_ranks = 1;
    b.can_replay = true;
    add_kernels(b);
    return b;
}

} // namespace

const Backend& cuda_backend() {
    static const Backend backend = make();
    return backend;
}

} // namespace moe
