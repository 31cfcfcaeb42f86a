// The models that the microbenchmark trains, and how ranks share them.
#pragma once

#include "engine/ops/backend.hpp"
#include "planner/machine/precision.hpp"
#include "planner/plan/fwd.hpp"

#include <string>
#include <vector>

namespace moe::bench {

// Degrees as in Plan; micro-batches are always two.
struct Sharing {
    int ranks = 1, tp = 1, pp = 1, dp = 1, ep = 1, etp = 1;
};

// A small model and the workload it runs. Sizes of one point differ from each other as those of real layers do.
struct Point {
    std::string family; // family of the model
    int hidden, heads, kv_heads, head_dim;
    int ffn, experts, top_k;
    int shared; // FFN width of the shared expert, or of dense layers; of mixtral, which has neither, its window
    int vocab;
    std::int64_t seq, mbs;
    machine::Precision precision = machine::Precision::bf16;
    Sharing sharing{};
    bool deterministic = false;
    unsigned offload = 0; // set of offload:: modules
    bool fp8_wgrad = false;
};

// Each from small to large, so that a budget that runs out costs the far end and never a kind of op.
std::vector<Point> grid_of_cores(); // grid of eight ranks, which share the cores
std::vector<Point> grid_of_gpus();  // grid of one rank

plan::Plan plan_of(const Point& point, const ops::Backend& backend);

} // namespace moe::bench
