// Op kinds as calls of a back end's kernels: attributes and operand order of the Program on one side, kernel shapes on
// the other.
#include "engine/ops/adamw_step.hpp"
#include "engine/ops/operands.hpp"

namespace moe::ops {

namespace {

void embedding(const OpContext& c) {
    const program::Tensor& table = c.input(1);
    c.kernels.embedding(ints(c, 0), src(c, 1), dst(c, 0), c.output(0).rows, table.cols, c.position.tensor * table.rows,
                        table.rows, c.stream);
}

void embedding_grad(const OpContext& c) {
    const program::Tensor& table = c.output(0);
    c.kernels.embedding_grad(ints(c, 0), src(c, 1), floats_out(c, 0), c.input(1).rows, table.cols,
                             c.position.tensor * table.rows, table.rows, c.stream);
}

void rmsnorm(const OpContext& c) {
    const program::NormAttr& a = std::get<program::NormAttr>(c.op.attr);
    if (a.centred)
        return c.kernels.layernorm(src(c, 0), src(c, 1), src(c, 2), dst(c, 0), floats_out(c, 1), a.rows, a.cols,
                                   a.stride, a.eps, c.stream);
    c.kernels.rmsnorm(src(c, 0), src(c, 1), dst(c, 0), floats_out(c, 1), a.rows, a.cols, a.stride, a.eps, c.stream);
}

void rmsnorm_grad(const OpContext& c) {
    const program::NormAttr& a = std::get<program::NormAttr>(c.op.attr);
    if (a.centred)
        return c.kernels.layernorm_grad(src(c, 0), src(c, 1), src(c, 2), floats(c, 3), src(c, 4), dst(c, 0),
                                        floats_out(c, 1), floats_out(c, 2), a.rows, a.cols, a.stride, c.stream);
    c.kernels.rmsnorm_grad(src(c, 0), src(c, 1), src(c, 2), floats(c, 3), src(c, 4), dst(c, 0), floats_out(c, 1),
                           a.rows, a.cols, a.stride, c.stream);
}

HeadsNormShape heads_norm_shape(const OpContext& c) {
    const program::HeadsNormAttr& a = std::get<program::HeadsNormAttr>(c.op.attr);
    return {a.tokens,      a.queries,  a.keys, c.input(0).elements() / a.tokens,
            a.all_queries, a.all_keys, a.eps,  static_cast<float>(a.key_share)};
}

void heads_squares(const OpContext& c) {
    c.kernels.heads_squares(heads_norm_shape(c), src(c, 0), floats_out(c, 0), c.stream);
}

void heads_norm(const OpContext& c) {
    c.kernels.heads_norm(heads_norm_shape(c), src(c, 0), floats(c, 1), src(c, 2), src(c, 3), dst(c, 0), c.stream);
}

void heads_along(const OpContext& c) {
    c.kernels.heads_along(heads_norm_shape(c), src(c, 0), src(c, 1), src(c, 2), src(c, 3), floats_out(c, 0), c.stream);
}

void heads_norm_grad(const OpContext& c) {
    c.kernels.heads_norm_grad(heads_norm_shape(c), src(c, 0), src(c, 1), floats(c, 2), floats(c, 3), src(c, 4),
                              src(c, 5), dst(c, 0), floats_out(c, 1), floats_out(c, 2), c.stream);
}

ValueNormShape value_norm_shape(const OpContext& c) {
    const program::ValueNormAttr& a = std::get<program::ValueNormAttr>(c.op.attr);
    return {a.tokens, a.front, a.heads, a.dim, a.eps, a.from_keys};
}

void value_norm(const OpContext& c) { c.kernels.value_norm(value_norm_shape(c), src(c, 0), dst(c, 0), c.stream); }

void value_norm_grad(const OpContext& c) {
    c.kernels.value_norm_grad(value_norm_shape(c), src(c, 0), src(c, 1), dst(c, 0), c.stream);
}

void scale(const OpContext& c) {
    c.kernels.scale(src(c, 0), src(c, 1), std::get<program::ScaleAttr>(c.op.attr).factor, dst(c, 0),
                    c.output(0).elements(), c.stream);
}

void clip(const OpContext& c) {
    const program::ClipAttr& a = std::get<program::ClipAttr>(c.op.attr);
    c.kernels.clip(src(c, 0), a.limit, a.soft, dst(c, 0), c.output(0).elements(), c.stream);
}

void clip_grad(const OpContext& c) {
    const program::ClipAttr& a = std::get<program::ClipAttr>(c.op.attr);
    c.kernels.clip_grad(src(c, 0), src(c, 1), a.limit, a.soft, dst(c, 0), c.output(0).elements(), c.stream);
}

void add(const OpContext& c) { c.kernels.add(src(c, 0), src(c, 1), dst(c, 0), c.output(0).elements(), c.stream); }

void bias_add(const OpContext& c) {
    const std::int64_t cols = c.input(1).elements();
    c.kernels.bias_add(src(c, 0), src(c, 1), dst(c, 0), rows_of(c.input(0), cols), cols, c.stream);
}

void copy_columns(const OpContext& c) {
    const program::ColumnsAttr& a = std::get<program::ColumnsAttr>(c.op.attr);
    c.kernels.copy_columns({c.input(0).rows, a.cols, c.input(0).cols, a.from, c.output(0).cols, a.to, a.accumulate},
                           src(c, 0), dst(c, 0), c.stream);
}

void bias_grad(const OpContext& c) {
    const std::int64_t cols = c.output(0).elements();
    c.kernels.bias_grad(src(c, 0), floats_out(c, 0), rows_of(c.input(0), cols), cols, c.stream);
}

// The TP member whose part of the sequence a ring has brought after `step` steps.
std::int64_t member_of(const OpContext& c, int ring, int step) { return (c.position.tensor + ring - step) % ring; }

// A wgrad whose first operand comes in the pieces of a ring.
void gemm_of_pieces(const OpContext& c, GemmShape shape) {
    const int pieces = static_cast<int>(c.op.in.size()) - 1;
    shape.k /= pieces;
    const std::int64_t first = shape.b_offset;
    for (int step = 0; step < pieces; ++step) {
        const std::size_t dy = step == 0 ? 0 : static_cast<std::size_t>(step) + 1;
        const std::int64_t piece = member_of(c, pieces, step);
        shape.b_offset = first + piece * shape.k * shape.n;
        if (is_columns(c, 0))
            fp8_wgrad(c, dy, piece, shape);
        else
            c.kernels.gemm(shape, src(c, dy), src(c, 1), dst(c, 0), c.stream);
        shape.accumulate = true;
    }
}

void gemm(const OpContext& c) {
    const program::GemmAttr& a = std::get<program::GemmAttr>(c.op.attr);
    GemmShape shape{a.m,   a.n,        a.k,        a.transpose_a, a.transpose_b, a.accumulate, a.lda,    a.ldb,
                    a.ldc, a.a_offset, a.b_offset, a.c_offset,    a.batch,       a.a_step,     a.b_step, a.c_step};
    if (c.op.in.size() > 2) return gemm_of_pieces(c, shape);
    if (is_columns(c, 0)) return fp8_wgrad(c, 0, 0, shape);
    if (a.ring > 1) shape.c_offset += member_of(c, a.ring, a.step) * a.m * (a.ldc != 0 ? a.ldc : a.n);
    if (a.batch > 1) return c.kernels.gemm(shape, src(c, 0), src(c, 1), dst(c, 0), c.stream); // one for every head
    if (c.block_scaled_gemm != nullptr &&
        c.block_scaled_gemm(c.block_format, shape, src(c, 0), src(c, 1), dst(c, 0), c.stream))
        return;
    shape.m /= a.runs;
    for (std::int64_t run = 0; run < a.runs; ++run) {
        if (is_fp8(c, 0))
            fp8_gemm(c, shape);
        else
            c.kernels.gemm(shape, src(c, 0), src(c, 1), dst(c, 0), c.stream);
        shape.a_offset += a.run_stride;
        shape.c_offset += shape.m * shape.n;
    }
}

RopeScale rope_scale(const program::FrequencyScale& s) { return {s.factor, s.low, s.high, s.turns, s.magnitude}; }
QueryScale query_scale(const model::QueryScale& s) { return {s.beta, s.positions, s.offset}; }

RopeShape rope_shape(const OpContext& c) {
    const program::RopeAttr& a = std::get<program::RopeAttr>(c.op.attr);
    return {
        a.tokens, a.batch,       a.heads, a.kv_heads,          a.head_dim,    a.rotary_dim, a.theta,
        a.eps,    a.interleaved, a.norm,  rope_scale(a.scale), a.norm_behind, a.v_dim,      query_scale(a.query_scale)};
}

void rope(const OpContext& c) {
    c.kernels.rope(rope_shape(c), src(c, 0), ints(c, 1), src(c, 2), src(c, 3), dst(c, 0), floats_out(c, 1), c.stream);
}

void rope_grad(const OpContext& c) {
    c.kernels.rope_grad(rope_shape(c), src(c, 0), ints(c, 1), src(c, 2), src(c, 3), src(c, 4), floats(c, 5), dst(c, 0),
                        floats_out(c, 1), floats_out(c, 2), c.stream);
}

void mla_rope(const OpContext& c) {
    c.kernels.mla_rope(mla_shape(c), src(c, 0), src(c, 1), src(c, 2), ints(c, 3), dst(c, 0), dst(c, 1), dst(c, 2),
                       c.stream);
}

void mla_rope_grad(const OpContext& c) {
    c.kernels.mla_rope_grad(mla_shape(c), src(c, 0), src(c, 1), src(c, 2), ints(c, 3), dst(c, 0), dst(c, 1), dst(c, 2),
                            c.stream);
}

// Where documents begin lies behind `operands` others.
AttentionShape attention_shape(const OpContext& c, std::size_t operands) {
    const program::AttentionAttr& a = std::get<program::AttentionAttr>(c.op.attr);
    AttentionShape s{a.batch,    a.seq_q,    a.seq_k,    a.heads,    a.kv_heads, a.qk_dim, a.v_dim, a.q_stride,
                     a.k_stride, a.v_stride, a.q_offset, a.k_offset, a.v_offset, a.window, a.scale, a.causal};
    s.spread = a.ring > 1;
    s.merge = a.merge;
    s.deterministic = a.deterministic;
    s.document_start = ints(c, operands);
    s.chunk = a.chunk;
    for (const int run : {0, 1}) {
        s.q_start[run] = plan::run_start(c.position.ring, run, a.ring, a.seq_q);
        s.k_start[run] = plan::run_start((c.position.ring + a.ring - a.step) % a.ring, run, a.ring, a.seq_k);
    }
    return s;
}

// CP by heads leaves each member its part of the heads, and of their sinks.
std::int64_t first_sink(const OpContext& c, std::size_t sinks) {
    const std::int64_t heads = std::get<program::AttentionAttr>(c.op.attr).heads;
    return c.has_input(sinks) && c.input(sinks).elements() > heads ? c.position.heads * heads : 0;
}

void attention(const OpContext& c) {
    if (std::get<program::AttentionAttr>(c.op.attr).picked > 0) return attention_picked(c);
    AttentionShape shape = attention_shape(c, 6);
    shape.largest = c.largest_logits;
    c.kernels.attention(shape, src(c, 0), src(c, 1), src(c, 2), src(c, 3) + first_sink(c, 3), dst(c, 0),
                        floats_out(c, 1), c.stream);
}

void attention_cached(const OpContext& c) {
    c.kernels.attention_cached(attention_shape(c, c.op.in.size()), src(c, 0), src(c, 1), src(c, 2), ints(c, 3),
                               src(c, 4), dst(c, 0), dst(c, 1), dst(c, 2), c.stream);
}

void attention_grad(const OpContext& c) {
    if (std::get<program::AttentionAttr>(c.op.attr).picked > 0) return attention_picked_grad(c);
    float* dsinks = floats_out(c, 3);
    if (dsinks != nullptr) dsinks += first_sink(c, 6);
    c.kernels.attention_grad(attention_shape(c, 8), src(c, 0), src(c, 1), src(c, 2), src(c, 3), src(c, 4), floats(c, 5),
                             src(c, 6) + first_sink(c, 6), dst(c, 0), dst(c, 1), dst(c, 2), dsinks, c.stream);
}

Curve curve(model::Activation function) {
    switch (function) {
    case model::Activation::silu:
        return Curve::silu;
    case model::Activation::gelu:
        return Curve::gelu;
    case model::Activation::quick_gelu:
        return Curve::quick_gelu;
    case model::Activation::relu2:
        return Curve::relu2;
    case model::Activation::gelu_tanh:
        return Curve::gelu_tanh;
    }
    return Curve::silu;
}

ActivationShape activation_shape(const OpContext& c, std::size_t counts) {
    const program::ActivationAttr& a = std::get<program::ActivationAttr>(c.op.attr);
    return {a.rows, a.ffn, curve(a.function), a.gated, groups_of(c, counts), a.limit, a.limit_behind};
}

void activation(const OpContext& c) {
    c.kernels.activation(activation_shape(c, 2), src(c, 0), floats(c, 1), ints(c, 2), dst(c, 0), fp8_out(c, 1),
                         c.stream);
}

void activation_grad(const OpContext& c) {
    if (c.has_output(4))
        return c.kernels.activation_grad_columns(activation_shape(c, 3), src(c, 0), src(c, 1), floats(c, 2), ints(c, 3),
                                                 floats_out(c, 1), fp8_out(c, 3), fp8_columns_out(c, 4),
                                                 fp8_columns_out(c, 2), c.stream);
    c.kernels.activation_grad(activation_shape(c, 3), src(c, 0), src(c, 1), floats(c, 2), ints(c, 3), dst(c, 0),
                              floats_out(c, 1), dst(c, 2), fp8_out(c, 3), c.stream);
}

// A gate is of one value after another, as many as there are for each.
bool is_softplus(const OpContext& c) {
    const auto* gate = std::get_if<program::GateAttr>(&c.op.attr);
    return gate != nullptr && gate->softplus;
}

void sigmoid_scale(const OpContext& c) {
    const std::int64_t gates = c.input(1).elements();
    c.kernels.sigmoid_scale(src(c, 0), src(c, 1), dst(c, 0), gates, c.input(0).elements() / gates, is_softplus(c),
                            c.stream);
}

void sigmoid_scale_grad(const OpContext& c) {
    const std::int64_t gates = c.input(2).elements();
    c.kernels.sigmoid_scale_grad(src(c, 0), src(c, 1), src(c, 2), dst(c, 0), dst(c, 1), gates,
                                 c.input(0).elements() / gates, is_softplus(c), c.stream);
}

void scale_rows(const OpContext& c) {
    c.kernels.scale_rows(src(c, 0), floats(c, 1), ints(c, 2), dst(c, 0), groups_of(c, 2), c.output(0).rows,
                         c.output(0).cols, c.stream);
}

void scale_rows_grad(const OpContext& c) {
    c.kernels.scale_rows_grad(src(c, 0), src(c, 1), floats(c, 2), ints(c, 3), dst(c, 0), floats_out(c, 1),
                              groups_of(c, 3), c.input(0).rows, c.input(0).cols, c.stream);
}

// The share of labels that count lies behind `operands` others.
LossShape loss_shape(const OpContext& c, std::size_t operands) {
    const program::LossAttr& a = std::get<program::LossAttr>(c.op.attr);
    return {a.rows, a.vocab_local, a.vocab, c.position.tensor * a.vocab_local, a.scale, floats(c, operands)};
}

void ce_max(const OpContext& c) { c.kernels.ce_max(loss_shape(c, 1), src(c, 0), floats_out(c, 0), c.stream); }
void ce_sum(const OpContext& c) {
    c.kernels.ce_sum(loss_shape(c, 3), src(c, 0), floats(c, 1), ints(c, 2), floats_out(c, 0), c.stream);
}
void ce_loss(const OpContext& c) {
    c.kernels.ce_loss(loss_shape(c, 2), floats(c, 0), floats(c, 1), floats_out(c, 0), c.stream);
}
void ce_grad(const OpContext& c) {
    c.kernels.ce_grad(loss_shape(c, 4), src(c, 0), floats(c, 1), floats(c, 2), ints(c, 3), dst(c, 0), c.stream);
}
void cross_entropy(const OpContext& c) {
    c.kernels.cross_entropy(loss_shape(c, 2), std::get<program::LossAttr>(c.op.attr).gradient_scale, src(c, 0),
                            ints(c, 1), floats_out(c, 1), floats_out(c, 2), floats_out(c, 3), dst(c, 0), c.stream);
}

void zero(const OpContext& c) { c.kernels.zero(dst(c, 0), c.output(0).elements(), c.stream); }
void sum_squares(const OpContext& c) {
    each_moving_part(c, c.input(0).elements(), [&](const ShardPart& part) {
        c.kernels.sum_squares(src(c, 0) + part.first, floats_out(c, 0), part.count, c.stream);
    });
}

void adamw(const OpContext& c) {
    const AdamwStep step = adamw_step_of(c);
    run_adamw(c.kernels, step, 0, step.elements, c.stream);
}
// The ranks of one process share its cores already.
void adamw_on_host(const OpContext& c) { run_on_host(adamw_step_of(c), 1); }

} // namespace

MlaRopeShape mla_shape(const OpContext& c) {
    const program::MlaRopeAttr& a = std::get<program::MlaRopeAttr>(c.op.attr);
    return {a.tokens,
            a.batch,
            a.heads,
            a.nope,
            a.rope,
            a.v,
            a.kv_lora,
            a.theta,
            a.interleaved,
            rope_scale(a.scale),
            query_scale(a.query_scale)};
}

void add_kernels(Backend& backend) {
    add_routed_kernels(backend);
    add_state_kernels(backend);
    add_sparse_kernels(backend);
    add_fp8_kernels(backend);
    add_muon_kernels(backend);
    const auto set = [&](program::OpKind kind, OpFunction function) {
        backend.table[static_cast<std::size_t>(kind)] = function;
    };
    set(program::OpKind::embedding, embedding);
    set(program::OpKind::embedding_grad, embedding_grad);
    set(program::OpKind::rmsnorm, rmsnorm);
    set(program::OpKind::rmsnorm_grad, rmsnorm_grad);
    set(program::OpKind::heads_squares, heads_squares);
    set(program::OpKind::heads_norm, heads_norm);
    set(program::OpKind::heads_along, heads_along);
    set(program::OpKind::heads_norm_grad, heads_norm_grad);
    set(program::OpKind::value_norm, value_norm);
    set(program::OpKind::value_norm_grad, value_norm_grad);
    set(program::OpKind::scale, scale);
    set(program::OpKind::clip, clip);
    set(program::OpKind::clip_grad, clip_grad);
    set(program::OpKind::add, add);
    set(program::OpKind::bias_add, bias_add);
    set(program::OpKind::copy_columns, copy_columns);
    set(program::OpKind::bias_grad, bias_grad);
    set(program::OpKind::gemm, gemm);
    set(program::OpKind::rope, rope);
    set(program::OpKind::rope_grad, rope_grad);
    set(program::OpKind::mla_rope, mla_rope);
    set(program::OpKind::mla_rope_grad, mla_rope_grad);
    set(program::OpKind::attention, attention);
    set(program::OpKind::attention_cached, attention_cached);
    set(program::OpKind::attention_grad, attention_grad);
    set(program::OpKind::activation, activation);
    set(program::OpKind::activation_grad, activation_grad);
    set(program::OpKind::sigmoid_scale, sigmoid_scale);
    set(program::OpKind::sigmoid_scale_grad, sigmoid_scale_grad);
    set(program::OpKind::scale_rows, scale_rows);
    set(program::OpKind::scale_rows_grad, scale_rows_grad);
    set(program::OpKind::ce_max, ce_max);
    set(program::OpKind::ce_sum, ce_sum);
    set(program::OpKind::ce_loss, ce_loss);
    set(program::OpKind::ce_grad, ce_grad);
    set(program::OpKind::cross_entropy, cross_entropy);
    set(program::OpKind::zero, zero);
    set(program::OpKind::sum_squares, sum_squares);
    set(program::OpKind::adamw, adamw);
    set(program::OpKind::adamw_on_host, adamw_on_host);
}

} // namespace moe::ops
