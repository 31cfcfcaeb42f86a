// Emitters of a model's parts: each declares its parameters, then writes its forward ops and, from what those kept, its
// backward ops. Residual streams are [T, hidden]; gradients of weights are accumulated by the ops themselves.
#pragma once

#include "planner/lower/emit/linear.hpp"
#include "planner/lower/layers/opaque_part.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/stack_traits.hpp"

#include <array>
#include <optional>
#include <string>

namespace moe::layers {

// y = RMSNorm(x) * w over the first `cols` columns of a row of x, or the model's LayerNorm.
struct Norm {
    std::string key;
    program::TensorId x = program::no_tensor, y = program::no_tensor, rstd = program::no_tensor;
    std::int64_t cols = 0;
    double eps = 0.0; // 0 = the model's
    // Megatron makes a norm one module with the product behind it (TELayerNormColumnParallelLinear) where that is the
    // projection of grouped queries, of Mamba or of a gated delta net, or an MLP's first: recomputation of norms does
    // not reach it, only that of the module around it does. Norms of MLA and of experts are modules of their own.
    // Source: Megatron-LM, megatron/core/models/gpt/gpt_layer_specs.py and hybrid/hybrid_layer_specs.py; the norms that
    // are recomputed: transformer_layer.py, recompute_input_layernorm (not where input_layernorm is IdentityOp).
    program::Module within = program::Module::layernorm;

