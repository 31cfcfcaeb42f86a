// The kinds of layers that a model is made of: attention and its rotation, router, experts or dense MLP.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

namespace moe::model {

enum class AttentionKind : std::uint8_t {
    gqa,         // grouped-query (and multi-head) softmax attention
    mla,         // multi-head latent attention (DeepSeek-V2/V3, Kimi-K2)
    gated_delta, // gated delta net, the linear attention of Qwen3-Next
    compressed,  // DeepSeek-V4: window plus compressed keys, with an indexer
    mamba,       // Mamba-2, a state space model with a short convolution (Nemotron-H, Nemotron 3)
    opaque,      // a mixer that is priced alone, as its opaque part says
    none,        // a layer of a hybrid that is nothing but its MLP or experts
};

// gelu is exact (erf), gelu_tanh its approximation by a hyperbolic tangent.
enum class Activation : std::uint8_t { silu, gelu, quick_gelu, relu2, gelu_tanh };

// "linear", "yarn", "llama3" or "proportional"; others are read but not trained. Empty type = none
struct RopeScaling {
    std::string type;
    double factor = 1.0;
    double beta_fast = 32.0, beta_slow = 1.0;
    double mscale = 0.0, mscale_all_dim = 0.0; // 0 = not given
    double attention_factor = 1.0; // factor of the rotated queries and keys, as given or from factor and mscale
    double low_freq_factor = 1.0, high_freq_factor = 4.0; // llama3
    bool truncate = true;                                 // whole columns bound YaRN's ramp
    double share = 1.0; // proportional: of the pairs of columns, those that turn, as they would if all did (Gemma 4)
    std::int64_t original_positions = 0;

    bool operator==(const RopeScaling&) const = default;
};

// The rotation of a kind of layers: its base and what bends its frequencies.
struct Rope {
    double theta = 10000.0;
    RopeScaling scaling;

    bool operator==(const Rope&) const = default;
};

// Queries are multiplied by 1 + beta * ln(1 + floor((position + offset) / positions)); beta 0: they are not (Llama 4,
// Mistral Small 4; transformers 5.24, modeling_llama4.py and modeling_mistral4.py).
struct QueryScale {
    double beta = 0.0, positions = 1.0, offset = 0.0;

    bool operator==(const QueryScale&) const = default;
};

// A part that no op here computes and that is priced alone: matrices around a core. Families give its numbers, so that
// counts are exact whatever it is made of.
struct OpaquePart {
    const char* name = "";    // what it is, as `show` says it
    std::int64_t weights = 0; // of all its matrices and vectors
    std::int64_t idle = 0;    // of these, what a token leaves out (experts of attention that it does not choose)
    std::int64_t out = 0; // columns that a last matrix takes back to the hidden width, 0: it has no output of its own
    double macs = 0.0;    // multiply-accumulates per token of its matrices and its core
    double macs_per_key = 0.0; // and for each key that a query could see

    bool operator==(const OpaquePart& other) const {
        return std::string_view(name) == other.name && weights == other.weights && idle == other.idle &&
               out == other.out && macs == other.macs && macs_per_key == other.macs_per_key;
    }
};

struct Attention {
    AttentionKind kind = AttentionKind::gqa;
    int heads = 0;           // query heads
    int kv_heads = 0;        // key/value heads (gqa)
    int qk_dim = 0;          // width of queries and keys of a head (MLA: nope + rope)
    int v_dim = 0;           // width of values of a head
    int rope_dim = 0;        // rotated columns per head (MLA: the shared rotary key's width)
    int q_lora = 0;          // latent width of queries, with a norm, 0 = queries projected directly
    int kv_lora = 0;         // MLA: latent width of keys and values
    std::int64_t window = 0; // positions a query sees including itself, 0 = all before it
    std::int64_t chunk = 0;  // positions in a run beyond which no query sees (Llama 4), 0 = the whole sequence
    bool qkv_bias = false;
    bool out_bias = false;
    bool qk_norm = false;       // RMSNorm over each query and key head (Qwen3)
    bool whole_qk_norm = false; // qk_norm is over all heads at once, as wide as they are (OLMoE, MiniMax-M2)
    bool sinks = false;         // one learned sink logit per head (GPT-OSS)
    bool plain_qk_norm = false; // qk_norm has no weights (Llama 4)
    bool norm_behind = false;   // qk_norm follows the rotation (Hunyuan)
    bool value_norm = false;    // RMSNorm without weights over each value head (Gemma 4)
    bool output_gate = false;   // sigmoid gate on the attention output (Qwen3-Next)
    bool head_gate = false;     // one such gate per head (Step-3.5)
    bool softplus_gate = false; // gates are a softplus instead of a sigmoid (Laguna)
    bool k_eq_v = false;        // no projection of values: keys serve as such (Gemma 4)
    std::optional<Rope> rope;   // where the layer turns by another base or scaling than the model's
    double scale = 0.0;         // factor of the products of queries and keys, 0 = 1 / sqrt(qk_dim) (Granite)
    double value_scale = 1.0;   // factor of the values (MiMo-V2)
    double clip = 0.0;          // projected queries, keys and values are cut at plus and minus this, 0: not (DBRX)
    QueryScale query_scale;
    // gated_delta; mamba: groups, heads, state and width of a head
    int key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0, conv_kernel = 0;
    int scan_chunk = 0; // mamba: positions whose products are made at once
    double step_min = 0.0, step_max = std::numeric_limits<double>::infinity(); // mamba: bounds of a step's width
    // compressed
    int compress_ratio = 0; // 0 = window only
    int out_groups = 0, out_lora = 0;
    // compressed; mla: keys are picked by an indexer (DeepSeek-V3.2, GLM-5), 0 = all take part. gqa: so many keys are
    // picked, by what `opaque` counts (MiniMax-M3)
    int indexer_heads = 0, indexer_dim = 0, indexer_top_k = 0;
    bool indexer_interleaved = false; // its queries and keys turn by neighbouring columns (GLM-5), not by halves
    bool shares_index = false; // mla: takes the keys that the last layer before it with an indexer has picked (GLM-5.2)
    OpaquePart opaque; // opaque: all of it; of other kinds: what stands beside, of the same input, added to the output

