// Merges a forward with a backward of another micro-batch, so that one computes while the other communicates.
#pragma once

#include "planner/program/program.hpp"

namespace moe::passes {

// Index into Program::merges of the order in which templates `forward` and `backward` run together; added where it is
// not there yet. Layer by layer, the forward from its first on and the backward from its last on. Within a layer they
// take turns behind every exchange over EP (what the one sends is on its way under what the other computes next;
// arXiv 2603.07685 section 4.2.3), and a layer of the forward ends behind that of the backward, whose saved activations
// it then takes over. Tokens that travel over peer memory do so by multiprocessors, and the first two products of
// experts behind their departure leave them those (Merge::reserved_sms), the first alone where it is long.
int merge_templates(program::Program& program, int forward, int backward);

// An op of a side, and the layer that it counts as; -1: outside of layers.
struct LayerOp {
    const program::Op* op;
    int layer;
};
// The order of Merge::from_backward for ops in their own order, whose tensors those of `program` are.
std::vector<bool> merged_order(const program::Program& program, const std::vector<LayerOp>& forward,
                               const std::vector<LayerOp>& backward);

// Says of ops in the order in which they run side by side which of them leave multiprocessors to tokens on their way.
class ReservedSms {
public:
    bool next(const program::Op& op);

private:
    int products_ = 0;   // since tokens left
    double flops_ = 0.0; // FLOPs of those
    double bytes_ = 0.0; // bytes of the tokens; 0: none have left
};

} // namespace moe::passes
