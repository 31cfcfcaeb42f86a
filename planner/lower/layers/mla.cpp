// Multi-head latent attention (DeepSeek-V2/V3, Kimi-K2), and queries of a latent beside plain keys (Step-3).
#include "planner/lower/layers/layers.hpp"

#include <algorithm>
#include <cmath>

namespace moe::layers {

// The published models' code builds the latents' norms with their default epsilon, whatever rms_norm_eps says
// (transformers 5.23, modeling_deepseek_v2.py and modeling_deepseek_v3.py).
constexpr double latent_eps = 1e-6;

// DeepSeek's code applies mscale_all_dim to the logits and divides it out of the rotated columns again.
double softmax_scale(const model::RopeScaling& scaling) {
    if (scaling.type.empty() || scaling.mscale_all_dim == 0.0) return 1.0;
    const double m = scaling.factor <= 1.0 ? 1.0 : 0.1 * scaling.mscale_all_dim * std::log(scaling.factor) + 1.0;
    return m * m;
}

// Latents are projected from the local tokens (replicated weights) and gathered over TP before the head-sharded
// up-projections. The key/value latent is gathered before its norm, one collective for latent and rotary key together:
// the norm's weight gradient is then a partial sum over heads, which the gradient group (it holds TP) adds up.
std::pair<program::TensorId, program::TensorId> AttentionLayer::mla_latents(emit::Builder& b,
                                                                            program::TensorId normed) {
    b.module = program::Module::attn_in;
    program::TensorId q_in = normed;
    if (a_.q_lora > 0) {
        emit::bind(b, q_down_, key_ + ".q_down", a_.q_lora, model_.hidden);
        q_down_.name = "q_down";
        const program::TensorId down = emit::linear_forward(b, q_down_, normed, b.activation_dtype());
        q_norm_.key = key_ + ".q_norm";
        q_norm_.eps = latent_eps;
        q_in = q_norm_.forward(b, down, a_.q_lora, "q_norm");
    }
    const std::int64_t kv_width = a_.kv_lora + a_.rope_dim;
    emit::bind(b, kv_down_, key_ + ".kv_down", kv_width, model_.hidden);
    kv_down_.name = "kv_down";
    const program::TensorId kv_down = emit::linear_forward(b, kv_down_, normed, b.activation_dtype());
    kv_down_full_ = b.gather_tokens(kv_down, "kv_down_full");
    kv_norm_.key = key_ + ".kv_norm";
    kv_norm_.eps = latent_eps;
    return {q_in, kv_norm_.forward(b, kv_down_full_, a_.kv_lora, "kv_norm")};
}

program::TensorId AttentionLayer::mla_queries(emit::Builder& b, program::TensorId q_in) {
    const int tp = b.plan().tp;
    b.module = program::Module::mla_up_proj;
    emit::bind(b, q_up_, key_ + ".q_up", static_cast<std::int64_t>(a_.heads / tp) * a_.qk_dim,
               a_.q_lora > 0 ? a_.q_lora : model_.hidden);
    q_up_.name = "q_up";
    q_up_.gather = tp > 1;
    return emit::linear_forward(b, q_up_, q_in, b.activation_dtype());
}

program::TensorId AttentionLayer::mla_core(emit::Builder& b, program::TensorId normed) {
    const std::int64_t tokens = b.gathered_tokens(), heads = a_.heads / b.plan().tp, nope = a_.qk_dim - a_.rope_dim;
    const auto [q_in, kv_in] = mla_latents(b, normed);
    const program::TensorId q = mla_queries(b, q_in);
    emit::bind(b, kv_up_, key_ + ".kv_up", heads * (nope + a_.v_dim), a_.kv_lora);
    kv_up_.name = "kv_up";
    const program::TensorId kv = emit::linear_forward(b, kv_up_, kv_in, b.activation_dtype());

    const model::Rope rope = model_.rope_of(a_);
    mla_rope_ = {tokens,
                 rope_batch(b),
                 static_cast<int>(heads),
                 static_cast<int>(nope),
                 a_.rope_dim,
                 a_.v_dim,
                 a_.kv_lora,
                 rope.theta,
                 model_.rope_interleaved,
                 program::frequency_scale(rope, a_.rope_dim),
                 a_.query_scale};
    const program::TensorId q_rope = b.activation("q", tokens, heads * a_.qk_dim);
    const program::TensorId k = b.activation("k", tokens, heads * a_.qk_dim);
    const program::TensorId v = b.activation("v", tokens, heads * a_.v_dim);
    b.emit(program::OpKind::mla_rope, {q, kv, kv_down_full_, rope_positions(b)}, {q_rope, k, v}, mla_rope_);

    program::AttentionAttr attr;
    attr.batch = b.plan().mbs;
    attr.seq_q = attr.seq_k = b.plan().seq / b.plan().cp;
    attr.heads = attr.kv_heads = static_cast<int>(heads);
    attr.qk_dim = a_.qk_dim;
    attr.v_dim = a_.v_dim;
    attr.q_stride = attr.k_stride = heads * a_.qk_dim;
    attr.v_stride = heads * a_.v_dim;
    attr.scale = softmax_scale(rope.scaling) / std::sqrt(static_cast<double>(a_.qk_dim));
    return attend(b, q_rope, k, v, attr, program::no_tensor);
}

program::TensorId AttentionLayer::mla_core_backward(emit::Builder& b, program::TensorId doutput) {
    const std::int64_t tokens = b.gathered_tokens();
    const auto width = [&](program::TensorId x) {
        return b.at(x).elements() / tokens;
    }; // columns per token of this rank's heads
    const program::TensorId dq_rope = b.activation("dq_rope", tokens, width(q_));
    const program::TensorId dk = b.activation("dk", tokens, width(k_));
    const program::TensorId dv = b.activation("dv", tokens, width(v_));
    attend_backward(b, doutput, dq_rope, dk, dv);

    b.module = program::Module::mla_up_proj;
    const program::TensorId dq = b.activation("dq", tokens, width(q_));
    const program::TensorId dkv = b.activation("dkv", tokens, kv_up_.weight.n);
    const program::TensorId dkv_down_full = b.activation("dkv_down_full", tokens, a_.kv_lora + a_.rope_dim);
    b.emit(program::OpKind::mla_rope_grad, {dq_rope, dk, dv, rope_positions(b)}, {dq, dkv, dkv_down_full}, mla_rope_);
    const program::TensorId dkv_in = emit::linear_backward(b, kv_up_, dkv);
    return mla_latents_backward(b, emit::linear_backward(b, q_up_, dq), dkv_in, dkv_down_full);
}

program::TensorId AttentionLayer::mla_latents_backward(emit::Builder& b, program::TensorId dq_in,
                                                       program::TensorId dkv_in, program::TensorId dkv_down_full) {
    b.module = program::Module::attn_in;
    kv_norm_.backward(b, dkv_in, program::no_tensor, dkv_down_full);
    const program::TensorId dkv_down = b.scatter_tokens(dkv_down_full, "dkv_down");
    program::TensorId dnormed = emit::linear_backward(b, kv_down_, dkv_down);
    if (a_.q_lora > 0) {
        const program::TensorId ddown = q_norm_.backward(b, dq_in);
        dnormed = b.add(dnormed, emit::linear_backward(b, q_down_, ddown), "dattn_norm");
    } else {
        dnormed = b.add(dnormed, dq_in, "dattn_norm");
    }
    return dnormed;
}

program::TensorId AttentionLayer::with_latent_queries(emit::Builder& b, program::TensorId normed,
                                                      program::TensorId kv) {
    const int tp = b.plan().tp;
    const std::int64_t tokens = b.gathered_tokens(), queries = std::int64_t{a_.heads / tp} * a_.qk_dim,
                       keys = b.at(kv).cols;
    emit::bind(b, q_down_, key_ + ".q_down", a_.q_lora, model_.hidden);
    q_down_.name = "q_down";
    const program::TensorId down = emit::linear_forward(b, q_down_, normed, b.activation_dtype());
    q_norm_.key = key_ + ".q_latent_norm";
    const program::TensorId latent = q_norm_.forward(b, down, a_.q_lora, "q_latent");
    emit::bind(b, q_up_, key_ + ".q_up", queries, a_.q_lora);
    q_up_.name = "q_up";
    q_up_.gather = tp > 1;
    const program::TensorId q = emit::linear_forward(b, q_up_, latent, b.activation_dtype());
    const program::TensorId packed = b.activation("qkv_packed", tokens, queries + keys);
    b.emit(program::OpKind::copy_columns, {q}, {packed}, program::ColumnsAttr{queries, 0, 0, false}).bytes =
        2.0 * b.at(q).expected_bytes();
    b.emit(program::OpKind::copy_columns, {kv}, {packed}, program::ColumnsAttr{keys, 0, queries, false}).bytes =
        2.0 * b.at(kv).expected_bytes();
    return packed;
}

program::TensorId AttentionLayer::latent_queries_backward(emit::Builder& b, program::TensorId dqkv) {
    const std::int64_t tokens = b.gathered_tokens(), queries = q_up_.weight.n, keys = b.at(dqkv).cols - queries;
    const program::TensorId dq = b.activation("dq_apart", tokens, queries),
                            dkv = b.activation("dkv_apart", tokens, keys);
    b.emit(program::OpKind::copy_columns, {dqkv}, {dq}, program::ColumnsAttr{queries, 0, 0, false}).bytes =
        2.0 * b.at(dq).expected_bytes();
    b.emit(program::OpKind::copy_columns, {dqkv}, {dkv}, program::ColumnsAttr{keys, queries, 0, false}).bytes =
        2.0 * b.at(dkv).expected_bytes();
    const program::TensorId dnormed = emit::linear_backward(b, qkv_, dkv);
    const program::TensorId dlatent = q_norm_.backward(b, emit::linear_backward(b, q_up_, dq));
    return b.add(dnormed, emit::linear_backward(b, q_down_, dlatent), "dattn_norm");
}

} // namespace moe::layers
