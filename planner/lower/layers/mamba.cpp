// Mamba-2 (Nemotron-H, Nemotron 3): its weights, and its layer as one op, which is how published stacks run it and only
// priced. Our engine's ops are those of every layer with a state.
#include "planner/lower/layers/layers.hpp"

#include <algorithm>
#include <cmath>

namespace moe::layers {

// Queries, keys and values are C, B and x here. Names are those of Granite 4's modules, but for what they keep in one
// matrix, of which ranks of TP split each part.
void AttentionLayer::declare_mamba(emit::ParameterSet& set) const {
    const program::StateAttr d = state_of(1);
    const std::string at = hf_ + "mamba.";
    const auto part = [&at](const char* name, std::int64_t rows, std::int64_t cols, double std) {
        return matrix(at + name, plan::Domain::dense, rows, cols, 0, std);
    };
    const auto of_heads = [&](const char* name, std::int64_t rows, program::Init init) {
        program::Parameter weight = part(name, rows, 1, 0.0);
        weight.init = init;
        return weight;
    };
    const std::int64_t h = model_.hidden;
    set.declare(key_ + ".qkv",
                {part("in_proj_c.weight", d.keys(), h, 0.02), part("in_proj_b.weight", d.keys(), h, 0.02),
                 part("in_proj_x.weight", d.values(), h, 0.02), part("in_proj_z.weight", d.values(), h, 0.02),
                 part("in_proj_dt.weight", d.value_heads, h, 0.02)},
                true);
    const double taps = 1.0 / std::sqrt(3.0 * d.kernel); // as uniform numbers up to 1 / sqrt(kernel) have
    set.declare(key_ + ".conv",
                {part("conv1d_c.weight", d.keys(), d.kernel, taps), part("conv1d_b.weight", d.keys(), d.kernel, taps),
                 part("conv1d_x.weight", d.values(), d.kernel, taps)},
                false);
    set.declare(key_ + ".conv_bias",
                {part("conv1d_c.bias", d.keys(), 1, 0.0), part("conv1d_b.bias", d.keys(), 1, 0.0),
                 part("conv1d_x.bias", d.values(), 1, 0.0)},
                false, false);
    set.declare(key_ + ".a_log", {of_heads("A_log", d.value_heads, program::Init::log_counts)}, false, false);
    set.declare(key_ + ".dt_bias", {of_heads("dt_bias", d.value_heads, program::Init::steps)}, false, false);
    set.declare(key_ + ".skip", {of_heads("D", d.value_heads, program::Init::ones)}, false, false);
    set.declare(key_ + ".gated_norm", {of_heads("norm.weight", d.values(), program::Init::ones)}, false, false);
    const double out_std = 0.02 / std::sqrt(2.0 * static_cast<double>(std::max<std::size_t>(1, model_.layers.size())));
    set.declare(key_ + ".out", {matrix(at + "out_proj.weight", plan::Domain::dense, h, d.values(), 1, out_std)}, true);
}

program::TensorId AttentionLayer::scan_core(emit::Builder& b, program::TensorId normed) {
    const int tp = b.plan().tp, cp = b.plan().cp;
    const program::StateAttr w = state_of(tp);
    const std::int64_t tokens = b.gathered_tokens() * cp;
    b.module = program::Module::attn_in;
    qkv_.weight = b.weight(key_ + ".qkv", w.projected(), model_.hidden);
    qkv_.name = "mamba_in";
    qkv_.gather = tp > 1;
    q_ = emit::linear_forward(b, qkv_, normed, b.activation_dtype());
    q_ = over_context(b, q_, "mamba_in.heads", true);
    scan_ = {tokens, a_.value_heads / (tp * cp), a_.value_dim, a_.key_heads / (tp * cp), a_.key_dim, a_.scan_chunk};
    v_ = b.activation("scan_out", tokens, w.values() / cp);
    o_ = b.activation("mamba_out", tokens, w.values() / cp);
    b.emit(program::OpKind::scan, {q_}, {v_, o_}, scan_).bytes = scan_.forward_bytes();
    return over_context(b, o_, "mamba_out.tokens", false);
}

program::TensorId AttentionLayer::scan_core_backward(emit::Builder& b, program::TensorId doutput) {
    b.module = program::Module::attn_in;
    const program::TensorId dmixed = over_context(b, doutput, "dmamba_out.heads", true);
    const program::TensorId dprojected = b.activation("dmamba_in", scan_.rows, b.at(q_).cols);
    b.emit(program::OpKind::scan_grad, {dmixed, q_, v_}, {dprojected}, scan_).bytes = scan_.backward_bytes();
    return emit::linear_backward(b, qkv_, over_context(b, dprojected, "dmamba_in.tokens", false));
}

} // namespace moe::layers
