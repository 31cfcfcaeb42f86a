// Memory of other GPUs of this machine: by its address within a process, by CUDA's inter-process handles between them.
#include "engine/backends/cuda/backend.hpp"
#include "kernels/cuda/cuda_kernels.hpp"
#include "planner/base/error.hpp"

#include <cuda_runtime_api.h>

#include <cstring>
#include <random>

namespace moe::backends {

namespace {

void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess) fail("cuda: {}: {}", what, cudaGetErrorString(status));
}

// Process numbers repeat between containers.
std::uint64_t this_process() {
    static const std::uint64_t number = [] {
        std::random_device random;
        return std::uint64_t{random()} << 32 | random();
    }();
    return number;
}

struct Shared {
    std::uint64_t process = 0;
    char* memory = nullptr;
    int device = 0;
    cudaError_t status = cudaSuccess; // status of the handle: not every machine shares memory between processes
    cudaIpcMemHandle_t handle{};
};
static_assert(sizeof(Shared) <= sizeof(comm::PeerLibrary::Handle));

Shared shared_of(const comm::PeerLibrary::Handle& handle) {
    Shared out;
    std::memcpy(&out, handle.data(), sizeof out);
    return out;
}

comm::PeerLibrary::Handle share(char* memory) {
    Shared shared{this_process(), memory, 0, cudaSuccess, {}};
    check(cudaGetDevice(&shared.device), "asking for the device");
    shared.status = cudaIpcGetMemHandle(&shared.handle, memory);
    if (shared.status != cudaSuccess) cudaGetLastError(); // The next launch's check must not find it.
    comm::PeerLibrary::Handle handle{};
    std::memcpy(handle.data(), &shared, sizeof shared);
    return handle;
}

char* reach_device(const Shared& shared, std::string& why) {
    int device = 0, able = 0;
    check(cudaGetDevice(&device), "asking for the device");
    if (device == shared.device) return shared.memory;
    check(cudaDeviceCanAccessPeer(&able, device, shared.device), "asking for peer access");
    if (able == 0) {
        why = fmt::format("GPU {} has no peer access to GPU {}", device, shared.device);
        return nullptr;
    }
    const cudaError_t status = cudaDeviceEnablePeerAccess(shared.device, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled)
        cudaGetLastError();
    else
        check(status, "enabling peer access");
    return shared.memory;
}

char* reach(const comm::PeerLibrary::Handle& handle, std::string& why) {
    const Shared shared = shared_of(handle);
    if (shared.process == this_process()) return reach_device(shared, why);
    void* memory = nullptr;
    cudaError_t status = shared.status;
    if (status == cudaSuccess) status = cudaIpcOpenMemHandle(&memory, shared.handle, cudaIpcMemLazyEnablePeerAccess);
    if (status == cudaSuccess) return static_cast<char*>(memory);
    cudaGetLastError();
    why = fmt::format("sharing GPU memory between processes: {}", cudaGetErrorString(status));
    return nullptr;
}

void let_go(const comm::PeerLibrary::Handle& handle, char* memory) {
    if (shared_of(handle).process != this_process()) cudaIpcCloseMemHandle(memory);
}

} // namespace

const comm::PeerLibrary& cuda_peers() {
    static const comm::PeerLibrary library{share, reach, let_go, cuda_peer_kernels};
    return library;
}

} // namespace moe::backends
