// Prices what the begin and finish slots and the last backward do with a bucket, as the lowering emits it.
#include "simulator/estimate/bucket_costs.hpp"

#include "planner/plan/plan.hpp"
#include "planner/program/program.hpp"

#include <utility>

namespace moe {
namespace {

// A quantized bucket is gathered in BF16 and quantized by every rank.
double gathered_bytes(const BucketSize& b) {
    return is_quantized(b.weight_dtype) ? 2.0 * static_cast<double>(b.elements) : weight_bytes(b);
}

// Matrix by matrix, from this rank's masters or what was gathered of all; the scales of 128 x 128 are nothing beside
// it.
double quantize_seconds(const CostModel& model, const BucketSize& b) {
    if (b.matrices == 0) return price_bytes(model, OpKind::quantize, gathered_bytes(b) + weight_bytes(b), Dtype::bf16);
    const bool alone = b.group_size == 1;
    const double bytes = (alone ? 6.0 : 4.0) * static_cast<double>(b.elements) / b.matrices;
    return b.matrices *
           price_bytes(model, OpKind::quantize, bytes, alone ? Dtype::f32 : Dtype::bf16, {}, QuantizeAttr{});
}

} // namespace

OpCost price_op(const CostModel& model, OpKind kind, double bytes, Dtype dtype, Group group, Attr attr) {
    // A search asks a million times: what it asks with is allocated once.
    struct Asked {
        Program program;
        Op op;
        Asked() {
            program.tensors.emplace_back();
            op.in = {0};
        }
    };
    thread_local Asked asked;
    asked.program.tensors.front().dtype = dtype;
    Op& op = asked.op;
    op.kind = kind;
    op.bytes = bytes;
    // As the lowering states it: measured calls go by FLOPs where an op has them.
    op.flops = kind == OpKind::sum_squares ? 2.0 * bytes / static_cast<double>(bytes_of(dtype, 1)) : 0.0;
    op.group = group;
    op.attr = std::move(attr);
    const bool message = kind == OpKind::send || kind == OpKind::recv;
    op.module = message ? Module::pipeline : Module::data_parallel;
    op.phase = message ? Phase::forward : Phase::step;
    return model(op, asked.program);
}

double price_bytes(const CostModel& model, OpKind kind, double bytes, Dtype dtype, Group group, Attr attr) {
    return price_op(model, kind, bytes, dtype, group, std::move(attr)).device;
}

double update_bytes(const Plan& plan, const BucketSize& b) {
    const auto n = static_cast<double>(b.elements);
    const double moments = plan.optimizer.bf16_moments ? 4.0 : 8.0;
    const double weights = b.matrices > 0 ? 0.0 : gathered_bytes(b); // or rounded as the next step begins
    return (gradient_bytes(plan) + weights / n + 2.0 * (4.0 + moments)) * n / b.group_size;
}

BucketTime moved(const CostModel& model, const BucketSize& b) {
    const auto n = static_cast<double>(b.elements);
    const Dtype sums = gradient_dtype(model.plan());
    BucketTime t;
    if (b.group_size > 1) {
        if (b.matrices > 0) t.round = price_bytes(model, OpKind::cast, 6.0 * n / b.group_size, Dtype::f32);
        t.gather = price_bytes(model, OpKind::all_gather, gathered_bytes(b), Dtype::bf16, b.group);
        t.reduce = price_bytes(model, OpKind::reduce_scatter, gradient_bytes(model.plan()) * n, sums, b.group);
    }
    if (is_quantized(b.weight_dtype)) t.quantize = quantize_seconds(model, b);
    return t;
}

BucketTime time_of(const CostModel& model, const BucketSize& b, std::int64_t zeroed) {
    const Dtype sums = gradient_dtype(model.plan());
    const double sum_bytes = gradient_bytes(model.plan()) * static_cast<double>(b.elements);
    BucketTime t = moved(model, b);
    if (zeroed > 0)
        t.zero = price_bytes(model, OpKind::zero, gradient_bytes(model.plan()) * static_cast<double>(zeroed), sums);
    t.late_zero =
        is_quantized(b.weight_dtype) && (b.matrices == 0 || b.group_size > 1); // the others pass by no staging
    t.squares = price_bytes(model, OpKind::sum_squares, sum_bytes / b.group_size, sums);
    if ((model.plan().offload & offload::optimizer) != 0) {
        t.reload = price_bytes(model, OpKind::copy_from_host, optimizer_bytes(model.plan(), b), Dtype::f32);
        t.store = price_bytes(model, OpKind::copy_to_host, optimizer_bytes(model.plan(), b), Dtype::f32);
    }
    t.update = price_bytes(model, OpKind::adamw, update_bytes(model.plan(), b), Dtype::f32);
    return t;
}

} // namespace moe
