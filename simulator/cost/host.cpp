// The host's side of an op: launches one by one or replays a CUDA graph, and waits where a dispatcher reads counts.
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/graph_scope.hpp"
#include "planner/program/op.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/cost/cost.hpp"

#include <algorithm>

namespace moe::cost {
bool on_routed_rows(const program::Op& op) {
    return op.phase != program::Phase::step &&
           (op.module == program::Module::dispatch || op.module == program::Module::experts ||
            op.module == program::Module::moe_act || op.module == program::Module::combine);
}

double launches(const stack::StackCosts& costs, program::OpKind kind) {
    switch (kind) {
    case program::OpKind::router:
    case program::OpKind::router_grad:
    case program::OpKind::router_load:
    case program::OpKind::router_loss:
    case program::OpKind::router_loss_grad:
    case program::OpKind::drop_copies:
        return costs.router_launches;
    case program::OpKind::sinkhorn: // as many in every iteration
        return program::sinkhorn_iterations * costs.router_launches;
    case program::OpKind::permute_map:
    case program::OpKind::permute:
    case program::OpKind::unpermute:
    case program::OpKind::sort_rows:
    case program::OpKind::unsort_rows:
        return costs.permute_launches;
    case program::OpKind::scan: // of mamba_ssm: see ScanAttr
        return 7.0;
    case program::OpKind::scan_grad:
        return 17.0;
    case program::OpKind::quantize:
        return costs.quantize_launches;
    default:
        return 1.0;
    }
}

double kernels_by_expert(const plan::Plan& plan, const stack::Stack& stack, const program::Op& op) {
    if (stack::fuses_experts(plan, stack)) return 0.0;
    if (const auto* grouped = std::get_if<program::GroupedGemmAttr>(&op.attr)) return grouped->groups;
    // Calls of the framework for each expert: a product and a sum forward; backward two products and two sums.
    double calls = op.kind == program::OpKind::quantize && on_routed_rows(op) ? 1.0 : 0.0;
    if (std::holds_alternative<program::GroupedBiasAttr>(op.attr) && op.in.size() > 3 && op.in[3] != program::no_tensor)
        calls = op.kind == program::OpKind::grouped_bias_add ? 2.0 : 4.0;
    if (calls == 0.0 || (calls > 1.0 && stack.costs.weighted_bias_bytes < 0.0)) return 0.0;
    double most = 0.0;
    for (const model::LayerKind& kind : plan.model->kinds)
        if (kind.moe) most = std::max(most, static_cast<double>(kind.moe->experts) / plan.ep);
    return calls * most;
}

double host_seconds(const plan::Plan& plan, const stack::Stack& stack, const program::Op& op) {
    if (plan.hardware->cpu) return 0.0; // the rank's own thread runs the op
    if (program::in_graph(plan, op)) return stack.costs.graph_launch_seconds;
    const double again = op.phase == program::Phase::recompute ? stack.costs.recompute_launches : 1.0;
    // Dispatch, experts and combine are chains of framework calls, where other ops are single ones.
    const double routed = on_routed_rows(op) ? stack.costs.routed_launches : 1.0;
    const double merged = plan.ep_overlap && op.phase != program::Phase::step ? stack.costs.overlap_launches : 1.0;
    return merged * (stack.costs.launch_seconds * routed * launches(stack.costs, op.kind) * again +
                     kernels_by_expert(plan, stack, op) * stack.costs.expert_launch_seconds);
}

bool host_waits(const plan::Plan& plan, const stack::Stack& stack, const program::Op& op) {
    const auto* map = std::get_if<program::PermuteAttr>(&op.attr);
    const bool counts =
        op.kind == program::OpKind::expert_counts || (op.kind == program::OpKind::permute_map && map->local);
    if (!counts || stack.costs.sync_seconds <= 0.0) return false;
    // Planned rows, which a graph of the whole step needs, spare the host the counts.
    if (plan.fixed_rows() || plan.cuda_graph == plan::CudaGraph::full) return false;
    return std::find(stack.host_synced.begin(), stack.host_synced.end(), plan.dispatcher) != stack.host_synced.end();
}

} // namespace moe::cost
