// Prices what the begin and finish slots and the last backward do with a bucket: the ops of step_ops.hpp.
#include "simulator/estimate/bucket_costs.hpp"

#include "planner/plan/plan.hpp"
#include "planner/program/program.hpp"

#include <utility>

namespace moe {
namespace {

// A search asks a million times: what it asks with is allocated once.
struct Asked {
    Program program;
    Op op;
    Asked() {
        program.tensors.emplace_back();
        op.in = {0};
    }
};

OpCost price(const CostModel& model, const StepOp& sized, Attr attr, bool message) {
    thread_local Asked asked;
    asked.program.tensors.front().dtype = sized.dtype;
    Op& op = asked.op;
    op.kind = sized.kind;
    op.bytes = sized.bytes;
    op.flops = sized.flops;
    op.group = sized.group;
    op.attr = std::move(attr);
    op.module = message ? Module::pipeline : sized.module;
    op.phase = message ? Phase::forward : Phase::step;
    return model(op, asked.program);
}

double seconds_of(const CostModel& model, const StepOp& sized) {
    return sized.times * price(model, sized, sized.in_blocks ? Attr{QuantizeAttr{}} : Attr{}, false).device;
}

} // namespace

OpCost price_op(const CostModel& model, OpKind kind, double bytes, Dtype dtype, Group group, Attr attr) {
    StepOp sized{.kind = kind, .dtype = dtype, .group = group, .bytes = bytes};
    // As the lowering states it: measured calls go by FLOPs where an op has them.
    if (kind == OpKind::sum_squares) sized.flops = 2.0 * bytes / static_cast<double>(bytes_of(dtype, 1));
    return price(model, sized, std::move(attr), kind == OpKind::send || kind == OpKind::recv);
}

double price_bytes(const CostModel& model, OpKind kind, double bytes, Dtype dtype, Group group, Attr attr) {
    return price_op(model, kind, bytes, dtype, group, std::move(attr)).device;
}

double seconds_of(const CostModel& model, const BucketSize& b, StepWork work) {
    return has_work(model.plan(), b, work) ? seconds_of(model, step_op(model.plan(), b, work)) : 0.0;
}

BucketTime time_of(const CostModel& model, const BucketSize& b, std::int64_t zeroed) {
    BucketTime t;
    t.staged = b.staged();
    for (std::size_t w = 0; w < step_work_count; ++w) {
        const auto work = static_cast<StepWork>(w);
        if (work != StepWork::zero) t[work] = seconds_of(model, b, work);
    }
    if (zeroed > 0) t[StepWork::zero] = seconds_of(model, zero_op(model.plan(), b, static_cast<double>(zeroed)));
    return t;
}

} // namespace moe
