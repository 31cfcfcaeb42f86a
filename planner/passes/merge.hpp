// Merges a forward with a backward of another micro-batch, so that one computes while the other communicates.
#pragma once

#include "planner/program.hpp"

namespace moe {

// Index into Program::merges of the order in which templates `forward` and `backward` run together; added where it is
// not there yet. Layer by layer, the forward from its first on and the backward from its last on. Within a layer they
// take turns behind every exchange over EP (what the one sends is on its way under what the other computes next;
// arXiv 2603.07685 section 4.2.3), and a layer of the forward ends behind that of the backward, whose saved activations
// it then takes over. Tokens that travel over peer memory do so by multiprocessors, and the first two products of
// experts behind their departure leave them those (Merge::spared).
int merge_templates(Program& program, int forward, int backward);

} // namespace moe