    // `name`: that of the weight; a bias has the same with ".bias" at its end.
    static void declare(emit::ParameterSet& set, const model::Model& model, const std::string& key,
                        const std::string& name, std::int64_t cols);
    program::TensorId forward(emit::Builder& b, program::TensorId input, std::int64_t width, const std::string& name);
    // dx of x's own shape; with a stride only its first cols are written, into `dx` when given.
    program::TensorId backward(emit::Builder& b, program::TensorId dy, program::TensorId dresidual = program::no_tensor,
                               program::TensorId dx = program::no_tensor) const;
};

// y[attr.rows, attr.ffn] of an activation, quantized as it is written where products read it so.
program::TensorId emit_activation(emit::Builder& b, const program::ActivationAttr& attr, const program::Operands& in,
                                  const std::string& name, double expected_rows);

// Columns of heads that lie side by side in a row; none: the row is one piece.
using HeadPieces = std::array<std::int64_t, 6>;
// All-to-all among n ranks of CP: x[T, W] -> y[n T, W/n], or back.
void exchange_heads(emit::Builder& b, plan::Group group, program::TensorId x, program::TensorId y, bool to_heads,
                    HeadPieces pieces = {});
// All tokens of a share of the heads among the ranks of CP, for a state that passes through the whole sequence, or
// back; the identity without CP.
program::TensorId over_context(emit::Builder& b, program::TensorId x, const std::string& name, bool to_heads,
                               const HeadPieces& pieces = {});

// Keys of the whole sequence, of which zigzag shares lie on the members of CP, and their gradient's share; the identity
// without CP.
program::TensorId gather_context(emit::Builder& b, program::TensorId x, const std::string& name);
program::TensorId scatter_context(emit::Builder& b, program::TensorId x, const std::string& name);

// Self-attention: x -> x + out_proj(attention(norm(x))).
class AttentionLayer {
public:
    AttentionLayer(const model::Model& model, const model::Attention& shape, std::string key, std::string hf_prefix,
                   int layer);
    void declare(emit::ParameterSet& set) const;
    // `keys`: picked by the layers before; a layer with an indexer puts its own there.
    program::TensorId forward(emit::Builder& b, program::TensorId x, program::TensorId& keys);
    // `dnormed`: of what another part of the layer read of its norm's output (LayerKind::parallel).
    program::TensorId backward(emit::Builder& b, program::TensorId dy, program::TensorId dnormed = program::no_tensor);
    program::TensorId normed() const { return norm_.y; } // behind forward()

private:
    program::TensorId core(emit::Builder& b, program::TensorId normed, program::TensorId& keys);
    program::TensorId core_backward(emit::Builder& b, program::TensorId doutput);
    program::TensorId gqa_core(emit::Builder& b, program::TensorId normed);
    emit::Weight qkv_bias(emit::Builder& b, std::int64_t columns);
    void qkv_bias_backward(emit::Builder& b, program::TensorId dqkv);
    program::TensorId norm_heads(emit::Builder& b, program::TensorId qkv);
    program::TensorId norm_heads_backward(emit::Builder& b, program::TensorId dnormed);
    program::TensorId gate(emit::Builder& b, program::TensorId output);
    program::TensorId gate_backward(emit::Builder& b, program::TensorId dgated);
    std::int64_t gate_columns(int tp) const; // of a row, on one rank
    bool gated() const { return a_.output_gate || a_.head_gate; }
    program::TensorId gqa_core_backward(emit::Builder& b, program::TensorId doutput);
    program::TensorId mla_core(emit::Builder& b, program::TensorId normed);
    program::TensorId mla_core_backward(emit::Builder& b, program::TensorId doutput);
    // Inputs of the up projections: of queries [T, q_lora] (or what came in), of keys and values [S, kv_lora].
    std::pair<program::TensorId, program::TensorId> mla_latents(emit::Builder& b, program::TensorId normed);
    program::TensorId mla_latents_backward(emit::Builder& b, program::TensorId dq_in, program::TensorId dkv_in,
                                           program::TensorId dkv_down_full);
    program::TensorId mla_queries(emit::Builder& b, program::TensorId q_in); // [S, heads of this rank * qk]
    void declare_indexer(emit::ParameterSet& set) const;
    program::TensorId sparse_core(emit::Builder& b, program::TensorId normed,
                                  program::TensorId& keys); // MLA over keys that an indexer picks
    program::TensorId sparse_core_backward(emit::Builder& b, program::TensorId doutput);
    program::TensorId pick_keys(emit::Builder& b, program::TensorId normed, program::TensorId q_in);
    void pick_keys_backward(emit::Builder& b);
    program::TensorId cached_rows(emit::Builder& b, program::TensorId x, const char* name) const;
    // Layers with a state. The one op that published stacks have for Mamba-2 is not executed.
    bool delta() const { return a_.kind == model::AttentionKind::gated_delta; }
    bool mamba() const { return a_.kind == model::AttentionKind::mamba; }
    bool scans(const emit::Builder& b) const { return mamba() && plan::stack_traits(b.plan()).scans_in_one_op; }
    void declare_delta(emit::ParameterSet& set) const;
    void declare_mamba(emit::ParameterSet& set) const;
    program::TensorId scan_core(emit::Builder& b, program::TensorId normed);
    program::TensorId scan_core_backward(emit::Builder& b, program::TensorId doutput);
    program::StateAttr state_of(int parts) const; // with the heads of one of so many ranks
    program::TensorId state_core(emit::Builder& b, program::TensorId normed);
    program::TensorId state_cached(emit::Builder& b);
    program::TensorId state_core_backward(emit::Builder& b, program::TensorId doutput);
    std::string name(const char* part) const; // of a tensor of a layer with a state
    program::Operands rule_operands(program::Operands first) const;
    static program::Operands with_starts(const emit::Builder& b, program::Operands in);
    // DeepSeek-V4, priced and not executed: attention over a window of keys and over blocks of them.
    void declare_compressed(emit::ParameterSet& set) const;
    program::TensorId compressed_core(emit::Builder& b, program::TensorId normed);
    program::TensorId compressed_core_backward(emit::Builder& b, program::TensorId doutput);
    bool picks_blocks() const { return a_.kind == model::AttentionKind::compressed && a_.indexer_top_k > 0; }
    std::int64_t blocks(const emit::Builder& b) const; // of the whole sequence
    void pick_blocks(emit::Builder& b, program::TensorId normed, program::TensorId q_in);
    void pick_blocks_backward(emit::Builder& b);
    // Rows of blocks from projected tokens: a mean by weights that are projected beside it, then a norm.
    struct Pooling {
        emit::Linear projection;
        Norm norm;
        std::int64_t width = 0;
    };
    program::TensorId pool(emit::Builder& b, Pooling& pooling, program::TensorId normed, const char* name,
                           std::int64_t width);
    // The gradient of the local tokens' projections.
    program::TensorId pool_backward(emit::Builder& b, const Pooling& pooling, program::TensorId dpooled);
    // Plain keys and values [S, kv] beside queries of a latent (Step-3): packed, and the gradient of what both read.
    program::TensorId with_latent_queries(emit::Builder& b, program::TensorId normed, program::TensorId kv);
    program::TensorId latent_queries_backward(emit::Builder& b, program::TensorId dqkv);
    program::TensorId attend(emit::Builder& b, program::TensorId q, program::TensorId k, program::TensorId v,
                             program::AttentionAttr attr, program::TensorId sinks);
    static bool by_documents(const emit::Builder& b);
    static program::TensorId rope_positions(const emit::Builder& b);
    static std::int64_t rope_batch(const emit::Builder& b);
    program::TensorId attend_cached(emit::Builder& b, program::TensorId q, program::TensorId k, program::TensorId v,
                                    program::AttentionAttr attr, program::TensorId sinks) const;
    program::TensorId low(emit::Builder& b, program::TensorId x, const std::string& name) const;
    void attend_backward(emit::Builder& b, program::TensorId doutput, program::TensorId dq, program::TensorId dk,
                         program::TensorId dv);
    program::TensorId travelling(emit::Builder& b) const;
    program::TensorId ring_backward(emit::Builder& b, program::TensorId doutput, program::TensorId dq);

