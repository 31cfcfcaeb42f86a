// Decides by the machine of a plan.
#include "planner/plan/block_scaling.hpp"

#include "planner/machine/hardware.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/stack_traits.hpp"

#include <cmath>

namespace moe::plan {

bool has_block_products(const Plan& plan) {
    const auto low = [](machine::Precision p) {
        return p == machine::Precision::mxfp8 || p == machine::Precision::nvfp4;
    };
    return stack_traits(plan).emulates_precisions && (low(plan.precision) || low(plan.head()));
}

bool scales_blocks(const Plan& plan) {
    const machine::Hardware* hardware = plan.hardware.get();
    return hardware != nullptr && !hardware->cpu && std::floor(hardware->compute_capability) == 10.0 &&
           has_block_products(plan);
}

} // namespace moe::plan
