// Op kinds of routed tokens as calls of a back end's kernels: router and its losses, permutation, experts.
#include "engine/ops/operands.hpp"

namespace moe::ops {

namespace {

Score score_of(const model::Router& router) {
    return router.scoring == model::Scoring::softmax   ? Score::softmax
           : router.scoring == model::Scoring::sigmoid ? Score::sigmoid
                                                       : Score::sqrt_softplus;
}

RouterShape router_shape(const OpContext& c) {
    const program::RouterAttr& a = std::get<program::RouterAttr>(c.op.attr);
    const model::Router& r = a.router;
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
            a.batch,
            r.mixer};
}

void sinkhorn(const OpContext& c) {
    const program::RouterAttr& a = std::get<program::RouterAttr>(c.op.attr);
    c.kernels.sinkhorn({a.tokens, a.experts, a.top_k}, src(c, 0), ints_out(c, 0), c.stream);
}

void jitter(const OpContext& c) {
    const program::JitterAttr& a = std::get<program::JitterAttr>(c.op.attr);
    c.kernels.jitter({a.tokens, a.cols, c.position.tensor * a.tokens, a.batch, a.layer, a.eps}, src(c, 0), ints(c, 1),
                     ints(c, 2), dst(c, 0), c.stream);
}

void router(const OpContext& c) {
    c.kernels.router(router_shape(c), src(c, 0), src(c, 1), {ints(c, 2), ints(c, 3)}, ints_out(c, 0), floats_out(c, 1),
                     c.stream);
}

void router_grad(const OpContext& c) {
    c.kernels.router_grad(router_shape(c), floats(c, 0), src(c, 1), ints(c, 2), dst(c, 0), c.stream);
}

void expert_scale(const OpContext& c) {
    c.kernels.expert_scale(floats(c, 0), ints(c, 1), src(c, 2), floats_out(c, 0), c.output(0).elements(),
                           static_cast<int>(c.input(2).elements()), c.stream);
}

void expert_scale_grad(const OpContext& c) {
    c.kernels.expert_scale_grad(floats(c, 0), floats(c, 1), ints(c, 2), src(c, 3), floats_out(c, 0), floats_out(c, 1),
                                c.output(0).elements(), static_cast<int>(c.input(3).elements()), c.stream);
}

BalanceShape balance_shape(const OpContext& c) {
    const program::BalanceAttr& a = std::get<program::BalanceAttr>(c.op.attr);
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
    const program::ExpertBiasAttr& a = std::get<program::ExpertBiasAttr>(c.op.attr);
    const std::int64_t first = a.offset - c.shard_offset; // in this rank's shard
    for (const ShardPart& part : c.parts)
        if (part.frozen && first < part.first + part.count && first + a.experts > part.first) return;
    c.kernels.expert_bias({a.experts, a.offset, c.shard_offset, c.output(0).elements(), a.rate}, floats(c, 0),
                          floats(c, 1), floats(c, 2), floats(c, 3), floats_out(c, 0), dst(c, 1), c.stream);
}
void local_experts(const OpContext& c) {
    const program::RowsAttr& a = std::get<program::RowsAttr>(c.op.attr);
    const int local = a.experts / a.ep;
    c.kernels.local_experts(ints(c, 0), ints_out(c, 0), c.input(0).elements(), first_expert(c, a), local, c.stream);
}
DomainShape domain_shape(const OpContext& c, std::int64_t tokens) {
    const program::RowsAttr& a = std::get<program::RowsAttr>(c.op.attr);
    return {tokens, a.capacity, static_cast<int>(c.input(0).cols), a.experts, a.ep, c.position.expert_domain};
}
void token_domains(const OpContext& c) {
    c.kernels.token_domains(domain_shape(c, c.input(0).rows), ints(c, 0), ints_out(c, 0), ints_out(c, 1),
                            floats_out(c, 2), c.stream);
}
void domain_experts(const OpContext& c) {
    c.kernels.domain_experts(domain_shape(c, 0), ints(c, 0), ints(c, 1), ints_out(c, 0), c.stream);
}
void drop_copies(const OpContext& c) {
    const program::DropAttr& a = std::get<program::DropAttr>(c.op.attr);
    DropShape s{a.tokens,   a.rivals,  0,       a.sequences,
                a.capacity, a.experts, a.top_k, a.policy == plan::DropPolicy::probs};
    if (s.rivals > s.tokens) s.first = (c.position.context * a.tensor_ranks + c.position.tensor) * s.tokens;
    c.kernels.drop_copies(s, ints(c, 0), floats(c, 1), ints(c, 2), ints_out(c, 0), floats_out(c, 1), c.stream);
}

void permute_map(const OpContext& c) {
    const program::PermuteAttr& a = std::get<program::PermuteAttr>(c.op.attr);
    std::int32_t* filled = a.padded > 0 ? ints_out(c, 2) : nullptr;
    c.kernels.permute_map(ints(c, 0), ints_out(c, 0), ints_out(c, 1), filled, a.tokens, a.top_k, a.experts, a.padded,
                          c.stream);
}

PermuteShape permute_shape(const OpContext& c) {
    const program::PermuteAttr& a = std::get<program::PermuteAttr>(c.op.attr);
    return {a.tokens, a.cols, a.top_k, a.per_copy, a.padded * a.experts};
}

// Quantized rows move four elements at a time, their scales behind them.
void permute_quantized(const OpContext& c) {
    const Fp8Rows from = fp8(c, 0), to = fp8_out(c, 0);
    PermuteShape shape = permute_shape(c);
    const std::int64_t blocks = scale_blocks(shape.cols);
    shape.cols /= 4;
    c.kernels.permute(shape, {from.data, Type::f32}, ints(c, 1), {to.data, Type::f32}, c.stream);
    shape.cols = blocks;
    c.kernels.permute(shape, {from.scale, Type::f32}, ints(c, 1), {to.scale, Type::f32}, c.stream);
}

// Tokens lie in the caches, so that columns are made of them, too, and not of the rows that are moved beside.
void permute_columns(const OpContext& c) {
    if (c.has_output(0)) permute_quantized(c);
    const program::Tensor& rows = c.output(2);
    const FilledRows filled{rows.rows, c.input(0).cols, groups_of(c, 2),
                            std::get<program::PermuteAttr>(c.op.attr).e5m2};
    c.kernels.permute_columns(permute_shape(c), filled, fp8(c, 0), ints(c, 1), ints(c, 2), ints_out(c, 2),
                              fp8_columns_out(c, 1), c.stream);
}

void permute(const OpContext& c) {
    if (c.has_output(1)) return permute_columns(c);
    if (is_fp8(c, 0)) return permute_quantized(c);
    c.kernels.permute(permute_shape(c), src(c, 0), ints(c, 1), dst(c, 0), c.stream);
}
void unpermute(const OpContext& c) {
    c.kernels.unpermute(permute_shape(c), src(c, 0), ints(c, 1), dst(c, 0), c.stream);
}

RowsShape rows_shape(const OpContext& c) {
    const program::RowsAttr& a = std::get<program::RowsAttr>(c.op.attr);
    const int local = a.experts / a.ep;
    return {a.cols, c.input(0).rows, a.experts, a.ep, a.etp, first_expert(c, a), local};
}

void expert_counts(const OpContext& c) {
    const program::RowsAttr& a = std::get<program::RowsAttr>(c.op.attr);
    const int local = a.experts / a.ep;
    c.kernels.expert_counts(ints(c, 0), ints_out(c, 0), a.ep * a.etp, a.experts, first_expert(c, a), local, c.stream);
}

void fit_rows(const OpContext& c) {
    const program::RowsAttr& a = std::get<program::RowsAttr>(c.op.attr);
    c.kernels.fit_rows({c.input(1).elements(), a.capacity, a.experts, a.ep, a.etp}, ints(c, 0), ints(c, 1),
                       ints_out(c, 0), ints_out(c, 1), floats_out(c, 2), c.stream);
}

void sort_rows(const OpContext& c) { c.kernels.sort_rows(rows_shape(c), src(c, 0), ints(c, 1), dst(c, 0), c.stream); }
void unsort_rows(const OpContext& c) {
    c.kernels.unsort_rows(rows_shape(c), src(c, 0), ints(c, 1), dst(c, 0), c.stream);
}

void grouped_gemm(const OpContext& c) {
    if (is_fp8(c, 0)) return fp8_grouped_gemm(c);
    if (is_columns(c, 0)) return fp8_grouped_wgrad(c);
    const program::GroupedGemmAttr& a = std::get<program::GroupedGemmAttr>(c.op.attr);
    const GroupedProduct product = a.mode == program::GroupedMode::forward ? GroupedProduct::forward
                                   : a.mode == program::GroupedMode::dgrad ? GroupedProduct::dgrad
                                                                           : GroupedProduct::wgrad;
    const GroupedShape shape{product, a.groups, a.n, a.k, a.capacity, a.accumulate, c.reserved_sms};
    c.kernels.grouped_gemm(shape, src(c, 0), src(c, 1), ints(c, 2), dst(c, 0), c.stream);
}

float bias_share(const OpContext& c) { return static_cast<float>(std::get<program::GroupedBiasAttr>(c.op.attr).share); }

void grouped_bias_add(const OpContext& c) {
    const int groups = static_cast<int>(c.input(2).elements());
    const program::Tensor& y = c.output(0);
    c.kernels.grouped_bias_add(src(c, 0), src(c, 1), ints(c, 2), floats(c, 3), dst(c, 0), groups, y.cols, y.rows,
                               bias_share(c), c.stream);
}

void grouped_bias_grad(const OpContext& c) {
    const int groups = static_cast<int>(c.input(1).elements());
    const program::Tensor& dy = c.input(0);
    c.kernels.grouped_bias_grad(src(c, 0), ints(c, 1), src(c, 2), floats(c, 3), floats_out(c, 0), floats_out(c, 1),
                                groups, dy.cols, dy.rows, bias_share(c), c.stream);
}

} // namespace

