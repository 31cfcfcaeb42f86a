// The host's side of an op: launches one by one or replays a CUDA graph, and waits where a dispatcher reads counts.
#include "planner/plan/plan.hpp"
#include "planner/program/op.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/cost/cost.hpp"

#include <algorithm>

namespace moe {
namespace {

// The scope of CUDA graphs that captures an op; none for dispatch, expert products and combine, whose shapes change.
CudaGraph scope_of(const Op& op) {
    if (op.phase == Phase::step) return CudaGraph::none;
    switch (op.module) {
    case Module::layernorm:
    case Module::attn_in:
    case Module::mla_up_proj:
    case Module::core_attn:
    case Module::attn_out:
    case Module::residual:
        return CudaGraph::attn;
    case Module::mlp:
    case Module::moe_act_dense:
        return CudaGraph::mlp;
    case Module::router:
        return CudaGraph::moe_router;
    case Module::shared_experts:
        return CudaGraph::shared_experts;
    case Module::dispatch: // preprocessing of routed rows before any of them moves
        return op.kind == OpKind::permute_map ? CudaGraph::moe_preprocess : CudaGraph::none;
    default:
        return CudaGraph::none;
    }
}

// Dispatch, experts and combine are chains of framework calls, where other ops are single ones.
bool on_routed_rows(const Op& op) {
    return op.phase != Phase::step && (op.module == Module::dispatch || op.module == Module::experts ||
                                       op.module == Module::moe_act || op.module == Module::combine);
}

} // namespace

double launches(const StackCosts& costs, OpKind kind) {
    switch (kind) {
    case OpKind::router:
    case OpKind::router_grad:
    case OpKind::router_load:
    case OpKind::router_loss:
    case OpKind::router_loss_grad:
    case OpKind::drop_copies:
        return costs.router_launches;
    case OpKind::permute_map:
    case OpKind::permute:
    case OpKind::unpermute:
    case OpKind::sort_rows:
    case OpKind::unsort_rows:
        return costs.permute_launches;
    case OpKind::scan: // of mamba_ssm: see ScanAttr
        return 7.0;
    case OpKind::scan_grad:
        return 17.0;
    case OpKind::quantize:
        return costs.quantize_launches;
    default:
        return 1.0;
    }
}

double host_seconds(const Plan& plan, const Stack& stack, const Op& op) {
    if (plan.hardware->cpu) return 0.0; // the rank's own thread runs the op
    const CudaGraph scope = scope_of(op);
    // With planned rows shapes never change, so that graphs of single layers hold the experts as well.
    const bool whole = plan.cuda_graph != CudaGraph::none && plan.fixed_rows() && op.phase != Phase::step;
    const bool graph =
        whole || plan.cuda_graph == CudaGraph::full || (scope != CudaGraph::none && holds(plan.cuda_graph, scope));
    if (graph) return stack.costs.graph_launch_seconds;
    const auto* grouped = std::get_if<GroupedGemmAttr>(&op.attr);
    const double again = op.phase == Phase::recompute ? stack.costs.recompute_launches : 1.0;
    const double routed = on_routed_rows(op) ? stack.costs.routed_launches : 1.0;
    return stack.costs.launch_seconds * routed * launches(stack.costs, op.kind) * again +
           (grouped == nullptr ? 0.0 : grouped->groups * stack.costs.expert_launch_seconds);
}

bool host_waits(const Plan& plan, const Stack& stack, const Op& op) {
    const auto* map = std::get_if<PermuteAttr>(&op.attr);
    const bool counts = op.kind == OpKind::expert_counts || (op.kind == OpKind::permute_map && map->local);
    if (!counts || stack.costs.sync_seconds <= 0.0) return false;
    // Planned rows, which a graph of the whole step needs, spare the host the counts.
    if (plan.fixed_rows() || plan.cuda_graph == CudaGraph::full) return false;
    return std::find(stack.host_synced.begin(), stack.host_synced.end(), plan.dispatcher) != stack.host_synced.end();
}

} // namespace moe
