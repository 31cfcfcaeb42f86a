// The scratch memory of streams: part of the module, since calls may be captured and allocate nothing.
#include "kernels/cuda/scratch.hpp"

#include "kernels/cuda/check.hpp"

#include <map>
#include <mutex>
#include <utility>

namespace moe::cuda {
namespace {

constexpr int slots = 8;

__device__ __align__(256) float memory[slots][scratch_floats]; // 32 MiB, and every device holds its own
__device__ int claims[slots][32];                              // of each the first, on a line of its own

using Owner = std::pair<int, cudaStream_t>; // The default stream has one handle on all devices.

struct Owners {
    std::mutex guard;
    std::map<Owner, float*> of;
};
Owners& owners() {
    static Owners all;
    return all;
}

// Asking for the address may load the module, which a capture of this thread would forbid.
template <class T>
void* address_of(const T& symbol) {
    void* start = nullptr;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
    const cudaError_t status = cudaGetSymbolAddress(&start, symbol);
    CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
    CUDA_CHECK(status);
    return start;
}
float* start_of_memory() { return static_cast<float*>(address_of(memory)); }

float* free_slot(const std::map<Owner, float*>& of) {
    float* const start = start_of_memory();
    for (int slot = 0; slot < slots; ++slot) {
        float* const candidate = start + slot * scratch_floats;
        bool taken = false;
        for (const auto& [owner, address] : of) taken = taken || address == candidate;
        if (!taken) return candidate;
    }
    require(false, "the number of streams of one device that sum columns at a time", slots + 1, slots);
    return nullptr;
}

} // namespace

float* scratch_of(cudaStream_t stream) {
    Owner owner{0, stream};
    CUDA_CHECK(cudaGetDevice(&owner.first));
    const std::lock_guard<std::mutex> lock(owners().guard);
    const auto known = owners().of.find(owner);
    if (known != owners().of.end()) return known->second;
    float* const slot = free_slot(owners().of);
    owners().of.emplace(owner, slot);
    return slot;
}

int* claims_of(cudaStream_t stream) {
    const std::ptrdiff_t slot = (scratch_of(stream) - start_of_memory()) / scratch_floats;
    return static_cast<int*>(address_of(claims)) + slot * 32;
}

void forget_scratch(cudaStream_t stream) {
    const std::lock_guard<std::mutex> lock(owners().guard);
    std::erase_if(owners().of, [&](const auto& entry) { return entry.first.second == stream; });
}

} // namespace moe::cuda
