// Declares the types of planner/machine for headers that only name them.
#pragma once

namespace moe::machine {

struct CommunicatorBytes;
struct GpuProperties;
struct Hardware;
struct MeasuredCall;

} // namespace moe::machine