    const model::Model& model_;
    const model::Attention& a_;
    std::string key_, hf_;
    int layer_;
    Norm norm_, post_norm_, q_norm_, kv_norm_;
    std::optional<OpaquePartOps> opaque_;
    emit::Linear qkv_, out_, q_down_, q_up_, kv_down_, kv_up_;
    emit::Weight q_head_norm_, k_head_norm_, qkv_bias_, keys_bias_, out_bias_, sinks_, conv_, conv_bias_, a_log_,
        dt_bias_, skip_;
    program::TensorId qkv_raw_ = program::no_tensor, head_rstd_ = program::no_tensor,
                      kv_down_full_ = program::no_tensor;
    // Gates of the output [S, gate columns] and their gradient, what they gate, norms over all heads and their input.
    std::int64_t packed_at_ = 0, gates_at_ = 0; // columns of what the product of queries, keys, values and gates gives
    program::TensorId gates_ = program::no_tensor, dgates_ = program::no_tensor, ungated_ = program::no_tensor,
                      clip_in_ = program::no_tensor, heads_in_ = program::no_tensor, squares_ = program::no_tensor;
    program::HeadsNormAttr heads_attr_;
    program::TensorId value_in_ = program::no_tensor; // what norms of values take
    program::ValueNormAttr values_attr_;
    program::TensorId q_ = program::no_tensor, k_ = program::no_tensor, v_ = program::no_tensor,
                      o_ = program::no_tensor, lse_ = program::no_tensor;
    program::AttentionAttr attr_;
    program::RopeAttr rope_;
    program::MlaRopeAttr mla_rope_;
    program::ScanAttr scan_;
    program::StateAttr state_;
    // Sparse attention: the indexer's projections, what it compares, what it picked.
    emit::Linear index_q_, index_k_, index_weights_;
    program::RopeAttr index_rope_;
    program::TensorId index_k_in_ = program::no_tensor, index_k_rstd_ = program::no_tensor; // of the key's LayerNorm
    program::TensorId index_queries_ = program::no_tensor, index_keys_ = program::no_tensor,
                      head_weights_ = program::no_tensor, picked_ = program::no_tensor;
    program::AttentionAttr index_attr_;
    // Compressed attention: its blocks and the indexer's, and the output before it turns back and by groups.
    Pooling blocks_, index_blocks_;
    emit::Weight group_out_;
    program::TensorId turned_back_ = program::no_tensor;
};

// Dense MLP: x -> x + down(act(gate, up)(norm(x))). Also the shared expert, which takes the MoE layer's normed input.
class MlpLayer {
public:
    // `shared`: no norm and no residual of its own.
    MlpLayer(const model::Model& model, const model::LayerKind& kind, std::int64_t ffn, bool shared, std::string key,
             std::string hf_prefix, int layer);
    void declare(emit::ParameterSet& set) const;
    // `given`: what attention reads, of a layer that is parallel; backward() then returns its gradient.
    program::TensorId forward(emit::Builder& b, program::TensorId x, program::TensorId given = program::no_tensor);
    program::TensorId backward(emit::Builder& b, program::TensorId dy);

private:
    bool own_norm() const { return !shared_ && !kind_.parallel; }
    bool biased() const { return shared_ ? kind_.moe && kind_.moe->shared_bias : kind_.mlp_bias; }

