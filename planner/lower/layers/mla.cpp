// Multi-head latent attention (DeepSeek-V2/V3, Kimi-K2), and linear attention that is only priced.
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

// Projections of the kinds that no engine of ours runs yet, lumped into one matrix on each side of the mixer with the
// same parameters and FLOPs as the real chain of smaller ones.
std::pair<std::int64_t, std::int64_t> AttentionLayer::mixer_rows() const {
    const std::int64_t h = model_.hidden, keys = static_cast<std::int64_t>(a_.key_heads) * a_.key_dim,
                       values = static_cast<std::int64_t>(a_.value_heads) * a_.value_dim;
    const std::int64_t in = (2 * keys + values + a_.value_heads) * h + a_.out_lora * (2 * h + keys + values);
    return {(in / h + 127) / 128 * 128, values};
}

double AttentionLayer::mixer_flops(const emit::Builder& b) const {
    const double tokens = static_cast<double>(b.gathered_tokens()) / b.plan().tp;
    // FLOPs per token and value head: state read, rank-one update and output (3 products of key_dim x value_dim), plus
    // the 64-token chunk's inner attention.
    const double per_head = 3.0 * a_.key_dim * a_.value_dim + 64.0 * (a_.key_dim + a_.value_dim);
    return 2.0 * tokens * a_.value_heads * per_head;
}

program::TensorId AttentionLayer::mixer_core(emit::Builder& b, program::TensorId normed) {
    const int tp = b.plan().tp;
    const auto [in, out] = mixer_rows();
    b.module = program::Module::attn_in;
    emit::bind(b, qkv_, key_ + ".qkv", in / tp, model_.hidden);
    qkv_.name = "mixer_in";
    qkv_.gather = tp > 1;
    q_ = emit::linear_forward(b, qkv_, normed, b.activation_dtype());
    b.module = program::Module::core_attn;
    o_ = b.activation("mixer_out", b.gathered_tokens(), out / tp);
    attr_.batch = b.plan().mbs;
    attr_.seq_q = attr_.seq_k = b.plan().seq / b.plan().cp;
    attr_.heads = attr_.kv_heads = std::max(1, a_.value_heads / tp);
    attr_.qk_dim = a_.key_dim;
    attr_.v_dim = a_.value_dim;
    attr_.q_stride = attr_.k_stride = attr_.v_stride = in / tp;
    attr_.deterministic = b.plan().deterministic;
    b.emit(program::OpKind::attention, {q_, q_, q_}, {o_}, attr_).flops = mixer_flops(b);
    return o_;
}

program::TensorId AttentionLayer::mixer_core_backward(emit::Builder& b, program::TensorId doutput) {
    b.module = program::Module::core_attn;
    const program::TensorId dmixed = b.activation("dmixer_in", b.gathered_tokens(), b.at(q_).cols);
    b.emit(program::OpKind::attention_grad, {doutput, q_, q_, q_, o_}, {dmixed, dmixed, dmixed}, attr_).flops =
        2.5 * mixer_flops(b);
    b.module = program::Module::attn_in;
    return emit::linear_backward(b, qkv_, dmixed);
}

} // namespace moe::layers
