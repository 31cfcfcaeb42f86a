// Emission of ops with their bytes and FLOPs.
#include "planner/lower/emit/builder.hpp"

#include "planner/base/error.hpp"
#include "planner/model/model.hpp"

#include <algorithm>

namespace moe {

Dtype activation_dtype(Precision precision) { return precision == Precision::fp32 ? Dtype::f32 : Dtype::bf16; }

Dtype quantized_dtype(Precision precision) {
    switch (precision) {
    case Precision::fp32:
    case Precision::bf16:
        return Dtype::bf16;
    case Precision::fp8_tensor:
        return Dtype::fp8_tensor;
    case Precision::fp8_blockwise:
        return Dtype::fp8_block;
    case Precision::mxfp8:
        return Dtype::mxfp8;
    case Precision::nvfp4:
        return Dtype::nvfp4;
    }
    return Dtype::bf16;
}

Builder::Builder(const Plan& plan, Program& program, ParameterSet& parameters)
    : plan_(plan),
      program_(program),
      parameters_(parameters),
      activations_(moe::activation_dtype(plan.precision)),
      local_(plan.tokens_local()),
      gathered_(plan.tokens_gathered()) {}

Dtype Builder::quantized_dtype() const {
    if (bf16) return moe::quantized_dtype(plan_.activations());
    switch (module) {
    case Module::core_attn:
        return moe::quantized_dtype(plan_.core_attention());
    case Module::experts:
    case Module::moe_act:
        return moe::quantized_dtype(plan_.experts());
    case Module::head:
        return moe::quantized_dtype(plan_.head());
    default:
        return moe::quantized_dtype(plan_.precision);
    }
}

int Builder::open(SlotKind kind, int chunk) {
    program_.templates.push_back({kind, chunk, {}});
    program_.templates.back().ops.reserve(64); // growing moves every op; one layer has about as many
    open_ = static_cast<int>(program_.templates.size()) - 1;
    chunk_ = chunk;
    return open_;
}

TensorId Builder::tensor(std::string name, Dtype dtype, std::int64_t rows, std::int64_t cols, double expected_rows) {
    Tensor t;
    if (layer >= 0) {
        const std::string number = std::to_string(layer); // searches name millions of tensors
        t.name.reserve(number.size() + name.size() + 6);
        t.name.append("layer").append(number).append(".").append(name);
    } else {
        t.name = std::move(name);
    }
    t.dtype = dtype;
    t.rows = rows;
    t.cols = cols;
    t.expected_rows = expected_rows < 0 ? static_cast<double>(rows) : expected_rows;
    t.chunk = chunk_;
    program_.tensors.push_back(std::move(t));
    return static_cast<TensorId>(program_.tensors.size()) - 1;
}

double Builder::operand_bytes(const Op& op) const {
    double bytes = 0.0;
    // A packed operand (query|key|value) is named several times but moved once.
    const auto add = [&](const std::vector<TensorId>& ids, double gradient_factor) {
        for (std::size_t i = 0; i < ids.size(); ++i) {
            const bool repeated = std::find(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(i), ids[i]) !=
                                  ids.begin() + static_cast<std::ptrdiff_t>(i);
            if (ids[i] == no_tensor || repeated) continue;
            bytes += at(ids[i]).expected_bytes() * (at(ids[i]).storage == Storage::gradient ? gradient_factor : 1.0);
        }
    };
    add(op.in, 1.0);
    add(op.out, 2.0);
    return bytes;
}

Op& Builder::emit(OpKind kind, std::vector<TensorId> in, std::vector<TensorId> out, Attr attr) {
    Op op;
    op.kind = kind;
    op.module = module;
    op.phase = phase;
    op.layer = static_cast<std::int16_t>(layer);
    op.in = std::move(in);
    op.out = std::move(out);
    op.attr = std::move(attr);
    op.bytes = operand_bytes(op);
    current().ops.push_back(std::move(op));
    return current().ops.back();
}

Op& Builder::communicate(OpKind kind, Group group, Stream stream, std::vector<TensorId> in, std::vector<TensorId> out,
                         Attr attr) {
    Op& op = emit(kind, std::move(in), std::move(out), std::move(attr));
    op.group = group;
    op.stream = stream;
    const bool larger_side_is_output =
        kind == OpKind::all_gather || kind == OpKind::all_gather_rows || kind == OpKind::recv;
    const TensorId side = larger_side_is_output ? op.out.front() : op.in.front();
    op.bytes = at(side).expected_bytes();
    return op;
}

Op& Builder::gemm(TensorId a, TensorId b, TensorId c, GemmAttr attr) {
    Op& op = emit(OpKind::gemm, {a, b}, {c}, attr);
    op.flops =
        2.0 * attr.batch * static_cast<double>(attr.m) * static_cast<double>(attr.n) * static_cast<double>(attr.k);
    return op;
}

TensorId Builder::add(TensorId a, TensorId b, const std::string& name) {
    const Tensor& shape = at(a);
    const TensorId out = tensor(name, shape.dtype, shape.rows, shape.cols, shape.expected_rows);
    emit(OpKind::add, {a, b}, {out});
    return out;
}

// Dense layers only: Megatron leaves shared experts and the LM head out of it.
bool Builder::pipelined() const {
    return plan_.tp_overlap && plan_.tp > 1 && module != Module::shared_experts && module != Module::head;
}

TensorId Builder::ring_step(TensorId x, const std::string& name) {
    const TensorId next = tensor(name, at(x).dtype, at(x).rows, at(x).cols);
    communicate(OpKind::ring_exchange, groups::tensor, Stream::tensor, {x}, {next});
    return next;
}

// n streams are read for the maps and the layer's input, then read and written with its output (arXiv 2409.19606).
TensorId Builder::residual(TensorId x, TensorId y, const std::string& name) {
    const TensorId sum = add(x, y, name);
    if (model().residual_streams > 1)
        current().ops.back().bytes += (3.0 * model().residual_streams - 2.0) * at(x).expected_bytes();
    return sum;
}

TensorId Builder::gather_tokens(TensorId x, const std::string& name) {
    if (plan_.tp == 1) return x;
    const TensorId out = tensor(name, at(x).dtype, at(x).rows * plan_.tp, at(x).cols);
    communicate(OpKind::all_gather, groups::tensor, Stream::tensor, {x}, {out});
    return out;
}

TensorId Builder::scatter_tokens(TensorId x, const std::string& name) {
    if (plan_.tp == 1) return x;
    const TensorId out = tensor(name, at(x).dtype, at(x).rows / plan_.tp, at(x).cols);
    communicate(OpKind::reduce_scatter, groups::tensor, Stream::tensor, {x}, {out});
    return out;
}

} // namespace moe
