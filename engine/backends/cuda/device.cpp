// One GPU as a device: memory by cudaMalloc, copies through pinned staging, streams, steps as CUDA graphs.
#include "engine/backends/cuda/backend.hpp"
#include "engine/backends/cuda/graph.hpp"
#include "engine/device/streams.hpp"

#include "kernels/cuda/cuda_kernels.hpp"
#include "planner/base/error.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

namespace moe::backends {

namespace {

void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess) fail("cuda: {}: {}", what, cudaGetErrorString(status));
}

// Makes the GPU the calling thread's own: a rank's thread and the one that reads results are not the same.
void select(int device) { check(cudaSetDevice(device), "choosing a GPU"); }

bool on_host(const void* memory) {
    cudaPointerAttributes attributes{};
    check(cudaPointerGetAttributes(&attributes, memory), "asking where memory lies");
    return attributes.type == cudaMemoryTypeHost || attributes.type == cudaMemoryTypeUnregistered;
}

device::QueuedStep described(cudaGraph_t graph) {
    device::QueuedStep step;
    step.records = 1;
    check(cudaGraphGetNodes(graph, nullptr, &step.nodes), "counting a graph's nodes");
    std::vector<cudaGraphNode_t> nodes(step.nodes);
    check(cudaGraphGetNodes(graph, nodes.data(), &step.nodes), "listing a graph's nodes");
    for (const cudaGraphNode_t node : nodes) {
        cudaGraphNodeType type{};
        check(cudaGraphNodeGetType(node, &type), "asking for a graph node's type");
        step.fills += type == cudaGraphNodeTypeMemset;
        if (type != cudaGraphNodeTypeMemcpy) continue;
        cudaMemcpy3DParms copy{};
        check(cudaGraphMemcpyNodeGetParams(node, &copy), "asking for a graph's copy");
        step.host_copies += on_host(copy.srcPtr.ptr) || on_host(copy.dstPtr.ptr);
    }
    return step;
}

class CudaQueue : public device::Queue {
public:
    CudaQueue(bool replayed, int device) : device_(device), replayed_(replayed) {
        select(device_);
        int least = 0, greatest = 0;
        check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for priorities");
        // Not ordered after the legacy default stream, which nothing here uses. Streams that others wait for go first.
        for (std::size_t s = 0; s < streams_.size(); ++s)
            check(cudaStreamCreateWithPriority(&streams_[s], cudaStreamNonBlocking, s == 0 ? least : greatest),
                  "creating a stream");
        void* marks = nullptr;
        check(cudaMallocHost(&marks, streams_.size() * sizeof(int)), "allocating pinned memory");
        marks_ = static_cast<int*>(marks);
        std::fill_n(marks_, streams_.size(), 0);
        check(cudaEventCreateWithFlags(&forked_, cudaEventDisableTiming), "creating an event");
        for (cudaEvent_t& event : played_) check(cudaEventCreate(&event), "creating an event");
        for (cudaEvent_t& event : joined_)
            check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
    }
    CudaQueue(const CudaQueue&) = delete;
    CudaQueue& operator=(const CudaQueue&) = delete;
    ~CudaQueue() override {
        cudaSetDevice(device_);
        cudaDeviceSynchronize();
        drop_records();
        for (cudaEvent_t event : stamps_) cudaEventDestroy(event);
        for (cudaEvent_t event : signals_) cudaEventDestroy(event);
        for (cudaEvent_t event : joined_) cudaEventDestroy(event);
        for (cudaEvent_t event : played_) cudaEventDestroy(event);
        cudaEventDestroy(forked_);
        cudaFreeHost(marks_);
        for (cudaStream_t stream : streams_) {
            cuda_forget_stream(stream);
            cudaStreamDestroy(stream);
        }
    }

    void* stream(int number) const override { return at(number); }
    cudaStream_t cuda_stream() const { return streams_.front(); }
    int device() const { return device_; }

    void reserve(std::size_t stamps, std::size_t signals) override {
        select(device_);
        grow(stamps_, stamps, cudaEventDefault);
        grow(signals_, signals, cudaEventDisableTiming);
    }

    bool replays() const override { return replayed_; }
    void prepare(bool stamped, const std::function<void()>& enqueue) override {
        if (!replayed_) return;
        select(device_);
        const device::QueuedStep step = record(steps_[stamped], enqueue);
        if (!stamped) queued_ = step;
    }
    device::QueuedStep record_part(std::size_t number, const std::function<void()>& enqueue) override {
        select(device_);
        if (parts_.size() <= number) parts_.resize(number + 1);
        return record(parts_[number], enqueue);
    }
    void play_part(std::size_t number) override {
        check(cudaGraphLaunch(parts_.at(number), cuda_stream()), "launching a graph of a part of the step");
    }

