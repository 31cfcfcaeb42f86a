// Prices what the begin and finish slots and the last backward do with a bucket: the ops of step_ops.hpp.
#include "simulator/estimate/bucket_costs.hpp"

#include "planner/plan/plan.hpp"
#include "planner/program/program.hpp"

#include <utility>

namespace moe::estimate {
namespace {

// A search asks a million times: what it asks with is allocated once.
struct Asked {
    program::Program program;
    program::Op op;
    Asked() {
        program.tensors.emplace_back();
        op.in = {0};
    }
};

cost::OpCost price(const cost::CostModel& model, const passes::StepOp& sized, program::Attr attr, bool message) {
    thread_local Asked asked;
    asked.program.tensors.front().dtype = sized.dtype;
    program::Op& op = asked.op;
    op.kind = sized.kind;
    op.bytes = sized.bytes;
    op.flops = sized.flops;
    op.group = sized.group;
    op.attr = std::move(attr);
    op.module = message ? program::Module::pipeline : sized.module;
    op.phase = message ? program::Phase::forward : program::Phase::step;
    return model(op, asked.program);
}

double seconds_of(const cost::CostModel& model, const passes::StepOp& sized) {
    return sized.times * price(model, sized,
                               sized.in_blocks                                ? program::Attr{program::QuantizeAttr{}}
                               : sized.kind == program::OpKind::newton_schulz ? program::Attr{sized.muon}
                                                                              : program::Attr{},
                               false)
                             .device;
}

} // namespace

cost::OpCost price_op(const cost::CostModel& model, program::OpKind kind, double bytes, program::Dtype dtype,
                      plan::Group group, program::Attr attr) {
    passes::StepOp sized{.kind = kind, .dtype = dtype, .group = group, .bytes = bytes};
    // FLOPs are as the lowering states them: measured calls go by FLOPs where an op has them.
    if (kind == program::OpKind::sum_squares)
        sized.flops = 2.0 * bytes / static_cast<double>(program::bytes_of(dtype, 1));
    return price(model, sized, std::move(attr), kind == program::OpKind::send || kind == program::OpKind::recv);
}

double price_bytes(const cost::CostModel& model, program::OpKind kind, double bytes, program::Dtype dtype,
                   plan::Group group, program::Attr attr) {
    return price_op(model, kind, bytes, dtype, group, std::move(attr)).device;
}

double seconds_of(const cost::CostModel& model, const passes::BucketSize& b, passes::StepWork work) {
    return passes::has_work(model.plan(), b, work) ? seconds_of(model, passes::step_op(model.plan(), b, work)) : 0.0;
}

BucketTime time_of(const cost::CostModel& model, const passes::BucketSize& b, std::int64_t zeroed) {
    BucketTime t;
    t.staged = b.staged();
    t.in_line = passes::has_work(model.plan(), b, passes::StepWork::quantize) &&
                passes::step_op(model.plan(), b, passes::StepWork::quantize).stream == program::Stream::compute;
    t.muon = b.is_muon();
    for (std::size_t w = 0; w < passes::step_work_count; ++w) {
        const auto work = static_cast<passes::StepWork>(w);
        if (work != passes::StepWork::zero) t[work] = seconds_of(model, b, work);
    }
    if (zeroed > 0 && passes::has_work(model.plan(), b, passes::StepWork::zero))
        t[passes::StepWork::zero] = seconds_of(model, passes::zero_op(model.plan(), b, static_cast<double>(zeroed)));
    return t;
}

} // namespace moe::estimate
