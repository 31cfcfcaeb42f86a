// Parts that are priced alone, as matrices around a core: Kimi delta attention, short convolutions, Mamba-1 and others.
#include "planner/lower/layers/layers.hpp"

#include <algorithm>
#include <cmath>

namespace moe::layers {

// As many as hold the weights that are not in the matrix behind the core, in whole tiles.
std::int64_t OpaquePartOps::columns(std::int64_t hidden) const {
    const std::int64_t before = std::max<std::int64_t>(1, part_.weights - part_.out * hidden);
    return ((before + hidden - 1) / hidden + 127) / 128 * 128;
}

double OpaquePartOps::core_macs(const emit::Builder& b) const {
    const double seen = static_cast<double>(b.plan().seq) / 2.0;
    return std::max(0.0, part_.macs + part_.macs_per_key * seen - static_cast<double>(part_.weights));
}

void OpaquePartOps::declare(emit::ParameterSet& set, std::int64_t hidden) const {
    const double std = 0.02;
    const std::int64_t idle = (part_.idle / hidden + 127) / 128 * 128;
    if (idle > 0) // Weights of which each token takes others: none has a product here.
        set.declare(key_ + ".idle", {matrix(hf_ + "idle.weight", plan::Domain::dense, idle, hidden, 0, std)}, true);
    if (part_.macs == 0.0) return;
    set.declare(key_ + ".in", {matrix(hf_ + "in_proj.weight", plan::Domain::dense, columns(hidden), hidden, 0, std)},
                true);
    if (part_.out == 0) return;
    set.declare(key_ + ".out", {matrix(hf_ + "out_proj.weight", plan::Domain::dense, hidden, part_.out, 1, std)}, true);
}

// What takes few multiply-accumulates for each column is bound by memory, as scans are; the rest is priced as attention
// of so many FLOPs.
void OpaquePartOps::emit_core(emit::Builder& b, bool back, const program::Operands& in,
                              const program::Operands& out) const {
    constexpr double few = 128.0, passes = 2.0, backward = 2.5;
    constexpr std::int64_t head = 128; // columns
    const std::int64_t tokens = b.gathered_tokens(), width = std::max<std::int64_t>(1, part_.out / b.plan().tp);
    const double macs = core_macs(b);
    if (macs < few * static_cast<double>(part_.out)) {
        double bytes = 0.0;
        for (const program::Operands* side : {&in, &out})
            for (const program::TensorId id : *side) bytes += b.at(id).expected_bytes();
        const int heads = static_cast<int>(std::max<std::int64_t>(1, width / head));
        b.emit(back ? program::OpKind::scan_grad : program::OpKind::scan, in, out,
               program::ScanAttr{tokens, heads, static_cast<int>(width / heads), 1, 1, 1})
            .bytes = passes * bytes;
        return;
    }
    program::AttentionAttr attr;
    attr.batch = b.plan().mbs;
    attr.seq_q = attr.seq_k = b.plan().seq / b.plan().cp;
    attr.heads = attr.kv_heads = static_cast<int>(std::max<std::int64_t>(1, width / head));
    attr.qk_dim = attr.v_dim = head;
    attr.q_stride = attr.k_stride = attr.v_stride = b.at(mixed_).cols;
    attr.deterministic = b.plan().deterministic;
    const program::TensorId x = mixed_;
    const double flops = 2.0 * static_cast<double>(tokens) / b.plan().tp * macs;
    if (back)
        b.emit(program::OpKind::attention_grad, {in[0], x, x, x, core_}, {out[0], out[0], out[0]}, attr).flops =
            backward * flops;
    else
        b.emit(program::OpKind::attention, {x, x, x}, {core_}, attr).flops = flops;
}

program::TensorId OpaquePartOps::forward(emit::Builder& b, program::TensorId normed) {
    if (part_.macs == 0.0) return program::no_tensor;
    const int tp = b.plan().tp;
    b.module = program::Module::attn_in;
    emit::bind(b, in_, key_ + ".in", columns(b.model().hidden) / tp, b.model().hidden);
    in_.name = "opaque_in";
    in_.gather = tp > 1;
    mixed_ = emit::linear_forward(b, in_, normed, b.activation_dtype());
    b.module = program::Module::core_attn;
    core_ = b.activation("opaque_core", b.gathered_tokens(), part_.out > 0 ? part_.out / tp : b.at(mixed_).cols);
    emit_core(b, false, {mixed_}, {core_});
    if (part_.out == 0) return program::no_tensor;
    b.module = program::Module::attn_out;
    emit::bind(b, out_, key_ + ".out", b.model().hidden, part_.out / tp);
    out_.name = "opaque_out";
    out_.shared_input = true;
    return emit::linear_forward_scattered(b, out_, core_, b.activation_dtype(), "opaque_local");
}

program::TensorId OpaquePartOps::backward(emit::Builder& b, program::TensorId dy) {
    if (part_.macs == 0.0) return program::no_tensor;
    b.module = program::Module::attn_out;
    const program::TensorId dcore = part_.out > 0 ? emit::linear_backward_gathered(b, out_, dy, "opaque_dout") : core_;
    b.module = program::Module::core_attn;
    const program::TensorId dmixed = b.activation("opaque_din", b.gathered_tokens(), b.at(mixed_).cols);
    emit_core(b, true, {dcore, mixed_, core_}, {dmixed});
    b.module = program::Module::attn_in;
    return emit::linear_backward(b, in_, dmixed);
}

} // namespace moe::layers
