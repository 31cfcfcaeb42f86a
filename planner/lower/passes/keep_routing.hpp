// Router replay: the experts that routers choose lie still for the whole step, to be read behind it or set before it.
#pragma once

#include "planner/program/program.hpp"

#include <vector>

namespace moe::passes {

// What the router of a layer chooses, as the input [T, top_k] of each micro-batch that keep_routing() makes of it.
struct KeptRouting {
    int layer = 0; // number of the layer in the model; MTP layers come behind the model's
    int experts = 0, top_k = 0;
    program::TensorId index = program::no_tensor;
};

// Makes an input (Storage::input) of what every router of a whole Program writes as its choice: 4 T top_k bytes of each
// micro-batch and layer. replay: routers take the choice from there, also where they are recomputed, and give it
// weights alone. Layers in order of their numbers; the same inputs in every Program of a plan's pipeline rank.
std::vector<KeptRouting> keep_routing(program::Program& program, bool replay);

} // namespace moe::passes