void add_routed_kernels(Backend& backend) {
    const auto set = [&](program::OpKind kind, OpFunction function) {
        backend.table[static_cast<std::size_t>(kind)] = function;
    };
    set(program::OpKind::sinkhorn, sinkhorn);
    set(program::OpKind::jitter, jitter);
    set(program::OpKind::router, router);
    set(program::OpKind::router_grad, router_grad);
    set(program::OpKind::expert_scale, expert_scale);
    set(program::OpKind::expert_scale_grad, expert_scale_grad);
    set(program::OpKind::router_load, router_load);
    set(program::OpKind::router_loss, router_loss);
    set(program::OpKind::router_loss_grad, router_loss_grad);
    set(program::OpKind::add_counts, add_counts);
    set(program::OpKind::expert_bias, expert_bias);
    set(program::OpKind::drop_copies, drop_copies);
    set(program::OpKind::local_experts, local_experts);
    set(program::OpKind::token_domains, token_domains);
    set(program::OpKind::domain_experts, domain_experts);
    set(program::OpKind::permute_map, permute_map);
    set(program::OpKind::permute, permute);
    set(program::OpKind::unpermute, unpermute);
    set(program::OpKind::expert_counts, expert_counts);
    set(program::OpKind::fit_rows, fit_rows);
    set(program::OpKind::sort_rows, sort_rows);
    set(program::OpKind::unsort_rows, unsort_rows);
    set(program::OpKind::grouped_gemm, grouped_gemm);
    set(program::OpKind::grouped_bias_add, grouped_bias_add);
    set(program::OpKind::grouped_bias_grad, grouped_bias_grad);
}

} // namespace moe::ops
