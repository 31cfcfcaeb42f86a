// Random bits by counter on the device, those of splitmix() in kernels/deviate.hpp.
#pragma once

#include "kernels/deviate.hpp"

#include <cstdint>

namespace moe::cuda {

__device__ inline std::uint64_t mixed(std::uint64_t x) {
    x += splitmix_step;
    x = (x ^ (x >> 30)) * splitmix_first;
    x = (x ^ (x >> 27)) * splitmix_second;
    return x ^ (x >> 31);
}

// The key of a step, from both its halves.
__device__ inline std::uint64_t step_key(const std::int32_t* noise) {
    return static_cast<std::uint32_t>(noise[0]) | static_cast<std::uint64_t>(static_cast<std::uint32_t>(noise[1]))
                                                      << 32;
}

} // namespace moe::cuda
