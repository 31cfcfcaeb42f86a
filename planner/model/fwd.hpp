// Declares the types of planner/model for headers that only name them.
#pragma once

namespace moe::model {

struct DocumentLengths;
struct Model;
struct Moe;
struct Rope;
struct Router;

} // namespace moe::model
