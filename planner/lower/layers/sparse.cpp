// DeepSeek sparse attention (DeepSeek-V3.2, GLM-5), priced and not executed: latent attention over keys that an indexer
// picks. Sources: arXiv 2512.02556 section 2.1; Megatron-LM, experimental_attention_variant/dsa.py.
//
// All heads see one key per position, the latent with its rotary columns, and the up projections of keys and values
// become products head by head on the side of queries and outputs. The indexer reads the layer's input and the query
// latent without a gradient to either; its own comes from the attention's distribution over the keys it picked.
#include "planner/lower/layers/layers.hpp"

#include <algorithm>
#include <cmath>

namespace moe::layers {
namespace {

double pairs_of(const program::AttentionAttr& a) { // pairs of queries and keys of one head
    return static_cast<double>(a.batch) * static_cast<double>(a.seq_q) * static_cast<double>(a.picked);
}

// Kernels work through all keys of the choice, those that a query early in the sequence does not have among them.
double core_flops(const program::AttentionAttr& a, bool backward) {
    return 2.0 * pairs_of(a) * a.heads * (backward ? 3.0 * a.qk_dim + 2.0 * a.v_dim : 1.0 * a.qk_dim + a.v_dim);
}

// One product for every head, of its columns of x and its rows of the up projection.
program::GemmAttr by_heads(std::int64_t heads, std::int64_t m, std::int64_t n, std::int64_t k) {
    program::GemmAttr attr;
    attr.batch = static_cast<int>(heads);
    attr.m = m, attr.n = n, attr.k = k;
    return attr;
}

// Keys of the whole sequence: zigzag shares of it lie on the members of CP.
program::TensorId gather_context(emit::Builder& b, program::TensorId x, const std::string& name) {
    const int cp = b.plan().cp;
    if (cp == 1) return x;
    const program::TensorId y = b.tensor(name, b.at(x).dtype, b.at(x).rows * cp, b.at(x).cols);
    b.communicate(program::OpKind::all_gather, emit::groups::context, program::Stream::tensor, {x}, {y});
    return y;
}
program::TensorId scatter_context(emit::Builder& b, program::TensorId x, const std::string& name) {
    const int cp = b.plan().cp;
    if (cp == 1) return x;
    const program::TensorId y = b.tensor(name, b.at(x).dtype, b.at(x).rows / cp, b.at(x).cols);
    b.communicate(program::OpKind::reduce_scatter, emit::groups::context, program::Stream::tensor, {x}, {y});
    return y;
}

bool any_shares(const model::Model& model) {
    return std::any_of(model.kinds.begin(), model.kinds.end(),
                       [](const model::LayerKind& kind) { return kind.attention.shares_index; });
}

} // namespace

void AttentionLayer::declare_indexer(emit::ParameterSet& set) const {
    const std::int64_t h = model_.hidden, width = static_cast<std::int64_t>(a_.indexer_heads) * a_.indexer_dim;
    const std::string at = hf_ + "self_attn.indexer.";
    const auto whole = [&at](const char* name, std::int64_t rows, std::int64_t cols) { // TP ranks hold it whole.
        return matrix(at + name, plan::Domain::dense, rows, cols, -1, 0.02);
    };
    set.declare(key_ + ".index_q", {whole("wq_b.weight", width, a_.q_lora > 0 ? a_.q_lora : h)}, true);
    set.declare(key_ + ".index_k", {whole("wk.weight", a_.indexer_dim, h)}, true);
    set.declare(key_ + ".index_norm",
                {norm_weight(at + "k_norm.weight", a_.indexer_dim), norm_weight(at + "k_norm.bias", a_.indexer_dim)},
                false, false);
    set.declare(key_ + ".index_w", {whole("weights_proj.weight", a_.indexer_heads, h)}, false);
}

// Every rank of TP picks for all tokens of the group: the choice is the same for all heads.
program::TensorId AttentionLayer::pick_keys(emit::Builder& b, program::TensorId normed, program::TensorId q_in) {
    const std::int64_t width = static_cast<std::int64_t>(a_.indexer_heads) * a_.indexer_dim;
    b.module = program::Module::attn_in;
    index_q_.weight = b.weight(key_ + ".index_q", width, b.at(q_in).cols);
    index_q_.name = "index_q";
    index_queries_ = b.gather_tokens(emit::linear_forward(b, index_q_, q_in, b.activation_dtype()), "index_q_full");
    index_k_.weight = b.weight(key_ + ".index_k", a_.indexer_dim, model_.hidden);
    index_k_.name = "index_k";
    index_norm_.x = emit::linear_forward(b, index_k_, normed, b.activation_dtype());
    const program::Tensor key = b.at(index_norm_.x);
    index_norm_.y = b.activation("index_k_norm", key.rows, key.cols);
    index_norm_.rstd = b.tensor("index_k_norm.rstd", program::Dtype::f32, key.rows, 1);
    b.emit(program::OpKind::rmsnorm, {index_norm_.x, b.weight(key_ + ".index_norm", 2 * key.cols, 1).value},
           {index_norm_.y, index_norm_.rstd}, program::NormAttr{key.rows, key.cols, key.cols, model_.norm_eps});
    index_keys_ = gather_context(b, b.gather_tokens(index_norm_.y, "index_k_full"), "index_k_all");
    index_weights_.weight = b.weight(key_ + ".index_w", a_.indexer_heads, model_.hidden);
    index_weights_.name = "index_w";
    index_weights_.quantize = false;
    head_weights_ =
        b.gather_tokens(emit::linear_forward(b, index_weights_, normed, b.activation_dtype()), "index_w_full");

    b.module = program::Module::core_attn;
    const program::TensorId keys = b.tensor("picked_keys", program::Dtype::i32, b.gathered_tokens(), attr_.picked);
    index_attr_ = attr_;
    index_attr_.heads = a_.indexer_heads;
    index_attr_.kv_heads = 1;
    index_attr_.qk_dim = index_attr_.v_dim = a_.indexer_dim;
    index_attr_.picked = 0; // All keys before a query are compared.
    index_attr_.kept = any_shares(model_);
    program::Op& op =
        b.emit(program::OpKind::pick_keys, {index_queries_, index_keys_, head_weights_}, {keys}, index_attr_);
    const double compared = static_cast<double>(b.gathered_tokens()) * static_cast<double>(attr_.seq_k) / 2.0;
    op.flops = 2.0 * compared * static_cast<double>(width);
    op.bytes += 2.0 * sizeof(float) * compared; // Scores are written, and read by the choice of the largest.
    return keys;
}

// The attention's probabilities of the picked keys once more, and the indexer's scores of them forward and backward.
void AttentionLayer::pick_keys_backward(emit::Builder& b) {
    b.module = program::Module::core_attn;
    b.phase = program::Phase::wgrad; // Nothing else waits for it.
    const auto like = [&b](program::TensorId x, const char* name) {
        return b.activation(name, b.at(x).rows, b.at(x).cols);
    };
    const program::TensorId dqueries = like(index_queries_, "dindex_q"), dkeys = like(index_keys_, "dindex_k");
    const program::TensorId dweights = like(head_weights_, "dindex_w");
    program::Op& op =
        b.emit(program::OpKind::pick_keys_grad, {q_, k_, lse_, index_queries_, index_keys_, head_weights_, picked_},
               {dqueries, dkeys, dweights}, attr_);
    op.flops = 2.0 * pairs_of(attr_) *
               (static_cast<double>(attr_.heads) * attr_.qk_dim + 3.0 * a_.indexer_heads * a_.indexer_dim);
    // Each rank of TP has what its heads have seen.
    b.module = program::Module::attn_in;
    emit::linear_wgrad(b, index_q_, b.scatter_tokens(dqueries, "dindex_q_local"));
    emit::linear_wgrad(b, index_weights_, b.scatter_tokens(dweights, "dindex_w_local"));
    const program::TensorId dnormed = b.scatter_tokens(scatter_context(b, dkeys, "dindex_k_context"), "dindex_k_local");
    const program::Tensor key = b.at(index_norm_.x);
    const program::TensorId dkey = b.activation("dindex_k_norm", key.rows, key.cols);
    const emit::Weight norm = b.weight(key_ + ".index_norm", 2 * key.cols, 1);
    b.emit(program::OpKind::rmsnorm_grad, {dnormed, index_norm_.x, norm.value, index_norm_.rstd}, {dkey, norm.gradient},
           program::NormAttr{key.rows, key.cols, key.cols, model_.norm_eps});
    emit::linear_wgrad(b, index_k_, dkey);
    b.phase = program::Phase::dgrad;
}

program::TensorId AttentionLayer::sparse_core(emit::Builder& b, program::TensorId normed, program::TensorId& keys) {
    const std::int64_t tokens = b.gathered_tokens(), heads = a_.heads / b.plan().tp, nope = a_.qk_dim - a_.rope_dim;
    const std::int64_t wide = a_.kv_lora + a_.rope_dim;
    attr_.batch = b.plan().mbs;
    attr_.seq_q = b.plan().seq / b.plan().cp;
    attr_.seq_k = b.plan().seq;
    attr_.heads = static_cast<int>(heads);
    attr_.kv_heads = 1;
    attr_.qk_dim = static_cast<int>(wide);
    attr_.v_dim = a_.kv_lora;
    attr_.q_stride = heads * wide;
    attr_.k_stride = attr_.v_stride = wide;
    attr_.picked = std::min<std::int64_t>(a_.indexer_top_k, attr_.seq_k);
    attr_.visible = model::keys_seen(a_, attr_.seq_k) / static_cast<double>(attr_.seq_k);
    attr_.deterministic = b.plan().deterministic;

    const auto [q_in, kv_in] = mla_latents(b, normed);
    const program::TensorId q = mla_queries(b, q_in);
    kv_up_.weight = b.weight(key_ + ".kv_up", heads * (nope + a_.v_dim), a_.kv_lora);
    qkv_raw_ = q;
    const program::TensorId absorbed = b.activation("q_absorbed", tokens, heads * a_.kv_lora);
    b.gemm(q, kv_up_.weight.value, absorbed, by_heads(heads, tokens, a_.kv_lora, nope));
    mla_rope_ = {tokens,
                 rope_batch(b),
                 static_cast<int>(heads),
                 static_cast<int>(nope),
                 a_.rope_dim,
                 a_.v_dim,
                 a_.kv_lora,
                 model_.rope_of(a_).theta,
                 model_.rope_interleaved,
                 program::frequency_scale(model_.rope_of(a_), a_.rope_dim),
                 {}};
    q_ = b.activation("q", tokens, heads * wide);
    const program::TensorId k = b.activation("k", tokens, wide);
    b.emit(program::OpKind::mla_rope, {q, absorbed, kv_in, kv_down_full_, rope_positions(b)}, {q_, k}, mla_rope_);
    k_ = gather_context(b, k, "k_all");

    if (a_.indexes()) {
        keys = pick_keys(b, normed, q_in);
    } else if (keys == program::no_tensor) { // A layer alone holds the choice as an input.
        keys = b.tensor("picked_keys", program::Dtype::i32, tokens, attr_.picked);
        b.program().tensors[static_cast<std::size_t>(keys)].storage = program::Storage::input;
    }
    picked_ = keys;
    b.module = program::Module::core_attn;
    o_ = b.activation("attn_latent", tokens, heads * a_.kv_lora);
    lse_ = b.tensor("attn_lse", program::Dtype::f32, tokens, heads);
    b.emit(program::OpKind::attention, {q_, k_, k_, picked_}, {o_, lse_}, attr_).flops = core_flops(attr_, false);
    b.module = program::Module::mla_up_proj;
    const program::TensorId o = b.activation("attn_out", tokens, heads * a_.v_dim);
    b.gemm(o_, kv_up_.weight.value, o, by_heads(heads, tokens, a_.v_dim, a_.kv_lora));
    return o;
}

program::TensorId AttentionLayer::sparse_core_backward(emit::Builder& b, program::TensorId doutput) {
    const std::int64_t tokens = b.gathered_tokens(), heads = attr_.heads, nope = a_.qk_dim - a_.rope_dim;
    const auto wgrad = [&](std::int64_t width, program::TensorId dy, program::TensorId x) {
        program::GemmAttr attr = by_heads(heads, width, a_.kv_lora, tokens);
        attr.transpose_a = true;
        attr.accumulate = b.at(kv_up_.weight.gradient).storage == program::Storage::gradient;
        b.phase = program::Phase::wgrad;
        b.gemm(dy, x, kv_up_.weight.gradient, attr);
        b.phase = program::Phase::dgrad;
    };
    b.module = program::Module::mla_up_proj;
    const program::TensorId dlatent = b.activation("dattn_latent", tokens, heads * a_.kv_lora);
    b.gemm(doutput, kv_up_.weight.value, dlatent, by_heads(heads, tokens, a_.kv_lora, a_.v_dim));
    wgrad(a_.v_dim, doutput, o_);

    b.module = program::Module::core_attn;
    const program::TensorId dq_wide = b.activation("dq_wide", tokens, b.at(q_).cols);
    const program::TensorId dk_all = b.activation("dk_all", b.at(k_).rows, b.at(k_).cols);
    b.emit(program::OpKind::attention_grad, {dlatent, q_, k_, k_, o_, lse_, picked_}, {dq_wide, dk_all, dk_all}, attr_)
        .flops = core_flops(attr_, true);
    const program::TensorId dk = scatter_context(b, dk_all, "dk");

    b.module = program::Module::mla_up_proj;
    const program::TensorId dq_nope = b.activation("dq_nope", tokens, heads * nope);
    b.gemm(dq_wide, kv_up_.weight.value, dq_nope, by_heads(heads, tokens, nope, a_.kv_lora));
    wgrad(nope, qkv_raw_, dq_wide);
    const program::TensorId dq = b.activation("dq", tokens, heads * a_.qk_dim);
    const program::TensorId dkv_in = b.activation("dkv_in", tokens, a_.kv_lora);
    const program::TensorId dkv_down_full = b.activation("dkv_down_full", tokens, a_.kv_lora + a_.rope_dim);
    b.emit(program::OpKind::mla_rope_grad, {dq_wide, dk, dq_nope, rope_positions(b)}, {dq, dkv_in, dkv_down_full},
           mla_rope_);
    const program::TensorId dq_in = emit::linear_backward(b, q_up_, dq);
    if (a_.indexes()) pick_keys_backward(b);
    return mla_latents_backward(b, dq_in, dkv_in, dkv_down_full);
}

} // namespace moe::layers
