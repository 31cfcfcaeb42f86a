// Device buffers of random numbers for timing, and the times of calls and of copies on the device.
#pragma once

#include "kernels/kernels.hpp"

#include <cstdint>
#include <functional>
#include <vector>

namespace moe::test {

// Device memory of random numbers that timed cases share, one after another. Throws where a case asks for more than
// there is.
class DevicePool {
public:
    DevicePool();
    ~DevicePool();
    DevicePool(const DevicePool&) = delete;
    DevicePool& operator=(const DevicePool&) = delete;

    // All memory again, of random numbers as at first, whatever was written.
    void reset();
    Dst take(Type type, std::int64_t elements);
    float* floats(std::int64_t elements) { return static_cast<float*>(take(Type::f32, elements).data); }
    const std::int32_t* ints(const std::vector<std::int32_t>& values);
    const float* floats_of(const std::vector<float>& values);

private:
    void fill(std::size_t bytes);

    void *memory_ = nullptr, *pattern_ = nullptr;
    std::size_t next_ = 0;
};

// Median seconds of a call, out of replays of a graph of a few calls.
double seconds_of(const std::function<void(void* stream)>& call);

// Median seconds of a copy within the device (cudaMemcpyAsync) that reads and writes `bytes` in all, out of several in
// a row; not in a graph, where a copy may go to a copy engine, which is slower.
double copy_seconds(double bytes);

} // namespace moe::test
