// Mamba-2 layers (Nemotron-H, Nemotron 3), which are priced and not executed: projections, short convolution, scan.
#include "planner/lower/layers/layers.hpp"

#include <algorithm>
#include <cmath>

namespace moe::layers {
namespace {

// Widths of the projection's parts of a token: gate and input of the heads, keys and queries of the groups (the state
// space model's B and C), a step width per head.
struct Widths {
    std::int64_t inner, groups, heads; // widths in elements
    std::int64_t projected() const { return 2 * inner + 2 * groups + heads; }
    std::int64_t convolved() const { return inner + 2 * groups; }
};

Widths widths_of(const model::Attention& a, int tp) {
    return {static_cast<std::int64_t>(a.value_heads) * a.value_dim / tp,
            static_cast<std::int64_t>(a.key_heads) * a.key_dim / tp, a.value_heads / tp};
}

} // namespace

void AttentionLayer::declare_mamba(emit::ParameterSet& set) const {
    const Widths w = widths_of(a_, 1);
    const std::string at = hf_ + "mixer.";
    const double out_std = 0.02 / std::sqrt(2.0 * static_cast<double>(std::max<std::size_t>(1, model_.layers.size())));
    const auto sharded = [&at](const char* name, std::int64_t rows, std::int64_t cols, int dim, double std) {
        return matrix(at + name, plan::Domain::dense, rows, cols, dim, std);
    };
    set.declare(key_ + ".in", {sharded("in_proj.weight", w.projected(), model_.hidden, 0, 0.02)}, true);
    set.declare(key_ + ".scan",
                {sharded("conv1d.weight", w.convolved(), a_.conv_kernel, 0, 0.02),
                 sharded("conv1d.bias", w.convolved(), 1, 0, 0.0), sharded("A_log", w.heads, 1, 0, 0.0),
                 sharded("D", w.heads, 1, 0, 0.0), sharded("dt_bias", w.heads, 1, 0, 0.0),
                 sharded("norm.weight", w.inner, 1, 0, 0.0)},
                false, false);
    set.declare(key_ + ".out", {sharded("out_proj.weight", model_.hidden, w.inner, 1, out_std)}, true);
}

program::TensorId AttentionLayer::mamba_core(emit::Builder& b, program::TensorId normed) {
    const int tp = b.plan().tp, cp = b.plan().cp;
    const Widths w = widths_of(a_, tp);
    const std::int64_t tokens = b.gathered_tokens() * cp;
    b.module = program::Module::attn_in;
    qkv_.weight = b.weight(key_ + ".in", w.projected(), model_.hidden);
    qkv_.name = "mamba_in";
    qkv_.gather = tp > 1;
    q_ = emit::linear_forward(b, qkv_, normed, b.activation_dtype());
    q_ = over_context(b, q_, "mamba_in.heads", true);
    scan_ = {tokens, a_.value_heads / (tp * cp), a_.value_dim, a_.key_heads / (tp * cp), a_.key_dim, a_.scan_chunk};
    v_ = b.activation("scan_out", tokens, w.inner / cp);
    o_ = b.activation("mamba_out", tokens, w.inner / cp);
    b.emit(program::OpKind::scan, {q_}, {v_, o_}, scan_).bytes = scan_.forward_bytes();
    return over_context(b, o_, "mamba_out.tokens", false);
}

program::TensorId AttentionLayer::mamba_core_backward(emit::Builder& b, program::TensorId doutput) {
    b.module = program::Module::attn_in;
    const program::TensorId dmixed = over_context(b, doutput, "dmamba_out.heads", true);
    const program::TensorId dprojected = b.activation("dmamba_in", scan_.rows, b.at(q_).cols);
    b.emit(program::OpKind::scan_grad, {dmixed, q_, v_}, {dprojected}, scan_).bytes = scan_.backward_bytes();
    return emit::linear_backward(b, qkv_, over_context(b, dprojected, "dmamba_in.tokens", false));
}

} // namespace moe::layers
