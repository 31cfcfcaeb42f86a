// What the cases of cuda_bandwidth.hpp have in common: device buffers, and a call timed beside a copy of its bytes.
#pragma once

#include "kernels/cuda/cuda_kernels.hpp"
#include "tests/kernels/cuda_bandwidth.hpp"
#include "tests/kernels/cuda_timing.hpp"

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace moe::test {

using Row = std::int64_t;

inline constexpr Row tokens = 16384, top_k = 8, copies = tokens * top_k;
inline constexpr int experts = 128;

class BandwidthCases {
public:
    explicit BandwidthCases(std::string part) : part_(std::move(part)) {}

protected:
    using Call = std::function<void(void* stream)>;

    // Times the call if `part` is in its name; `bytes`: what it must read and write, each once.
    void add(const std::string& name, double bytes, const Call& call) {
        if (name.find(part_) == std::string::npos) return;
        moved_.push_back({name, seconds_of(call), copy_seconds(bytes)});
    }
    // The same, and gives all buffers back.
    void time(const std::string& name, double bytes, const Call& call) {
        add(name, bytes, call);
        pool_.reset();
    }
    static double of(Type type, double elements) { return elements * static_cast<double>(size_of(type)); }

    const Kernels& k_ = *cuda_kernels();
    DevicePool pool_;
    std::string part_;
    std::vector<Moved> moved_;
};

// The cases of quantization, and of layers with a state.
std::vector<Moved> bandwidth_of_quantization(const std::string& part);
std::vector<Moved> bandwidth_of_states(const std::string& part);

} // namespace moe::test
