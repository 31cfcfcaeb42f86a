// What computing loses to tokens on their way beside it: in merged slots, and a shared expert in all.
#pragma once

#include "planner/passes/merge.hpp"
#include "simulator/cost/cost.hpp"

#include <deque>
#include <utility>

namespace moe {

// Whether an op takes tokens' rows to experts or back.
bool exchanges_rows(const Program& program, const Op& op);

// Follows the ops of a rank in the order in which they run. A product of experts that leaves the tokens their
// multiprocessors does so to its end. One that does not has its tiles shared out in advance, and those of the
// multiprocessors that are taken begin when the tokens have come. Anything else goes on at a lower rate.
class BesideTokens {
public:
    explicit BesideTokens(BesideExchange price) : price_(price) {}
    // Seconds by which an op of `program` is longer that starts at `start` and takes `seconds` with nothing beside it.
    double longer(const Program& program, const Op& op, double start, double seconds, bool merged);

private:
    double slowed(double start, double seconds) const;

    BesideExchange price_;
    SparingProducts sparing_;
    std::deque<std::pair<double, double>> travels_; // of tokens, from when until when
};

} // namespace moe