    // Weights of the norms of queries and of keys.
    std::int64_t q_norm() const { return static_cast<std::int64_t>(qk_dim) * (whole_qk_norm ? heads : 1); }
    // Whether each key head lies on several ranks of tensor parallelism, and the key heads of one rank.
    bool replicates_keys(int tp) const { return kind == AttentionKind::gqa && kv_heads < tp; }
    int key_heads_of(int tp) const { return replicates_keys(tp) ? 1 : kv_heads / tp; }
    std::int64_t k_norm() const { return static_cast<std::int64_t>(qk_dim) * (whole_qk_norm ? kv_heads : 1); }
    // Whether queries see picked keys alone; of latents, sparse().
    bool picks() const { return kind != AttentionKind::compressed && indexer_top_k > 0; }
    bool sparse() const { return kind == AttentionKind::mla && indexer_top_k > 0; }
    bool has_opaque() const { return opaque.weights > 0; }
    bool indexes() const { return sparse() && !shares_index; }
    bool operator==(const Attention&) const = default;
};

enum class Scoring : std::uint8_t { softmax, sigmoid, sqrt_softplus };

struct Router {
    Scoring scoring = Scoring::softmax;
    bool softmax_after_top_k = false; // softmax over the chosen logits (Mixtral, GPT-OSS) instead of over all experts
    bool normalize = false;           // divide the chosen weights by their sum
    double scale = 1.0;               // routed_scaling_factor
    int groups = 1;                   // expert groups (node-limited routing)
    int groups_kept = 1;
    int group_score_top = 1;  // a group's score is the sum of its best so many scores (V3: 2, V2: 1)
    bool expert_bias = false; // selection bias that balances load without a loss (DeepSeek-V3)
    bool linear_bias = false; // bias of the gating matrix (GPT-OSS)
    // Above 0: experts are picked one after another. A softmax over those left, of which (best - logit) / max(|logit|,
    // best) is at most twice this, is the weight (Phi-3.5-MoE; arXiv 2409.12136, without sampling).
    double mixer = 0.0;

    bool operator==(const Router&) const = default;
};

struct Moe {
    int experts = 0;
    int top_k = 0;
    std::int64_t ffn = 0;        // width of one routed expert
    std::int64_t shared_ffn = 0; // total width of the shared expert(s), 0 = none
    // Width of a small expert that group_size routed ones share, which a token passes once (GroveMoE), 0 = none. Their
    // share of its weights is in `ffn`.
    std::int64_t group_ffn = 0;
    int group_size = 1;
    std::int64_t latent = 0;     // width that tokens travel and experts work in (LatentMoE), 0 = the model's
    bool shared_gate = false;    // sigmoid gate on the shared expert's output (Qwen2-MoE)
    bool expert_bias = false;    // bias in the experts' linear layers (GPT-OSS)
    bool shared_bias = false;    // bias in the shared expert's linear layers (ERNIE-4.5 with use_bias)
    bool branch_norms = false;   // shared MLP, router and experts have norms of their own (Gemma 4)
    bool probs_on_input = false; // routing weight multiplies the expert's input (Llama 4)
    Router router;

    bool operator==(const Moe&) const = default;
};

// One distinct kind of transformer layer; layers of one kind cost the same.
struct LayerKind {
    Attention attention;
    std::optional<Moe> moe;     // empty: a dense MLP
    std::int64_t dense_ffn = 0; // its width; 0: none, attention alone
    Activation activation = Activation::silu;
    bool gated = true; // gate * up (SwiGLU and kin) against a plain two-matrix MLP
    bool mlp_bias = false;
    // GPT-OSS: the gate is cut at the limit, up at plus and minus the limit (0: none), and 1 is added to up.
    double swiglu_limit = 0.0, shared_limit = 0.0; // the latter of the shared expert
    bool limit_behind = false; // the gate is cut behind its activation, and nothing is added to up (Step-3.5)
    bool parallel = false;     // MLP or experts read what attention reads, and both are added at once (Cohere)
    bool output_scale = false; // a number of the checkpoint multiplies what the layer hands on; it stays (Gemma 4)
    bool bf16 = false; // a plan's choice, not the architecture's: its products are not quantized (keep_in_bf16())

    bool dense() const { return !moe && dense_ffn > 0; }
    bool operator==(const LayerKind&) const = default;
};

} // namespace moe::model
