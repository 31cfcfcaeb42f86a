// The CUDA back end's table, filled in once a GPU has been found.
#include "engine/backends/cuda/backend.hpp"
#include "engine/device/streams.hpp"

#include "engine/ops/adamw_step.hpp"
#include "engine/ops/op_context.hpp"
#include "kernels/cuda/cuda_kernels.hpp"
#include "kernels/cuda/products/block_scaled.hpp"
#include "planner/base/error.hpp"
#include "planner/machine/gpu_properties.hpp"
#include "planner/plan/block_scaling.hpp"
#include "planner/program/communicators.hpp"
#include "planner/program/op.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace moe::backends {

namespace {

// Offloaded tensors, in the order of the queue: the last inputs go to the outputs, one each. The driver knows by the
// address which side is the host's pinned memory. Its engines copy beside all that computes, but a graph with their
// copies is queued one copy at a time: there a kernel copies.
void copy_bytes(const ops::OpContext& c) {
    const auto stream = static_cast<cudaStream_t>(c.stream);
    cudaStreamCaptureStatus captured{};
    cudaError_t status = cudaStreamIsCapturing(stream, &captured);
    const std::size_t count = c.op.out.size(), first = c.op.in.size() - count;
    for (std::size_t i = 0; i < count && status == cudaSuccess; ++i) {
        const std::int64_t bytes = c.output(i).bytes();
        if (captured == cudaStreamCaptureStatusActive)
            cuda_copy_by_blocks(c.out[i], c.in[first + i], bytes, program::host_copy_blocks, stream);
        else
            status =
                cudaMemcpyAsync(c.out[i], c.in[first + i], static_cast<std::size_t>(bytes), cudaMemcpyDefault, stream);
    }
    if (status != cudaSuccess) fail("cuda: copying to or from the host: {}", cudaGetErrorString(status));
}

// The cores of this host, shared by the ranks of its devices.
int step_threads() {
    int devices = 1;
    if (cudaGetDeviceCount(&devices) != cudaSuccess) devices = 1;
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    return std::clamp(cores / std::max(devices, 1), 1, 32);
}

struct HostStep {
    ops::AdamwStep step;
    int threads = 1;
};
void CUDART_CB run_host_step(void* held) {
    const auto* host = static_cast<const HostStep*>(held);
    ops::run_on_host(host->step, host->threads);
}

// The driver calls the step when its stream has come there, again at every replay: what it is told stays here, under
// the op and the masters that it works on.
void adamw_on_host(const ops::OpContext& c) {
    static std::mutex mutex;
    static std::map<std::pair<const void*, const void*>, HostStep> steps;
    HostStep* held = nullptr;
    {
        const std::lock_guard lock(mutex);
        held = &steps[{&c.op, c.out[0]}];
        *held = {ops::adamw_step_of(c), step_threads()};
    }
    const cudaError_t status = cudaLaunchHostFunc(static_cast<cudaStream_t>(c.stream), run_host_step, held);
    if (status != cudaSuccess) fail("cuda: queueing the host's step: {}", cudaGetErrorString(status));
}

int count_devices() {
    int devices = 0;
    const cudaError_t status = cudaGetDeviceCount(&devices);
    if (status != cudaSuccess) fail("cuda: counting GPUs: {}", cudaGetErrorString(status));
    return devices;
}

int attribute(cudaDeviceAttr which) {
    int value = 0;
    const cudaError_t status = cudaDeviceGetAttribute(&value, which, 0);
    if (status != cudaSuccess) fail("cuda: asking for the GPU's properties: {}", cudaGetErrorString(status));
    return value;
}

machine::GpuProperties properties() {
    cudaDeviceProp known{};
    const cudaError_t status = cudaGetDeviceProperties(&known, 0);
    if (status != cudaSuccess) fail("cuda: asking for the GPU's properties: {}", cudaGetErrorString(status));
    machine::GpuProperties gpu;
    gpu.name = known.name;
    gpu.major = known.major;
    gpu.minor = known.minor;
    gpu.multiprocessors = known.multiProcessorCount;
    gpu.clock = 1e3 * attribute(cudaDevAttrClockRate); // kHz
    gpu.memory_bytes = static_cast<double>(known.totalGlobalMem);
    gpu.memory_clock = 1e3 * attribute(cudaDevAttrMemoryClockRate); // kHz
    gpu.memory_bus = attribute(cudaDevAttrGlobalMemoryBusWidth);
    return gpu;
}

} // namespace

void fill_cuda(ops::Backend& b) {
    // More streams than the driver's default of 8 hardware queues would wait for each other; read at its first use. No
    // more than are needed: on an H200, with this variable set before, a process begins in 0.29 s with 8, in 0.42 with
    // 16 and in 0.64 with 32.
    static_assert(device::queue_streams < 16);
    ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16", 0);
    std::string why;
    if (!cuda_supported(why)) refuse("--backend cuda: {}; use --backend cpu", why);
    b.name = "cuda";
    b.kernels = cuda_kernels();
    b.open = open_cuda;
    b.devices = count_devices;
    b.properties = properties;
    b.collectives = nccl_library;
    b.peers = cuda_peers;
    b.tiled = cuda_has_tiles;
    static_assert(block_scaled_scratch == plan::block_scaled_scratch);
    if (cuda_scales_blocks()) b.block_scaled_gemm = cuda_block_scaled_gemm;
    b.can_replay = b.tells_logits = true;
    for (const program::OpKind kind : {program::OpKind::copy_to_host, program::OpKind::copy_from_host})
        b.table[static_cast<std::size_t>(kind)] = copy_bytes;
    b.table[static_cast<std::size_t>(program::OpKind::adamw_on_host)] = adamw_on_host;
}

} // namespace moe::backends
