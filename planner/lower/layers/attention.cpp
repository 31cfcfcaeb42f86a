// Attention layers: grouped-query attention, and what all kinds share (norm, output projection, the core and its CP
// ring).
#include "planner/lower/layers/layers.hpp"

#include "planner/base/error.hpp"
#include "planner/plan/stack_traits.hpp"

#include <algorithm>
#include <cmath>

namespace moe::layers {

AttentionLayer::AttentionLayer(const model::Model& model, const model::Attention& shape, std::string key,
                               std::string hf_prefix, int layer)
    : model_(model), a_(shape), key_(std::move(key)), hf_(std::move(hf_prefix)), layer_(layer) {
    if (a_.has_opaque()) opaque_.emplace(a_.opaque, key_ + ".opaque", hf_ + "mixer.");
}

namespace {

// Width of the packed query|key|value row of one TP rank.
std::int64_t packed_width(const model::Attention& a, int tp) {
    return std::int64_t{a.heads / tp} * a.qk_dim + std::int64_t{a.key_heads_of(tp)} * (a.qk_dim + a.v_dim);
}

} // namespace

void AttentionLayer::declare(emit::ParameterSet& set) const {
    const std::int64_t h = model_.hidden, heads = a_.heads;
    const std::string at = hf_ + "self_attn.";
    const double out_std = 0.02 / std::sqrt(2.0 * static_cast<double>(std::max<std::size_t>(1, model_.layers.size())));
    const auto dense = [](std::string name, std::int64_t rows, std::int64_t cols, int dim, double std) {
        return matrix(std::move(name), plan::Domain::dense, rows, cols, dim, std);
    };
    Norm::declare(set, model_, key_ + ".norm", hf_ + "input_layernorm.weight", h);
    if (model_.post_norms) Norm::declare(set, model_, key_ + ".post_norm", hf_ + "post_attention_layernorm.weight", h);
    if (opaque_) opaque_->declare(set, h);
    switch (a_.kind) {
    case model::AttentionKind::gqa: {
        const std::int64_t q = heads * a_.qk_dim, k = static_cast<std::int64_t>(a_.kv_heads) * a_.qk_dim,
                           v = static_cast<std::int64_t>(a_.kv_heads) * a_.v_dim;
        const bool replicated = a_.replicates_keys(set.plan().tp);
        const auto of_keys = [replicated](program::Parameter p) {
            if (replicated) p.cut = plan::axis::key_parts;
            return p;
        };
        std::vector<program::Parameter> in;
        if (a_.q_lora > 0) {
            set.declare(key_ + ".q_down", {dense(at + "q_a_proj.weight", a_.q_lora, h, -1, 0.02)}, true);
            Norm::declare(set, model_, key_ + ".q_latent_norm", at + "q_a_layernorm.weight", a_.q_lora);
            set.declare(key_ + ".q_up", {dense(at + "q_b_proj.weight", q, a_.q_lora, 0, 0.02)}, true);
        } else {
            in.push_back(dense(at + "q_proj.weight", q, h, 0, 0.02));
        }
        in.push_back(of_keys(dense(at + "k_proj.weight", k, h, 0, 0.02)));
        if (!a_.k_eq_v) in.push_back(of_keys(dense(at + "v_proj.weight", v, h, 0, 0.02)));
        // Gates lie behind what is packed or, where keys and values have a product of their own, before it.
        if (gated())
            in.insert(replicated ? in.begin() : in.end(),
                      dense(at + "g_proj.weight", a_.head_gate ? heads : heads * a_.v_dim, h, 0, 0.02));
        set.declare_adapted(plan::adapted::attention, key_ + ".qkv", std::move(in), true);
        if (a_.qkv_bias)
            set.declare(key_ + ".qkv_bias",
                        {dense(at + "q_proj.bias", q, 1, 0, 0.0), of_keys(dense(at + "k_proj.bias", k, 1, 0, 0.0)),
                         of_keys(dense(at + "v_proj.bias", v, 1, 0, 0.0))},
                        false, false);
        if (a_.qk_norm && !a_.plain_qk_norm) {
            for (const auto& [name, cols] : {std::pair{"q_norm", a_.q_norm()}, std::pair{"k_norm", a_.k_norm()}}) {
                program::Parameter weight = norm_weight(at + name + ".weight", cols);
                if (a_.whole_qk_norm) weight.shard_dim = 0; // Each TP rank has the weights of its heads.
                if (cols != a_.q_norm()) weight = of_keys(std::move(weight));
                set.declare(key_ + "." + name, {weight}, false, false);
            }
        }
        if (a_.sinks) set.declare(key_ + ".sinks", {dense(at + "sinks", heads, 1, 0, 0.0)}, false, false);
        break;
    }
    case model::AttentionKind::mla: {
        const std::int64_t q = heads * a_.qk_dim, nope = a_.qk_dim - a_.rope_dim;
        if (a_.q_lora > 0) {
            set.declare_adapted(plan::adapted::attention, key_ + ".q_down",
                                {dense(at + "q_a_proj.weight", a_.q_lora, h, -1, 0.02)}, true);
            Norm::declare(set, model_, key_ + ".q_norm", at + "q_a_layernorm.weight", a_.q_lora);
            set.declare_adapted(plan::adapted::attention, key_ + ".q_up",
                                {dense(at + "q_b_proj.weight", q, a_.q_lora, 0, 0.02)}, true);
        } else {
            set.declare_adapted(plan::adapted::attention, key_ + ".q_up", {dense(at + "q_proj.weight", q, h, 0, 0.02)},
                                true);
        }
        set.declare_adapted(plan::adapted::attention, key_ + ".kv_down",
                            {dense(at + "kv_a_proj_with_mqa.weight", a_.kv_lora + a_.rope_dim, h, -1, 0.02)}, true);
        Norm::declare(set, model_, key_ + ".kv_norm", at + "kv_a_layernorm.weight", a_.kv_lora);
        set.declare_adapted(plan::adapted::attention, key_ + ".kv_up",
                            {dense(at + "kv_b_proj.weight", heads * (nope + a_.v_dim), a_.kv_lora, 0, 0.02)},
                            !a_.sparse()); // Products head by head stay in BF16.
        if (a_.indexes()) declare_indexer(set);
        break;
    }
    case model::AttentionKind::mamba:
        return declare_mamba(set);
    case model::AttentionKind::opaque:
    case model::AttentionKind::none:
        return;
    case model::AttentionKind::gated_delta:
        return declare_delta(set);
    case model::AttentionKind::compressed:
        return declare_compressed(set);
    }
    const std::int64_t o = heads * a_.v_dim;
    set.declare_adapted(plan::adapted::attention, key_ + ".out", {dense(at + "o_proj.weight", h, o, 1, out_std)}, true);
    if (a_.out_bias) set.declare(key_ + ".out_bias", {dense(at + "o_proj.bias", h, 1, -1, 0.0)}, false, false);
}

program::TensorId AttentionLayer::forward(emit::Builder& b, program::TensorId x, program::TensorId& keys) {
    b.layer = layer_;
    b.phase = program::Phase::forward;
    b.module = program::Module::layernorm;
    norm_.key = key_ + ".norm";
    const bool latent = a_.kind == model::AttentionKind::mla || a_.kind == model::AttentionKind::compressed;
    if (plan::stack_traits(b.plan()).keeps_norm_with_product && !latent) norm_.within = program::Module::attn_in;
    const program::TensorId normed = norm_.forward(b, x, model_.hidden, "attn_norm");
    program::TensorId y = a_.kind == model::AttentionKind::opaque ? program::no_tensor : core(b, normed, keys);
    if (opaque_) {
        const program::TensorId beside = opaque_->forward(b, normed);
        if (beside != program::no_tensor) y = y == program::no_tensor ? beside : b.add(y, beside, "attn_beside");
    }
    if (model_.post_norms) {
        b.module = program::Module::layernorm;
        post_norm_.key = key_ + ".post_norm";
        y = post_norm_.forward(b, y, model_.hidden, "attn_post_norm");
    }
    return b.residual(x, y, "attn_residual");
}

// The kind's own attention with its output projection.
program::TensorId AttentionLayer::core(emit::Builder& b, program::TensorId normed, program::TensorId& keys) {
    program::TensorId o = program::no_tensor;
    switch (a_.kind) {
    case model::AttentionKind::gqa:
        o = gqa_core(b, normed);
        break;
    case model::AttentionKind::mla:
        o = a_.sparse() ? sparse_core(b, normed, keys) : mla_core(b, normed);
        break;
    case model::AttentionKind::mamba:
        o = scans(b) ? scan_core(b, normed) : state_core(b, normed);
        break;
    case model::AttentionKind::compressed:
        o = compressed_core(b, normed);
        break;
    default:
        o = state_core(b, normed);
        break;
    }
    b.module = program::Module::attn_out;
    emit::bind(b, out_, key_ + ".out", model_.hidden, b.at(o).cols);
    out_.name = "attn_proj";
    // Attention's backward keeps its BF16 output anyway, of which gates make another.
    out_.shared_input = gates_ == program::no_tensor && !delta() && (!mamba() || scans(b)) &&
                        a_.kind != model::AttentionKind::compressed;
    program::TensorId y = emit::linear_forward_scattered(b, out_, o, b.activation_dtype(), "attn_proj_local");
    if (a_.out_bias) {
        out_bias_ = b.weight(key_ + ".out_bias", model_.hidden, 1);
        const program::TensorId biased = b.activation("attn_proj_bias", b.at(y).rows, b.at(y).cols);
        b.emit(program::OpKind::bias_add, {y, out_bias_.value}, {biased});
        y = biased;
    }
    return y;
}

program::TensorId AttentionLayer::backward(emit::Builder& b, program::TensorId dy, program::TensorId dnormed) {
    b.layer = layer_;
    b.phase = program::Phase::dgrad;
    program::TensorId dprojected = b.residual_gradient(dy, "dattn_residual");
    if (model_.post_norms) {
        b.module = program::Module::layernorm;
        dprojected = post_norm_.backward(b, dprojected);
    }
    const auto join = [&](program::TensorId d) {
        if (d == program::no_tensor) return;
        dnormed = dnormed == program::no_tensor ? d : b.add(dnormed, d, "dattn_joined");
    };
    if (opaque_) join(opaque_->backward(b, dprojected));
    if (a_.kind != model::AttentionKind::opaque) join(core_backward(b, dprojected));
    b.module = program::Module::layernorm;
    return norm_.backward(b, dnormed, dy);
}

program::TensorId AttentionLayer::core_backward(emit::Builder& b, program::TensorId dprojected) {
    b.module = program::Module::attn_out;
    if (a_.out_bias && b.trains(out_bias_)) {
        b.phase = program::Phase::wgrad;
        b.emit(program::OpKind::bias_grad, {dprojected}, {out_bias_.gradient});
        b.phase = program::Phase::dgrad;
    }
    const program::TensorId doutput = emit::linear_backward_gathered(b, out_, dprojected, "attn_dproj");
    switch (a_.kind) {
    case model::AttentionKind::gqa:
        return gqa_core_backward(b, doutput);
    case model::AttentionKind::mla:
        return a_.sparse() ? sparse_core_backward(b, doutput) : mla_core_backward(b, doutput);
    case model::AttentionKind::mamba:
        return scans(b) ? scan_core_backward(b, doutput) : state_core_backward(b, doutput);
    case model::AttentionKind::compressed:
        return compressed_core_backward(b, doutput);
    default:
        return state_core_backward(b, doutput);
    }
}

std::int64_t AttentionLayer::gate_columns(int tp) const {
    if (a_.head_gate) return a_.heads / tp;
    return a_.output_gate ? static_cast<std::int64_t>(a_.heads) * a_.v_dim / tp : 0;
}

program::TensorId AttentionLayer::gqa_core(emit::Builder& b, program::TensorId normed) {
    const int tp = b.plan().tp;
    const std::int64_t packed = packed_width(a_, tp), width = packed + gate_columns(tp), tokens = b.gathered_tokens();
    // Keys that serve as values become both where values have their norm.
    std::int64_t projected = a_.k_eq_v ? width - std::int64_t{a_.key_heads_of(tp)} * a_.v_dim : width;
    if (a_.q_lora > 0) projected -= std::int64_t{a_.heads / tp} * a_.qk_dim;
    b.module = program::Module::attn_in;
    emit::bind(b, qkv_, key_ + ".qkv", projected, model_.hidden);
    qkv_.name = "qkv";
    qkv_.gather = tp > 1;
    program::TensorId qkv = emit::linear_forward(b, qkv_, normed, b.activation_dtype());
    if (a_.q_lora > 0) qkv = with_latent_queries(b, normed, qkv);
    if (gated()) {
        const std::int64_t gates = width - packed;
        gates_at_ = qkv_.beside ? 0 : packed;
        packed_at_ = qkv_.beside ? gates : 0;
        gates_ = b.activation("attn_gates", tokens, gates);
        b.emit(program::OpKind::copy_columns, {qkv}, {gates_}, program::ColumnsAttr{gates, gates_at_, 0, false}).bytes =
            2.0 * b.at(gates_).expected_bytes();
        const program::TensorId rest = b.activation("qkv_apart", tokens, packed);
        b.emit(program::OpKind::copy_columns, {qkv}, {rest}, program::ColumnsAttr{packed, packed_at_, 0, false}).bytes =
            2.0 * b.at(rest).expected_bytes();
        qkv = rest;
    }
    if (a_.qkv_bias) {
        qkv_bias_ = qkv_bias(b, b.at(qkv).cols);
        const program::TensorId biased = b.activation("qkv_bias", tokens, b.at(qkv).cols);
        b.emit(program::OpKind::bias_add, {qkv, qkv_bias_.value}, {biased});
        qkv = biased;
    }
    if (a_.whole_qk_norm) qkv = norm_heads(b, qkv);
    if (a_.clip > 0.0) {
        clip_in_ = qkv;
        qkv = b.activation("qkv_clipped", tokens, b.at(qkv).cols);
        b.emit(program::OpKind::clip, {clip_in_}, {qkv}, program::ClipAttr{a_.clip});
    }
    if (a_.value_norm) {
        value_in_ = qkv;
        const int values = a_.key_heads_of(tp);
        values_attr_ = {tokens, packed - values * a_.v_dim, values, a_.v_dim, model_.norm_eps, a_.k_eq_v};
        qkv = b.activation("qkv_values", tokens, packed);
        b.emit(program::OpKind::value_norm, {value_in_}, {qkv}, values_attr_);
    }
    qkv_raw_ = qkv;
    const model::Rope rope = model_.rope_of(a_);
    const bool norm = a_.qk_norm && !a_.whole_qk_norm;
    rope_ = {tokens,
             rope_batch(b),
             a_.heads / tp,
             a_.key_heads_of(tp),
             a_.qk_dim,
             a_.rope_dim,
             rope.theta,
             model_.norm_eps,
             model_.rope_interleaved,
             norm,
             program::frequency_scale(rope, a_.rope_dim),
             a_.norm_behind,
             a_.v_dim,
             a_.query_scale};
    const program::TensorId rotated = b.activation("qkv_rope", tokens, gated() ? packed : width);
    program::Operands in{qkv, rope_positions(b)}, out{rotated};
    if (norm) {
        head_rstd_ = b.tensor("qk_rstd", program::Dtype::f32, tokens, rope_.heads + rope_.kv_heads);
        out.push_back(head_rstd_);
    }
    if (norm && !a_.plain_qk_norm) {
        q_head_norm_ = b.weight(key_ + ".q_norm", a_.q_norm(), 1);
        k_head_norm_ = b.weight(key_ + ".k_norm", a_.k_norm(), 1);
        in.append({q_head_norm_.value, k_head_norm_.value});
    }
    b.emit(program::OpKind::rope, in, out, rope_);
    program::AttentionAttr attr;
    attr.batch = b.plan().mbs;
    attr.seq_q = attr.seq_k = b.plan().seq / b.plan().cp;
    attr.heads = rope_.heads;
    attr.kv_heads = rope_.kv_heads;
    attr.qk_dim = a_.qk_dim;
    attr.v_dim = a_.v_dim;
    attr.q_stride = attr.k_stride = attr.v_stride = b.at(rotated).cols;
    attr.k_offset = static_cast<std::int64_t>(rope_.heads) * a_.qk_dim;
    attr.v_offset = attr.k_offset + static_cast<std::int64_t>(rope_.kv_heads) * a_.qk_dim;
    attr.window = a_.window;
    attr.scale = a_.scale > 0.0 ? a_.scale : 1.0 / std::sqrt(static_cast<double>(a_.qk_dim));
    attr.chunk = a_.chunk;
    attr.visible = model::keys_seen(a_, b.plan().seq) / static_cast<double>(b.plan().seq);
    if (a_.sinks) sinks_ = b.weight(key_ + ".sinks", attr.heads, 1);
    program::TensorId o = attend(b, rotated, rotated, rotated, attr, sinks_.value);
    if (a_.value_scale != 1.0) o = b.scale(o, a_.value_scale, "attn_scaled");
    return gated() ? gate(b, o) : o;
}

program::TensorId AttentionLayer::gqa_core_backward(emit::Builder& b, program::TensorId dout) {
    program::TensorId doutput = gates_ != program::no_tensor ? gate_backward(b, dout) : dout;
    if (a_.value_scale != 1.0) doutput = b.scale(doutput, a_.value_scale, "dattn_scaled");
    const std::int64_t tokens = b.gathered_tokens(), width = b.at(q_).elements() / tokens;
    const program::TensorId drotated = b.activation("dqkv_rope", tokens, width);
    attend_backward(b, doutput, drotated, drotated, drotated);
    b.module = program::Module::attn_in;
    program::TensorId dqkv = b.activation("dqkv", tokens, b.at(qkv_raw_).cols);
    program::Operands in{drotated, rope_positions(b)}, out{dqkv};
    if (rope_.norm) {
        in.append({qkv_raw_, q_head_norm_.value, k_head_norm_.value, head_rstd_});
        if (!a_.plain_qk_norm) out.append({q_head_norm_.gradient, k_head_norm_.gradient});
    }
    b.emit(program::OpKind::rope_grad, in, out, rope_);
    if (a_.value_norm) {
        const program::TensorId dvalues = dqkv;
        dqkv = b.activation("dqkv_values", tokens, b.at(value_in_).cols);
        b.emit(program::OpKind::value_norm_grad, {dvalues, value_in_}, {dqkv}, values_attr_);
    }
    if (a_.clip > 0.0) {
        const program::TensorId dclipped = dqkv;
        dqkv = b.activation("dqkv_clipped", tokens, b.at(dqkv).cols);
        b.emit(program::OpKind::clip_grad, {dclipped, clip_in_}, {dqkv}, program::ClipAttr{a_.clip});
    }
    if (a_.whole_qk_norm) dqkv = norm_heads_backward(b, dqkv);
    if (a_.qkv_bias && b.trains(qkv_bias_)) qkv_bias_backward(b, dqkv);
    if (gates_ != program::no_tensor) {
        const std::int64_t packed = b.at(dqkv).cols, gates = b.at(gates_).cols;
        const program::TensorId joined = b.activation("dqkv_joined", tokens, packed + gates);
        b.emit(program::OpKind::copy_columns, {dqkv}, {joined}, program::ColumnsAttr{packed, 0, packed_at_, false})
            .bytes = 2.0 * b.at(dqkv).expected_bytes();
        b.emit(program::OpKind::copy_columns, {dgates_}, {joined}, program::ColumnsAttr{gates, 0, gates_at_, false})
            .bytes = 2.0 * b.at(dgates_).expected_bytes();
        dqkv = joined;
    }
    if (a_.q_lora > 0) return latent_queries_backward(b, dqkv);
    return emit::linear_backward(b, qkv_, dqkv);
}

// Positions by which heads turn: of each row in its document, or of each place in the sequence for the whole batch.
// What is generated is one document.
bool AttentionLayer::by_documents(const emit::Builder& b) { return b.plan().masks_documents() && b.cached_keys == 0; }
program::TensorId AttentionLayer::rope_positions(const emit::Builder& b) {
    return by_documents(b) ? b.program().io.document_positions : b.program().io.positions;
}
std::int64_t AttentionLayer::rope_batch(const emit::Builder& b) { return by_documents(b) ? 1 : b.plan().mbs; }

// An operand of the core in its precision.
program::TensorId AttentionLayer::low(emit::Builder& b, program::TensorId x, const std::string& name) const {
    return b.quantized() ? emit::quantize(b, x, name, name, true, false).row : x;
}

} // namespace moe::layers
