// Emission of ops with their bytes and FLOPs.
#include "planner/lower/emit/builder.hpp"

#include "planner/base/error.hpp"
#include "planner/model/model.hpp"

#include <algorithm>

namespace moe::emit {

program::Dtype activation_dtype(machine::Precision precision) {
    return precision == machine::Precision::fp32 ? program::Dtype::f32 : program::Dtype::bf16;
}

program::Dtype quantized_dtype(const plan::Plan& plan, machine::Precision wanted) {
    switch (plan.computed_in(wanted)) {
    case machine::Precision::fp32:
    case machine::Precision::bf16:
        return program::Dtype::bf16;
    case machine::Precision::fp8_tensor:
        return program::Dtype::fp8_tensor;
    case machine::Precision::fp8_blockwise:
        return program::Dtype::fp8_block;
    case machine::Precision::mxfp8:
        return program::Dtype::mxfp8;
    case machine::Precision::nvfp4:
        return program::Dtype::nvfp4;
    }
    return program::Dtype::bf16;
}

Builder::Builder(const plan::Plan& plan, program::Program& program, ParameterSet& parameters)
    : plan_(plan),
      program_(program),
      parameters_(parameters),
      activations_(moe::emit::activation_dtype(plan.precision)),
      local_(plan.tokens_local()),
      gathered_(plan.tokens_gathered()) {}

machine::Precision Builder::precision() const {
    if (bf16) return plan_.activations();
    switch (module) {
    case program::Module::core_attn:
        return plan_.core_attention();
    case program::Module::experts:
    case program::Module::moe_act:
        return plan_.experts();
    case program::Module::head:
        return plan_.head();
    default:
        return plan_.precision;
    }
}

program::Dtype Builder::quantized_dtype() const { return moe::emit::quantized_dtype(plan_, precision()); }

int Builder::open(plan::SlotKind kind, int chunk) {
    program_.templates.push_back({kind, chunk, {}});
    program_.templates.back().ops.reserve(64); // Growing moves every op; one layer has about as many.
    open_ = static_cast<int>(program_.templates.size()) - 1;
    chunk_ = chunk;
    return open_;
}

program::TensorId Builder::tensor(std::string name, program::Dtype dtype, std::int64_t rows, std::int64_t cols,
                                  double expected_rows) {
    program::Tensor& t = program_.tensors.emplace_back();
    if (named && layer >= 0) {
        const std::string number = std::to_string(layer); // Searches name millions of tensors.
        t.name.reserve(number.size() + name.size() + 6);
        t.name.append("layer").append(number).append(".").append(name);
    } else if (named) {
        t.name = std::move(name);
    }
    t.dtype = dtype;
    t.rows = rows;
    t.cols = cols;
    t.expected_rows = expected_rows < 0 ? static_cast<double>(rows) : expected_rows;
    t.chunk = chunk_;
    return static_cast<program::TensorId>(program_.tensors.size()) - 1;
}

double Builder::operand_bytes(const program::Op& op) const {
    double bytes = 0.0;
    // A packed operand (query|key|value) is named several times but moved once.
    const auto add = [&](const program::Operands& ids, double gradient_factor) {
        for (std::size_t i = 0; i < ids.size(); ++i) {
            const bool repeated = std::find(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(i), ids[i]) !=
                                  ids.begin() + static_cast<std::ptrdiff_t>(i);
            if (ids[i] == program::no_tensor || repeated) continue;
            bytes += at(ids[i]).expected_bytes() *
                     (at(ids[i]).storage == program::Storage::gradient ? gradient_factor : 1.0);
        }
    };
    add(op.in, 1.0);
    add(op.out, 2.0);
    return bytes;
}

program::Op& Builder::emit(program::OpKind kind, program::Operands in, program::Operands out, program::Attr attr) {
    program::Op& op = current().ops.emplace_back();
    op.kind = kind;
    op.module = module;
    op.phase = phase;
    op.layer = static_cast<std::int16_t>(layer);
    op.in = std::move(in);
    op.out = std::move(out);
    op.attr = std::move(attr);
    op.bytes = operand_bytes(op);
    return op;
}

program::Op& Builder::communicate(program::OpKind kind, plan::Group group, program::Stream stream, program::Operands in,
                                  program::Operands out, program::Attr attr) {
    program::Op& op = emit(kind, std::move(in), std::move(out), std::move(attr));
    op.group = group;
    op.stream = stream;
    const bool larger_side_is_output = kind == program::OpKind::all_gather ||
                                       kind == program::OpKind::all_gather_rows || kind == program::OpKind::recv;
    const program::TensorId side = larger_side_is_output ? op.out.front() : op.in.front();
    op.bytes = at(side).expected_bytes();
    return op;
}

program::Op& Builder::gemm(program::TensorId a, program::TensorId b, program::TensorId c, program::GemmAttr attr) {
    program::Op& op = emit(program::OpKind::gemm, {a, b}, {c}, attr);
    op.flops =
        2.0 * attr.batch * static_cast<double>(attr.m) * static_cast<double>(attr.n) * static_cast<double>(attr.k);
    return op;
}

Weight Builder::weight(const std::string& key, std::int64_t n, std::int64_t k) {
    Weight weight = parameters_.weight(program_, key, n, k);
    if (weight.gradient == program::no_tensor && !parameters_.decays(key))
        weight.gradient = tensor(key + ".unused_gradient", gradient_dtype(plan_), n, k);
    return weight;
}

bool Builder::trains(const Weight& weight) const {
    return weight.gradient != program::no_tensor &&
           !(plan_.lora.on() && at(weight.gradient).base == program::no_tensor);
}

program::TensorId Builder::add(program::TensorId a, program::TensorId b, const std::string& name) {
    const program::Tensor& shape = at(a);
    const program::TensorId out = tensor(name, shape.dtype, shape.rows, shape.cols, shape.expected_rows);
    emit(program::OpKind::add, {a, b}, {out});
    return out;
}

// Dense layers only: Megatron leaves shared experts and the LM head out of it.
bool Builder::pipelined() const {
    return plan_.tp_overlap && plan_.tp > 1 && module != program::Module::shared_experts &&
           module != program::Module::head;
}

program::TensorId Builder::ring_step(program::TensorId x, const std::string& name) {
    const program::TensorId next = tensor(name, at(x).dtype, at(x).rows, at(x).cols);
    communicate(program::OpKind::ring_exchange, groups::tensor, program::Stream::tensor, {x}, {next});
    return next;
}

// n streams are read for the maps and the layer's input, then read and written with its output (arXiv 2409.19606).
program::TensorId Builder::residual(program::TensorId x, program::TensorId y, const std::string& name) {
    module = program::Module::residual;
    if (model().residual_scale != 1.0) y = scale(y, model().residual_scale, name + "_scaled");
    const program::TensorId sum = add(x, y, name);
    if (model().residual_streams > 1)
        current().ops.back().bytes += (3.0 * model().residual_streams - 2.0) * at(x).expected_bytes();
    return sum;
}

program::TensorId Builder::residual_gradient(program::TensorId dy, const std::string& name) {
    if (model().residual_scale == 1.0) return dy;
    module = program::Module::residual;
    return scale(dy, model().residual_scale, name);
}

program::TensorId Builder::scale(program::TensorId x, double factor, const std::string& name) {
    const program::Tensor& shape = at(x);
    const program::TensorId out = tensor(name, shape.dtype, shape.rows, shape.cols, shape.expected_rows);
    emit(program::OpKind::scale, {x}, {out}, program::ScaleAttr{factor});
    return out;
}

program::TensorId Builder::sum_over_tp(program::TensorId partial, const std::string& name) {
    if (plan_.tp == 1) return partial;
    const program::TensorId whole = tensor(name, at(partial).dtype, at(partial).rows, at(partial).cols);
    communicate(program::OpKind::all_reduce, groups::tensor, program::Stream::tensor, {partial}, {whole},
                program::ReduceAttr{});
    return whole;
}

program::TensorId Builder::gather_tokens(program::TensorId x, const std::string& name) {
    if (plan_.tp == 1) return x;
    const program::TensorId out = tensor(name, at(x).dtype, at(x).rows * plan_.tp, at(x).cols);
    communicate(program::OpKind::all_gather, groups::tensor, program::Stream::tensor, {x}, {out});
    return out;
}

program::TensorId Builder::scatter_tokens(program::TensorId x, const std::string& name) {
    if (plan_.tp == 1) return x;
    const program::TensorId out = tensor(name, at(x).dtype, at(x).rows / plan_.tp, at(x).cols);
    communicate(program::OpKind::reduce_scatter, groups::tensor, program::Stream::tensor, {x}, {out});
    return out;
}

} // namespace moe::emit