    void play(bool stamped, const std::function<void()>& enqueue) override {
        select(device_);
        check(cudaEventRecord(played_[0], cuda_stream()), "recording an event");
        if (replayed_)
            launch(stamped);
        else
            enqueue();
        check(cudaEventRecord(played_[1], cuda_stream()), "recording an event");
    }
    double played_seconds() override {
        float milliseconds = 0.0f;
        check(cudaEventElapsedTime(&milliseconds, played_[0], played_[1]), "reading an event");
        return 1e-3 * static_cast<double>(milliseconds);
    }
    device::QueuedStep queued_step() const override {
        device::QueuedStep step = queued_;
        std::array<double, kept_launches> seconds = host_seconds_;
        const std::size_t count = std::min(launches_, seconds.size()), middle = count / 2;
        std::nth_element(seconds.begin(), seconds.begin() + middle, seconds.begin() + count);
        step.host_seconds = seconds[middle];
        return step;
    }

    void rehearse(const std::function<void()>& enqueue) override {
        select(device_);
        const cudaGraph_t graph = capture(enqueue);
        cudaGraphExec_t step = nullptr;
        const cudaError_t status = cudaGraphInstantiate(&step, graph, 0);
        cudaGraphDestroy(graph);
        check(status, "instantiating a step's graph");
        const cudaError_t uploaded = cudaGraphUpload(step, cuda_stream());
        cudaStreamSynchronize(cuda_stream());
        cudaGraphExecDestroy(step);
        check(uploaded, "uploading a step's graph");
    }

    void forget() override {
        select(device_);
        check(cudaDeviceSynchronize(), "waiting for queued work");
        drop_records();
    }

    void fork(int number) override {
        check(cudaEventRecord(forked_, cuda_stream()), "recording an event");
        check(cudaStreamWaitEvent(at(number), forked_, 0), "waiting for an event");
    }
    void join(int number) override {
        const cudaEvent_t event = joined_[static_cast<std::size_t>(number)];
        check(cudaEventRecord(event, at(number)), "recording an event");
        check(cudaStreamWaitEvent(cuda_stream(), event, 0), "waiting for an event");
    }
    void signal(std::size_t index, int number) override {
        check(cudaEventRecord(signals_.at(index), at(number)), "recording an event");
    }
    void await(std::size_t index, int number) override {
        check(cudaStreamWaitEvent(at(number), signals_.at(index), 0), "waiting for an event");
    }

    // Inside a graph only an external record is a node that can be timed.
    void stamp(std::size_t index, int number) override {
        check(cudaEventRecordWithFlags(stamps_.at(index), at(number),
                                       capturing_ ? cudaEventRecordExternal : cudaEventRecordDefault),
              "recording an event");
    }

    double seconds(std::size_t index) override {
        float milliseconds = 0.0f;
        check(cudaEventElapsedTime(&milliseconds, stamps_.at(0), stamps_.at(index)), "reading an event");
        return 1e-3 * static_cast<double>(milliseconds);
    }

    void mark(int value, int number) override { cuda_mark(marks_ + number, value, at(number)); }
    int marked(int number) const override { return static_cast<const volatile int*>(marks_)[number]; }
    bool idle() override { return cudaStreamQuery(cuda_stream()) != cudaErrorNotReady; }

    void wait() override {
        select(device_);
        check(cudaStreamSynchronize(cuda_stream()), "waiting for queued work");
    }

private:
    cudaStream_t at(int number) const { return streams_[static_cast<std::size_t>(number)]; }

    static void grow(std::vector<cudaEvent_t>& events, std::size_t count, unsigned flags) {
        while (events.size() < count) {
            cudaEvent_t event = nullptr;
            check(cudaEventCreateWithFlags(&event, flags), "creating an event");
            events.push_back(event);
        }
    }

    void drop_records() {
        for (cudaGraphExec_t& step : steps_)
            if (step != nullptr) cudaGraphExecDestroy(std::exchange(step, nullptr));
        for (const cudaGraphExec_t part : parts_)
            if (part != nullptr) cudaGraphExecDestroy(part);
        parts_.clear();
    }

    // Facts of what `enqueue` queues, which `runnable` runs from now on.
    device::QueuedStep record(cudaGraphExec_t& runnable, const std::function<void()>& enqueue) {
        const std::int64_t before = cuda_copies_by_blocks();
        const cudaGraph_t graph = capture(enqueue);
        device::QueuedStep step = described(graph);
        step.host_copies += static_cast<std::size_t>(cuda_copies_by_blocks() - before);
        const cudaError_t status = cudaGraphInstantiate(&runnable, graph, 0);
        cudaGraphDestroy(graph);
        check(status, "instantiating a step's graph");
        check(cudaGraphUpload(runnable, cuda_stream()), "uploading a step's graph");
        return step;
    }

