// Steps of ring attention at sizes of training, beside the plain causal gradient of as many pairs.
#pragma once

#include <string>
#include <vector>

namespace moe::test {

// Median seconds of a step's gradient, and of the causal one in the same run.
struct RingStep {
    std::string name;
    double seconds = 0.0, causal_seconds = 0.0;
};

// The gradients of both ranks of CP 2 in the order of the planner: other keys, then a rank's own. Heads of
// Qwen3-30B-A3B, 2 sequences of 4,096 tokens. Empty where attention is not a library's.
std::vector<RingStep> ring_steps();

} // namespace moe::test
