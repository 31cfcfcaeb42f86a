// CUDA_CHECK: a CUDA call that failed becomes an exception with the place, the call and the driver's words.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace moe::cuda {

inline void check(cudaError_t status, const char* what, const char* file, int line) {
    if (status == cudaSuccess) return;
    throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what + ": " +
                             cudaGetErrorString(status));
}

// A size that a kernel is not built for; `limit` is what it takes at most.
inline void require(bool condition, const char* what, long long value, long long limit) {
    if (condition) return;
    throw std::runtime_error(std::string("CUDA kernels: ") + what + " is " + std::to_string(value) + ", at most " +
                             std::to_string(limit) + " is supported");
}

} // namespace moe::cuda

#define CUDA_CHECK(call) ::moe::cuda::check((call), #call, __FILE__, __LINE__)
