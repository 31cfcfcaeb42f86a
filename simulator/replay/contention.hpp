// Contention, which is the time that computing loses to communication beside it: to tokens in merged slots, and beside
// a shared expert in all; to gathers and reductions of data parallelism in any.
#pragma once

#include "planner/lower/passes/merge.hpp"
#include "simulator/cost/cost.hpp"

#include <deque>
#include <utility>

namespace moe::replay {

// True where an op takes tokens' rows to experts or back.
bool exchanges_rows(const program::Program& program, const program::Op& op);

// Communication on its way, from when until when, in order; one begins when the one before it has ended, or later.
using CommIntervals = std::deque<std::pair<double, double>>;
// Seconds by which work is longer that begins at `start` and takes `seconds` with nothing beside it, if it loses the
// part `lost` of its rate beside each of them.
double slowed(const CommIntervals& travels, double lost, double start, double seconds);

// Follows the ops of a rank in the order in which they run. A product of experts that leaves the tokens their
// multiprocessors does so to its end. One that does not has its tiles shared out in advance, and those of the
// multiprocessors that are taken begin when the tokens have come. Anything else goes on at a lower rate, and everything
// does beside data parallelism. Beside kernels that copy to the host and back, issued before it, all but products of
// experts does, which leave them their multiprocessors.
class Contention {
public:
    explicit Contention(cost::ContentionPrice price) : price_(price) {}
    // Seconds by which an op of `program` is longer that starts at `start` and takes `seconds` with nothing beside it.
    double longer(const program::Program& program, const program::Op& op, double start, double seconds, bool merged);

private:
    double for_tokens(const program::Op& op, double start, double seconds, bool spares) const;

    cost::ContentionPrice price_;
    passes::ReservedSms reserved_;
    CommIntervals tokens_, collectives_, copies_;
};

} // namespace moe::replay
