// Op kinds of sparse attention as calls of a back end's kernels.
#include "engine/ops/operands.hpp"

namespace moe::ops {

namespace {

// Where documents begin lies behind `operands` others.
PickedKeys picked_keys(const OpContext& c, std::int64_t top_k, std::size_t operands) {
    const program::AttentionAttr& a = std::get<program::AttentionAttr>(c.op.attr);
    PickedKeys keys{a.batch, a.seq_q, a.seq_k, top_k, c.position.context, a.parts};
    keys.document_start = ints(c, operands);
    return keys;
}

LatentShape latent_shape(const OpContext& c) {
    const program::AttentionAttr& a = std::get<program::AttentionAttr>(c.op.attr);
    return {picked_keys(c, a.picked, c.op.in.size()), a.heads, a.qk_dim, a.v_dim, a.scale};
}

void pick_keys(const OpContext& c) {
    const program::AttentionAttr& a = std::get<program::AttentionAttr>(c.op.attr);
    IndexShape shape{picked_keys(c, c.output(0).cols, 3), a.heads, a.qk_dim, a.scale};
    shape.keys.positions = ints(c, 4);
    c.kernels.pick_keys(shape, src(c, 0), src(c, 1), src(c, 2), ints_out(c, 0), c.stream);
}

void pick_keys_grad(const OpContext& c) {
    const program::AttentionAttr& a = std::get<program::AttentionAttr>(c.op.attr);
    IndexLossShape shape;
    shape.core = latent_shape(c);
    shape.index = {picked_keys(c, a.picked, 6), a.index.heads, a.index.dim, a.index.scale};
    shape.all_heads = a.index.all_heads;
    shape.all_keys = a.index.all_keys;
    shape.factor = a.index.factor;
    c.kernels.pick_keys_grad(shape, src(c, 0), src(c, 1), src(c, 2), src(c, 3), src(c, 4), ints(c, 5), dst(c, 0),
                             dst(c, 1), dst(c, 2), floats_out(c, 3), floats_out(c, 4), floats_out(c, 5), c.stream);
}

void xlogx(const OpContext& c) {
    c.kernels.xlogx(floats(c, 0), std::get<program::ScaleAttr>(c.op.attr).factor, floats_out(c, 0),
                    c.input(0).elements(), c.stream);
}

void cache_rows(const OpContext& c) {
    c.kernels.cache_rows(src(c, 0), ints(c, 1), dst(c, 0), c.input(0).rows, c.input(0).cols, c.stream);
}

void latent_rope(const OpContext& c) {
    c.kernels.latent_rope(mla_shape(c), src(c, 0), src(c, 1), src(c, 2), src(c, 3), ints(c, 4), dst(c, 0), dst(c, 1),
                          c.stream);
}

void latent_rope_grad(const OpContext& c) {
    c.kernels.latent_rope_grad(mla_shape(c), src(c, 0), src(c, 1), src(c, 2), ints(c, 3), dst(c, 0), dst(c, 1),
                               dst(c, 2), c.stream);
}

} // namespace

void attention_picked(const OpContext& c) {
    LatentShape shape = latent_shape(c);
    shape.largest = c.largest_logits;
    c.kernels.attention_picked(shape, src(c, 0), src(c, 1), ints(c, 3), dst(c, 0), floats_out(c, 1), c.stream);
}

void attention_picked_grad(const OpContext& c) {
    c.kernels.attention_picked_grad(latent_shape(c), src(c, 0), src(c, 1), src(c, 2), src(c, 4), floats(c, 5),
                                    ints(c, 6), dst(c, 0), dst(c, 1), c.stream);
}

// A back end without these kernels has none of these ops, so that a plan which asks for them is refused.
void add_sparse_kernels(Backend& backend) {
    if (backend.kernels->pick_keys == nullptr) return;
    const auto set = [&](program::OpKind kind, OpFunction function) {
        backend.table[static_cast<std::size_t>(kind)] = function;
    };
    set(program::OpKind::pick_keys, pick_keys);
    set(program::OpKind::pick_keys_grad, pick_keys_grad);
    set(program::OpKind::xlogx, xlogx);
    set(program::OpKind::cache_rows, cache_rows);
    set(program::OpKind::latent_rope, latent_rope);
    set(program::OpKind::latent_rope_grad, latent_rope_grad);
}

} // namespace moe::ops
