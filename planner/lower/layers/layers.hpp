// Emitters of a model's parts: each declares its parameters, then writes its forward ops and, from what those kept, its
// backward ops. Residual streams are [T, hidden]; gradients of weights are accumulated by the ops themselves.
#pragma once

#include "planner/lower/emit/linear.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/stack_traits.hpp"

#include <array>
#include <optional>
#include <string>

namespace moe {

// y = RMSNorm(x) * w over the last `cols` columns' start; x may have a longer row stride than cols.
struct Norm {
    std::string key;
    TensorId x = no_tensor, y = no_tensor, rstd = no_tensor;
    std::int64_t cols = 0;
    double eps = 0.0; // 0 = the model's
    // Megatron makes a norm one module with the product behind it (TELayerNormColumnParallelLinear) where that is the
    // projection of grouped queries, of Mamba or of a gated delta net, or an MLP's first: recomputation of norms does
    // not reach it, only that of the module around it does. Norms of MLA and of experts are modules of their own.
    // Source: Megatron-LM, megatron/core/models/gpt/gpt_layer_specs.py and hybrid/hybrid_layer_specs.py; the norms that
    // are recomputed: transformer_layer.py, recompute_input_layernorm (not where input_layernorm is IdentityOp).
    Module within = Module::layernorm;

    static void declare(ParameterSet& set, const std::string& key, const std::string& name, std::int64_t cols);
    TensorId forward(Builder& b, TensorId input, std::int64_t width, const std::string& name);
    // dx of x's own shape; with a stride only its first cols are written, into `dx` when given.
    TensorId backward(Builder& b, TensorId dy, TensorId dresidual = no_tensor, TensorId dx = no_tensor) const;
};

// y[attr.rows, attr.ffn] of an activation, quantized as it is written where products read it so.
TensorId emit_activation(Builder& b, const ActivationAttr& attr, const std::vector<TensorId>& in,
                         const std::string& name, double expected_rows);

// Columns of heads that lie side by side in a row; none: the row is one piece.
using HeadPieces = std::array<std::int64_t, 3>;
// All-to-all over CP: x[S/cp, W] -> y[S, W/cp], or back.
void exchange_heads(Builder& b, TensorId x, TensorId y, bool to_heads, HeadPieces pieces = {});

// Self-attention: x -> x + out_proj(attention(norm(x))).
class AttentionLayer {
public:
    AttentionLayer(const Model& model, const Attention& shape, std::string key, std::string hf_prefix, int layer);
    void declare(ParameterSet& set) const;
    // `keys`: picked by the layers before; a layer with an indexer puts its own there.
    TensorId forward(Builder& b, TensorId x, TensorId& keys);
    TensorId backward(Builder& b, TensorId dy);

private:
    TensorId gqa_core(Builder& b, TensorId normed);
    TensorId gqa_core_backward(Builder& b, TensorId doutput);
    TensorId mla_core(Builder& b, TensorId normed);
    TensorId mla_core_backward(Builder& b, TensorId doutput);
    // Inputs of the up projections: of queries [T, q_lora] (or what came in), of keys and values [S, kv_lora].
    std::pair<TensorId, TensorId> mla_latents(Builder& b, TensorId normed);
    TensorId mla_latents_backward(Builder& b, TensorId dq_in, TensorId dkv_in, TensorId dkv_down_full);
    TensorId mla_queries(Builder& b, TensorId q_in); // [S, heads of this rank * qk]
    void declare_indexer(ParameterSet& set) const;
    TensorId sparse_core(Builder& b, TensorId normed, TensorId& keys); // MLA over keys that an indexer picks
    TensorId sparse_core_backward(Builder& b, TensorId doutput);
    TensorId pick_keys(Builder& b, TensorId normed, TensorId q_in);
    void pick_keys_backward(Builder& b);
    void declare_mamba(ParameterSet& set) const;
    TensorId mamba_core(Builder& b, TensorId normed);
    TensorId mamba_core_backward(Builder& b, TensorId doutput);
    TensorId mixer_core(Builder& b, TensorId normed); // gated delta net and compressed attention: priced, not executed
    TensorId mixer_core_backward(Builder& b, TensorId doutput);
    TensorId attend(Builder& b, TensorId q, TensorId k, TensorId v, AttentionAttr attr, TensorId sinks);
    TensorId low(Builder& b, TensorId x, const std::string& name) const;
    void attend_backward(Builder& b, TensorId doutput, TensorId dq, TensorId dk, TensorId dv);
    TensorId travelling(Builder& b) const;
    TensorId ring_backward(Builder& b, TensorId doutput, TensorId dq);
    // Rows of the lumped input and output projections, [rows, hidden] each, of the kinds that are only priced.
    std::pair<std::int64_t, std::int64_t> mixer_rows() const;
    double mixer_flops(const Builder& b) const;

