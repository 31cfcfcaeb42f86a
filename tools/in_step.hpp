// What ranks on several GPUs take in a step beyond what one GPU, and a collective alone, take.
#pragma once

#include "planner/hardware.hpp"

#include <string>

namespace moe::tools {

// Trains small plans on the first `gpus` devices, two of long products, with EP overlap and without, and one of many
// short collectives, and compares them with what `hardware`, of one such GPU and its collectives, says. Adds to its
// measured calls products_key, waits_key and losses_key (planner/measured.hpp).
void measure_in_step(Hardware& hardware, const std::string& backend, int gpus);

} // namespace moe::tools
