// Refusals of what the engine cannot run, each by the name of the field that asks for it.
#include "engine/run/executable.hpp"

#include "engine/comm/check.hpp"
#include "planner/base/error.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/plan_choices.hpp"
#include "planner/plan/stack_traits.hpp"
#include "planner/program/program.hpp"

namespace moe::run {

namespace {

void check_fields(const plan::Plan& plan, const ops::Backend& backend) {
    const model::Model& model = *plan.model;
    if (!model.not_executable.empty()) refuse("execute: the model cannot be trained here: {}", model.not_executable);
    const bool published =
        plan.dispatcher == plan::Dispatcher::hybridep && !plan::stack_traits(plan).peer_memory_dispatch;
    if (plan.dispatcher == plan::Dispatcher::deepep || plan.dispatcher == plan::Dispatcher::ncclep || published)
        refuse("execute: dispatcher = {} of stack \"{}\" is not supported: search again with --stack moe-plan",
               plan::to_string(plan.dispatcher), plan.stack);
    if (plan.cuda_graph != plan::CudaGraph::none && !backend.can_replay)
        refuse("execute: cuda_graph = {} is not supported by backend {}, only none is: search again with --fix "
               "cuda_graph=none",
               plan::to_string(plan.cuda_graph), backend.name);
    if (plan.cuda_graph != plan::CudaGraph::full && plan::holds(plan.cuda_graph, plan::CudaGraph::full))
        refuse("execute: cuda_graph = {}: full holds every scope, write full alone", plan::to_string(plan.cuda_graph));
    if (const plan::PlanFault fault = plan::check_executable(plan))
        refuse("execute: {}, or search again with --fix", fault.message);
}

// The plan field that asked for an op kind which not every back end has.
std::string field_of(const plan::Plan& plan, const program::Op& op) {
    switch (op.kind) {
    case program::OpKind::quantize:
    case program::OpKind::dequantize:
        return fmt::format("precision = {}", machine::to_string(plan.precision));
    case program::OpKind::copy_to_host:
    case program::OpKind::copy_from_host:
    case program::OpKind::adamw_on_host:
        return fmt::format("offload = {}", plan::offload::to_string(plan.offload));
    default:
        return fmt::format("the model's layer {}", op.layer);
    }
}

void check_ops(const plan::Plan& plan, const program::Program& program, const ops::Backend& backend) {
    for (const program::Template& ops : program.templates)
        for (const program::Op& op : ops.ops)
            if (backend.function(op.kind) == nullptr)
                refuse("execute: {} needs the op {}, which the {} back end does not have", field_of(plan, op),
                       program::to_string(op.kind), backend.name);
    for (const program::Tensor& tensor : program.tensors)
        if (tensor.dtype != program::Dtype::f32 && tensor.dtype != program::Dtype::bf16 &&
            tensor.dtype != program::Dtype::fp8_block && tensor.dtype != program::Dtype::fp8_columns &&
            tensor.dtype != program::Dtype::i32 &&
            !(tensor.dtype == program::Dtype::mxfp8 && plan.optimizer.moments == plan::Moments::fp8))
            refuse("execute: precision = {} stores {} as {}, the {} back end has f32, bf16 and fp8-blockwise: search "
                   "again with --precision bf16",

                   machine::to_string(plan.precision), tensor.name, program::to_string(tensor.dtype), backend.name);
}

} // namespace

void check_executable(const plan::Plan& plan, const std::vector<program::Program>& programs,
                      const ops::Backend& backend) {
    check_fields(plan, backend);
    for (const program::Program& program : programs) check_ops(plan, program, backend);
    comm::check_communication(programs, plan::Mesh(plan));
}

} // namespace moe::run
