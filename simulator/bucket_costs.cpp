// Prices what the begin and finish slots and the last backward do with a bucket, as the lowering emits it.
#include "simulator/bucket_costs.hpp"

namespace moe {
namespace {

// A quantized bucket is gathered in BF16 and quantized by every rank.
double gathered_bytes(const BucketSize& b) {
    return is_quantized(b.weight_dtype) ? 2.0 * static_cast<double>(b.elements) : weight_bytes(b);
}

} // namespace

OpCost price_op(const CostModel& model, OpKind kind, double bytes, Dtype dtype, Group group) {
    Program program;
    Tensor tensor;
    tensor.dtype = dtype;
    program.tensors.push_back(tensor);
    Op op;
    op.kind = kind;
    op.in = {0};
    op.bytes = bytes;
    if (kind == OpKind::sum_squares) // as the lowering states it: measured calls go by FLOPs where an op has them
        op.flops = 2.0 * bytes / static_cast<double>(bytes_of(dtype, 1));
    op.group = group;
    const bool message = kind == OpKind::send || kind == OpKind::recv;
    op.module = message ? Module::pipeline : Module::data_parallel;
    op.phase = message ? Phase::forward : Phase::step;
    return model(op, program);
}

double price_bytes(const CostModel& model, OpKind kind, double bytes, Dtype dtype, Group group) {
    return price_op(model, kind, bytes, dtype, group).device;
}

double update_bytes(const Plan& plan, const BucketSize& b) {
    const auto n = static_cast<double>(b.elements);
    const double moments = plan.optimizer.bf16_moments ? 4.0 : 8.0;
    return (gradient_bytes(plan) + gathered_bytes(b) / n + 2.0 * (4.0 + moments)) * n / b.group_size;
}

BucketTime time_of(const CostModel& model, const BucketSize& b) {
    const auto n = static_cast<double>(b.elements);
    const Dtype sums = gradient_dtype(model.plan());
    const double sum_bytes = gradient_bytes(model.plan()) * n;
    BucketTime t;
    if (b.group_size > 1) {
        t.gather = price_bytes(model, OpKind::all_gather, gathered_bytes(b), Dtype::bf16, b.group);
        t.reduce = price_bytes(model, OpKind::reduce_scatter, sum_bytes, sums, b.group);
    }
    t.zero = price_bytes(model, OpKind::zero, sum_bytes, sums);
    t.late_zero = is_quantized(b.weight_dtype);
    if (is_quantized(b.weight_dtype))
        t.quantize = price_bytes(model, OpKind::quantize, gathered_bytes(b) + weight_bytes(b), Dtype::bf16);
    t.squares = price_bytes(model, OpKind::sum_squares, sum_bytes / b.group_size, sums);
    if ((model.plan().offload & offload::optimizer) != 0) {
        t.reload = price_bytes(model, OpKind::copy_from_host, optimizer_bytes(model.plan(), b), Dtype::f32);
        t.store = price_bytes(model, OpKind::copy_to_host, optimizer_bytes(model.plan(), b), Dtype::f32);
    }
    t.update = price_bytes(model, OpKind::adamw, update_bytes(model.plan(), b), Dtype::f32);
    return t;
}

} // namespace moe
