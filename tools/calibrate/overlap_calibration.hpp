// Calibration of overlap: the time that ranks on several GPUs take in a step beyond what one GPU, and a collective
// alone, take.
#pragma once

#include "planner/machine/hardware.hpp"

#include <string>

namespace moe::tools {

// Trains small plans on the first `gpus` devices, two of long products, with EP overlap and without, one that reduces
// experts' gradients and one of many short collectives, and compares them with what `hardware`, of one such GPU and its
// collectives, says, and with each other. Adds to its measured calls in_step_keys (planner/program/measured.hpp).
void measure_in_step(machine::Hardware& hardware, const std::string& backend, int gpus);

} // namespace moe::tools