    const Model& model_;
    const Attention& a_;
    std::string key_, hf_;
    int layer_;
    Norm norm_, post_norm_, q_norm_, kv_norm_;
    Linear qkv_, out_, q_down_, q_up_, kv_down_, kv_up_;
    Weight q_head_norm_, k_head_norm_, qkv_bias_, out_bias_, sinks_;
    TensorId qkv_raw_ = no_tensor, head_rstd_ = no_tensor, kv_down_full_ = no_tensor;
    TensorId q_ = no_tensor, k_ = no_tensor, v_ = no_tensor, o_ = no_tensor, lse_ = no_tensor;
    AttentionAttr attr_;
    RopeAttr rope_;
    MlaRopeAttr mla_rope_;
    ScanAttr scan_;
    // Sparse attention: the indexer's projections, what it compares, what it picked.
    Linear index_q_, index_k_, index_weights_;
    Norm index_norm_;
    TensorId index_queries_ = no_tensor, index_keys_ = no_tensor, head_weights_ = no_tensor, picked_ = no_tensor;
    AttentionAttr index_attr_;
};

// Dense MLP: x -> x + down(act(gate, up)(norm(x))). Also the shared expert, which takes the MoE layer's normed input.
class MlpLayer {
public:
    // `shared`: no norm and no residual of its own.
    MlpLayer(const Model& model, const LayerKind& kind, std::int64_t ffn, bool shared, std::string key,
             std::string hf_prefix, int layer);
    void declare(ParameterSet& set) const;
    TensorId forward(Builder& b, TensorId x);
    TensorId backward(Builder& b, TensorId dy);

private:
    const Model& model_;
    const LayerKind& kind_;
    std::int64_t ffn_;
    bool shared_;
    std::string key_, hf_;
    int layer_;
    Norm norm_, post_norm_;
    Linear in_, out_, gate_;
    Weight in_bias_, out_bias_;
    TensorId pre_ = no_tensor, y_ = no_tensor, gate_logit_ = no_tensor;
    ActivationAttr act_;
};

// Mixture of experts: x -> x + combine(experts(dispatch(norm(x)))) (+ shared expert).
class MoeLayer {
public:
    MoeLayer(const Model& model, const LayerKind& kind, std::string key, std::string hf_prefix, int layer);
    void declare(ParameterSet& set, const Plan& plan) const;
    TensorId forward(Builder& b, TensorId x);
    TensorId backward(Builder& b, TensorId dy);

private:
    // low: the rows quantized, where tokens were before they became rows; then `rows` may be none.
    struct Rows {
        TensorId rows = no_tensor, probs = no_tensor, low = no_tensor;
    };
    void route(Builder& b, TensorId normed);
    BalanceAttr balance_attr(const Builder& b) const;
    void balance(Builder& b);                                // losses of the router
    TensorId balance_backward(Builder& b, TensorId dlogits); // dlogits with their gradient
    void drop(Builder& b);
    void count_load(Builder& b, TensorId counts);
    std::int64_t expert_capacity(const Builder& b) const; // tokens that one expert keeps of this rank's
    std::int64_t padded(const Builder& b) const;          // rows that one expert gets of this rank, 0: as chosen
    std::int64_t sent_rows(const Builder& b) const;       // rows of this rank for all experts
    std::int64_t width() const { return moe_.latent > 0 ? moe_.latent : model_.hidden; } // of what travels
    Rows dispatch(Builder& b, TensorId x, TensorId weight, const std::string& name);     // also backward of combine
    // Also backward of dispatch: the sums, and where `rows` has gradients of the routing weights, these by copy.
    Rows combine(Builder& b, Rows rows, const std::string& name);
    TensorId combine_rows(Builder& b, TensorId rows, const std::string& name);
    TensorId combine_probs(Builder& b, TensorId dprobs);
    Rows dispatch_gathered(Builder& b, TensorId x, TensorId weight, const std::string& name);
    TensorId combine_gathered(Builder& b, TensorId rows, std::int64_t cols, bool per_copy, const std::string& name);
    Rows dispatch_over_peers(Builder& b, TensorId x, TensorId weight, const std::string& name);
    Rows combine_over_peers(Builder& b, Rows rows, const std::string& name);
    TensorId gather_group(Builder& b, TensorId x, const std::string& name); // over all ranks that share the experts
    TensorId experts(Builder& b, Rows rows);
    Rows experts_backward(Builder& b, const Rows& dout);
    TensorId wide_input(Builder& b);
    bool quantizes_tokens(const Builder& b) const;
    TensorId quantized_tokens(Builder& b, TensorId x, const std::string& name);
    TensorId permute_low(Builder& b, TensorId x, const PermuteAttr& attr, const std::string& name);
    TensorId gather_counts(Builder& b, TensorId counts) const;
    TensorId move_rows(Builder& b, TensorId rows, bool back, const std::string& name);
    double arriving_rows(const Builder& b) const;
    double routed_rows(const Builder& b) const;
    std::int64_t worst_rows(const Builder& b) const;
    std::int64_t capacity(const Builder& b) const;
    void fit_rows(Builder& b, TensorId& counts, const RowsAttr& attr);
    bool exchanges(const Builder& b) const { return b.plan().ep * b.plan().etp > 1; }
    // Ours; published stacks' ops of that name are only priced.
    bool over_peers(const Builder& b) const {
        return exchanges(b) && b.plan().dispatcher == Dispatcher::hybridep &&
               stack_traits(b.plan()).peer_memory_dispatch;
    }
    // Of what is made of all ranks' counts: where tokens go next to their experts, only they wait for the other ranks.
    Stream counting_stream(const Builder& b) const { return over_peers(b) ? Stream::expert : Stream::compute; }
    bool gathers(const Builder& b) const { return exchanges(b) && b.plan().dispatcher == Dispatcher::allgather; }

