// Declares the types of planner/machine for headers that only name them.
#pragma once

namespace moe {

struct CommunicatorBytes;
struct Hardware;
struct MeasuredCall;

} // namespace moe
