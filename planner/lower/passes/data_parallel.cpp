// Gradient reduction inside the last backward, weight gathers at the start of the step, and the optimizer at its end.
#include "planner/lower/passes/data_parallel.hpp"

#include "planner/base/error.hpp"
#include "planner/lower/emit/builder.hpp"
#include "planner/lower/passes/step_ops.hpp"
#include "planner/lower/passes/tensor.hpp"
#include "planner/plan/mesh.hpp"

#include <algorithm>
#include <map>

namespace moe::passes {

namespace {

program::Op make(program::OpKind kind, program::Stream stream, program::Module module, program::Operands in,
                 program::Operands out, program::Attr attr = {}) {
    program::Op op;
    op.kind = kind;
    op.stream = stream;
    op.module = module;
    op.phase = program::Phase::step;
    op.in = std::move(in);
    op.out = std::move(out);
    op.attr = attr;
    return op;
}

double bytes(const program::Program& program, program::TensorId id) {
    return id == program::no_tensor ? 0.0 : tensor(program, id).expected_bytes();
}

// An op as step_ops.hpp sizes it, over these tensors.
program::Op make(const StepOp& sized, program::Operands in, program::Operands out, program::Attr attr = {}) {
    program::Op op = make(sized.kind, sized.stream, sized.module, std::move(in), std::move(out), attr);
    op.group = sized.group;
    op.bytes = sized.bytes;
    op.flops = sized.flops;
    return op;
}

// A matrix in blocks, or with one scale: of its largest magnitude, or of the steps before, to which those that count
// (`reports`) add.
program::Op quantize_matrix(const program::Program& program, const plan::Plan& plan, const program::Bucket& b,
                            const program::Bucket::Matrix& m, bool reports) {
    const program::QuantizeAttr attr{m.copies, m.n, m.k, b.one_scale, m.slot};
    const double elements = static_cast<double>(m.copies * m.n * m.k);
    program::Operands in{m.source}, out{m.value};
    if (b.one_scale && plan.keeps_scales()) {
        if (m.slot < 0) fail("matrices of {} x {} have no place in the histories of delayed scaling", m.n, m.k);
        in.push_back(program.io.scale_windows);
        if (reports) out.push_back(program.io.scale_largest);
    } else if (b.one_scale) {
        out.push_back(m.largest);
    }
    const StepOp sized = quantize_op(plan, size_of(program, b), elements, static_cast<double>(attr.scales()));
    return make(sized, std::move(in), std::move(out), attr);
}

// The ops of the begin slot with a bucket, but for zeroing; `reports`: a backward follows.
void add_gathers(const program::Program& program, const plan::Plan& plan, const program::Bucket& b, StepWork work,
                 bool reports, std::vector<program::Op>& ops) {
    const BucketSize size = size_of(program, b);
    if (!has_work(plan, size, work)) return;
    if (work == StepWork::quantize && !b.matrices.empty()) {
        for (const program::Bucket::Matrix& m : b.matrices)
            ops.push_back(quantize_matrix(program, plan, b, m, reports));
        return;
    }
    const StepOp sized = step_op(plan, size, work);
    if (work == StepWork::round) ops.push_back(make(sized, {b.master}, {b.weight_shard}));
    if (work == StepWork::gather)
        ops.push_back(make(sized, {b.weight_shard}, {b.staging == program::no_tensor ? b.weights : b.staging}));
    if (work == StepWork::quantize) ops.push_back(make(sized, {b.staging}, {b.weights, program::no_tensor}));
}

// Elements [from, to) of a bucket's gradients.
program::TensorId part_of_gradients(program::Program& program, const program::Bucket& b, std::int64_t from,
                                    std::int64_t to) {
    const program::Tensor whole = tensor(program, b.gradients); // This is a copy, as a tensor is added below.
    if (to - from == whole.elements()) return b.gradients;
    const program::TensorId part =
        emit::add_flat(program, whole.name + ".unset", whole.dtype, whole.storage, to - from, b.chunk);
    program.tensors[static_cast<std::size_t>(part)].base = b.gradients;
    program.tensors[static_cast<std::size_t>(part)].offset = from;
    return part;
}

// A BF16 tensor beside one of gradients.
program::TensorId add_copy(program::Program& program, const program::Bucket& b, program::TensorId of) {
    const program::Tensor whole = tensor(program, of); // This is a copy, as a tensor is added below.
    return emit::add_flat(program, whole.name + ".bf16", program::Dtype::bf16, program::Storage::activation,
                          whole.elements(), b.chunk);
}

// The reduction of a bucket's gradients over its group, through a BF16 copy where the plan says so.
void add_reduction(program::Program& program, const plan::Plan& plan, const program::Bucket& b,
                   std::vector<program::Op>& ops) {
    const StepOp sized = step_op(plan, size_of(program, b), StepWork::reduce);
    if (!emit::reduces_copy(plan)) {
        ops.push_back(make(sized, {b.gradients}, {b.gradient_shard}));
        return;
    }
    const program::TensorId whole = add_copy(program, b, b.gradients), own = add_copy(program, b, b.gradient_shard);
    program::Tensor& part = program.tensors[static_cast<std::size_t>(own)];
    part.base = whole;
    part.shard_group = b.group;
    const auto elements = static_cast<double>(b.elements);
    ops.push_back(make(narrow_op(elements), {b.gradients}, {whole}));
    ops.push_back(make(sized, {whole}, {own}));
    ops.push_back(make(narrow_op(elements / b.group_size), {own}, {b.gradient_shard}));
}

// HSDP: a step's gradients of a shard, summed over the ranks that hold it, through a BF16 copy likewise.
void add_replica_sum(program::Program& program, const plan::Plan& plan, const program::Bucket& b,
                     std::vector<program::Op>& ops) {
    const auto elements = static_cast<double>(tensor(program, b.gradient_shard).elements());
    const bool narrow = emit::reduces_copy(plan);
    const program::TensorId summed = narrow ? add_copy(program, b, b.gradient_shard) : b.gradient_shard;
    if (narrow) ops.push_back(make(narrow_op(elements), {b.gradient_shard}, {summed}));
    program::Op op = make(program::OpKind::all_reduce, program::Stream::data, program::Module::data_parallel, {summed},
                          {summed}, program::ReduceAttr{false});
    op.group = b.replicas;
    op.bytes = bytes(program, summed);
    ops.push_back(std::move(op));
    if (narrow) ops.push_back(make(narrow_op(elements), {summed}, {b.gradient_shard}));
}

} // namespace

program::Template with_gradient_reduction(program::Program& program, const plan::Plan& plan,
                                          const program::Template& backward) {
    std::map<program::TensorId, std::size_t> last_writer; // last op that writes each root gradient tensor
    for (std::size_t i = 0; i < backward.ops.size(); ++i)
        for (program::TensorId id : backward.ops[i].out) {
            if (id == program::no_tensor || tensor(program, id).storage != program::Storage::gradient) continue;
            const program::TensorId base = tensor(program, id).base;
            last_writer[base == program::no_tensor ? id : base] = i;
        }
    struct Reduction {
        const program::Bucket* bucket;
        bool reduced;
    };
    constexpr std::size_t unwritten = static_cast<std::size_t>(-1);
    std::multimap<std::size_t, Reduction> complete; // reductions by the op behind which their gradients are whole
    for (const program::Bucket& bucket : program.buckets) {
        if (bucket.chunk != backward.chunk) continue;
        const bool reduced = has_work(plan, size_of(program, bucket), StepWork::reduce);
        if (!reduced && !bucket.sums_copies()) continue;
        const auto writer = last_writer.find(bucket.gradients);
        complete.emplace(writer == last_writer.end() ? unwritten : writer->second, Reduction{&bucket, reduced});
    }
    program::Template result{backward.kind, backward.chunk, {}};
    result.ops.reserve(backward.ops.size() + program.buckets.size());
    const auto reduce_behind = [&](std::size_t op) {
        const auto [first, last] = complete.equal_range(op);
        for (auto at = first; at != last; ++at) {
            const auto& [bucket, reduced] = at->second;
            if (reduced) add_reduction(program, plan, *bucket, result.ops);
            if (bucket->sums_copies()) add_replica_sum(program, plan, *bucket, result.ops);
        }
    };
    if (backward.kind == plan::SlotKind::wgrad) reduce_behind(unwritten);
    for (std::size_t i = 0; i < backward.ops.size(); ++i) {
        result.ops.push_back(backward.ops[i]);
        reduce_behind(i);
    }
    return result;
}

program::Template begin_template(program::Program& program, const plan::Plan& plan, const FirstGradients& first) {
    program::Template begin{plan::SlotKind::begin, -1, {}};
    const auto early_zero = [&](std::size_t i) {
        const program::Bucket& b = program.buckets[i];
        return b.staging != program::no_tensor && !b.resharded() && first.sets(b);
    };
    each_begin_op(program.buckets.size(), early_zero, [&](std::size_t i, StepWork work) {
        const program::Bucket& b = program.buckets[i];
        if (work != StepWork::zero) return add_gathers(program, plan, b, work, true, begin.ops);
        if (b.frozen) return;
        for (const auto& [from, to] : first.unset(b)) {
            const StepOp sized = zero_op(plan, size_of(program, b), static_cast<double>(to - from));
            begin.ops.push_back(make(sized, {}, {part_of_gradients(program, b, from, to)}));
        }
    });
    return begin;
}

program::Template gather_template(const program::Program& program, const plan::Plan& plan) {
    program::Template begin{plan::SlotKind::begin, -1, {}};
    each_begin_op(
        program.buckets.size(), [](std::size_t) { return false; },
        [&](std::size_t i, StepWork work) {
            if (work != StepWork::zero) add_gathers(program, plan, program.buckets[i], work, false, begin.ops);
        });
    return begin;
}

namespace {

// Moves the selection bias on the rank that holds its part of the optimizer's shard; the others gather it with the
// weights of the next step.
program::Op bias_step(const program::Program& program, const plan::Plan& plan, const program::RouterIo& router) {
    const program::Tensor& bias = tensor(program, router.bias);
    for (const program::Bucket& b : program.buckets) {
        // Layers take turns with the buffers of whole weights.
        if (b.resharded() ? b.gathered != bias.base || b.layer != router.layer : b.weights != bias.base) continue;
        program::Op op = make(program::OpKind::expert_bias, program::Stream::compute, program::Module::optimizer,
                              {router.load, program.io.overflow, program.io.gradient_norm, program.io.hyper},
                              {b.master, b.weight_shard},
                              program::ExpertBiasAttr{router.experts, bias.offset, plan.router.bias_update});
        op.layer = static_cast<std::int16_t>(router.layer);
        op.bytes = 20.0 * router.experts; // bytes of load, master and weight
        return op;
    }
    fail("the selection bias of layer {} lies in no bucket", router.layer);
}

// What Muon does with a bucket. Between `collect` and `newton_schulz` its updates lie in the gradients, which are whole
// where they have been spread.
program::Op muon_op(const program::Program& program, std::size_t bucket, StepWork work, const StepOp& sized) {
    const program::ProgramIo& io = program.io;
    const program::Bucket& b = program.buckets[bucket];
    program::MuonAttr attr = b.muon.attr;
    attr.bucket = static_cast<int>(bucket);
    switch (work) {
    case StepWork::update:
        return make(sized, {b.gradient_shard, io.gradient_norm, io.hyper, b.exp_avg, io.overflow, b.copies},
                    {b.exp_avg, b.gradient_shard}, program::AdamAttr{b.elements / b.group_size, b.decayed});
    case StepWork::spread:
        return make(sized, {b.gradient_shard}, {b.gradients});
    case StepWork::collect:
        return make(sized, {b.gradients}, {b.muon.collected}, attr);
    case StepWork::join:
        return make(sized, {b.muon.collected}, {b.muon.updates});
    default:
        break;
    }
    const bool rounded_later = !b.matrices.empty(); // as the next step begins
    return make(sized,
                {b.muon.parts > 1 ? b.muon.updates : b.gradients, io.gradient_norm, io.hyper, b.master, io.overflow},
                {b.master, rounded_later ? program::no_tensor : b.weight_shard, b.muon.work, b.muon.norm}, attr);
}

// The step of one rank's shard by the host: gradients go there, with the scalars of the step before the first of them,
// and new weights come back.
program::Op host_step_op(const program::Program& program, std::size_t bucket, StepWork work, const StepOp& sized) {
    const program::ProgramIo& io = program.io;
    const program::Bucket& b = program.buckets[bucket];
    if (work == StepWork::store) return make(sized, {b.host_weights}, {b.weight_shard});
    if (work == StepWork::update)
        return make(sized,
                    {b.host_gradients, io.host_norm, io.host_hyper, b.host_master, b.host_exp_avg, b.host_exp_avg_sq,
                     io.overflow == program::no_tensor ? program::no_tensor : io.host_overflow},
                    {b.host_master, b.host_exp_avg, b.host_exp_avg_sq, b.host_weights},
                    program::AdamAttr{b.elements / b.group_size, b.decayed});
    const auto first = std::find_if(program.buckets.begin(), program.buckets.end(),
                                    [](const program::Bucket& other) { return other.steps_on_host(); });
    program::Op op = make(sized, {b.gradient_shard}, {b.host_gradients});
    if (&*first != &b) return op;
    const auto add = [&](program::TensorId from, program::TensorId to) {
        if (from == program::no_tensor) return;
        op.in.push_back(from);
        op.out.push_back(to);
        op.bytes += bytes(program, from);
    };
    add(io.gradient_norm, io.host_norm);
    add(io.hyper, io.host_hyper);
    add(io.overflow, io.host_overflow);
    return op;
}

// One rank's states of a bucket: from the host, through AdamW, or back.
program::Op optimizer_op(const program::Program& program, std::size_t bucket, StepWork work, const StepOp& sized) {
    const program::ProgramIo& io = program.io;
    const program::Bucket& b = program.buckets[bucket];
    if (b.steps_on_host()) return host_step_op(program, bucket, work, sized);
    std::vector<program::TensorId> states{b.master, b.exp_avg}, homes{b.host_master, b.host_exp_avg};
    if (b.exp_avg_sq != program::no_tensor) states.push_back(b.exp_avg_sq), homes.push_back(b.host_exp_avg_sq);
    if (work == StepWork::store) return make(sized, states, homes);
    if (work == StepWork::fetch) { // Activations are gone before the norm of the gradients, for which the fetch waits.
        homes.insert(homes.begin(), io.gradient_norm);
        return make(sized, homes, states);
    }
    if (b.is_muon()) return muon_op(program, bucket, work, sized);
    const program::TensorId weights =
        b.matrices.empty() ? b.weight_shard : program::no_tensor; // Else they are rounded as the next step begins.
    return make(
        sized, {b.gradient_shard, io.gradient_norm, io.hyper, b.master, b.exp_avg, b.exp_avg_sq, io.overflow, b.copies},
        {b.master, b.exp_avg, b.exp_avg_sq, weights}, program::AdamAttr{b.elements / b.group_size, b.decayed});
}

} // namespace

program::Template sum_template(const program::Program& program, const plan::Plan& plan) {
    program::Template finish{plan::SlotKind::finish, -1, {}};
    const program::ProgramIo& io = program.io;
    const auto all_reduce = [&](plan::Group group, program::TensorId id) {
        if (plan::group_size(plan, group) == 1) return;
        program::Op op = make(program::OpKind::all_reduce, program::Stream::data, program::Module::optimizer, {id},
                              {id}, program::ReduceAttr{false});
        op.group = group;
        op.bytes = bytes(program, id);
        finish.ops.push_back(std::move(op));
    };
    const bool has_loss =
        std::any_of(program.chunks.begin(), program.chunks.end(), [](const plan::Stage& s) { return s.loss; });
    if (has_loss) all_reduce(emit::groups::samples, io.loss);
    if (has_loss && io.mtp_loss != program::no_tensor) all_reduce(emit::groups::samples, io.mtp_loss);
    if (io.layer_sums != program::no_tensor) all_reduce(emit::groups::stage, io.layer_sums);
    return finish;
}

program::Template finish_template(const program::Program& program, const plan::Plan& plan) {
    program::Template finish = sum_template(program, plan);
    const program::ProgramIo& io = program.io;
    const std::vector<program::Bucket>& buckets = program.buckets;
    if (!io.scaled.empty() && plan::group_size(plan, emit::groups::stage) > 1) {
        const auto operands = static_cast<int>(tensor(program, io.scale_largest).elements());
        finish.ops.push_back(
            make(scales_op(operands), {io.scale_largest}, {io.scale_largest}, program::ReduceAttr{true}));
    }
    const auto square = [&](bool copied) {
        each_op_before_norm(buckets.size(), [&](std::size_t i, StepWork work) {
            const program::Bucket& b = buckets[i];
            const BucketSize size = size_of(program, b);
            if (!has_work(plan, size, work) || b.sums_copies() != copied) return;
            // The copies of all buckets are there before the first one steps.
            finish.ops.push_back(make(step_op(plan, size, work), {b.gradient_shard}, {io.gradient_norm, b.copies}));
        });
    };
    // HSDP: the sum over all ranks has the squares of shards that several ranks hold as often.
    square(true);
    if (plan.fsdp_replicas > 1) {
        program::Op share = make(program::OpKind::scale, program::Stream::compute, program::Module::optimizer,
                                 {io.gradient_norm}, {io.gradient_norm}, program::ScaleAttr{1.0 / plan.fsdp_replicas});
        share.bytes = 2.0 * bytes(program, io.gradient_norm);
        finish.ops.push_back(std::move(share));
    }
    square(false);
    if (plan.gpus > 1) {
        const auto scalars = static_cast<int>(tensor(program, io.step_sums).elements());
        finish.ops.push_back(make(norm_op(scalars), {io.step_sums}, {io.step_sums}, program::ReduceAttr{false}));
    }
    const auto is_muon = [&](std::size_t i) { return buckets[i].is_muon(); };
    each_op_behind_norm(buckets.size(), is_muon, [&](std::size_t i, StepWork work) {
        const BucketSize size = size_of(program, buckets[i]);
        if (!has_work(plan, size, work)) return;
        finish.ops.push_back(optimizer_op(program, i, work, step_op(plan, size, work)));
    });
    for (const program::RouterIo& router : io.routers)
        if (router.bias != program::no_tensor) finish.ops.push_back(bias_step(program, plan, router));
    return finish;
}

} // namespace moe::passes
