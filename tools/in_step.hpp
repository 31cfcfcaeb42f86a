// What ranks on several GPUs take in a step beyond what one GPU, and a collective alone, take.
#pragma once

#include "planner/hardware.hpp"

#include <string>

namespace moe::tools {

// Trains small plans on the first `gpus` devices, two of long products and one of many short collectives, and
// compares them with what `hardware`, of one such GPU and its collectives, says. Adds to its measured calls
// (planner/measured.hpp) products_key: [seconds of large products, what they take on the slowest GPU], and waits_key:
// [0, seconds by which a communication op is longer than alone].
void measure_in_step(Hardware& hardware, const std::string& backend, int gpus);

} // namespace moe::tools
