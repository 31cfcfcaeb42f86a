// The scopes of CUDA graphs as modules of a layer.
#include "planner/program/graph_scope.hpp"

#include "planner/plan/plan.hpp"
#include "planner/plan/stack_traits.hpp"
#include "planner/program/op.hpp"

namespace moe::program {

namespace {

// The scope of CUDA graphs that captures an op; none for dispatch, expert products and combine, whose shapes change.
plan::CudaGraph scope_of(const Op& op) {
    switch (op.module) {
    case Module::layernorm:
    case Module::attn_in:
    case Module::mla_up_proj:
    case Module::core_attn:
    case Module::attn_out:
    case Module::residual:
        return plan::CudaGraph::attn;
    case Module::mlp:
    case Module::moe_act_dense:
        return plan::CudaGraph::mlp;
    case Module::router:
        return plan::CudaGraph::moe_router;
    case Module::shared_experts:
        return plan::CudaGraph::shared_experts;
    case Module::dispatch: // preprocessing of routed rows before any of them moves
        return op.kind == OpKind::permute_map ? plan::CudaGraph::moe_preprocess : plan::CudaGraph::none;
    default:
        return plan::CudaGraph::none;
    }
}

} // namespace

bool in_graph(const plan::Plan& plan, const Op& op) {
    if (plan.cuda_graph == plan::CudaGraph::none) return false;
    if (plan.cuda_graph == plan::CudaGraph::full) return true;
    if (op.phase == Phase::step) return false;
    if (plan::stack_traits(plan).engine == plan::StackEngine::own && is_communication(op.kind)) return false;
    const plan::CudaGraph scope = scope_of(op);
    // Graphs of single layers hold the experts as well where their rows are planned.
    return plan.fixed_rows() || (scope != plan::CudaGraph::none && plan::holds(plan.cuda_graph, scope));
}

} // namespace moe::program
