// DeepSeek sparse attention (DeepSeek-V3.2, GLM-5): latent attention over keys that an indexer picks. Sources: arXiv
// 2512.02556 section 2.1; transformers 5.24, modeling_deepseek_v32.py and modeling_glm_moe_dsa.py; Megatron-LM,
// experimental_attention_variant/dsa.py.
//
// All heads see one key per position, the latent with its rotary columns, and the up projections of keys and values
// become products head by head on the side of queries and outputs. The indexer reads the layer's input and the query
// latent without a gradient to either; its own comes from the attention's distribution over the keys it picked.
#include "planner/lower/layers/heads.hpp"
#include "planner/lower/layers/layers.hpp"

#include "planner/base/error.hpp"

#include <algorithm>
#include <cmath>

namespace moe::layers {
namespace {

double pairs_of(const program::AttentionAttr& a) { // pairs of queries and keys of one head
    return static_cast<double>(a.batch) * static_cast<double>(a.seq_q) * static_cast<double>(a.picked);
}

// Kernels work through all keys of the choice, those that a query early in the sequence does not have among them.
double picked_flops(const program::AttentionAttr& a, bool backward) {
    return 2.0 * pairs_of(a) * a.heads * (backward ? 3.0 * a.qk_dim + 2.0 * a.v_dim : 1.0 * a.qk_dim + a.v_dim);
}

// Rows of the up projection, [nope | v] of every head, from the head's row `first` on.
Heads up_rows(const model::Attention& a, std::int64_t first) {
    const std::int64_t each = a.qk_dim - a.rope_dim + a.v_dim;
    return {a.kv_lora, each * a.kv_lora, first * a.kv_lora};
}

// The indexer's key norm has the default of its code, as the latents' norms have (transformers 5.24).
constexpr double index_eps = 1e-6;

bool any_shares(const model::Model& model) {
    return std::any_of(model.kinds.begin(), model.kinds.end(),
                       [](const model::LayerKind& kind) { return kind.attention.shares_index; });
}

} // namespace

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

void AttentionLayer::declare_indexer(emit::ParameterSet& set) const {
    const std::int64_t h = model_.hidden, width = static_cast<std::int64_t>(a_.indexer_heads) * a_.indexer_dim;
    const std::string at = hf_ + "self_attn.indexer.";
    const auto whole = [&at](const char* name, std::int64_t rows, std::int64_t cols) { // TP ranks hold it whole.
        return matrix(at + name, plan::Domain::dense, rows, cols, -1, 0.02);
    };
    set.declare(key_ + ".index_q", {whole("wq_b.weight", width, a_.q_lora > 0 ? a_.q_lora : h)}, true);
    set.declare(key_ + ".index_k", {whole("wk.weight", a_.indexer_dim, h)}, true);
    set.declare(key_ + ".index_norm", {norm_weight(at + "k_norm.weight", a_.indexer_dim)}, false, false);
    set.declare(key_ + ".index_norm_bias",
                {matrix(at + "k_norm.bias", plan::Domain::dense, a_.indexer_dim, 1, -1, 0.0)}, false, false);
    set.declare(key_ + ".index_w", {whole("weights_proj.weight", a_.indexer_heads, h)}, false);
}

// Rows that come later than others, in a cache that is this layer's own from call to call.
program::TensorId AttentionLayer::cached_rows(emit::Builder& b, program::TensorId x, const char* name) const {
    const program::TensorId cache =
        emit::add_flat(b.program(), fmt::format("layer{}.{}_cache", layer_, name), b.activation_dtype(),
                       program::Storage::optimizer, b.cached_keys * b.at(x).cols, b.chunk());
    b.emit(program::OpKind::cache_rows, {x, b.program().io.positions}, {cache});
    return cache;
}

// Every rank of TP picks for all tokens of the group: the choice is the same for all heads.
program::TensorId AttentionLayer::pick_keys(emit::Builder& b, program::TensorId normed, program::TensorId q_in) {
    const std::int64_t width = static_cast<std::int64_t>(a_.indexer_heads) * a_.indexer_dim;
    const std::int64_t tokens = b.gathered_tokens();
    b.module = program::Module::attn_in;
    index_rope_ = {};
    index_rope_.tokens = tokens, index_rope_.batch = rope_batch(b);
    index_rope_.head_dim = index_rope_.v_dim = a_.indexer_dim;
    index_rope_.rotary_dim = a_.rope_dim;
    index_rope_.theta = mla_rope_.theta;
    index_rope_.interleaved = a_.indexer_interleaved;
    index_rope_.scale = mla_rope_.scale;
    const auto turned = [&](program::TensorId x, int heads, const char* name) {
        const program::TensorId y = b.activation(name, tokens, b.at(x).cols);
        index_rope_.heads = heads;
        b.emit(program::OpKind::rope, {x, rope_positions(b)}, {y}, index_rope_);
        return y;
    };
    index_q_.weight = b.weight(key_ + ".index_q", width, b.at(q_in).cols);
    index_q_.name = "index_q";
    index_queries_ =
        turned(b.gather_tokens(emit::linear_forward(b, index_q_, q_in, b.activation_dtype()), "index_q_full"),
               a_.indexer_heads, "index_q_rope");
    index_k_.weight = b.weight(key_ + ".index_k", a_.indexer_dim, model_.hidden);
    index_k_.name = "index_k";
    index_k_in_ = emit::linear_forward(b, index_k_, normed, b.activation_dtype());
    const program::Tensor key = b.at(index_k_in_);
    const program::TensorId normed_key = b.activation("index_k_norm", key.rows, key.cols);
    index_k_rstd_ = b.tensor("index_k_norm.rstd", program::Dtype::f32, key.rows, 2);
    b.emit(program::OpKind::rmsnorm,
           {index_k_in_, b.weight(key_ + ".index_norm", key.cols, 1).value,
            b.weight(key_ + ".index_norm_bias", key.cols, 1).value},
           {normed_key, index_k_rstd_},
           program::NormAttr{key.rows, key.cols, key.cols, index_eps, program::Module::layernorm, true});
    index_keys_ = turned(b.gather_tokens(normed_key, "index_k_full"), 1, "index_k_rope");
    index_keys_ =
        b.cached_keys > 0 ? cached_rows(b, index_keys_, "index_key") : gather_context(b, index_keys_, "index_k_all");
    index_weights_.weight = b.weight(key_ + ".index_w", a_.indexer_heads, model_.hidden);
    index_weights_.name = "index_w";
    index_weights_.quantize = false;
    head_weights_ =
        b.gather_tokens(emit::linear_forward(b, index_weights_, normed, b.activation_dtype()), "index_w_full");

    b.module = program::Module::core_attn;
    const program::TensorId keys = b.tensor("picked_keys", program::Dtype::i32, tokens, attr_.picked);
    index_attr_ = attr_;
    index_attr_.heads = a_.indexer_heads;
    index_attr_.kv_heads = 1;
    index_attr_.qk_dim = index_attr_.v_dim = a_.indexer_dim;
    index_attr_.picked = 0; // All keys before a query are compared.
    index_attr_.kept = any_shares(model_);
    index_attr_.scale = 1.0 / std::sqrt(static_cast<double>(width));
    index_attr_.documents = by_documents(b);
    std::vector<program::TensorId> in{index_queries_, index_keys_, head_weights_};
    if (index_attr_.documents) in.push_back(b.program().io.document_starts);
    if (b.cached_keys > 0) in.insert(in.end(), {program::no_tensor, b.program().io.positions});
    program::Op& op = b.emit(program::OpKind::pick_keys, in, {keys}, index_attr_);
    const double compared = static_cast<double>(tokens) * static_cast<double>(attr_.seq_k) / 2.0;
    op.flops = 2.0 * compared * static_cast<double>(width);
    op.bytes += 2.0 * sizeof(float) * compared; // Scores are written, and read by the choice of the largest.
    return keys;
}

// The attention's probabilities once more, and the indexer's scores forward and backward.
void AttentionLayer::pick_keys_backward(emit::Builder& b) {
    const plan::IndexerTraining& training = b.plan().indexer;
    b.module = program::Module::core_attn;
    b.phase = program::Phase::wgrad; // Nothing else waits for it.
    const auto like = [&b](program::TensorId x, const char* name) {
        return b.activation(name, b.at(x).rows, b.at(x).cols);
    };
    const program::TensorId dqueries = like(index_queries_, "dindex_q_rope"), dkeys = like(index_keys_, "dindex_k_all");
    const program::TensorId dweights = like(head_weights_, "dindex_w");
    program::AttentionAttr attr = attr_;
    attr.documents = by_documents(b);
    attr.index = {a_.indexer_heads,
                  a_.indexer_dim,
                  index_attr_.scale,
                  a_.heads,
                  training.stage != plan::IndexerStage::sparse,
                  training.loss / (static_cast<double>(b.plan().gbs) * static_cast<double>(b.plan().seq))};
    if (attr.index.all_keys) attr.picked = attr.seq_k;
    std::vector<program::TensorId> in{q_, k_, index_queries_, index_keys_, head_weights_, picked_};
    if (attr.index.all_keys) in.back() = program::no_tensor;
    if (attr.documents) in.push_back(b.program().io.document_starts);
    // The logs of the softmaxes' sums or, on tensor cores, a gradient for each key of a row; and losses by query.
    const program::TensorId work = b.tensor("index_work", program::Dtype::f32, b.gathered_tokens(),
                                            std::max<std::int64_t>(attr.heads, attr.picked) + 2);
    std::vector<program::TensorId> out{dqueries, dkeys, dweights, work};
    // The divergence is no sum over heads: each rank of TP ends it for a share of the tokens, with all heads' p.
    const std::vector<program::IndexerIo>& reported = b.program().io.indexers;
    const auto io = std::find_if(reported.begin(), reported.end(),
                                 [this](const program::IndexerIo& of) { return of.layer == layer_; });
    const program::TensorId loss = io != reported.end() ? io->loss : program::no_tensor;
    if (loss != program::no_tensor) out.push_back(loss);
    const bool parts = loss != program::no_tensor && b.plan().tp > 1;
    if (parts) out.push_back(b.tensor("index_p", program::Dtype::f32, b.gathered_tokens(), attr.picked));
    const program::TensorId p = out.back();
    b.emit(program::OpKind::pick_keys_grad, in, out, attr).flops =
        2.0 * pairs_of(attr) *
        (static_cast<double>(attr.heads) * attr.qk_dim + 3.0 * a_.indexer_heads * a_.indexer_dim);
    if (parts)
        b.emit(program::OpKind::xlogx, {b.scatter_tokens(p, "index_p_local")}, {loss},
               program::ScaleAttr{attr.index.factor});
    b.module = program::Module::attn_in;
    const auto turned_back = [&](program::TensorId x, int heads, const char* name) {
        const program::TensorId y = like(x, name);
        program::RopeAttr rope = index_rope_;
        rope.heads = heads;
        b.emit(program::OpKind::rope_grad, {x, rope_positions(b)}, {y}, rope);
        return y;
    };
    // Each rank of TP has what its heads have seen.
    emit::linear_wgrad(b, index_q_,
                       b.scatter_tokens(turned_back(dqueries, a_.indexer_heads, "dindex_q"), "dindex_q_local"));
    emit::linear_wgrad(b, index_weights_, b.scatter_tokens(dweights, "dindex_w_local"));
    const program::TensorId dnormed = b.scatter_tokens(
        turned_back(scatter_context(b, dkeys, "dindex_k_rope"), 1, "dindex_k_context"), "dindex_k_local");
    const program::Tensor key = b.at(index_k_in_);
    const program::TensorId dkey = b.activation("dindex_k_norm", key.rows, key.cols);
    const emit::Weight norm = b.weight(key_ + ".index_norm", key.cols, 1);
    b.emit(program::OpKind::rmsnorm_grad, {dnormed, index_k_in_, norm.value, index_k_rstd_},
           {dkey, norm.gradient, b.weight(key_ + ".index_norm_bias", key.cols, 1).gradient},
           program::NormAttr{key.rows, key.cols, key.cols, index_eps, program::Module::layernorm, true});
    emit::linear_wgrad(b, index_k_, dkey);
    b.phase = program::Phase::dgrad;
}

program::TensorId AttentionLayer::sparse_core(emit::Builder& b, program::TensorId normed, program::TensorId& keys) {
    const std::int64_t tokens = b.gathered_tokens(), heads = a_.heads / b.plan().tp, nope = a_.qk_dim - a_.rope_dim;
    const std::int64_t wide = a_.kv_lora + a_.rope_dim;
    const bool all = b.plan().indexer.stage == plan::IndexerStage::warm_up;
    const model::Rope rope = model_.rope_of(a_);
    attr_ = {};
    attr_.batch = b.plan().mbs;
    attr_.seq_q = b.plan().seq / b.plan().cp;
    attr_.seq_k = b.cached_keys > 0 ? b.cached_keys : b.plan().seq;
    attr_.heads = static_cast<int>(heads);
    attr_.kv_heads = 1;
    attr_.qk_dim = static_cast<int>(wide);
    attr_.v_dim = a_.kv_lora;
    attr_.q_stride = heads * wide;
    attr_.k_stride = attr_.v_stride = wide;
    attr_.scale = softmax_scale(rope.scaling) / std::sqrt(static_cast<double>(a_.qk_dim));
    attr_.picked = all ? attr_.seq_k : std::min<std::int64_t>(a_.indexer_top_k, attr_.seq_k);
    attr_.parts = b.plan().cp;
    if (!all) attr_.visible = model::keys_seen(a_, attr_.seq_k) / static_cast<double>(attr_.seq_k);
    attr_.deterministic = b.plan().deterministic;

    const auto [q_in, kv_in] = mla_latents(b, normed);
    const program::TensorId q = mla_queries(b, q_in);
    kv_up_.weight = b.weight(key_ + ".kv_up", heads * (nope + a_.v_dim), a_.kv_lora);
    qkv_raw_ = q;
    const program::TensorId absorbed = b.activation("q_absorbed", tokens, heads * a_.kv_lora);
    b.gemm(q, kv_up_.weight.value, absorbed,
           by_heads(heads, tokens, a_.kv_lora, nope, columns_of(heads, a_.qk_dim), up_rows(a_, 0),
                    columns_of(heads, a_.kv_lora)));
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
                 {}};
    q_ = b.activation("q", tokens, heads * wide);
    const program::TensorId k = b.activation("k", tokens, wide);
    b.emit(program::OpKind::latent_rope, {q, absorbed, kv_in, kv_down_full_, rope_positions(b)}, {q_, k}, mla_rope_);
    k_ = b.cached_keys > 0 ? cached_rows(b, k, "latent") : gather_context(b, k, "k_all");

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
    b.emit(program::OpKind::attention, {q_, k_, k_, picked_}, {o_, lse_}, attr_).flops = picked_flops(attr_, false);
    b.module = program::Module::mla_up_proj;
    const program::TensorId o = b.activation("attn_out", tokens, heads * a_.v_dim);
    program::GemmAttr up = by_heads(heads, tokens, a_.v_dim, a_.kv_lora, columns_of(heads, a_.kv_lora),
                                    up_rows(a_, nope), columns_of(heads, a_.v_dim));
    up.transpose_b = true;
    b.gemm(o_, kv_up_.weight.value, o, up);
    return o;
}

