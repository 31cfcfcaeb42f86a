// Op kinds of layers with a state as calls of a back end's kernels.
#include "engine/ops/operands.hpp"

namespace moe::ops {

namespace {

// Where documents begin lies behind `operands` others.
StateShape state_shape(const OpContext& c, std::size_t operands) {
    const program::StateAttr& a = std::get<program::StateAttr>(c.op.attr);
    StateShape s{a.rows, a.batch, a.key_heads, a.value_heads, a.key_dim, a.value_dim, a.kernel, a.eps};
    s.part = c.position.context;
    s.parts = a.parts;
    s.document_start = ints(c, operands);
    s.rule = a.ssd ? StateRule::ssd : StateRule::delta;
    s.step_min = static_cast<float>(a.step_min);
    s.step_max = static_cast<float>(a.step_max);
    return s;
}

void short_conv(const OpContext& c) {
    c.kernels.short_conv(state_shape(c, 3), src(c, 0), src(c, 1), src(c, 2), dst(c, 0), c.stream);
}

void short_conv_grad(const OpContext& c) {
    c.kernels.short_conv_grad(state_shape(c, 4), src(c, 0), src(c, 1), src(c, 2), src(c, 3), dst(c, 0),
                              floats_out(c, 1), floats_out(c, 2), c.stream);
}

void delta_rule(const OpContext& c) {
    c.kernels.delta_rule(state_shape(c, 4), src(c, 0), src(c, 1), src(c, 2), src(c, 3), dst(c, 0), floats_out(c, 1),
                         c.stream);
}

void delta_rule_grad(const OpContext& c) {
    c.kernels.delta_rule_grad(state_shape(c, 5), src(c, 0), src(c, 1), src(c, 2), src(c, 3), src(c, 4), dst(c, 0),
                              dst(c, 1), floats_out(c, 2), floats_out(c, 3), floats_out(c, 4), c.stream);
}

void ssd(const OpContext& c) {
    c.kernels.ssd(state_shape(c, 5), src(c, 0), src(c, 1), src(c, 2), src(c, 3), src(c, 4), dst(c, 0), floats_out(c, 1),
                  c.stream);
}

void ssd_grad(const OpContext& c) {
    c.kernels.ssd_grad(state_shape(c, 6), src(c, 0), src(c, 1), src(c, 2), src(c, 3), src(c, 4), src(c, 5), dst(c, 0),
                       dst(c, 1), floats_out(c, 2), floats_out(c, 3), floats_out(c, 4), floats_out(c, 5), c.stream);
}

void gated_norm(const OpContext& c) {
    c.kernels.gated_norm(state_shape(c, 3), src(c, 0), src(c, 1), src(c, 2), dst(c, 0), c.stream);
}

void gated_norm_grad(const OpContext& c) {
    c.kernels.gated_norm_grad(state_shape(c, 4), src(c, 0), src(c, 1), src(c, 2), src(c, 3), dst(c, 0), dst(c, 1),
                              floats_out(c, 2), c.stream);
}

void delta_cached(const OpContext& c) {
    c.kernels.delta_cached(state_shape(c, 5), src(c, 0), src(c, 1), src(c, 2), src(c, 3), ints(c, 4), dst(c, 0),
                           dst(c, 1), floats_out(c, 2), c.stream);
}

void ssd_cached(const OpContext& c) {
    c.kernels.ssd_cached(state_shape(c, 7), src(c, 0), src(c, 1), src(c, 2), src(c, 3), src(c, 4), src(c, 5),
                         ints(c, 6), dst(c, 0), dst(c, 1), floats_out(c, 2), c.stream);
}

} // namespace

void add_state_kernels(Backend& backend) {
    const auto set = [&](program::OpKind kind, OpFunction function) {
        backend.table[static_cast<std::size_t>(kind)] = function;
    };
    set(program::OpKind::short_conv, short_conv);
    set(program::OpKind::short_conv_grad, short_conv_grad);
    set(program::OpKind::delta_rule, delta_rule);
    set(program::OpKind::delta_rule_grad, delta_rule_grad);
    set(program::OpKind::ssd, ssd);
    set(program::OpKind::ssd_grad, ssd_grad);
    set(program::OpKind::gated_norm, gated_norm);
    set(program::OpKind::gated_norm_grad, gated_norm_grad);
    set(program::OpKind::delta_cached, delta_cached);
    set(program::OpKind::ssd_cached, ssd_cached);
}

} // namespace moe::ops
