// Declares the types of planner/plan for headers that only name them.
#pragma once

namespace moe {

class Mesh;
struct Plan;
struct PlanFault;
struct Stage;

} // namespace moe
