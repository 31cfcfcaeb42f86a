// Windows by NCCL's device API: addresses of those that loads and stores reach, and the network to the others.
//
// The network's part has not run: no machine at hand has a NIC. It is compiled with NCCL 2.29.7 and later, and keeps to
// what NCCL's headers and its examples (docs/examples/06_device_api) say of put, signal, readSignal and flush.
#include "kernels/cuda/tokens/nccl_windows.hpp"

#include "kernels/cuda/tokens/slot_exchange.cuh"

#if __has_include(<nccl_device.h>)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter" // of functions in its headers
#include <nccl.h>
#include <nccl_device.h>
#pragma GCC diagnostic pop
#endif

#include <stdexcept>

#if defined(_NCCL_DEVICE_CORE_H_)
#define MOE_NCCL_DEVICE NCCL_VERSION_CODE
#else
#define MOE_NCCL_DEVICE 0
#endif

namespace moe::cuda {
namespace {

#if MOE_NCCL_DEVICE > 0
__global__ void reach_kernel(ncclWindow_t window, int first, int count, int members, char** reached) {
    for (int m = static_cast<int>(threadIdx.x); m < members; m += static_cast<int>(blockDim.x)) {
        const bool near = m >= first && m < first + count;
        reached[m] = near ? static_cast<char*>(ncclGetLsaPointer(window, 0, m - first)) : nullptr;
    }
}
#endif

#if MOE_NCCL_DEVICE >= 22907
#if MOE_NCCL_DEVICE >= 23000
using Raise = ncclGin_WeakSignalInc; // it says that the put it comes with has settled, and no more is asked
#else
using Raise = ncclGin_SignalInc;
#endif

// Signal 0 counts the members that are ready, all calls together, and signal 1 + b what block b's parts were put with.
struct Network {
    static constexpr bool present = true;
    ncclDevComm comm;
    ncclWindow_t window;

    __device__ ncclGin gin() const { return {comm, 0}; }
    __device__ void tell_ready(int member) const { gin().signal(ncclTeamWorld(comm), member, Raise{0}); }
    // All remote ones: none is a call ahead, as that waits for this one's data.
    __device__ void wait_until_ready(const Exchange& e, unsigned call) const {
        wait_for(e, 0, static_cast<std::uint64_t>(call) * static_cast<std::uint64_t>(e.group.remote));
    }
    __device__ void put(int member, std::int64_t there, std::int64_t here, std::int64_t bytes) const {
        gin().put(ncclTeamWorld(comm), member, window, static_cast<std::size_t>(there), window,
                  static_cast<std::size_t>(here), static_cast<std::size_t>(bytes), Raise{1 + blockIdx.x},
                  ncclGin_None{}, ncclCoopCta{});
    }
    __device__ void wait_for_data(const Exchange& e) const {
        unsigned long long parts = 0;
        for (int from = 0; from < e.group.members; ++from)
            if (e.group.reached[from] == nullptr && e.part(from, e.group.member).bytes > 0) ++parts;
        if (parts == 0) return;
        unsigned long long& awaited = e.head()->awaited[blockIdx.x];
        const std::uint64_t least = awaited + parts;
        __syncthreads(); // All have read it.
        if (threadIdx.x == 0) awaited = least;
        wait_for(e, 1 + blockIdx.x, least);
    }
    // What has left may be written again.
    __device__ void finish() const { gin().flush(ncclCoopCta{}); }

private:
    __device__ void wait_for(const Exchange& e, ncclGinSignal_t signal, std::uint64_t least) const {
        if (threadIdx.x == 0) {
            int remote = 0;
            while (e.group.reached[remote] != nullptr) ++remote;
            e.wait_for(remote, [&] { return gin().readSignal(signal) >= least; });
        }
        __syncthreads();
    }
};
#endif

} // namespace

void nccl_exchange(const Exchange& exchange, void* stream) {
#if MOE_NCCL_DEVICE >= 22907
    const auto& end = *static_cast<const NcclEnd*>(exchange.group.library);
    launch_exchange(exchange,
                    Network{*static_cast<const ncclDevComm*>(end.comm), static_cast<ncclWindow_t>(end.window)}, stream);
#else
    (void)exchange, (void)stream;
    throw std::runtime_error("cuda: an exchange over the network, which NCCL's device API has since 2.29.7");
#endif
}

} // namespace moe::cuda

namespace moe {

int nccl_device_version() { return MOE_NCCL_DEVICE; }
int nccl_exchange_signals(int blocks) { return 1 + blocks; }

void nccl_reached_windows(void* window, int first, int count, int members, char** reached) {
#if MOE_NCCL_DEVICE > 0
    cuda::reach_kernel<<<1, 256>>>(static_cast<ncclWindow_t>(window), first, count, members, reached);
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaStreamSynchronize(nullptr));
#else
    (void)window, (void)first, (void)count, (void)members, (void)reached;
    throw std::runtime_error("cuda: windows, for which the kernels were compiled without NCCL's device API");
#endif
}

} // namespace moe
