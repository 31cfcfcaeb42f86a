// Whether a plan's products in mxfp8 and nvfp4 run on tensor cores that scale blocks.
#pragma once

#include "planner/plan/fwd.hpp"

#include <cstdint>

namespace moe::plan {

// True under our own stack where dense products or the LM head are mxfp8 or nvfp4: their operands are rounded
// (Plan::computed_in()), and a GPU of compute capability 10.x multiplies those in whole blocks
// (program::block_format()) in cuBLASLt. Experts' products, and all on other machines, are emulated.
bool has_block_products(const Plan& plan);
// Whether the plan's own machine is such a GPU.
bool scales_blocks(const Plan& plan);

// Bytes of device memory that such a plan takes for packed operands.
inline constexpr std::int64_t block_scaled_scratch = std::int64_t{256} << 20;

} // namespace moe::plan
