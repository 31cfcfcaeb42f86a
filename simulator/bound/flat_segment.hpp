// A segment as flat arrays: which op waits for which, and what is alive when; played in a few nanoseconds per op.
#pragma once

#include "planner/program/fwd.hpp"
#include "planner/program/op_kind.hpp"
#include "simulator/cost/cost.hpp"

#include <array>
#include <cstdint>
#include <vector>

namespace moe::bound {

// The costs of a segment's ops and the sizes of its tensors depend on degrees and sizes; which op waits for which does
// not. A FlatSegment holds the second part of a segment, for any prices of the first. It numbers ops and tensors as the
// *plain* segment does, the one without recomputation: forward ops, then backward ops; recomputed ops and tensors carry
// the numbers of those that they repeat. Segments that differ in recomputation alone therefore share prices.
class FlatSegment {
public:
    // `plain` and `segment` are lower_segment() of two plans that differ in recomputation alone.
    FlatSegment(const program::Program& plain, const program::Program& segment);

    // One direction (0 forward, 1 backward) among others like it, with nothing before it on any stream.
    struct Play {
        double end = 0.0;          // seconds until the last op is through
        double issued = 0.0;       // when the host has issued everything
        double host = 0.0;         // seconds that the host works for that, without waiting
        double before_input = 0.0; // when the first op that reads the neighbour's message starts
        bool waits = false;        // the host waited for routed counts on the way
    };
    // prices: by plain op. The host begins `lead` seconds before the device. The result is that of play_segment().
    Play play(int direction, const std::vector<cost::OpCost>& prices, double lead, double sync_seconds,
              std::vector<double>& ends) const;
    // Seconds that each stream is busy.
    std::array<double, program::stream_count> busy(int direction, const std::vector<cost::OpCost>& prices) const;

    // bytes: by plain tensor, 0 for what is not an activation. Saved: by one micro-batch. Least workspace: the most
    // bytes alive at one time in one direction, which no packing can go below.
    std::int64_t saved(const std::vector<std::int64_t>& bytes) const;
    std::int64_t least_workspace(int direction, const std::vector<std::int64_t>& bytes) const;
    std::uint64_t groups() const { return groups_; } // groups of its communication, see group_bit()

private:
    struct FlatOp {
        int price = 0; // index of the plain op
        std::uint8_t stream = 0;
        bool counts = false;                // the host may wait for what it reads
        int waits_begin = 0, waits_end = 0; // ops of this direction on other streams that must be through, in `waits`
        int reads_begin = 0, reads_end = 0; // counts: all writers of its inputs
    };
    struct Life {
        int tensor = 0, first = 0, last = 0; // alive from op to op, both included
    };
    struct Direction {
        std::vector<FlatOp> ops;
        std::vector<int> waits;
        std::vector<Life> lives; // lives of what does not outlive the direction
        int first_reader = -1;   // first op that reads the neighbour's message; -1 = none
    };
    void add_ops(int direction, const program::Program& segment, const std::vector<int>& price_of);
    void add_lives(const program::Program& segment, const std::vector<int>& tensor_of);

    Direction directions_[2];
    std::vector<int> saved_; // plain tensors
    std::uint64_t groups_ = 0;
};

// Sequence of op kinds, streams and tensors: segments whose signatures are equal have equal FlatSegments.
std::vector<std::int32_t> signature(const program::Program& segment);
// Bytes of every activation as the arena places it, by tensor; 0 for views and everything else.
std::vector<std::int64_t> activation_bytes(const program::Program& segment);

} // namespace moe::bound
