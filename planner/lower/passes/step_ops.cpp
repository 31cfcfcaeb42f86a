// Bytes, FLOPs, groups and streams of what a step does with a bucket.
#include "planner/lower/passes/step_ops.hpp"

#include "planner/lower/emit/builder.hpp"

namespace moe::passes {
namespace {

// A quantized bucket is gathered in BF16 and quantized by every rank.
double gathered_bytes(const BucketSize& b) {
    return program::is_quantized(b.weight_dtype) ? 2.0 * static_cast<double>(b.elements) : weight_bytes(b);
}

// Bytes of an element's moments.
double moment_bytes(const plan::Plan& plan, const BucketSize& b) {
    if (b.is_muon()) return 4.0;
    constexpr double bytes[] = {8.0, 4.0, 1.0 + 1.0 / 32.0 + 2.0}; // by Moments
    return bytes[static_cast<std::size_t>(plan.optimizer.moments)];
}

// The gradient and new weights once, master and moments read and written. Matrices are rounded as the next step begins.
// Momentum reads and writes gradient and moment.
double update_bytes(const plan::Plan& plan, const BucketSize& b) {
    const auto n = static_cast<double>(b.elements);
    if (b.is_muon()) return 2.0 * (gradient_bytes(plan) + moment_bytes(plan, b)) * n / b.group_size;
    const double weights = b.matrices > 0 ? 0.0 : gathered_bytes(b);
    return (gradient_bytes(plan) + weights / n + 2.0 * (4.0 + moment_bytes(plan, b))) * n / b.group_size;
}

// A shard's gradients on their way to the host that steps, or its new weights on their way back.
StepOp host_copy(const plan::Plan& plan, const BucketSize& b, StepWork work) {
    const auto own = static_cast<double>(b.elements) / b.group_size;
    const double weights = gathered_bytes(b) / b.group_size;
    return {.kind = work == StepWork::fetch ? program::OpKind::copy_to_host : program::OpKind::copy_from_host,
            .stream = program::Stream::host,
            .module = program::Module::optimizer,
            .bytes = work == StepWork::fetch ? gradient_bytes(plan) * own : weights};
}

double updates_bytes(const plan::Plan& plan, const BucketSize& b) {
    return static_cast<double>(program::bytes_of(emit::activation_dtype(plan.precision), b.window));
}

// Every matrix is read into its place; master is read and written, and the weights once.
double orthogonalize_bytes(const plan::Plan& plan, const BucketSize& b) {
    const auto own = static_cast<double>(b.elements) / b.group_size;
    const double weights = b.matrices > 0 ? 0.0 : gathered_bytes(b) / b.group_size;
    const double sides = b.muon.matrices * b.muon.short_side * b.muon.long_side;
    return (gradient_bytes(plan) + 4.0) * sides + 8.0 * own + weights;
}

// So many matrices of `elements` together. Each is read in BF16, or in FP32 from the master of a group of one rank, and
// written in two forms of one byte; `scales`: of each, FP32 in either form. One scale, of the matrix as it is, takes a
// read of its own.
//
// Beside the first products where its input is gathered beside them. Elsewhere it would only disturb them: memory that
// both ask for is shared, and 4 layers of Qwen3-30B-A3B on an H200 take 83.1 ms so and 82.1 ms with one after the
// other.
StepOp quantize_matrices(const plan::Plan& plan, const BucketSize& b, double elements, double scales, int matrices) {
    const bool alone = b.group_size == 1;
    const double read = (alone ? 4.0 : 2.0) * (b.one_scale && !plan.keeps_scales() ? 2.0 : 1.0);
    return {.kind = program::OpKind::quantize,
            .stream = alone ? program::Stream::compute : program::Stream::data,
            .dtype = alone ? program::Dtype::f32 : program::Dtype::bf16,
            .bytes = (read + 2.0) * elements / matrices + 8.0 * scales,
            .times = matrices,
            .in_blocks = true};
}

} // namespace

namespace {

// What a bucket's update works in at its fullest: whole gradients are collected before they are spread, and what
// Newton-Schulz works in comes behind that.
std::int64_t muon_bytes(const program::Program& program, const program::Bucket& b) {
    const auto bytes = [&program](program::TensorId id) {
        return id == program::no_tensor ? 0 : (program.tensors[static_cast<std::size_t>(id)].bytes() + 255) / 256 * 256;
    };
    const std::int64_t collected = bytes(b.muon.collected), work = bytes(b.muon.work) + bytes(b.muon.norm);
    if (b.muon.updates == program::no_tensor) return collected + work;
    return bytes(b.muon.updates) + std::max(collected, work);
}

} // namespace

BucketSize size_of(const program::Program& program, const program::Bucket& b) {
    const program::TensorId weights = b.resharded() ? b.gathered : b.weights;
    return {b.domain,
            b.elements,
            b.group,
            b.group_size,
            program.tensors[static_cast<std::size_t>(weights)].dtype,
            b.layer,
            static_cast<int>(b.matrices.size()),
            b.quantizable,
            b.resharded(),
            b.copy,
            b.frozen,
            b.muon.attr,
            b.muon.parts,
            b.muon.window,
            muon_bytes(program, b),
            b.cut,
            b.one_scale};
}

double gradient_bytes(const plan::Plan& plan) {
    return static_cast<double>(program::bytes_of(emit::gradient_dtype(plan), 1));
}

double weight_bytes(const BucketSize& b) {
    return static_cast<double>(
        program::bytes_of(b.weight_dtype, program::is_quantized(b.weight_dtype) ? 2 * b.elements : b.elements));
}

double gradient_bytes(const plan::Plan& plan, const BucketSize& b) {
    return b.frozen ? 0.0 : gradient_bytes(plan) * static_cast<double>(b.elements);
}

double optimizer_bytes(const plan::Plan& plan, const BucketSize& b) {
    if (b.frozen) return 0.0;
    return (4.0 + moment_bytes(plan, b)) * static_cast<double>(b.elements) / b.group_size;
}

bool has_work(const plan::Plan& plan, const BucketSize& b, StepWork work) {
    if (b.frozen) return false;
    switch (work) {
    case StepWork::round:
        return b.group_size > 1 && b.matrices > 0 && !b.resharded;
    case StepWork::gather:
    case StepWork::reduce:
        return b.group_size > 1 && !b.resharded;
    case StepWork::quantize:
        return program::is_quantized(b.weight_dtype) && !b.resharded;
    case StepWork::square:
        return !b.copy;
    case StepWork::fetch:
    case StepWork::store:
        return (plan.offload & plan::offload::states) != 0;
    case StepWork::spread:
        return b.is_muon() && b.group_size > 1;
    case StepWork::collect:
    case StepWork::join:
        return b.is_muon() && b.parts > 1;
    case StepWork::orthogonalize:
        return b.is_muon();
    case StepWork::zero:
    case StepWork::update:
        return true;
    }
    return false;
}

StepOp step_op(const plan::Plan& plan, const BucketSize& b, StepWork work) {
    const auto n = static_cast<double>(b.elements);
    const program::Dtype sums = emit::gradient_dtype(plan);
    switch (work) {
    case StepWork::round:
        return {.kind = program::OpKind::cast,
                .stream = program::Stream::data,
                .dtype = program::Dtype::f32,
                .bytes = 6.0 * n / b.group_size};
    case StepWork::gather:
        return {.kind = program::OpKind::all_gather,
                .stream = program::Stream::data,
                .dtype = program::Dtype::bf16,
                .group = b.group,
                .bytes = gathered_bytes(b)};
    case StepWork::quantize:
        if (b.matrices > 0)
            return quantize_matrices(plan, b, n, 0.0, b.matrices); // Scales are nothing beside the rest.
        return {.kind = program::OpKind::quantize,
                .stream = program::Stream::data,
                .dtype = program::Dtype::bf16,
                .bytes = gathered_bytes(b) + weight_bytes(b)};
    case StepWork::zero:
        return zero_op(plan, b, n);
    case StepWork::reduce:
        return {.kind = program::OpKind::reduce_scatter,
                .stream = program::Stream::data,
                .dtype = emit::reduces_copy(plan) ? program::Dtype::bf16 : sums,
                .group = b.group,
                .bytes = (emit::reduces_copy(plan) ? 2.0 : gradient_bytes(plan)) * n};
    case StepWork::square:
        return {.kind = program::OpKind::sum_squares,
                .module = program::Module::optimizer,
                .dtype = sums,
                .bytes = gradient_bytes(plan) * n / b.group_size,
                .flops = 2.0 * n / b.group_size};
    case StepWork::fetch:
    case StepWork::store:
        if (plan.steps_on_host()) return host_copy(plan, b, work);
        return {.kind = work == StepWork::fetch ? program::OpKind::copy_from_host : program::OpKind::copy_to_host,
                .stream = program::Stream::host,
                .module = program::Module::optimizer,
                .bytes = optimizer_bytes(plan, b)};
    case StepWork::update:
        return {.kind = b.is_muon()            ? program::OpKind::momentum
                        : plan.steps_on_host() ? program::OpKind::adamw_on_host
                                               : program::OpKind::adamw,
                .module = program::Module::optimizer,
                .bytes = update_bytes(plan, b)};
    case StepWork::spread:
        return {.kind = program::OpKind::all_gather,
                .stream = program::Stream::data,
                .module = program::Module::optimizer,
                .dtype = sums,
                .group = b.group,
                .bytes = gradient_bytes(plan) * n};
    case StepWork::collect:
        return {.kind = program::OpKind::collect,
                .module = program::Module::optimizer,
                .bytes = gradient_bytes(plan) * static_cast<double>(b.window) + updates_bytes(plan, b)};
    case StepWork::join:
        return {.kind = program::OpKind::all_gather,
                .stream = b.domain == plan::Domain::dense ? program::Stream::tensor : program::Stream::expert,
                .module = program::Module::optimizer,
                .dtype = emit::activation_dtype(plan.precision),
                .group = {b.domain, b.cut},
                .bytes = b.parts * updates_bytes(plan, b)};
    case StepWork::orthogonalize: {
        const double s = b.muon.short_side, l = b.muon.long_side;
        return {.kind = program::OpKind::newton_schulz,
                .module = program::Module::optimizer,
                .dtype = emit::activation_dtype(plan.precision),
                .bytes = orthogonalize_bytes(plan, b),
                .flops = 5.0 * b.muon.matrices * (4.0 * s * s * l + 2.0 * s * s * s),
                .muon = b.muon};
    }
    }
    return {};
}

StepOp zero_op(const plan::Plan& plan, const BucketSize& b, double elements) {
    const bool behind_gathers = b.staged() && !b.resharded;
    return {.kind = program::OpKind::zero,
            .stream = behind_gathers ? program::Stream::data : program::Stream::compute,
            .dtype = emit::gradient_dtype(plan),
            .bytes = gradient_bytes(plan) * elements};
}

StepOp quantize_op(const plan::Plan& plan, const BucketSize& b, double elements, double scales) {
    return quantize_matrices(plan, b, elements, scales, 1);
}

StepOp narrow_op(double elements) {
    return {.kind = program::OpKind::cast,
            .stream = program::Stream::data,
            .dtype = program::Dtype::f32,
            .bytes = 6.0 * elements};
}

StepOp norm_op(int scalars) {
    return {.kind = program::OpKind::all_reduce,
            .stream = program::Stream::data,
            .module = program::Module::optimizer,
            .group = emit::groups::world,
            .bytes = 4.0 * scalars};
}

StepOp scales_op(int operands) {
    return {.kind = program::OpKind::all_reduce,
            .stream = program::Stream::data,
            .module = program::Module::optimizer,
            .group = emit::groups::stage,
            .bytes = 4.0 * operands};
}

} // namespace moe::passes
