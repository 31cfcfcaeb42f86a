// Op kinds as calls of a back end's kernels: attributes and operand order of the Program on one side, kernel shapes on
// the other.
#include "engine/backend.hpp"

namespace moe {

namespace {

Type type_of(const Tensor& tensor) { return tensor.dtype == Dtype::bf16 ? Type::bf16 : Type::f32; }

Src src(const OpContext& c, std::size_t i) {
    if (!c.has_input(i)) return {};
    return {c.in[i], type_of(c.input(i))};
}
Dst dst(const OpContext& c, std::size_t i) {
    if (!c.has_output(i)) return {};
    return {c.out[i], type_of(c.output(i))};
}
const float* floats(const OpContext& c, std::size_t i) {
    return c.has_input(i) ? static_cast<const float*>(c.in[i]) : nullptr;
}
float* floats_out(const OpContext& c, std::size_t i) {
    return c.has_output(i) ? static_cast<float*>(c.out[i]) : nullptr;
}
const std::int32_t* ints(const OpContext& c, std::size_t i) {
    return c.has_input(i) ? static_cast<const std::int32_t*>(c.in[i]) : nullptr;
}
std::int32_t* ints_out(const OpContext& c, std::size_t i) {
    return c.has_output(i) ? static_cast<std::int32_t*>(c.out[i]) : nullptr;
}

// Rows of [rows, cols] whatever leading shape the tensor was declared with.
std::int64_t rows_of(const Tensor& tensor, std::int64_t cols) { return tensor.elements() / cols; }

void embedding(const OpContext& c) {
    const Tensor& table = c.input(1);
    c.kernels.embedding(ints(c, 0), src(c, 1), dst(c, 0), c.output(0).rows, table.cols, c.position.tensor * table.rows,
                        table.rows, c.stream);
}

void embedding_grad(const OpContext& c) {
    const Tensor& table = c.output(0);
    c.kernels.embedding_grad(ints(c, 0), src(c, 1), floats_out(c, 0), c.input(1).rows, table.cols,
                             c.position.tensor * table.rows, table.rows, c.stream);
}

void rmsnorm(const OpContext& c) {
    const NormAttr& a = std::get<NormAttr>(c.op.attr);
    c.kernels.rmsnorm(src(c, 0), src(c, 1), dst(c, 0), floats_out(c, 1), a.rows, a.cols, a.stride, a.eps, c.stream);
}

void rmsnorm_grad(const OpContext& c) {
    const NormAttr& a = std::get<NormAttr>(c.op.attr);
    c.kernels.rmsnorm_grad(src(c, 0), src(c, 1), src(c, 2), floats(c, 3), src(c, 4), dst(c, 0), floats_out(c, 1),
                           a.rows, a.cols, a.stride, c.stream);
}

void add(const OpContext& c) { c.kernels.add(src(c, 0), src(c, 1), dst(c, 0), c.output(0).elements(), c.stream); }

void bias_add(const OpContext& c) {
    const std::int64_t cols = c.input(1).elements();
    c.kernels.bias_add(src(c, 0), src(c, 1), dst(c, 0), rows_of(c.input(0), cols), cols, c.stream);
}

void copy_columns(const OpContext& c) {
    const ColumnsAttr& a = std::get<ColumnsAttr>(c.op.attr);
    c.kernels.copy_columns({c.input(0).rows, a.cols, c.input(0).cols, a.from, c.output(0).cols, a.to, a.accumulate},
                           src(c, 0), dst(c, 0), c.stream);
}

void bias_grad(const OpContext& c) {
    const std::int64_t cols = c.output(0).elements();
    c.kernels.bias_grad(src(c, 0), floats_out(c, 0), rows_of(c.input(0), cols), cols, c.stream);
}

// Which TP member's part of the sequence a ring has brought after `step` steps.
std::int64_t member_of(const OpContext& c, int ring, int step) { return (c.position.tensor + ring - step) % ring; }

// A wgrad whose first operand comes in the pieces of a ring.
void gemm_of_pieces(const OpContext& c, GemmShape shape) {
    const int pieces = static_cast<int>(c.op.in.size()) - 1;
    shape.k /= pieces;
    const std::int64_t first = shape.b_offset;
    for (int step = 0; step < pieces; ++step) {
        shape.b_offset = first + member_of(c, pieces, step) * shape.k * shape.n;
        c.kernels.gemm(shape, src(c, step == 0 ? 0 : static_cast<std::size_t>(step) + 1), src(c, 1), dst(c, 0),
                       c.stream);
        shape.accumulate = true;
    }
}

void gemm(const OpContext& c) {
    const GemmAttr& a = std::get<GemmAttr>(c.op.attr);
    GemmShape shape{a.m,   a.n,   a.k,   a.transpose_a, a.transpose_b, a.accumulate,
                    a.lda, a.ldb, a.ldc, a.a_offset,    a.b_offset,    a.c_offset};
    if (c.op.in.size() > 2) return gemm_of_pieces(c, shape);
    if (a.ring > 1) shape.c_offset += member_of(c, a.ring, a.step) * a.m * a.n;
    shape.m /= a.runs;
    for (std::int64_t run = 0; run < a.runs; ++run) {
        c.kernels.gemm(shape, src(c, 0), src(c, 1), dst(c, 0), c.stream);
        shape.a_offset += a.run_stride;
        shape.c_offset += shape.m * shape.n;
    }
}

RopeScale rope_scale(const FrequencyScale& s) { return {s.factor, s.low, s.high, s.turns, s.magnitude}; }

RopeShape rope_shape(const OpContext& c) {
    const RopeAttr& a = std::get<RopeAttr>(c.op.attr);
    return {a.tokens, a.batch, a.heads,       a.kv_heads, a.head_dim,         a.rotary_dim,
            a.theta,  a.eps,   a.interleaved, a.norm,     rope_scale(a.scale)};
}

void rope(const OpContext& c) {
    c.kernels.rope(rope_shape(c), src(c, 0), ints(c, 1), src(c, 2), src(c, 3), dst(c, 0), floats_out(c, 1), c.stream);
}

void rope_grad(const OpContext& c) {
    c.kernels.rope_grad(rope_shape(c), src(c, 0), ints(c, 1), src(c, 2), src(c, 3), src(c, 4), floats(c, 5), dst(c, 0),
                        floats_out(c, 1), floats_out(c, 2), c.stream);
}

MlaRopeShape mla_shape(const OpContext& c) {
    const MlaRopeAttr& a = std::get<MlaRopeAttr>(c.op.attr);
    return {a.tokens, a.batch, a.heads, a.nope, a.rope, a.v, a.kv_lora, a.theta, a.interleaved, rope_scale(a.scale)};
}

void mla_rope(const OpContext& c) {
    c.kernels.mla_rope(mla_shape(c), src(c, 0), src(c, 1), src(c, 2), ints(c, 3), dst(c, 0), dst(c, 1), dst(c, 2),
                       c.stream);
}

void mla_rope_grad(const OpContext& c) {
    c.kernels.mla_rope_grad(mla_shape(c), src(c, 0), src(c, 1), src(c, 2), ints(c, 3), dst(c, 0), dst(c, 1), dst(c, 2),
                            c.stream);
}

AttentionShape attention_shape(const OpContext& c) {
    const AttentionAttr& a = std::get<AttentionAttr>(c.op.attr);
    AttentionShape s{a.batch,    a.seq_q,    a.seq_k,    a.heads,    a.kv_heads, a.qk_dim, a.v_dim, a.q_stride,
                     a.k_stride, a.v_stride, a.q_offset, a.k_offset, a.v_offset, a.window, a.scale, a.causal};
    s.spread = a.ring > 1;
    s.merge = a.merge;
    for (const int run : {0, 1}) {
        s.q_start[run] = run_start(c.position.context, run, a.ring, a.seq_q);
        s.k_start[run] = run_start((c.position.context + a.ring - a.step) % a.ring, run, a.ring, a.seq_k);
    }
    return s;
}

// CP by heads leaves each member its part of the heads, and of their sinks.
std::int64_t first_sink(const OpContext& c, std::size_t sinks) {
    const std::int64_t heads = std::get<AttentionAttr>(c.op.attr).heads;
    return c.has_input(sinks) && c.input(sinks).elements() > heads ? c.position.context * heads : 0;
}

void attention(const OpContext& c) {
    c.kernels.attention(attention_shape(c), src(c, 0), src(c, 1), src(c, 2), src(c, 3) + first_sink(c, 3), dst(c, 0),
                        floats_out(c, 1), c.stream);
}

void attention_grad(const OpContext& c) {
    float* dsinks = floats_out(c, 3);
    if (dsinks != nullptr) dsinks += first_sink(c, 6);
    c.kernels.attention_grad(attention_shape(c), src(c, 0), src(c, 1), src(c, 2), src(c, 3), src(c, 4), floats(c, 5),
                             src(c, 6) + first_sink(c, 6), dst(c, 0), dst(c, 1), dst(c, 2), dsinks, c.stream);
}

int groups_of(const OpContext& c, std::size_t counts) {
    return c.has_input(counts) ? static_cast<int>(c.input(counts).elements()) : 0;
}

Curve curve(Activation function) {
    switch (function) {
    case Activation::silu:
        return Curve::silu;
    case Activation::gelu:
        return Curve::gelu;
    case Activation::quick_gelu:
        return Curve::quick_gelu;
    case Activation::relu2:
        return Curve::relu2;
    }
    return Curve::silu;
}

ActivationShape activation_shape(const OpContext& c, std::size_t counts) {
    const ActivationAttr& a = std::get<ActivationAttr>(c.op.attr);
    return {a.rows, a.ffn, curve(a.function), a.gated, groups_of(c, counts), a.limit};
}

void activation(const OpContext& c) {
    c.kernels.activation(activation_shape(c, 2), src(c, 0), floats(c, 1), ints(c, 2), dst(c, 0), c.stream);
}

void activation_grad(const OpContext& c) {
    c.kernels.activation_grad(activation_shape(c, 3), src(c, 0), src(c, 1), floats(c, 2), ints(c, 3), dst(c, 0),
                              floats_out(c, 1), c.stream);
}

void sigmoid_scale(const OpContext& c) {
    c.kernels.sigmoid_scale(src(c, 0), src(c, 1), dst(c, 0), c.output(0).rows, c.output(0).cols, c.stream);
}

void sigmoid_scale_grad(const OpContext& c) {
    c.kernels.sigmoid_scale_grad(src(c, 0), src(c, 1), src(c, 2), dst(c, 0), dst(c, 1), c.input(0).rows,
                                 c.input(0).cols, c.stream);
}

void scale_rows(const OpContext& c) {
    c.kernels.scale_rows(src(c, 0), floats(c, 1), ints(c, 2), dst(c, 0), groups_of(c, 2), c.output(0).rows,
                         c.output(0).cols, c.stream);
}

void scale_rows_grad(const OpContext& c) {
    c.kernels.scale_rows_grad(src(c, 0), src(c, 1), floats(c, 2), ints(c, 3), dst(c, 0), floats_out(c, 1),
                              groups_of(c, 3), c.input(0).rows, c.input(0).cols, c.stream);
}

Score score_of(const Router& router) {
    return router.scoring == Scoring::softmax   ? Score::softmax
           : router.scoring == Scoring::sigmoid ? Score::sigmoid
                                                : Score::sqrt_softplus;
}

RouterShape router_shape(const OpContext& c) {
    const RouterAttr& a = std::get<RouterAttr>(c.op.attr);
    const Router& r = a.router;
    const Score score = score_of(r);
    return {a.tokens,
            a.experts,
            a.top_k,
            score,
            r.softmax_after_top_k,
            r.normalize,
            r.scale,
            r.groups,
            r.groups_kept,
            r.group_score_top,
            c.position.tensor * a.tokens,
            a.batch};
}

void router(const OpContext& c) {
    c.kernels.router(router_shape(c), src(c, 0), src(c, 1), ints(c, 2), ints_out(c, 0), floats_out(c, 1), c.stream);
}

void router_grad(const OpContext& c) {
    c.kernels.router_grad(router_shape(c), floats(c, 0), src(c, 1), ints(c, 2), dst(c, 0), c.stream);
}

BalanceShape balance_shape(const OpContext& c) {
    const BalanceAttr& a = std::get<BalanceAttr>(c.op.attr);
    BalanceShape shape;
    shape.router.tokens = a.tokens;
    shape.router.experts = a.experts;
    shape.router.top_k = a.top_k;
    shape.router.score = score_of(a.router);
    shape.sequences = a.sequences;
    shape.aux = a.aux;
    shape.z = a.z;
    return shape;
}

void router_load(const OpContext& c) { c.kernels.router_load(balance_shape(c), src(c, 0), floats_out(c, 0), c.stream); }
void router_loss(const OpContext& c) {
    c.kernels.router_loss(balance_shape(c), src(c, 0), floats(c, 1), floats_out(c, 0), c.stream);
}
void router_loss_grad(const OpContext& c) {
    c.kernels.router_loss_grad(balance_shape(c), src(c, 0), floats(c, 1), src(c, 2), dst(c, 0), c.stream);
}
void add_counts(const OpContext& c) {
    c.kernels.add_counts(ints(c, 0), floats_out(c, 0), static_cast<int>(c.output(0).elements()), c.stream);
}
void expert_bias(const OpContext& c) {
    const ExpertBiasAttr& a = std::get<ExpertBiasAttr>(c.op.attr);
    c.kernels.expert_bias({a.experts, a.offset, c.shard_offset, c.output(0).elements(), a.rate}, floats(c, 0),
                          floats(c, 1), floats_out(c, 0), dst(c, 1), c.stream);
}
void local_experts(const OpContext& c) {
    const RowsAttr& a = std::get<RowsAttr>(c.op.attr);
    const int local = a.experts / a.ep;
    c.kernels.local_experts(ints(c, 0), ints_out(c, 0), c.input(0).elements(), c.position.expert * local, local,
                            c.stream);
}
void drop_copies(const OpContext& c) {
    const DropAttr& a = std::get<DropAttr>(c.op.attr);
    c.kernels.drop_copies({a.tokens, a.capacity, a.experts, a.top_k, a.policy == DropPolicy::probs}, ints(c, 0),
                          floats(c, 1), ints_out(c, 0), floats_out(c, 1), c.stream);
}

void permute_map(const OpContext& c) {
    const PermuteAttr& a = std::get<PermuteAttr>(c.op.attr);
    c.kernels.permute_map(ints(c, 0), ints_out(c, 0), ints_out(c, 1), a.tokens, a.top_k, a.experts, c.stream);
}

PermuteShape permute_shape(const OpContext& c) {
    const PermuteAttr& a = std::get<PermuteAttr>(c.op.attr);
    return {a.tokens, a.cols, a.top_k, a.per_copy};
}

void permute(const OpContext& c) { c.kernels.permute(permute_shape(c), src(c, 0), ints(c, 1), dst(c, 0), c.stream); }
void unpermute(const OpContext& c) {
    c.kernels.unpermute(permute_shape(c), src(c, 0), ints(c, 1), dst(c, 0), c.stream);
}

RowsShape rows_shape(const OpContext& c) {
    const RowsAttr& a = std::get<RowsAttr>(c.op.attr);
    const int local = a.experts / a.ep;
    return {a.cols, c.input(0).rows, a.experts, a.ep, a.etp, c.position.expert * local, local};
}

void expert_counts(const OpContext& c) {
    const RowsAttr& a = std::get<RowsAttr>(c.op.attr);
    const int local = a.experts / a.ep;
    c.kernels.expert_counts(ints(c, 0), ints_out(c, 0), a.ep * a.etp, a.experts, c.position.expert * local, local,
                            c.stream);
}

void fit_rows(const OpContext& c) {
    const RowsAttr& a = std::get<RowsAttr>(c.op.attr);
    c.kernels.fit_rows({c.input(1).elements(), a.capacity, a.experts, a.ep, a.etp}, ints(c, 0), ints(c, 1),
                       ints_out(c, 0), ints_out(c, 1), floats_out(c, 2), c.stream);
}

void sort_rows(const OpContext& c) { c.kernels.sort_rows(rows_shape(c), src(c, 0), ints(c, 1), dst(c, 0), c.stream); }
void unsort_rows(const OpContext& c) {
    c.kernels.unsort_rows(rows_shape(c), src(c, 0), ints(c, 1), dst(c, 0), c.stream);
}

void grouped_gemm(const OpContext& c) {
    const GroupedGemmAttr& a = std::get<GroupedGemmAttr>(c.op.attr);
    const GroupedProduct product = a.mode == GroupedMode::forward ? GroupedProduct::forward
                                   : a.mode == GroupedMode::dgrad ? GroupedProduct::dgrad
                                                                  : GroupedProduct::wgrad;
    c.kernels.grouped_gemm({product, a.groups, a.n, a.k, a.capacity}, src(c, 0), src(c, 1), ints(c, 2), dst(c, 0),
                           c.stream);
}

float bias_share(const OpContext& c) { return static_cast<float>(std::get<GroupedBiasAttr>(c.op.attr).share); }

void grouped_bias_add(const OpContext& c) {
    const int groups = static_cast<int>(c.input(2).elements());
    const Tensor& y = c.output(0);
    c.kernels.grouped_bias_add(src(c, 0), src(c, 1), ints(c, 2), floats(c, 3), dst(c, 0), groups, y.cols, y.rows,
                               bias_share(c), c.stream);
}

void grouped_bias_grad(const OpContext& c) {
    const int groups = static_cast<int>(c.input(1).elements());
    const Tensor& dy = c.input(0);
    c.kernels.grouped_bias_grad(src(c, 0), ints(c, 1), src(c, 2), floats(c, 3), floats_out(c, 0), floats_out(c, 1),
                                groups, dy.cols, dy.rows, bias_share(c), c.stream);
}

LossShape loss_shape(const OpContext& c) {
    const LossAttr& a = std::get<LossAttr>(c.op.attr);
    return {a.rows, a.vocab_local, a.vocab, c.position.tensor * a.vocab_local, a.scale};
}

void ce_max(const OpContext& c) { c.kernels.ce_max(loss_shape(c), src(c, 0), floats_out(c, 0), c.stream); }
void ce_sum(const OpContext& c) {
    c.kernels.ce_sum(loss_shape(c), src(c, 0), floats(c, 1), ints(c, 2), floats_out(c, 0), c.stream);
}
void ce_loss(const OpContext& c) {
    c.kernels.ce_loss(loss_shape(c), floats(c, 0), floats(c, 1), floats_out(c, 0), c.stream);
}
void ce_grad(const OpContext& c) {
    c.kernels.ce_grad(loss_shape(c), src(c, 0), floats(c, 1), floats(c, 2), ints(c, 3), dst(c, 0), c.stream);
}

void zero(const OpContext& c) { c.kernels.zero(dst(c, 0), c.output(0).elements(), c.stream); }
void sum_squares(const OpContext& c) {
    c.kernels.sum_squares(src(c, 0), floats_out(c, 0), c.input(0).elements(), c.stream);
}

void adamw(const OpContext& c) {
    const AdamAttr& a = std::get<AdamAttr>(c.op.attr);
    c.kernels.adamw({a.elements, c.shard_offset, a.decayed}, floats(c, 0), floats(c, 1), floats(c, 2), floats(c, 6),
                    floats_out(c, 0), dst(c, 1), dst(c, 2), dst(c, 3), c.stream);
}

} // namespace

void add_kernels(Backend& backend) {
    const auto set = [&](OpKind kind, OpFunction function) {
        backend.table[static_cast<std::size_t>(kind)] = function;
    };
    set(OpKind::embedding, embedding);
    set(OpKind::embedding_grad, embedding_grad);
    set(OpKind::rmsnorm, rmsnorm);
    set(OpKind::rmsnorm_grad, rmsnorm_grad);
    set(OpKind::add, add);
    set(OpKind::bias_add, bias_add);
    set(OpKind::copy_columns, copy_columns);
    set(OpKind::bias_grad, bias_grad);
    set(OpKind::gemm, gemm);
    set(OpKind::rope, rope);
    set(OpKind::rope_grad, rope_grad);
    set(OpKind::mla_rope, mla_rope);
    set(OpKind::mla_rope_grad, mla_rope_grad);
    set(OpKind::attention, attention);
    set(OpKind::attention_grad, attention_grad);
    set(OpKind::activation, activation);
    set(OpKind::activation_grad, activation_grad);
    set(OpKind::sigmoid_scale, sigmoid_scale);
    set(OpKind::sigmoid_scale_grad, sigmoid_scale_grad);
    set(OpKind::scale_rows, scale_rows);
    set(OpKind::scale_rows_grad, scale_rows_grad);
    set(OpKind::router, router);
    set(OpKind::router_grad, router_grad);
    set(OpKind::router_load, router_load);
    set(OpKind::router_loss, router_loss);
    set(OpKind::router_loss_grad, router_loss_grad);
    set(OpKind::add_counts, add_counts);
    set(OpKind::expert_bias, expert_bias);
    set(OpKind::drop_copies, drop_copies);
    set(OpKind::local_experts, local_experts);
    set(OpKind::permute_map, permute_map);
    set(OpKind::permute, permute);
    set(OpKind::unpermute, unpermute);
    set(OpKind::expert_counts, expert_counts);
    set(OpKind::fit_rows, fit_rows);
    set(OpKind::sort_rows, sort_rows);
    set(OpKind::unsort_rows, unsort_rows);
    set(OpKind::grouped_gemm, grouped_gemm);
    set(OpKind::grouped_bias_add, grouped_bias_add);
    set(OpKind::grouped_bias_grad, grouped_bias_grad);
    set(OpKind::ce_max, ce_max);
    set(OpKind::ce_sum, ce_sum);
    set(OpKind::ce_loss, ce_loss);
    set(OpKind::ce_grad, ce_grad);
    set(OpKind::zero, zero);
    set(OpKind::sum_squares, sum_squares);
    set(OpKind::adamw, adamw);
}

} // namespace moe
