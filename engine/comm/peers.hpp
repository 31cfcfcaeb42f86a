// Ranks whose devices read and write each other's memory: who reaches what, found out once before the first step.
//
// Ranks of a group run the same Program, so that an op's operands lie at the same offset in the arenas of all.
#pragma once

#include "engine/comm/communicator.hpp"
#include "engine/device/device.hpp"
#include "kernels/peers.hpp"

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace moe::comm {

// The functions by which one device's memory is reached from another: a table, as CollectiveLibrary is. Functions work
// on the device that is current; they throw Error (failure) where the driver reports one.
struct PeerLibrary {
    using Handle =
        std::array<char, 128>; // handle of an allocation for other ranks, in this process or another of this machine

    Handle (*share)(char* memory) = nullptr;
    // An address of that memory for the current device; null where it cannot be reached, and `why`.
    char* (*reach)(const Handle& handle, std::string& why) = nullptr;
    void (*let_go)(const Handle& handle, char* memory) = nullptr;
    const PeerKernels& (*kernels)() = nullptr;
};

class PeerMemory {
public:
    struct Place {
        std::vector<int> ranks; // ranks of the group
        int index = 0;          // index of this rank in the group
    };
    // All members make theirs at the same time. all_gather: `mine` of every member, one after another. tokens: of the
    // largest call. blocks: multiprocessors that a call with nothing computing beside it takes at most, the same at all
    // members. Throws Error (bad_input) where a member's memory cannot be reached.
    PeerMemory(const PeerLibrary& library, device::Device& device, Place place, char* arena, std::int64_t arena_bytes,
               std::int64_t tokens, int blocks,
               const std::function<std::vector<char>(const std::vector<char>& mine)>& all_gather);
    ~PeerMemory();
    PeerMemory(const PeerMemory&) = delete;
    PeerMemory& operator=(const PeerMemory&) = delete;

    std::int64_t bytes() const { return board_bytes_; } // bytes taken beside the arena
    void exchange(const program::RowsAttr& attr, const TokenOperands& operands, void* stream) const;
    // True where gather() can: y in the arena, and little of it.
    bool gathers(const void* y, std::int64_t bytes) const;
    void gather(const void* x, void* y, std::int64_t bytes, void* stream) const;
    // Throws Error (failure) when a call has waited for another rank for too long.
    void check() const;

private:
    struct Release {
        device::Device* device;
        void operator()(char* memory) const { device->release(memory); }
    };
    struct Mapped {
        PeerLibrary::Handle handle;
        char* memory;
    };

    const PeerLibrary& library_;
    Place place_;
    std::int64_t arena_bytes_, board_bytes_;
    std::unique_ptr<char, Release> board_;
    std::unique_ptr<device::Device> host_;
    std::unique_ptr<char, Release> trouble_; // an int that the device sets when a wait is given up
    std::vector<Mapped> mapped_;
    PeerGroup group_;
};

} // namespace moe::comm
