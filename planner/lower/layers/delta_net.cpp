// Gated delta nets (Qwen3-Next, Qwen3.5): projection, short convolution, delta rule, gated norm. A state passes through
// the whole sequence, so that ranks of CP trade their tokens for heads.
#include "planner/lower/layers/layers.hpp"

#include "planner/base/error.hpp"

#include <algorithm>
#include <cmath>

namespace moe::layers {
namespace {

// Heads of one rank of TP, and of CP where tokens have been traded.
program::DeltaAttr delta_of(const model::Attention& a, int parts) {
    program::DeltaAttr delta;
    delta.key_heads = a.key_heads / parts;
    delta.value_heads = a.value_heads / parts;
    delta.key_dim = a.key_dim;
    delta.value_dim = a.value_dim;
    delta.kernel = a.conv_kernel;
    return delta;
}

// The parts of a projected row, each of which is split by heads.
HeadPieces pieces_of(const program::DeltaAttr& d) {
    return {d.keys(), d.keys(), d.values(), d.values(), d.value_heads, d.value_heads};
}

} // namespace

program::TensorId over_context(emit::Builder& b, program::TensorId x, const std::string& name, bool to_heads,
                               const HeadPieces& pieces) {
    const int cp = b.plan().cp;
    if (cp == 1) return x;
    const program::Tensor of = b.at(x);
    const program::TensorId y = to_heads ? b.tensor(name, of.dtype, of.rows * cp, of.cols / cp)
                                         : b.tensor(name, of.dtype, of.rows / cp, of.cols * cp);
    exchange_heads(b, emit::groups::context, x, y, to_heads, pieces);
    return y;
}

// Names are those of Qwen3.5's modules, but for what they keep in one matrix, of which ranks of TP split each part.
void AttentionLayer::declare_delta(emit::ParameterSet& set) const {
    const program::DeltaAttr d = delta_of(a_, 1);
    const std::string at = hf_ + "linear_attn.";
    const auto part = [&at](const char* name, std::int64_t rows, std::int64_t cols, double std) {
        return matrix(at + name, plan::Domain::dense, rows, cols, 0, std);
    };
    const std::int64_t h = model_.hidden;
    set.declare(key_ + ".qkv",
                {part("in_proj_q.weight", d.keys(), h, 0.02), part("in_proj_k.weight", d.keys(), h, 0.02),
                 part("in_proj_v.weight", d.values(), h, 0.02), part("in_proj_z.weight", d.values(), h, 0.02),
                 part("in_proj_b.weight", d.value_heads, h, 0.02), part("in_proj_a.weight", d.value_heads, h, 0.02)},
                true);
    const double taps = 1.0 / std::sqrt(3.0 * d.kernel); // as uniform numbers up to 1 / sqrt(kernel) have
    set.declare(key_ + ".conv",
                {part("conv1d_q.weight", d.keys(), d.kernel, taps), part("conv1d_k.weight", d.keys(), d.kernel, taps),
                 part("conv1d_v.weight", d.values(), d.kernel, taps)},
                false);
    set.declare(key_ + ".a_log", {part("A_log", d.value_heads, 1, 1.0)}, false, false);
    program::Parameter bias = part("dt_bias", d.value_heads, 1, 0.0);
    bias.ones = true;
    set.declare(key_ + ".dt_bias", {bias}, false, false);
    set.declare(key_ + ".gated_norm", {norm_weight(at + "norm.weight", d.value_dim)}, false, false);
    const double out_std = 0.02 / std::sqrt(2.0 * static_cast<double>(std::max<std::size_t>(1, model_.layers.size())));
    set.declare(key_ + ".out", {matrix(at + "out_proj.weight", plan::Domain::dense, h, d.values(), 1, out_std)}, true);
}

// One token at a time, with the last rows of the convolution and the state kept from call to call.
program::TensorId AttentionLayer::delta_cached(emit::Builder& b) {
    const std::int64_t rows = std::max(1, delta_.kernel - 1) * delta_.convolved();
    const program::TensorId window = emit::add_flat(b.program(), fmt::format("layer{}.conv_cache", layer_),
                                                    b.activation_dtype(), program::Storage::optimizer, rows, b.chunk());
    const program::TensorId state =
        emit::add_flat(b.program(), fmt::format("layer{}.state_cache", layer_), program::Dtype::f32,
                       program::Storage::optimizer, delta_.values() * delta_.key_dim, b.chunk());
    const program::TensorId o = b.activation("delta_out", delta_.rows, delta_.values());
    b.emit(program::OpKind::delta_cached, {q_, conv_.value, a_log_.value, dt_bias_.value, b.program().io.positions},
           {o, window, state}, delta_)
        .flops = delta_.flops();
    return o;
}

program::TensorId AttentionLayer::delta_core(emit::Builder& b, program::TensorId normed) {
    const int tp = b.plan().tp, cp = b.plan().cp;
    delta_ = delta_of(a_, tp);
    const HeadPieces pieces = pieces_of(delta_);
    b.module = program::Module::attn_in;
    qkv_.weight = b.weight(key_ + ".qkv", delta_.projected(), model_.hidden);
    conv_ = b.weight(key_ + ".conv", delta_.convolved(), delta_.kernel);
    a_log_ = b.weight(key_ + ".a_log", delta_.value_heads, 1);
    dt_bias_ = b.weight(key_ + ".dt_bias", delta_.value_heads, 1);
    q_head_norm_ = b.weight(key_ + ".gated_norm", delta_.value_dim, 1);
    qkv_.name = "delta_in";
    qkv_.gather = tp > 1;
    q_ = over_context(b, emit::linear_forward(b, qkv_, normed, b.activation_dtype()), "delta_in.heads", true, pieces);
    delta_ = delta_of(a_, tp * cp);
    delta_.rows = b.at(q_).rows;
    delta_.batch = b.plan().mbs;
    delta_.parts = cp;
    delta_.eps = model_.norm_eps;
    b.module = program::Module::core_attn;
    if (b.cached_keys > 0) {
        o_ = delta_cached(b);
    } else {
        k_ = b.activation("delta_conv", delta_.rows, delta_.convolved());
        b.emit(program::OpKind::short_conv, with_starts(b, {q_, conv_.value}), {k_}, delta_);
        o_ = b.activation("delta_out", delta_.rows, delta_.values());
        const program::TensorId work = b.tensor("delta_work", program::Dtype::f32, delta_.work(false), 1);
        b.emit(program::OpKind::delta_rule, with_starts(b, {k_, q_, a_log_.value, dt_bias_.value}), {o_, work}, delta_)
            .flops = delta_.flops();
    }
    const program::TensorId y = b.activation("delta_gated", delta_.rows, delta_.values());
    b.emit(program::OpKind::gated_norm, {o_, q_, q_head_norm_.value}, {y}, delta_);
    return over_context(b, y, "delta_gated.tokens", false);
}

program::TensorId AttentionLayer::delta_core_backward(emit::Builder& b, program::TensorId doutput) {
    b.module = program::Module::core_attn;
    const program::TensorId dy = over_context(b, doutput, "ddelta_gated.heads", true);
    const program::TensorId dprojected = b.activation("ddelta_in", delta_.rows, delta_.projected());
    const program::TensorId dout = b.activation("ddelta_out", delta_.rows, delta_.values());
    b.emit(program::OpKind::gated_norm_grad, {dy, o_, q_, q_head_norm_.value},
           {dout, dprojected, q_head_norm_.gradient}, delta_);
    const program::TensorId dconv = b.activation("ddelta_conv", delta_.rows, delta_.convolved());
    const program::TensorId work = b.tensor("ddelta_work", program::Dtype::f32, delta_.work(true), 1);
    b.emit(program::OpKind::delta_rule_grad, with_starts(b, {dout, k_, q_, a_log_.value, dt_bias_.value}),
           {dconv, dprojected, a_log_.gradient, dt_bias_.gradient, work}, delta_)
        .flops = 2.5 * delta_.flops();
    b.emit(program::OpKind::short_conv_grad, with_starts(b, {dconv, q_, conv_.value}), {dprojected, conv_.gradient},
           delta_);
    b.module = program::Module::attn_in;
    const HeadPieces pieces = pieces_of(delta_of(a_, b.plan().tp));
    return emit::linear_backward(b, qkv_, over_context(b, dprojected, "ddelta_in.tokens", false, pieces));
}

// Where the document of each row begins is the operand behind all others.
std::vector<program::TensorId> AttentionLayer::with_starts(const emit::Builder& b, std::vector<program::TensorId> in) {
    if (b.plan().masks_documents()) in.push_back(b.program().io.sequence_starts);
    return in;
}

} // namespace moe::layers
