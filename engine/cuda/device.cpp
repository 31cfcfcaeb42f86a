// One GPU as a device: memory by cudaMalloc, copies through pinned staging, a stream, steps as CUDA graphs.
#include "engine/cuda/backend.hpp"

#include "kernels/cuda/cuda_kernels.hpp"
#include "planner/error.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

namespace moe {

namespace {

void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess) fail("cuda: {}: {}", what, cudaGetErrorString(status));
}

class CudaQueue : public Queue {
public:
    explicit CudaQueue(bool replayed) : replayed_(replayed) {
        // Not ordered after the legacy default stream, which nothing here uses.
        check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
    }
    CudaQueue(const CudaQueue&) = delete;
    CudaQueue& operator=(const CudaQueue&) = delete;
    ~CudaQueue() override {
        cudaStreamSynchronize(stream_);
        cuda_forget_stream(stream_);
        for (cudaGraphExec_t step : steps_)
            if (step != nullptr) cudaGraphExecDestroy(step);
        for (cudaEvent_t stamp : stamps_) cudaEventDestroy(stamp);
        cudaStreamDestroy(stream_);
    }

    void* stream() const override { return stream_; }
    cudaStream_t cuda_stream() const { return stream_; }

    void reserve(std::size_t stamps) override {
        while (stamps_.size() < stamps) {
            cudaEvent_t event = nullptr;
            check(cudaEventCreate(&event), "creating an event");
            stamps_.push_back(event);
        }
    }

    void prepare(bool stamped, const std::function<void()>& enqueue) override {
        if (!replayed_) return;
        const cudaGraph_t graph = capture(enqueue);
        const cudaError_t status = cudaGraphInstantiate(&steps_[stamped], graph, 0);
        cudaGraphDestroy(graph);
        check(status, "instantiating the step's graph");
        check(cudaGraphUpload(steps_[stamped], stream_), "uploading the step's graph");
    }

    void play(bool stamped, const std::function<void()>& enqueue) override {
        if (!replayed_) return enqueue();
        check(cudaGraphLaunch(steps_[stamped], stream_), "launching the step's graph");
    }

    // Inside a graph only an external record is a node that can be timed.
    void stamp(std::size_t index) override {
        check(cudaEventRecordWithFlags(stamps_.at(index), stream_,
                                       capturing_ ? cudaEventRecordExternal : cudaEventRecordDefault),
              "recording an event");
    }

    double seconds(std::size_t index) override {
        float milliseconds = 0.0f;
        check(cudaEventElapsedTime(&milliseconds, stamps_.at(0), stamps_.at(index)), "reading an event");
        return 1e-3 * static_cast<double>(milliseconds);
    }

    void wait() override { check(cudaStreamSynchronize(stream_), "waiting for queued work"); }

private:
    cudaGraph_t capture(const std::function<void()>& enqueue) {
        cudaGraph_t graph = nullptr;
        check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capturing a step");
        capturing_ = true;
        try {
            enqueue();
        } catch (...) {
            capturing_ = false;
            if (cudaStreamEndCapture(stream_, &graph) == cudaSuccess) cudaGraphDestroy(graph);
            throw;
        }
        capturing_ = false;
        check(cudaStreamEndCapture(stream_, &graph), "capturing a step");
        return graph;
    }

    cudaStream_t stream_ = nullptr;
    bool replayed_, capturing_ = false;
    std::array<cudaGraphExec_t, 2> steps_{}; // without and with stamps
    std::vector<cudaEvent_t> stamps_;
};

// Pageable memory would be copied piece by piece through the driver's own staging, and the host would wait each time.
class Staging {
public:
    static constexpr std::size_t bytes = std::size_t{32} << 20;

    Staging() { check(cudaMallocHost(&memory_, bytes), "allocating pinned staging of 32 MiB"); }
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;
    ~Staging() { cudaFreeHost(memory_); }

    char* at(std::size_t offset) const { return static_cast<char*>(memory_) + offset; }

private:
    void* memory_ = nullptr;
};

