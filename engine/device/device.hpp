// A device: the memory of a rank and the queue of its work, in this process, or on an accelerator that runs behind it.
#pragma once

#include "engine/device/power_sample.hpp"

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

namespace moe::device {

// A step as it is replayed, whole or in parts.
struct QueuedStep {
    std::size_t records = 0;          // records that a step runs: one, or its parts; 0 where steps are not replayed
    std::size_t nodes = 0;            // kernels, copies, fills and waits of the records
    std::size_t host_copies = 0;      // nodes that copy between the host's memory and the device's, kernels included
    std::size_t fills = 0;            // nodes that are the device's own fills, which make a graph slow to queue
    double host_seconds = 0.0;        // seconds that the host took to queue the step: the median of the last 64
    double event_overhead = 0.0;      // seconds taken out of the step for each of its stamps (engine/run/stamps.hpp)
    double usual_stamp_seconds = 0.0; // seconds of one stamp behind kernels that do next to nothing
};

// The work of an accelerator: calls return at once, the work follows, on each stream in the order of the calls. Streams
// are numbered from 0, as moe::Stream is; those above 0 run only between fork() and join().
class Queue {
public:
    virtual ~Queue() = default;

    virtual void* stream(int number = 0) const = 0; // handle of a stream that kernels take

    // A step, queued by the function `enqueue`. Where steps are replayed, prepare() records what `enqueue` queues and
    // play() runs the record; elsewhere prepare() does nothing and play() calls `enqueue`. A step with and one without
    // stamps are two records. At least `stamps` stamps and `signals` signals must have been reserved when a step sets
    // them.
    virtual bool replays() const = 0;
    virtual void reserve(std::size_t stamps, std::size_t signals) = 0;
    virtual void prepare(bool stamped, const std::function<void()>& enqueue) = 0;
    virtual void play(bool stamped, const std::function<void()>& enqueue) = 0;
    // Parts of a step that is queued op by op: record_part() records what `enqueue` queues on stream 0 under a number
    // of the caller's, and play_part() queues that record there. Only where Backend::can_replay.
    virtual QueuedStep record_part(std::size_t, const std::function<void()>&) { return {}; }
    virtual void play_part(std::size_t) {}
    virtual void forget() = 0;                            // drops the records of steps and of parts
    virtual QueuedStep queued_step() const { return {}; } // facts of the step without stamps
    // Seconds that the last play() took on the device, its stamps included; to be asked when it is done. 0 if nobody
    // knows.
    virtual double played_seconds() { return 0.0; }
    // Loads what a step needs without running it. Kernels are loaded at their first use, which can wait for all work of
    // the device: where that is communication which waits for another rank that loads kernels too, for ever.
    virtual void rehearse(const std::function<void()>& enqueue) = 0;
    // Stream `number` waits for all work of stream 0 before, and the other way round.
    virtual void fork(int number) = 0;
    virtual void join(int number) = 0;
    // Signal `index` is given when all work of stream `number` before is done; await: the stream goes on behind that.
    virtual void signal(std::size_t index, int number) = 0;
    virtual void await(std::size_t index, int number) = 0;
    // Time stamp `index`: taken when everything queued before it on the stream is done.
    virtual void stamp(std::size_t index, int number = 0) = 0;
    virtual double seconds(std::size_t index) = 0; // seconds from stamp 0 to that stamp; after wait()

    // Progress that the host can see while the queue runs: mark() writes `value` when the stream has come there.
    virtual void mark(int value, int number) = 0;
    virtual int marked(int number) const = 0; // last mark of a stream; for any thread
    virtual bool idle() = 0;                  // whether everything queued on stream 0 is done or has failed

    // Returns when everything queued is done. Throws Error (failure) where some of it failed.
    virtual void wait() = 0;
};

class Device;
// This process' memory, without a queue.
std::unique_ptr<Device> open_host();

// Used by one thread at a time. Everything throws Error (failure) where the device reports one.
class Device {
public:
    virtual ~Device() = default;

    virtual std::string name() const = 0;
    virtual Queue* queue() { return nullptr; } // null: ops are done when their function returns

    // Memory aligned to 256 bytes; null where there is not enough.
    virtual char* allocate(std::size_t bytes) = 0;
    virtual void release(char* memory) noexcept = 0;
    // Bytes free now, for messages; 0 where that is not known.
    virtual double free_bytes() const { return 0.0; }
    // Bytes of the device that are taken now, by whomever: arena, context, loaded kernels, libraries and other
    // programs; 0 where that is not known.
    virtual double used_bytes() const { return 0.0; }

    virtual PowerSample power_sample() const { return {}; }

    // The host's memory that ops of this device copy to and from, where offloaded tensors wait. read() and write() take
    // its addresses as well.
    virtual std::unique_ptr<Device> open_offload() const { return open_host(); }

    // These run in the order of the queue. `source` of write() may change as soon as it returns; read() returns when
    // the bytes are there.
    virtual void fill(void* target, int byte, std::size_t bytes) = 0;
    virtual void write(void* target, const void* source, std::size_t bytes) = 0;
    virtual void read(void* target, const void* source, std::size_t bytes) = 0;
};

// Memory of a device, which outlives it.
struct Release {
    Device* device = nullptr;
    void operator()(char* memory) const { device->release(memory); }
};
using Memory = std::unique_ptr<char, Release>;

} // namespace moe::device
