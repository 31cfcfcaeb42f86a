// Declares the types of planner/stack for headers that only name them.
#pragma once

namespace moe::stack {

struct LinkShares;
struct Stack;
struct StackCosts;

} // namespace moe::stack
