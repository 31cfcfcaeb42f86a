// Refusals of what the engine cannot run, each by the name of the field that asks for it.
#include "engine/run/executable.hpp"

#include "engine/comm/check.hpp"
#include "planner/base/error.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/plan_choices.hpp"
#include "planner/plan/stack_traits.hpp"
#include "planner/program/program.hpp"

namespace moe {

namespace {

void check_fields(const Plan& plan, const Backend& backend) {
    const Model& model = *plan.model;
    if (!model.not_executable.empty()) refuse("execute: the model cannot be trained here: {}", model.not_executable);
    const bool published = plan.dispatcher == Dispatcher::hybridep && !stack_traits(plan).peer_memory_dispatch;
    if (plan.dispatcher == Dispatcher::deepep || published)
        refuse("execute: dispatcher = {} of stack \"{}\" is not supported: search again with --stack moe-plan",
               to_string(plan.dispatcher), plan.stack);
    if (plan.cuda_graph != CudaGraph::none && !(plan.cuda_graph == CudaGraph::full && backend.can_replay))
        refuse("execute: cuda_graph = {} is not supported by backend {}, {}: search again with --fix cuda_graph=none",
               to_string(plan.cuda_graph), backend.name,
               backend.can_replay ? "only none and full are" : "only none is");
    if (const PlanFault fault = check_executable(plan))
        refuse("execute: {}, or search again with --fix", fault.message);
}

// The plan field that asked for an op kind which not every back end has.
std::string field_of(const Plan& plan, const Op& op) {
    switch (op.kind) {
    case OpKind::quantize:
    case OpKind::dequantize:
        return fmt::format("precision = {}", to_string(plan.precision));
    case OpKind::copy_to_host:
    case OpKind::copy_from_host:
        return fmt::format("offload = {}", offload::to_string(plan.offload));
    default:
        return fmt::format("the model's layer {}", op.layer);
    }
}

void check_ops(const Plan& plan, const Program& program, const Backend& backend) {
    for (const Template& ops : program.templates)
        for (const Op& op : ops.ops)
            if (backend.function(op.kind) == nullptr)
                refuse("execute: {} needs the op {}, which the {} back end does not have", field_of(plan, op),
                       to_string(op.kind), backend.name);
    for (const Tensor& tensor : program.tensors)
        if (tensor.dtype != Dtype::f32 && tensor.dtype != Dtype::bf16 && tensor.dtype != Dtype::fp8_block &&
            tensor.dtype != Dtype::i32)
            refuse("execute: precision = {} stores {} as {}, the {} back end has f32, bf16 and fp8-blockwise: search "
                   "again with --precision bf16",

                   to_string(plan.precision), tensor.name, to_string(tensor.dtype), backend.name);
}

} // namespace

void check_executable(const Plan& plan, const std::vector<Program>& programs, const Backend& backend) {
    check_fields(plan, backend);
    for (const Program& program : programs) check_ops(plan, program, backend);
    check_communication(programs, Mesh(plan));
}

} // namespace moe
