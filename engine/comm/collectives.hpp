// A library of collectives on devices (NCCL) as the engine calls it: a table, so that builds run without it and tests
// put another one in its place.
#pragma once

#include "kernels/slot_exchange.hpp"
#include "planner/program/tensor.hpp"

#include <array>
#include <cstdint>
#include <memory>
#include <string>

namespace moe::comm {

// The key by which the members of a communicator find each other: made by one process, known to all members.
using MeetingPoint = std::array<char, 128>;

// A member's memory that kernels of the communicator's other members read and write. It goes before the member leaves.
class SlotWindow {
public:
    virtual ~SlotWindow() = default;
    // All members call it at the same time, where each has one. Says why it cannot be done; empty: it is.
    virtual std::string open() = 0;
    virtual SlotGroup group() const = 0; // of an open one; without patience
    virtual const ExchangeKernels& kernels() const = 0;
    virtual std::string name() const = 0; // by what the members reach each other
};

// Work is queued on `stream`; pointers are of the device that was current when the communicator was joined. Functions
// throw Error (failure) with the library's words.
struct CollectiveLibrary {
    using Member = void*; // one rank's end of a communicator

    MeetingPoint (*meeting_point)() = nullptr;
    // Returns when all members have come. At most `blocks` multiprocessors' worth of the device; 0: as the library
    // likes.
    Member (*join)(const MeetingPoint& point, int members, int index, int blocks) = nullptr;
    void (*leave)(Member member) = nullptr;
    // Leaves without waiting: what is queued ends unfinished.
    void (*abandon)(Member member) = nullptr;
    std::string (*trouble)(Member member) = nullptr; // trouble of queued work; empty while all is well

    void (*all_gather)(Member, const void* x, void* y, std::int64_t bytes, void* stream) = nullptr;
    void (*reduce_scatter)(Member, const void* x, void* y, std::int64_t elements, program::Dtype,
                           void* stream) = nullptr;
    void (*all_reduce)(Member, const void* x, void* y, std::int64_t elements, program::Dtype, bool max,
                       void* stream) = nullptr;
    // Between begin_group() and end_group() the order of sends and receives does not matter, beyond that of messages
    // between the same two members; a message to oneself is allowed there.
    void (*begin_group)() = nullptr;
    void (*end_group)() = nullptr;
    void (*send)(Member, const void* x, std::int64_t bytes, int to, void* stream) = nullptr;
    void (*recv)(Member, void* y, std::int64_t bytes, int from, void* stream) = nullptr;

    void (*copy)(void* to, const void* from, std::int64_t bytes, void* stream) = nullptr; // queued copy on the device

    // A window for slots of so many bytes in all, which a call moves by at most `blocks` multiprocessors; null, and
    // `why`, where this member can have none. Waits for nobody. Null: no member of this library has windows.
    std::unique_ptr<SlotWindow> (*slot_window)(Member, std::int64_t slots_bytes, int blocks,
                                               std::string& why) = nullptr;
};

} // namespace moe::comm