    void launch(bool stamped) {
        using Clock = std::chrono::steady_clock;
        const Clock::time_point start = Clock::now();
        check(cudaGraphLaunch(steps_[stamped], cuda_stream()), "launching the step's graph");
        if (stamped) return;
        host_seconds_[launches_ % host_seconds_.size()] = std::chrono::duration<double>(Clock::now() - start).count();
        ++launches_;
    }

    cudaGraph_t capture(const std::function<void()>& enqueue) {
        cudaGraph_t graph = nullptr;
        check(cudaStreamBeginCapture(cuda_stream(), cudaStreamCaptureModeThreadLocal), "capturing a step");
        capturing_ = true;
        try {
            enqueue();
        } catch (...) {
            capturing_ = false;
            if (cudaStreamEndCapture(cuda_stream(), &graph) == cudaSuccess) cudaGraphDestroy(graph);
            throw;
        }
        capturing_ = false;
        check(cudaStreamEndCapture(cuda_stream(), &graph), "capturing a step");
        cuda_replace_fills(graph);
        drop_implied_edges(graph);
        return graph;
    }

    int device_;
    std::array<cudaStream_t, device::queue_streams> streams_{};
    bool replayed_, capturing_ = false;
    std::array<cudaGraphExec_t, 2> steps_{}; // graphs without and with stamps
    std::vector<cudaGraphExec_t> parts_;     // graphs of parts of a step that is queued op by op
    device::QueuedStep queued_;              // facts of the queued step, except its host time
    static constexpr std::size_t kept_launches = 64;
    std::array<double, kept_launches> host_seconds_{};
    std::size_t launches_ = 0;
    std::vector<cudaEvent_t> stamps_, signals_;
    cudaEvent_t forked_ = nullptr;
    std::array<cudaEvent_t, device::queue_streams> joined_{};
    std::array<cudaEvent_t, 2> played_{}; // events around the last step
    int* marks_ = nullptr;                // pinned marks by stream
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
class PinnedHost : public device::Device {
public:
    std::string name() const override { return "this machine's pinned memory"; }
    char* allocate(std::size_t size) override {
        void* memory = nullptr;
        if (cudaMallocHost(&memory, size) == cudaSuccess) return static_cast<char*>(memory);
        cudaGetLastError(); // The next launch's check must not find it.
        return nullptr;
    }
    void release(char* memory) noexcept override { cudaFreeHost(memory); }
    void fill(void* target, int byte, std::size_t size) override { std::memset(target, byte, size); }
    void write(void* target, const void* source, std::size_t size) override { std::memcpy(target, source, size); }
    void read(void* target, const void* source, std::size_t size) override { std::memcpy(target, source, size); }
};

class CudaDevice : public device::Device {
public:
    CudaDevice(bool replayed, int device) : queue_(replayed, device) {
        cuda_gemm_library(); // Opens the library for this GPU before any capture.
    }

    std::string name() const override {
        cudaDeviceProp properties{};
        check(cudaGetDeviceProperties(&properties, queue_.device()), "asking for the GPU's name");
        return properties.name;
    }
    device::Queue* queue() override { return &queue_; }
    std::unique_ptr<device::Device> open_offload() const override { return std::make_unique<PinnedHost>(); }

    char* allocate(std::size_t size) override {
        select(queue_.device());
        void* memory = nullptr;
        const cudaError_t status = cudaMalloc(&memory, size);
        if (status == cudaErrorMemoryAllocation) {
            cudaGetLastError(); // The next launch's check must not find it.
            return nullptr;
        }
        check(status, "allocating the arena");
        return static_cast<char*>(memory);
    }
    void release(char* memory) noexcept override {
        cudaSetDevice(queue_.device());
        cudaStreamSynchronize(queue_.cuda_stream());
        cudaFree(memory);
    }
    double free_bytes() const override {
        select(queue_.device());
        std::size_t free = 0, all = 0;
        check(cudaMemGetInfo(&free, &all), "asking for free memory");
        return static_cast<double>(free);
    }

    device::PowerSample power_sample() const override { return cuda_draw(queue_.device()); }

    double used_bytes() const override {
        select(queue_.device());
        std::size_t free = 0, all = 0;
        check(cudaMemGetInfo(&free, &all), "asking for free memory");
        return static_cast<double>(all - free);
    }

    void fill(void* target, int byte, std::size_t size) override {
        select(queue_.device());
        check(cudaMemsetAsync(target, byte, size, queue_.cuda_stream()), "filling memory");
    }

    // Staged pieces lie one behind another; when there is no room left, all copies before are waited for.
    void write(void* target, const void* source, std::size_t size) override {
        select(queue_.device());
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

std::unique_ptr<device::Device> open_cuda(bool replayed, int device) {
    return std::make_unique<CudaDevice>(replayed, device);
}

} // namespace moe::backends