    const model::Model& model_;
    const model::LayerKind& kind_;
    std::int64_t ffn_;
    bool shared_;
    std::string key_, hf_;
    int layer_;
    Norm norm_, post_norm_;
    emit::Linear in_, out_, gate_;
    emit::Weight in_bias_, out_bias_;
    program::TensorId pre_ = program::no_tensor, y_ = program::no_tensor, gate_logit_ = program::no_tensor;
    program::ActivationAttr act_;
};

// Mixture of experts: x -> x + combine(experts(dispatch(norm(x)))) (+ shared expert).
class MoeLayer {
public:
    MoeLayer(const model::Model& model, const model::LayerKind& kind, std::string key, std::string hf_prefix,
             int layer);
    void declare(emit::ParameterSet& set, const plan::Plan& plan) const;
    // `given`: as in MlpLayer.
    program::TensorId forward(emit::Builder& b, program::TensorId x, program::TensorId given = program::no_tensor);
    program::TensorId backward(emit::Builder& b, program::TensorId dy);

private:
    // low: rows of quantized tokens, and then `rows` may be none; columns: theirs, where they were made for wgrad.
    struct Rows {
        program::TensorId rows = program::no_tensor, probs = program::no_tensor, low = program::no_tensor,
                          columns = program::no_tensor;
    };
    void route(emit::Builder& b, program::TensorId normed);
    // x times the noise of this step, and likewise the gradient on its way back; x itself where there is none.
    program::TensorId jittered(emit::Builder& b, program::TensorId x, const std::string& name) const;
    double logit_factor() const;
    program::TensorId unscaled(emit::Builder& b, program::TensorId dweight);
    program::BalanceAttr balance_attr(const emit::Builder& b) const;
    void balance(emit::Builder& b);                                                  // losses of the router
    program::TensorId balance_backward(emit::Builder& b, program::TensorId dlogits); // dlogits with their gradient
    void drop(emit::Builder& b);
    void count_load(emit::Builder& b, program::TensorId counts);
    program::TensorId of_sequences(emit::Builder& b, program::TensorId x) const;
    std::int64_t expert_capacity(const emit::Builder& b) const; // tokens that one expert keeps of those in drop_scope
    std::int64_t most_kept(const emit::Builder& b) const;       // tokens that one expert gets at most of an EP group
    std::int64_t padded(const emit::Builder& b) const;          // rows that one expert gets of this rank, 0: as chosen
    std::int64_t sent_rows(const emit::Builder& b) const;       // rows of this rank for all experts
    // Elements of a row that travels.
    std::int64_t width() const { return moe_.latent > 0 ? moe_.latent : model_.hidden; }
    Rows dispatch(emit::Builder& b, program::TensorId x, program::TensorId weight,
                  const std::string& name); // is the backward of combine too
    // Combines the experts' rows, and is the backward of dispatch: the sums, and where `rows` has gradients of the
    // routing weights, these by copy.
    Rows combine(emit::Builder& b, Rows rows, const std::string& name);
    program::TensorId combine_rows(emit::Builder& b, program::TensorId rows, const std::string& name);
    program::TensorId combine_probs(emit::Builder& b, program::TensorId dprobs);
    Rows dispatch_gathered(emit::Builder& b, program::TensorId x, program::TensorId weight, const std::string& name);
    program::TensorId combine_gathered(emit::Builder& b, program::TensorId rows, std::int64_t cols, bool per_copy,
                                       const std::string& name);
    // The ranks that tokens reach over peers' memory, their experts, and this rank's tokens for them: all of the EP
    // group, or where dispatch has two levels those of one domain and what came for them from as many domains.
    struct Level {
        std::int64_t tokens = 0;
        int experts = 0, ep = 1, domains = 1;
        plan::Group group;
    };
    Level level(const emit::Builder& b) const;
    bool two_levels(const emit::Builder& b) const;
    double tokens_sent(const emit::Builder& b, int domains) const;
    std::int64_t slot_rows(const emit::Builder& b, int domains) const;
    program::RowsAttr slots_attr(const emit::Builder& b, std::int64_t cols, bool back) const;
    program::TensorId into_slots(emit::Builder& b, program::TensorId x, const std::string& name);
    program::TensorId exchange_slots(emit::Builder& b, program::TensorId slots, bool back, const std::string& name);
    void out_of_slots(emit::Builder& b, program::TensorId slots, program::TensorId y);
    void route_domains(emit::Builder& b);
    Rows dispatch_domains(emit::Builder& b, program::TensorId x, program::TensorId weight, const std::string& name);
    Rows combine_domains(emit::Builder& b, Rows rows, const std::string& name);
    Rows dispatch_over_peers(emit::Builder& b, program::TensorId x, program::TensorId weight, const std::string& name);
    Rows combine_over_peers(emit::Builder& b, Rows rows, const std::string& name);
    program::TensorId gather_group(emit::Builder& b, program::TensorId x, const std::string& name);
    program::TensorId experts(emit::Builder& b, Rows rows);
    Rows experts_backward(emit::Builder& b, const Rows& dout);
    program::TensorId input_factor(emit::Builder& b);
    bool quantizes_tokens(const emit::Builder& b) const;
    program::TensorId quantized_tokens(emit::Builder& b, program::TensorId x, const std::string& name);
    Rows permute_low(emit::Builder& b, program::TensorId x, const program::PermuteAttr& attr, const std::string& name);
    // Columns of the rows that quantized tokens become, beside `rows` where these are given.
    program::TensorId permute_columns(emit::Builder& b, program::TensorId tokens, program::TensorId rows,
                                      const std::string& name);
    program::PermuteAttr permute_attr(const emit::Builder& b) const; // of this rank's tokens
    program::TensorId gather_counts(emit::Builder& b, program::TensorId counts) const;
    program::TensorId move_rows(emit::Builder& b, program::TensorId rows, bool back, const std::string& name);
    double arriving_rows(const emit::Builder& b) const;
    double routed_rows(const emit::Builder& b) const;
    std::int64_t worst_rows(const emit::Builder& b) const;
    std::int64_t capacity(const emit::Builder& b) const;
    void fit_rows(emit::Builder& b, program::TensorId& counts, const program::RowsAttr& attr);
    bool exchanges(const emit::Builder& b) const { return b.plan().ep * b.plan().etp > 1; }
    // True for dispatch by our engine; published stacks' ops of that name are only priced.
    bool over_peers(const emit::Builder& b) const {
        return exchanges(b) && b.plan().dispatcher == plan::Dispatcher::hybridep &&
               plan::stack_traits(b.plan()).peer_memory_dispatch;
    }
    // The stream of ops on the counts of all ranks: where tokens go next to their experts, only these wait for the
    // other ranks.
    program::Stream counting_stream(const emit::Builder& b) const {
        return over_peers(b) ? program::Stream::expert : program::Stream::compute;
    }
    bool gathers(const emit::Builder& b) const {
        return exchanges(b) && b.plan().dispatcher == plan::Dispatcher::allgather;
    }

