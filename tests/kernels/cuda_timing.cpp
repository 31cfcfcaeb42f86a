// Device buffers of random numbers for timing, and the times of calls and of copies on the device.
#include "tests/kernels/cuda_timing.hpp"

#include "kernels/cuda/check.hpp"
#include "kernels/cuda/cuda_kernels.hpp"

#include <algorithm>
#include <random>
#include <stdexcept>

namespace moe::test {
namespace {

constexpr std::size_t pool_bytes = std::size_t{8} << 30, pattern_bytes = std::size_t{16} << 20;

struct Stream {
    cudaStream_t stream = nullptr;
    cudaEvent_t start = nullptr, end = nullptr;
    Stream() {
        CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CUDA_CHECK(cudaEventCreate(&start));
        CUDA_CHECK(cudaEventCreate(&end));
        CUDA_CHECK(cudaDeviceSynchronize());
    }
    ~Stream() {
        cudaEventDestroy(start);
        cudaEventDestroy(end);
        cuda_forget_stream(stream);
        cudaStreamDestroy(stream);
    }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
};

// Median of a few runs of `queue`, which comes after one that is not counted.
template <class Queue>
double median_seconds(const Stream& s, Queue queue) {
    constexpr int runs = 7;
    queue();
    std::vector<float> times(runs);
    for (float& milliseconds : times) {
        CUDA_CHECK(cudaEventRecord(s.start, s.stream));
        queue();
        CUDA_CHECK(cudaEventRecord(s.end, s.stream));
        CUDA_CHECK(cudaEventSynchronize(s.end));
        CUDA_CHECK(cudaEventElapsedTime(&milliseconds, s.start, s.end));
    }
    std::nth_element(times.begin(), times.begin() + runs / 2, times.end());
    return 1e-3 * static_cast<double>(times[runs / 2]);
}

} // namespace

DevicePool::DevicePool() {
    CUDA_CHECK(cudaMalloc(&memory_, pool_bytes));
    CUDA_CHECK(cudaMalloc(&pattern_, pattern_bytes));
    // Either half of a word is a BF16 number of size 0.5 to 4, and the word an FP32 one.
    std::mt19937 engine(1);
    std::vector<std::uint32_t> words(pattern_bytes / 4);
    for (std::uint32_t& w : words) {
        const auto r = static_cast<std::uint32_t>(engine());
        w = (r & 0x807f807fu) | (126 + (r >> 8) % 3) << 23 | (126 + (r >> 24) % 3) << 7;
    }
    CUDA_CHECK(cudaMemcpy(pattern_, words.data(), pattern_bytes, cudaMemcpyHostToDevice));
    fill(pool_bytes);
}

DevicePool::~DevicePool() {
    cudaFree(pattern_);
    cudaFree(memory_);
}

void DevicePool::fill(std::size_t bytes) {
    for (std::size_t at = 0; at < bytes; at += pattern_bytes)
        CUDA_CHECK(cudaMemcpy(static_cast<char*>(memory_) + at, pattern_, std::min(pattern_bytes, bytes - at),
                              cudaMemcpyDeviceToDevice));
}

void DevicePool::reset() {
    fill(next_);
    next_ = 0;
}

Dst DevicePool::take(Type type, std::int64_t elements) {
    const std::size_t size = (static_cast<std::size_t>(elements) * size_of(type) + 255) / 256 * 256;
    if (next_ + size > pool_bytes) throw std::runtime_error("the benchmark's buffers do not fit its pool");
    void* const at = static_cast<char*>(memory_) + next_;
    next_ += size;
    return {at, type};
}

const std::int32_t* DevicePool::ints(const std::vector<std::int32_t>& values) {
    void* const at = take(Type::f32, static_cast<std::int64_t>(values.size())).data;
    CUDA_CHECK(cudaMemcpy(at, values.data(), values.size() * 4, cudaMemcpyHostToDevice));
    return static_cast<std::int32_t*>(at);
}

const float* DevicePool::floats_of(const std::vector<float>& values) {
    float* const at = floats(static_cast<std::int64_t>(values.size()));
    CUDA_CHECK(cudaMemcpy(at, values.data(), values.size() * 4, cudaMemcpyHostToDevice));
    return at;
}

double seconds_of(const std::function<void(void* stream)>& call) {
    constexpr int calls = 4;
    const Stream s;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t runnable = nullptr;
    CUDA_CHECK(cudaStreamBeginCapture(s.stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < calls; ++i) call(s.stream);
    CUDA_CHECK(cudaStreamEndCapture(s.stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&runnable, graph, 0));
    const double seconds = median_seconds(s, [&] { CUDA_CHECK(cudaGraphLaunch(runnable, s.stream)); });
    CUDA_CHECK(cudaGraphExecDestroy(runnable));
    CUDA_CHECK(cudaGraphDestroy(graph));
    return seconds / calls;
}

double copy_seconds(double bytes) {
    constexpr int calls = 4;
    // Kept from call to call, so that nothing is given back just before the next case is timed.
    static void* memory = nullptr;
    static std::size_t size = 0;
    const auto half = static_cast<std::size_t>(bytes / 2.0);
    if (2 * half > size) {
        CUDA_CHECK(cudaFree(memory));
        size = 2 * half;
        CUDA_CHECK(cudaMalloc(&memory, size));
        CUDA_CHECK(cudaMemset(memory, 0x3f, size));
    }
    const Stream s;
    const double seconds = median_seconds(s, [&] {
        for (int i = 0; i < calls; ++i)
            CUDA_CHECK(
                cudaMemcpyAsync(memory, static_cast<char*>(memory) + half, half, cudaMemcpyDeviceToDevice, s.stream));
    });
    return seconds / calls;
}

} // namespace moe::test
