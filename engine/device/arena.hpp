// One rank's memory: a single allocation in which every tensor of its Program has the place that was planned.
#pragma once

#include "engine/device/device.hpp"
#include "planner/memory/memory.hpp"
#include "planner/plan/fwd.hpp"
#include "planner/program/fwd.hpp"

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace moe::device {

class Arena {
public:
    // Allocates memory.arena_bytes on the device and fills them with 0xff, so that reading what was never written gives
    // NaN. Views of this rank's own slice of a bucket (Tensor::shard_group) are resolved with the rank's position.
    // Throws Error (failure) when the device has not enough memory. The device must outlive the arena.
    Arena(const program::Program& program, const memory::MemoryPlan& memory, const plan::Mesh& mesh, int rank,
          Device& device);

    // An arena of the memory of `home` with the places of another Program, which must be no larger. `home` must outlive
    // it.
    Arena(const program::Program& program, const memory::MemoryPlan& memory, const plan::Mesh& mesh, int rank,
          const Arena& home);

    Device& device() const { return device_; }
    // Address, in the device's memory, of a tensor's instance for a micro-batch.
    void* at(program::TensorId id, int micro_batch = 0) const {
        const Spot& spot = spots_[static_cast<std::size_t>(id)];
        const int instance =
            spot.shared.empty() ? micro_batch % spot.instances : spot.shared[static_cast<std::size_t>(micro_batch)];
        return spot.start + spot.stride * instance;
    }
    template <class T>
    T* as(program::TensorId id, int micro_batch = 0) const {
        return static_cast<T*>(at(id, micro_batch));
    }
    char* memory() const { return memory_.get(); } // memory of the device; null where it is another arena's
    std::size_t bytes() const { return bytes_; }
    std::size_t host_bytes() const { return host_bytes_; } // bytes in this process' memory that offloaded tensors take

private:
    void place(const program::Program& program, const memory::MemoryPlan& memory, const plan::Mesh& mesh, int rank,
               char* device, char* host);

    struct Spot {
        char* start = nullptr;
        std::ptrdiff_t stride = 0;
        int instances = 1;
        std::span<const int> shared; // saved activations: instance by micro-batch, in blocks_
    };
    Device& device_;
    std::size_t bytes_ = 0;
    Memory memory_;
    std::size_t host_bytes_ = 0;
    std::unique_ptr<Device> host_;
    Memory host_memory_;
    std::vector<memory::SavedBlock> blocks_;
    std::vector<Spot> spots_;
};

} // namespace moe::device
