// Slots between ranks by kernels of the device: the rows that they hold, rounded up to chunks, through windows of
// memory that the members of a communicator opened to each other.
//
// A slot has room for `slot_rows` rows; x and y hold one for each member. Members whose windows this device reaches are
// written to by stores, the others over the network that the device drives itself. Every member calls the same
// functions in the same order on one stream. A call waits on the device until the others have come to it. Nothing is
// read by the host, so calls can be captured and replayed as CUDA graphs.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MOE_EVERYWHERE __host__ __device__
#else
#define MOE_EVERYWHERE
#endif

namespace moe {

struct ChunkShape {
    std::int64_t slot_rows = 0, chunk_rows = 1, row_bytes = 0; // row_bytes: even
    bool back = false; // the rows of a call before come back: slot m has those that came from member m

    // Bytes that move for a slot with so many rows, whole chunks but for the slot's end.
    MOE_EVERYWHERE constexpr std::int64_t moved_bytes(std::int64_t rows) const {
        const std::int64_t whole = (rows + chunk_rows - 1) / chunk_rows * chunk_rows;
        return (rows <= 0 ? 0 : whole < slot_rows ? whole : slot_rows) * row_bytes;
    }
    MOE_EVERYWHERE constexpr std::int64_t slot_bytes() const { return slot_rows * row_bytes; }
};

// The part of a slot's bytes that one of `blocks` moves: as many for each, in whole pages, and nothing for the last
// ones of a short slot.
struct BlockPart {
    std::int64_t first = 0, bytes = 0;
};
MOE_EVERYWHERE constexpr BlockPart part_of(std::int64_t bytes, int blocks, int block) {
    constexpr std::int64_t page = 4096;
    const std::int64_t each = (bytes + blocks * page - 1) / (blocks * page) * page, first = block * each;
    if (first >= bytes) return {};
    return {first, each < bytes - first ? each : bytes - first};
}

// One member's end of the windows.
struct SlotGroup {
    int members = 1, member = 0;
    int remote = 0;                 // members that are reached over the network
    int blocks = 24;                // multiprocessors that a call takes at most, the same at all members
    std::int64_t window_bytes = 0;  // as window_bytes() says for the slots of the largest call
    char* own = nullptr;            // this member's window; its head is zero before the first call
    char* const* reached = nullptr; // on the device: every member's window as this one addresses it, null if remote
    const void* library = nullptr;  // what the library's own functions take (nccl_windows.hpp); null = remote is 0
    // A call that waits longer than so many seconds for a member writes 1 + that member to pinned memory of the host
    // and goes on with whatever lies there; 0: waits for ever.
    double patience = 0.0;
    int* trouble = nullptr;
};

struct ExchangeKernels {
    // Bytes of a window for slots of so many bytes in all; remote: members are reached over the network.
    std::int64_t (*window_bytes)(int members, std::int64_t slots_bytes, bool remote) = nullptr;
    // Slot m of x goes to slot `member` of member m's y. counts[members, members] say how many rows each has for each,
    // on the device; the slots' other rows are those of x up to the end of their chunk, and beyond it left as they are.
    // Throws std::runtime_error for a CUDA error and where the windows are too small.
    void (*exchange)(const SlotGroup& group, const ChunkShape& shape, const void* x, const std::int32_t* counts,
                     void* y, void* stream) = nullptr;
};

} // namespace moe
