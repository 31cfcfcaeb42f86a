// Which ranks sum a weight's gradient, in which type, and which of them hold copies.
#include "planner/lower/emit/parameters.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/stack_traits.hpp"

#include <algorithm>

namespace moe::emit {

plan::Group gradient_group(const plan::Plan& plan, plan::Domain domain, std::uint16_t cut) {
    const bool copied = plan::weight_replicas(plan, domain) > 1;
    plan::Group group{domain, copied ? plan::axis::shards : plan::axis::data};
    if (domain == plan::Domain::dense) group.axes |= plan::axis::context;
    if (cut == 0) group.axes |= plan::axis::tensor;
    if (cut == plan::axis::key_parts) group.axes |= plan::axis::key_replicas;
    if (plan::group_size(plan, group) == 1) group.axes = 0;
    return group;
}

bool reduces_copy(const plan::Plan& plan) {
    return plan.gradients == machine::Precision::bf16 && plan::stack_traits(plan).reduces_bf16_copy;
}

program::Dtype gradient_dtype(const plan::Plan& plan) {
    const bool bf16 = plan.gradients == machine::Precision::bf16 && !reduces_copy(plan);
    return bf16 ? program::Dtype::bf16 : program::Dtype::f32;
}

plan::Group replica_group(const plan::Plan& plan, plan::Domain domain) {
    if (plan::weight_replicas(plan, domain) == 1) return {};
    return {domain, plan::axis::replicas};
}

std::vector<int> table_holders(const plan::Plan& plan) {
    std::vector<int> ranks;
    if (plan.pp == 1) return {0};
    const std::vector<plan::Stage> all = plan::stages(plan);
    for (std::size_t s = 0; s < all.size(); ++s)
        if (all[s].embedding || all[s].mtp > 0 || (all[s].loss && plan.model->tied_embeddings))
            ranks.push_back(plan::rank_of_stage(plan.schedule, plan.pp, static_cast<int>(s)));
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
}

bool copies_table(const plan::Plan& plan) {
    const bool read_again = plan.model->tied_embeddings || !plan.model->mtp.empty();
    return plan::stack_traits(plan).adds_up_shards_of_tied_table && plan.pp > 1 && read_again &&
           table_holders(plan).size() > 1;
}

bool shares_table(const plan::Plan& plan) { return copies_table(plan) && !plan.lora.on(); }

} // namespace moe::emit