// Pinned, so that copies run behind the queue's other work without the driver's own staging, in a graph too.
class PinnedHost : public Device {
public:
    std::string name() const override { return "this machine's pinned memory"; }
    char* allocate(std::size_t size) override {
        void* memory = nullptr;
        if (cudaMallocHost(&memory, size) == cudaSuccess) return static_cast<char*>(memory);
        cudaGetLastError(); // the next launch's check must not find it
        return nullptr;
    }
    void release(char* memory) noexcept override { cudaFreeHost(memory); }
    void fill(void* target, int byte, std::size_t size) override { std::memset(target, byte, size); }
    void write(void* target, const void* source, std::size_t size) override { std::memcpy(target, source, size); }
    void read(void* target, const void* source, std::size_t size) override { std::memcpy(target, source, size); }
};

class CudaDevice : public Device {
public:
    explicit CudaDevice(bool replayed) : queue_(replayed) {}

    std::string name() const override {
        int device = 0;
        cudaDeviceProp properties{};
        check(cudaGetDevice(&device), "asking for the GPU");
        check(cudaGetDeviceProperties(&properties, device), "asking for the GPU's name");
        return properties.name;
    }
    Queue* queue() override { return &queue_; }
    std::unique_ptr<Device> open_offload() const override { return std::make_unique<PinnedHost>(); }

    char* allocate(std::size_t size) override {
        void* memory = nullptr;
        const cudaError_t status = cudaMalloc(&memory, size);
        if (status == cudaErrorMemoryAllocation) {
            cudaGetLastError(); // the next launch's check must not find it
            return nullptr;
        }
        check(status, "allocating the arena");
        return static_cast<char*>(memory);
    }
    void release(char* memory) noexcept override {
        cudaStreamSynchronize(queue_.cuda_stream());
        cudaFree(memory);
    }
    double free_bytes() const override {
        std::size_t free = 0, all = 0;
        check(cudaMemGetInfo(&free, &all), "asking for free memory");
        return static_cast<double>(free);
    }

    double used_bytes() const override {
        std::size_t free = 0, all = 0;
        check(cudaMemGetInfo(&free, &all), "asking for free memory");
        return static_cast<double>(all - free);
    }

    void fill(void* target, int byte, std::size_t size) override {
        check(cudaMemsetAsync(target, byte, size, queue_.cuda_stream()), "filling memory");
    }

    // Staged pieces lie one behind another; when there is no room left, all copies before are waited for.
    void write(void* target, const void* source, std::size_t size) override {
        for (std::size_t done = 0; done < size;) {
            if (used_ == Staging::bytes) drain();
            const std::size_t piece = std::min(size - done, Staging::bytes - used_);
            std::memcpy(staging_.at(used_), static_cast<const char*>(source) + done, piece);
            check(cudaMemcpyAsync(static_cast<char*>(target) + done, staging_.at(used_), piece, cudaMemcpyDefault,
                                  queue_.cuda_stream()),
                  "copying to the GPU");
            used_ += piece;
            done += piece;
        }
    }

    void read(void* target, const void* source, std::size_t size) override {
        drain();
        for (std::size_t done = 0; done < size;) {
            const std::size_t piece = std::min(size - done, Staging::bytes);
            check(cudaMemcpyAsync(staging_.at(0), static_cast<const char*>(source) + done, piece, cudaMemcpyDefault,
                                  queue_.cuda_stream()),
                  "copying from the GPU");
            queue_.wait();
            std::memcpy(static_cast<char*>(target) + done, staging_.at(0), piece);
            done += piece;
        }
    }

private:
    void drain() {
        queue_.wait();
        used_ = 0;
    }

    CudaQueue queue_;
    Staging staging_;
    std::size_t used_ = 0; // bytes of staging that copies may still read
};

} // namespace

std::unique_ptr<Device> open_cuda(bool replayed) { return std::make_unique<CudaDevice>(replayed); }

} // namespace moe
