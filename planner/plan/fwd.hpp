// Declares the types of planner/plan for headers that only name them.
#pragma once

namespace moe::plan {

class Mesh;
struct Plan;
struct PlanFault;
struct Stage;

} // namespace moe::plan