    const model::Model& model_;
    const model::LayerKind& kind_;
    const model::Moe& moe_;
    std::string key_, hf_;
    int layer_;
    Norm norm_, post_norm_;
    Norm router_norm_, expert_norm_, expert_post_, shared_post_; // norms of branches, where these have their own
    std::optional<MlpLayer> shared_;
    emit::Linear gate_, latent_down_, latent_up_;
    emit::Weight fc1_, fc2_, gate_bias_, select_bias_, fc1_bias_, fc2_bias_, scale_; // scale_: a factor of each expert
    std::optional<emit::Adapter> fc1_adapter_, fc2_adapter_;
    program::TensorId logits_ = program::no_tensor, index_ = program::no_tensor, weight_ = program::no_tensor,
                      row_of_ = program::no_tensor, counts_ = program::no_tensor, all_counts_ = program::no_tensor,
                      places_ = program::no_tensor;
    program::TensorId slot_of_ = program::no_tensor, domain_counts_ = program::no_tensor; // of two levels
    program::TensorId unscaled_ = program::no_tensor; // weight_ before those factors
    program::TensorId balance_load_ = program::no_tensor,
                      kept_ = program::no_tensor;       // kept_: index_ without the copies that are dropped
    program::TensorId tokens_low_ = program::no_tensor; // the quantized tokens that became rows
    program::TensorId in_saved_ = program::no_tensor, fc1_out_ = program::no_tensor, act_saved_ = program::no_tensor,
                      probs_ = program::no_tensor,
                      unweighed_ = program::no_tensor, // rows before routing weights multiply them
        fc2_out_ = program::no_tensor;                 // kept only where routing weights multiply it
    program::ActivationAttr act_;
};

// Token embedding (vocabulary-parallel) and the loss end: final norm, LM head, cross-entropy.
class EmbeddingLayer {
public:
    explicit EmbeddingLayer(const model::Model& model) : model_(model) {}
    void declare(emit::ParameterSet& set, const plan::Plan& plan) const;
    // `ids`: a tensor of ProgramIo; rows of negative ids are zero and get no gradient.
    program::TensorId forward(emit::Builder& b, program::TensorId ids);
    void backward(emit::Builder& b, program::TensorId ids, program::TensorId dx);

private:
    const model::Model& model_;
};

class HeadLayer {
public:
    // depth 0: the model's own head; d: that of MTP layer d, which predicts d tokens further on, reports its loss apart
    // and has weight 0.1 / depths (DeepSeek-V3's lambda, arXiv 2412.19437 section 2.2). The LM head's weight is shared.
    // `norm_name` empty: what comes in has passed the norm already.
    HeadLayer(const model::Model& model, std::string key, std::string norm_name, int depth)
        : model_(model), key_(std::move(key)), norm_name_(std::move(norm_name)), depth_(depth) {}
    void declare(emit::ParameterSet& set, const plan::Plan& plan) const;
    // Returns the normed x.
    program::TensorId forward(emit::Builder& b, program::TensorId x);
    // `dnormed`: gradient of what forward() returned from other readers, or no_tensor.
    program::TensorId backward(emit::Builder& b, program::TensorId dnormed = program::no_tensor);

private:
    program::TensorId labels(const emit::Builder& b) const;
    program::Operands with_share(const emit::Builder& b, program::Operands in) const;
    const model::Model& model_;
    std::string key_, norm_name_;
    int depth_;
    Norm norm_;
    emit::Linear head_;
    program::LossAttr loss_, gradient_; // apart in their scale
    emit::Weight bias_;
    program::TensorId uncapped_ = program::no_tensor; // logits before their cap
    program::TensorId logits_ = program::no_tensor, max_ = program::no_tensor, stat_ = program::no_tensor;
};

// The input of an MTP layer, which two linear layers and two norms make: h' = W [norm(embedding of the next token);
// norm(h)].
class MtpInput {
public:
    MtpInput(const model::Model& model, std::string key, std::string hf_prefix)
        : model_(model), key_(std::move(key)), hf_(std::move(hf_prefix)) {}
    void declare(emit::ParameterSet& set) const;
    program::TensorId forward(emit::Builder& b, program::TensorId h, program::TensorId embedded);
    // Gradients of h and of the embedded tokens.
    std::pair<program::TensorId, program::TensorId> backward(emit::Builder& b, program::TensorId dy);

private:
    const model::Model& model_;
    std::string key_, hf_;
    Norm hidden_norm_, embed_norm_;
    emit::Linear hidden_, embed_;
};

// Factor of attention's logits beside 1 / sqrt(width), where YaRN has one for all dimensions.
double softmax_scale(const model::RopeScaling& scaling);
program::Parameter matrix(std::string name, plan::Domain domain, std::int64_t rows, std::int64_t cols, int shard_dim,
                          double std);
program::Parameter norm_weight(std::string name, std::int64_t cols);
// The norms before and behind the MLP or experts; a model without the latter has the former's other name.
void declare_mlp_norms(emit::ParameterSet& set, const model::Model& model, const std::string& key,
                       const std::string& hf);

} // namespace moe::layers
