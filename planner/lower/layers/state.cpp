// Layers with a state, gated delta nets and Mamba-2: projection, short convolution, rule, gated norm. A state passes
// through the whole sequence, so that ranks of CP trade their tokens for heads.
#include "planner/lower/layers/layers.hpp"

#include "planner/base/error.hpp"

#include <algorithm>

namespace moe::layers {
namespace {

// The parts of a projected row, each of which is split by heads.
HeadPieces pieces_of(const program::StateAttr& d) {
    return {d.keys(), d.keys(), d.values(), d.values(), d.value_heads, d.ssd ? 0 : d.value_heads};
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

program::StateAttr AttentionLayer::state_of(int parts) const {
    program::StateAttr state;
    state.key_heads = a_.key_heads / parts;
    state.value_heads = a_.value_heads / parts;
    state.key_dim = a_.key_dim;
    state.value_dim = a_.value_dim;
    state.kernel = a_.conv_kernel;
    state.ssd = a_.kind == model::AttentionKind::mamba;
    state.step_min = a_.step_min;
    state.step_max = a_.step_max;
    return state;
}

// One token at a time, with the last rows of the convolution and the state kept from call to call.
program::TensorId AttentionLayer::state_cached(emit::Builder& b) {
    const std::int64_t rows = std::max(1, state_.kernel - 1) * state_.convolved();
    const program::TensorId window = emit::add_flat(b.program(), fmt::format("layer{}.conv_cache", layer_),
                                                    b.activation_dtype(), program::Storage::optimizer, rows, b.chunk());
    const program::TensorId state =
        emit::add_flat(b.program(), fmt::format("layer{}.state_cache", layer_), program::Dtype::f32,
                       program::Storage::optimizer, state_.values() * state_.key_dim, b.chunk());
    const program::TensorId o = b.activation(name("out"), state_.rows, state_.values()), at = b.program().io.positions;
    program::Operands in{q_, conv_.value, a_log_.value, dt_bias_.value, at};
    if (state_.ssd) in = {q_, conv_.value, conv_bias_.value, a_log_.value, dt_bias_.value, skip_.value, at};
    b.emit(state_.ssd ? program::OpKind::ssd_cached : program::OpKind::delta_cached, in, {o, window, state}, state_)
        .flops = state_.flops();
    return o;
}

std::string AttentionLayer::name(const char* part) const {
    return fmt::format("{}_{}", state_.ssd ? "mamba" : "delta", part);
}

// Operands of the rule behind what it convolved: the row with its gates, and the weights of heads.
program::Operands AttentionLayer::rule_operands(program::Operands first) const {
    first.append({k_, q_, a_log_.value, dt_bias_.value});
    if (state_.ssd) first.push_back(skip_.value);
    return first;
}

program::TensorId AttentionLayer::state_core(emit::Builder& b, program::TensorId normed) {
    const int tp = b.plan().tp, cp = b.plan().cp;
    state_ = state_of(tp);
    const HeadPieces pieces = pieces_of(state_);
    b.module = program::Module::attn_in;
    qkv_.weight = b.weight(key_ + ".qkv", state_.projected(), model_.hidden);
    conv_ = b.weight(key_ + ".conv", state_.convolved(), state_.kernel);
    a_log_ = b.weight(key_ + ".a_log", state_.value_heads, 1);
    dt_bias_ = b.weight(key_ + ".dt_bias", state_.value_heads, 1);
    if (state_.ssd) {
        conv_bias_ = b.weight(key_ + ".conv_bias", state_.convolved(), 1);
        skip_ = b.weight(key_ + ".skip", state_.value_heads, 1);
    }
    q_head_norm_ = b.weight(key_ + ".gated_norm", state_.norm_weights(), 1);
    qkv_.name = name("in");
    qkv_.gather = tp > 1;
    q_ = over_context(b, emit::linear_forward(b, qkv_, normed, b.activation_dtype()), name("in.heads"), true, pieces);
    state_ = state_of(tp * cp);
    state_.rows = b.at(q_).rows;
    state_.batch = b.plan().mbs;
    state_.parts = cp;
    state_.eps = model_.norm_eps;
    b.module = program::Module::core_attn;
    if (b.cached_keys > 0) {
        o_ = state_cached(b);
    } else {
        k_ = b.activation(name("conv"), state_.rows, state_.convolved());
        b.emit(program::OpKind::short_conv, with_starts(b, {q_, conv_.value, conv_bias_.value}), {k_}, state_);
        o_ = b.activation(name("out"), state_.rows, state_.values());
        const program::TensorId work = b.tensor(name("work"), program::Dtype::f32, state_.work(false), 1);
        b.emit(state_.ssd ? program::OpKind::ssd : program::OpKind::delta_rule, with_starts(b, rule_operands({})),
               {o_, work}, state_)
            .flops = state_.flops();
    }
    const program::TensorId y = b.activation(name("gated"), state_.rows, state_.values());
    b.emit(program::OpKind::gated_norm, {o_, q_, q_head_norm_.value}, {y}, state_);
    return over_context(b, y, name("gated.tokens"), false);
}

program::TensorId AttentionLayer::state_core_backward(emit::Builder& b, program::TensorId doutput) {
    b.module = program::Module::core_attn;
    const auto gradient = [&](const char* part) { return fmt::format("d{}", name(part)); };
    const program::TensorId dy = over_context(b, doutput, gradient("gated.heads"), true);
    const program::TensorId dprojected = b.activation(gradient("in"), state_.rows, state_.projected());
    const program::TensorId dout = b.activation(gradient("out"), state_.rows, state_.values());
    b.emit(program::OpKind::gated_norm_grad, {dy, o_, q_, q_head_norm_.value},
           {dout, dprojected, q_head_norm_.gradient}, state_);
    const program::TensorId dconv = b.activation(gradient("conv"), state_.rows, state_.convolved());
    const program::TensorId work = b.tensor(gradient("work"), program::Dtype::f32, state_.work(true), 1);
    program::Operands out{dconv, dprojected, a_log_.gradient, dt_bias_.gradient};
    if (state_.ssd) out.push_back(skip_.gradient);
    out.push_back(work);
    b.emit(state_.ssd ? program::OpKind::ssd_grad : program::OpKind::delta_rule_grad,
           with_starts(b, rule_operands({dout})), out, state_)
        .flops = 2.5 * state_.flops();
    program::Operands of_conv{dprojected, conv_.gradient};
    if (state_.ssd) of_conv.push_back(conv_bias_.gradient);
    b.emit(program::OpKind::short_conv_grad, with_starts(b, {dconv, q_, conv_.value, conv_bias_.value}), of_conv,
           state_);
    b.module = program::Module::attn_in;
    const HeadPieces pieces = pieces_of(state_of(b.plan().tp));
    return emit::linear_backward(b, qkv_, over_context(b, dprojected, gradient("in.tokens"), false, pieces));
}

// Where the document of each row begins is the operand behind all others.
program::Operands AttentionLayer::with_starts(const emit::Builder& b, program::Operands in) {
    if (b.plan().masks_documents()) in.push_back(b.program().io.sequence_starts);
    return in;
}

} // namespace moe::layers
