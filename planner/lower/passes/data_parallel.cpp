// Gradient reduction inside the last backward, weight gathers at the start of the step, and the optimizer at its end.
#include "planner/lower/passes/data_parallel.hpp"

#include "planner/base/error.hpp"
#include "planner/lower/emit/builder.hpp"
#include "planner/plan/mesh.hpp"

#include <algorithm>
#include <map>

namespace moe {

namespace {

const Tensor& tensor(const Program& program, TensorId id) { return program.tensors[static_cast<std::size_t>(id)]; }

Op make(OpKind kind, Stream stream, Module module, std::vector<TensorId> in, std::vector<TensorId> out,
        Attr attr = {}) {
    Op op;
    op.kind = kind;
    op.stream = stream;
    op.module = module;
    op.phase = Phase::step;
    op.in = std::move(in);
    op.out = std::move(out);
    op.attr = std::move(attr);
    return op;
}

double bytes(const Program& program, TensorId id) {
    return id == no_tensor ? 0.0 : tensor(program, id).expected_bytes();
}

// This rank's part of new weights, in BF16 and in place to be gathered.
Op round_master(const Program& program, const Bucket& b) {
    Op op = make(OpKind::cast, Stream::data, Module::data_parallel, {b.master}, {b.weight_shard});
    op.bytes = bytes(program, b.master) + bytes(program, b.weight_shard);
    return op;
}

// Beside the first products where its input is gathered beside them. Elsewhere it would only disturb them: memory that
// both ask for is shared, and 4 layers of Qwen3-30B-A3B on an H200 take 83.1 ms so and 82.1 ms with one after the
// other.
Op quantize(const Program& program, const Bucket& b, const Bucket::Matrix& m) {
    const QuantizeAttr attr{m.copies, m.n, m.k};
    Op op = make(OpKind::quantize, b.group_size > 1 ? Stream::data : Stream::compute, Module::data_parallel, {m.source},
                 {m.value}, attr);
    op.bytes = bytes(program, m.source) + static_cast<double>(2 * m.copies * m.n * m.k + 8 * attr.scales());
    return op;
}

// Elements [from, to) of a bucket's gradients.
TensorId part_of_gradients(Program& program, const Bucket& b, std::int64_t from, std::int64_t to) {
    const Tensor whole = tensor(program, b.gradients); // a copy: a tensor is added below
    if (to - from == whole.elements()) return b.gradients;
    const TensorId part = add_flat(program, whole.name + ".unset", whole.dtype, whole.storage, to - from, b.chunk);
    program.tensors[static_cast<std::size_t>(part)].base = b.gradients;
    program.tensors[static_cast<std::size_t>(part)].offset = from;
    return part;
}

} // namespace

Template with_gradient_reduction(const Program& program, const Template& backward) {
    std::map<TensorId, std::size_t> last_writer; // root gradient tensor -> op
    for (std::size_t i = 0; i < backward.ops.size(); ++i)
        for (TensorId id : backward.ops[i].out) {
            if (id == no_tensor || tensor(program, id).storage != Storage::gradient) continue;
            const TensorId base = tensor(program, id).base;
            last_writer[base == no_tensor ? id : base] = i;
        }
    Template result{backward.kind, backward.chunk, {}};
    result.ops.reserve(backward.ops.size() + program.buckets.size());
    const auto reduce = [&](auto&& complete) {
        for (const Bucket& bucket : program.buckets) {
            if (bucket.group_size == 1 || bucket.resharded() || bucket.chunk != backward.chunk) continue;
            if (!complete(last_writer.find(bucket.gradients))) continue;
            Op op = make(OpKind::reduce_scatter, Stream::data, Module::data_parallel, {bucket.gradients},
                         {bucket.gradient_shard});
            op.group = bucket.group;
            op.bytes = bytes(program, bucket.gradients);
            result.ops.push_back(std::move(op));
        }
    };
    if (backward.kind == SlotKind::wgrad) reduce([&](auto writer) { return writer == last_writer.end(); });
    for (std::size_t i = 0; i < backward.ops.size(); ++i) {
        result.ops.push_back(backward.ops[i]);
        reduce([&](auto writer) { return writer != last_writer.end() && writer->second == i; });
    }
    return result;
}

Template begin_template(Program& program, const FirstGradients& first) {
    Template begin{SlotKind::begin, -1, {}};
    const auto passed_through = [](const Bucket& b) { return b.staging != no_tensor && !b.resharded(); };
    const auto zero = [&](const Bucket& b) {
        for (const auto& [from, to] : first.unset(b)) {
            const TensorId part = part_of_gradients(program, b, from, to);
            Op op = make(OpKind::zero, passed_through(b) ? Stream::data : Stream::compute, Module::data_parallel, {},
                         {part});
            op.bytes = bytes(program, part);
            begin.ops.push_back(std::move(op));
        }
    };
    for (const Bucket& b : program.buckets) {
        if (b.resharded()) continue; // gathered layer by layer
        const TensorId gathered = b.staging == no_tensor ? b.weights : b.staging;
        if (b.group_size > 1) {
            if (!b.matrices.empty()) begin.ops.push_back(round_master(program, b));
            Op op = make(OpKind::all_gather, Stream::data, Module::data_parallel, {b.weight_shard}, {gathered});
            op.group = b.group;
            op.bytes = bytes(program, gathered);
            begin.ops.push_back(std::move(op));
        }
        for (const Bucket::Matrix& m : b.matrices) begin.ops.push_back(quantize(program, b, m));
        if (b.staging != no_tensor && b.matrices.empty()) {
            Op op = make(OpKind::quantize, Stream::data, Module::data_parallel, {b.staging}, {b.weights, no_tensor});
            op.bytes = bytes(program, b.staging) + bytes(program, b.weights);
            begin.ops.push_back(std::move(op));
        }
        if (passed_through(b) && first.sets(b)) zero(b); // what is left is little
    }
    // Whole buckets behind all gathers when they pass through the gradient buffer, so that the first forward need not
    // wait for them.
    for (const Bucket& b : program.buckets)
        if (!passed_through(b) || !first.sets(b)) zero(b);
    return begin;
}

namespace {

// Moves the selection bias on the rank that holds its part of the optimizer's shard; the others gather it with the
// weights of the next step.
Op bias_step(const Program& program, const Plan& plan, const RouterIo& router) {
    const Tensor& bias = tensor(program, router.bias);
    for (const Bucket& b : program.buckets) {
        if (b.weights != bias.base && b.gathered != bias.base) continue;
        Op op = make(OpKind::expert_bias, Stream::compute, Module::optimizer, {router.load, program.io.overflow},
                     {b.master, b.weight_shard}, ExpertBiasAttr{router.experts, bias.offset, plan.router.bias_update});
        op.layer = static_cast<std::int16_t>(router.layer);
        op.bytes = 20.0 * router.experts; // load, master and weight
        return op;
    }
    fail("the selection bias of layer {} lies in no bucket", router.layer);
}

} // namespace

Template finish_template(const Program& program, const Plan& plan) {
    Template finish{SlotKind::finish, -1, {}};
    const ProgramIo& io = program.io;
    const auto all_reduce = [&](Group group, TensorId id) {
        if (group_size(plan, group) == 1) return;
        Op op = make(OpKind::all_reduce, Stream::data, Module::optimizer, {id}, {id}, ReduceAttr{false});
        op.group = group;
        op.bytes = bytes(program, id);
        finish.ops.push_back(std::move(op));
    };
    const bool has_loss =
        std::any_of(program.chunks.begin(), program.chunks.end(), [](const Stage& s) { return s.loss; });
    if (has_loss) all_reduce(groups::samples, io.loss);
    if (has_loss && io.mtp_loss != no_tensor) all_reduce(groups::samples, io.mtp_loss);
    if (io.router_sums != no_tensor)
        all_reduce({Domain::dense, axis::tensor | axis::context | axis::data}, io.router_sums);
    for (const Bucket& b : program.buckets) {
        if (b.copy) continue;
        Op op = make(OpKind::sum_squares, Stream::compute, Module::optimizer, {b.gradient_shard},
                     {io.gradient_norm, b.copies}); // the copies of all buckets are there before the first one steps
        op.bytes = bytes(program, b.gradient_shard);
        op.flops = 2.0 * static_cast<double>(b.elements / b.group_size);
        finish.ops.push_back(std::move(op));
    }
    all_reduce(groups::world, io.step_sums);
    const bool offloaded = (plan.offload & offload::optimizer) != 0;
    const auto states = [](const Bucket& b) { return std::vector<TensorId>{b.master, b.exp_avg, b.exp_avg_sq}; };
    const auto copy = [&](OpKind kind, const Bucket& b) {
        const std::vector<TensorId> homes{b.host_master, b.host_exp_avg, b.host_exp_avg_sq};
        // The states come back when the activations have gone, which the norm of the gradients waits for.
        std::vector<TensorId> back{io.gradient_norm};
        back.insert(back.end(), homes.begin(), homes.end());
        Op op = kind == OpKind::copy_to_host ? make(kind, Stream::host, Module::optimizer, states(b), homes)
                                             : make(kind, Stream::host, Module::optimizer, back, states(b));
        for (const TensorId id : states(b)) op.bytes += bytes(program, id);
        finish.ops.push_back(std::move(op));
    };
    if (offloaded)
        for (const Bucket& b : program.buckets) copy(OpKind::copy_from_host, b);
    for (const Bucket& b : program.buckets) {
        const TensorId weights = b.matrices.empty() ? b.weight_shard : no_tensor; // or rounded as the next step begins
        Op op = make(
            OpKind::adamw, Stream::compute, Module::optimizer,
            {b.gradient_shard, io.gradient_norm, io.hyper, b.master, b.exp_avg, b.exp_avg_sq, io.overflow, b.copies},
            {b.master, b.exp_avg, b.exp_avg_sq, weights}, AdamAttr{b.elements / b.group_size, b.decayed});
        op.bytes = bytes(program, b.gradient_shard) + bytes(program, weights) +
                   2.0 * (bytes(program, b.master) + bytes(program, b.exp_avg) + bytes(program, b.exp_avg_sq));
        finish.ops.push_back(std::move(op));
        if (offloaded) copy(OpKind::copy_to_host, b);
    }
    for (const RouterIo& router : io.routers)
        if (router.bias != no_tensor) finish.ops.push_back(bias_step(program, plan, router));
    return finish;
}

} // namespace moe
