// A model's architecture, read from a Hugging Face config.json, with its parameter and FLOP counts.
#pragma once

#include "planner/model/fwd.hpp"
#include "planner/model/layer_kind.hpp"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace moe::model {

struct Model {
    std::string name;
    std::string architecture; // e.g. "DeepseekV3ForCausalLM"
    std::int64_t hidden = 0;
    std::int64_t vocab = 0;
    std::int64_t vocab_divisor = 128; // Megatron's make_vocab_size_divisible_by
    bool tied_embeddings = false;
    bool head_bias = false;       // the LM head has a bias (Phi-3.5-MoE, ERNIE-4.5 with use_bias)
    bool layer_norm = false;      // LayerNorm instead of RMSNorm (DBRX, and all with a bias)
    bool layer_norm_bias = false; // LayerNorm has a bias (GPT-3, Nemotron-4, Phi-3.5-MoE)
    bool norms_from_one = false;  // checkpoints hold the weights of norms less 1 (Nemotron-4)
    bool post_norms = false;      // RMSNorm behind attention and behind the MLP too, before their sums (AFMoE)
    double norm_eps = 1e-6;
    double rope_theta = 10000.0;
    bool rope_interleaved = false; // adjacent pairs (DeepSeek) against half-split (Llama, Qwen)
    RopeScaling rope_scaling;
    // Factors of the embedded tokens, of what layers add to the residual stream, and of the logits (Granite, AFMoE).
    double embedding_scale = 1.0, residual_scale = 1.0, logit_scale = 1.0;
    double logit_cap = 0.0; // logits become cap * tanh(logits / cap), 0: they stay as they are (Gemma 4)
    std::vector<LayerKind> kinds;
    std::vector<int> layers;        // kind of every decoder layer, in order
    std::vector<int> mtp;           // kind of every multi-token-prediction layer
    int residual_streams = 1;       // hyper-connections (DeepSeek-V4)
    bool unmixed_streams = false;   // their maps read and write, and do not mix them with each other (Hy-4)
    std::int64_t other_weights = 0; // beside the layers, the tables and the last norm, in no product
    bool hybrid = false;            // layers of one part each, by a pattern (Nemotron-H)
    // Empty when execute can train it; otherwise the config field and value that it cannot run.
    std::string not_executable;
    // Fields of the config whose modules beside the language model (towers of vision, of audio) are in no figure here.
    std::vector<std::string> left_out;
    std::string config_json; // the config as read, so that a plan can carry its model

    const LayerKind& kind_of(int layer) const {
        return kinds[static_cast<std::size_t>(layers[static_cast<std::size_t>(layer)])];
    }
    // The rotation of a layer with this attention.
    Rope rope_of(const Attention& attention) const { return attention.rope.value_or(Rope{rope_theta, rope_scaling}); }
    // Vocabulary padded to a multiple of vocab_divisor * tp, as Megatron pads it.
    std::int64_t padded_vocab(int tp) const;
};

// Average number of keys that a query of `seq` positions sees under the causal mask with its window, its chunks or the
// keys that an indexer picks; within documents of given lengths, where there are some.
double keys_seen(const Attention& attention, std::int64_t seq, const DocumentLengths* documents = nullptr);

struct ParameterCount {
    std::int64_t total = 0; // all parameters, with MTP layers and both embeddings
    std::int64_t total_no_mtp = 0;
    std::int64_t active = 0;          // used per token, embedding counted, without MTP
    std::int64_t active_no_embed = 0; // active minus the input embedding (when untied)
};
ParameterCount count_parameters(const Model& model);

// Training FLOPs per token by Megatron's convention (causal attention at half, no recompute, router not counted, MTP
// and its head counted): 6 * multiply-accumulates. Units: FLOP per token. Source: Megatron-Bridge flop_utils.py.
// `documents`: attention stays within documents of these lengths, where its cores are plain (GQA, MLA).
double model_flops_per_token(const Model& model, std::int64_t seq, int tp = 1,
                             const DocumentLengths* documents = nullptr);

} // namespace moe::model
