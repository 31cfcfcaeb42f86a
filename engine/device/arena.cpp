// Allocation of a rank's arena and resolution of tensors and views to addresses in it.
#include "engine/device/arena.hpp"

#include "planner/base/error.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/program/program.hpp"

#include <algorithm>

namespace moe::device {

Arena::Arena(const program::Program& program, const memory::MemoryPlan& memory, const plan::Mesh& mesh, int rank,
             Device& device)
    : device_(device),
      bytes_(static_cast<std::size_t>(std::max<std::int64_t>(memory.arena_bytes, 1))),
      memory_(device.allocate(bytes_), Release{&device}),
      host_memory_(nullptr, Release{nullptr}),
      blocks_(memory.blocks) {
    if (!memory_) {
        const double gib = 1 << 30, free = device.free_bytes();
        fail("rank {}: cannot allocate an arena of {:.2f} GiB in {}{}; use more ranks, a smaller mbs or recompute",
             rank, static_cast<double>(bytes_) / gib, device.name(),
             free > 0.0 ? fmt::format(", which has {:.2f} GiB free", free / gib) : "");
    }
    device.fill(memory_.get(), 0xff, bytes_);
    if (memory.host_bytes > 0) {
        host_bytes_ = static_cast<std::size_t>(memory.host_bytes);
        host_ = device.open_offload();
        host_memory_ = {host_->allocate(host_bytes_), Release{host_.get()}};
        if (!host_memory_)
            fail("rank {}: cannot allocate {:.2f} GiB of host memory for what is offloaded; offload less", rank,
                 static_cast<double>(host_bytes_) / (1 << 30));
        host_->fill(host_memory_.get(), 0xff, host_bytes_);
    }
    place(program, memory, mesh, rank, memory_.get(), host_memory_.get());
}

Arena::Arena(const program::Program& program, const memory::MemoryPlan& memory, const plan::Mesh& mesh, int rank,
             const Arena& home)
    : device_(home.device_),
      bytes_(home.bytes_),
      memory_(nullptr, Release{nullptr}),
      host_bytes_(home.host_bytes_),
      host_memory_(nullptr, Release{nullptr}),
      blocks_(memory.blocks) {
    if (memory.arena_bytes > static_cast<std::int64_t>(bytes_) ||
        memory.host_bytes > static_cast<std::int64_t>(host_bytes_))
        fail("rank {}: a second Program needs {} bytes and {} on the host, the arena has {} and {}", rank,
             memory.arena_bytes, memory.host_bytes, bytes_, host_bytes_);
    place(program, memory, mesh, rank, home.memory_.get(), home.host_memory_.get());
}

void Arena::place(const program::Program& program, const memory::MemoryPlan& memory, const plan::Mesh& mesh, int rank,
                  char* device, char* host) {
    spots_.reserve(program.tensors.size());
    for (std::size_t id = 0; id < program.tensors.size(); ++id) {
        // A view may be a view of a view.
        std::size_t root = id;
        std::int64_t offset = 0;
        while (true) {
            const program::Tensor& t = program.tensors[root];
            if (t.base == program::no_tensor) break;
            std::int64_t elements = t.offset;
            if (t.shard_group.axes != 0) elements += mesh.index(t.shard_group, rank) * t.elements();
            offset += program::bytes_of(t.dtype, elements);
            root = static_cast<std::size_t>(t.base);
        }
        const memory::Place& place = memory.places[root];
        const bool on_host = program.tensors[root].storage == program::Storage::host;
        Spot spot{(on_host ? host : device) + place.offset + offset,
                  static_cast<std::ptrdiff_t>(place.stride),
                  std::max(1, place.instances),
                  {}};
        if (place.block >= 0) spot.shared = blocks_[static_cast<std::size_t>(place.block)].instance;
        spots_.push_back(spot);
    }
}

} // namespace moe::device
