// Interprets a Program for one rank: slot by slot, op by op, in the order listed.
#pragma once

#include "engine/arena.hpp"
#include "engine/backend.hpp"
#include "engine/recorder.hpp"

#include <cstddef>
#include <vector>

namespace moe {

// Streams are kept as they are listed: on the CPU a rank is one thread, and the listed order satisfies every
// dependency.
class Executor {
public:
    Executor(const Program& program, const Arena& arena, const Mesh& mesh, int rank, const Backend& backend,
             Communicator& communicator);

    // Runs every slot once and records each op. Errors name rank, op, layer and slot.
    void step(Recorder& recorder);

private:
    void run(const Slot& slot, std::size_t slot_number, Recorder& recorder);
    void call(const Op& op, int micro_batch);
    [[noreturn]] void report(const Op& op, std::size_t slot, const std::exception& error) const;
    std::int64_t shard_offset(const Op& op) const;

    const Program& program_;
    const Arena& arena_;
    const Backend& backend_;
    Communicator& communicator_;
    RankPosition position_;
    std::vector<std::int64_t> bucket_offset_; // by bucket: elements before this rank's shard
    std::vector<void*> in_, out_;             // operands of the current op
};

} // namespace moe