program::TensorId AttentionLayer::sparse_core_backward(emit::Builder& b, program::TensorId doutput) {
    const std::int64_t tokens = b.gathered_tokens(), heads = attr_.heads, nope = a_.qk_dim - a_.rope_dim;
    const std::int64_t wide = a_.kv_lora + a_.rope_dim;
    // Rows of every head from `first` on: width of them, by columns of dy and of x.
    const auto wgrad = [&](std::int64_t width, std::int64_t first, program::TensorId dy, const Heads& of_dy,
                           program::TensorId x, const Heads& of_x) {
        program::GemmAttr attr = by_heads(heads, width, a_.kv_lora, tokens, of_dy, of_x, up_rows(a_, first));
        attr.transpose_a = true;
        attr.accumulate =
            b.at(kv_up_.weight.gradient).storage == program::Storage::gradient; // FSDP's are new in every backward
        b.phase = program::Phase::wgrad;
        b.gemm(dy, x, kv_up_.weight.gradient, attr);
        b.phase = program::Phase::dgrad;
    };
    b.module = program::Module::mla_up_proj;
    const program::TensorId dlatent = b.activation("dattn_latent", tokens, heads * a_.kv_lora);
    b.gemm(doutput, kv_up_.weight.value, dlatent,
           by_heads(heads, tokens, a_.kv_lora, a_.v_dim, columns_of(heads, a_.v_dim), up_rows(a_, nope),
                    columns_of(heads, a_.kv_lora)));
    wgrad(a_.v_dim, nope, doutput, columns_of(heads, a_.v_dim), o_, columns_of(heads, a_.kv_lora));

    b.module = program::Module::core_attn;
    const program::TensorId dq_wide = b.activation("dq_wide", tokens, b.at(q_).cols);
    const program::TensorId dk_all = b.activation("dk_all", b.at(k_).rows, b.at(k_).cols);
    b.emit(program::OpKind::attention_grad, {dlatent, q_, k_, k_, o_, lse_, picked_}, {dq_wide, dk_all, dk_all}, attr_)
        .flops = picked_flops(attr_, true);
    const program::TensorId dk = scatter_context(b, dk_all, "dk");

    b.module = program::Module::mla_up_proj;
    const program::TensorId dq_nope = b.activation("dq_nope", tokens, heads * nope);
    program::GemmAttr down =
        by_heads(heads, tokens, nope, a_.kv_lora, columns_of(heads, wide), up_rows(a_, 0), columns_of(heads, nope));
    down.transpose_b = true;
    b.gemm(dq_wide, kv_up_.weight.value, dq_nope, down);
    wgrad(nope, 0, qkv_raw_, columns_of(heads, a_.qk_dim), dq_wide, columns_of(heads, wide));
    const program::TensorId dq = b.activation("dq", tokens, heads * a_.qk_dim);
    const program::TensorId dkv_in = b.activation("dkv_in", tokens, a_.kv_lora);
    const program::TensorId dkv_down_full = b.activation("dkv_down_full", tokens, a_.kv_lora + a_.rope_dim);
    b.emit(program::OpKind::latent_rope_grad, {dq_wide, dk, dq_nope, rope_positions(b)}, {dq, dkv_in, dkv_down_full},
           mla_rope_);
    const program::TensorId dq_in = emit::linear_backward(b, q_up_, dq);
    if (a_.indexes() && b.plan().indexer.loss > 0.0) pick_keys_backward(b);
    return mla_latents_backward(b, dq_in, dkv_in, dkv_down_full);
}

} // namespace moe::layers
