// The host's side of an op: launches one by one or replays a CUDA graph, and waits where a dispatcher reads counts.
#include "simulator/cost/cost.hpp"

#include <algorithm>

namespace moe {
namespace {

// What partial CUDA graphs capture: attention, router with preprocessing and dense parts; dispatch, expert products and
// combine stay outside (Megatron-LM's scopes attn, moe_router, moe_preprocess, mlp).
bool in_partial_graph(const Op& op) {
    switch (op.module) {
    case Module::layernorm:
    case Module::attn_in:
    case Module::mla_up_proj:
    case Module::core_attn:
    case Module::attn_out:
    case Module::mlp:
    case Module::moe_act_dense:
    case Module::router:
    case Module::shared_experts:
    case Module::residual:
        return op.phase != Phase::step;
    default:
        return false;
    }
}

} // namespace

double host_seconds(const Plan& plan, const Stack& stack, const Op& op) {
    if (plan.hardware->cpu) return 0.0; // the rank's own thread runs the op
    const bool graph =
        plan.cuda_graph == CudaGraph::full || (plan.cuda_graph == CudaGraph::partial && in_partial_graph(op));
    if (graph) return stack.costs.graph_launch_seconds;
    const auto* grouped = std::get_if<GroupedGemmAttr>(&op.attr);
    return stack.costs.launch_seconds +
           (grouped == nullptr ? 0.0 : grouped->groups * stack.costs.expert_launch_seconds);
}

bool host_waits(const Plan& plan, const Stack& stack, const Op& op) {
    if (op.kind != OpKind::expert_counts || stack.costs.sync_seconds <= 0.0) return false;
    return std::find(stack.host_synced.begin(), stack.host_synced.end(), plan.dispatcher) != stack.host_synced.end();
}

} // namespace moe