    const Model& model_;
    const LayerKind& kind_;
    const Moe& moe_;
    std::string key_, hf_;
    int layer_;
    Norm norm_, post_norm_;
    Norm router_norm_, expert_norm_, expert_post_, shared_post_; // where branches have their own
    std::optional<MlpLayer> shared_;
    Linear gate_, latent_down_, latent_up_;
    Weight fc1_, fc2_, gate_bias_, select_bias_, fc1_bias_, fc2_bias_;
    TensorId logits_ = no_tensor, index_ = no_tensor, weight_ = no_tensor, row_of_ = no_tensor, counts_ = no_tensor,
             all_counts_ = no_tensor, places_ = no_tensor;
    TensorId balance_load_ = no_tensor, kept_ = no_tensor; // kept_: index_ without the copies that are dropped
    TensorId tokens_low_ = no_tensor;                      // the quantized tokens that became rows
    TensorId in_saved_ = no_tensor, fc1_out_ = no_tensor, act_saved_ = no_tensor, probs_ = no_tensor,
             fc2_out_ = no_tensor; // kept only where routing weights multiply it
    ActivationAttr act_;
};

// Token embedding (vocabulary-parallel) and the loss end: final norm, LM head, cross-entropy.
class EmbeddingLayer {
public:
    explicit EmbeddingLayer(const Model& model) : model_(model) {}
    void declare(ParameterSet& set, const Plan& plan) const;
    // `ids`: a tensor of ProgramIo; rows of negative ids are zero and get no gradient.
    TensorId forward(Builder& b, TensorId ids);
    void backward(Builder& b, TensorId ids, TensorId dx);

private:
    const Model& model_;
};

class HeadLayer {
public:
    // depth 0: the model's own head; d: that of MTP layer d, which predicts d tokens further on, reports its loss apart
    // and has weight 0.1 / depths (DeepSeek-V3's lambda, arXiv 2412.19437 section 2.2). The LM head's weight is shared.
    // `norm_name` empty: what comes in has passed the norm already.
    HeadLayer(const Model& model, std::string key, std::string norm_name, int depth)
        : model_(model), key_(std::move(key)), norm_name_(std::move(norm_name)), depth_(depth) {}
    void declare(ParameterSet& set, const Plan& plan) const;
    // Returns the normed x.
    TensorId forward(Builder& b, TensorId x);
    // `dnormed`: gradient of what forward() returned from other readers, or no_tensor.
    TensorId backward(Builder& b, TensorId dnormed = no_tensor);

private:
    TensorId labels(const Builder& b) const;
    const Model& model_;
    std::string key_, norm_name_;
    int depth_;
    Norm norm_;
    Linear head_;
    LossAttr loss_, gradient_; // apart in their scale
    TensorId logits_ = no_tensor, max_ = no_tensor, stat_ = no_tensor;
};

// What two linear layers and two norms put before an MTP layer: h' = W [norm(embedding of the next token); norm(h)].
class MtpInput {
public:
    MtpInput(const Model& model, std::string key, std::string hf_prefix)
        : model_(model), key_(std::move(key)), hf_(std::move(hf_prefix)) {}
    void declare(ParameterSet& set) const;
    TensorId forward(Builder& b, TensorId h, TensorId embedded);
    // Gradients of h and of the embedded tokens.
    std::pair<TensorId, TensorId> backward(Builder& b, TensorId dy);

private:
    const Model& model_;
    std::string key_, hf_;
    Norm hidden_norm_, embed_norm_;
    Linear hidden_, embed_;
};

Parameter matrix(std::string name, Domain domain, std::int64_t rows, std::int64_t cols, int shard_dim, double std);
Parameter norm_weight(std::string name, std::int64_t cols);
// The norms before and behind the MLP or experts; a model without the latter has the former's other name.
void declare_mlp_norms(ParameterSet& set, const Model& model, const std::string& key, const std::string& hf);

} // namespace moe
