// Configurations of the small models, in Hugging Face's own fields.
#include "tests/engine/train/samples.hpp"

#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"

#include <nlohmann/json.hpp>

#include <cmath>
#include <map>

using namespace moe;

namespace {

// Tied to nothing: enough heads, experts and width for 8 ranks along any axis.
const char* common = R"("vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 8,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "max_position_embeddings": 4096, "rope_theta": 10000.0, "hidden_act": "silu",)";

const std::map<std::string, std::string>& configs() {
    static const std::map<std::string, std::string> all = {
        {"qwen3",
         R"("architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": 4, "head_dim": 8,
            "intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": true,
            "decoder_sparse_step": 1, "mlp_only_layers": [])"},
        {"qwen2", R"("architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_key_value_heads": 8,
            "intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 32, "norm_topk_prob": false, "decoder_sparse_step": 1, "mlp_only_layers": [])"},
        {"deepseek3",
         R"("architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 8,
            "intermediate_size": 64, "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1, "routed_scaling_factor": 2.5,
            "norm_topk_prob": true, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "q_lora_rank": 24, "kv_lora_rank": 16,
            "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "num_nextn_predict_layers": 0)"},
        // Keys that an indexer picks, in every layer or shared by some.
        {"deepseek32",
         R"("architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "num_key_value_heads": 8,
            "intermediate_size": 64, "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1, "routed_scaling_factor": 2.5,
            "norm_topk_prob": true, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "q_lora_rank": 24, "kv_lora_rank": 16,
            "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "index_n_heads": 6, "index_head_dim": 12,
            "index_topk": 6, "num_nextn_predict_layers": 0)"},
        {"glm5",
         R"("architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "num_key_value_heads": 8,
            "intermediate_size": 64, "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "q_lora_rank": 24, "kv_lora_rank": 16,
            "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "index_n_heads": 6, "index_head_dim": 12,
            "index_topk": 6, "index_topk_freq": 2, "index_skip_topk_offset": 1, "num_nextn_predict_layers": 1)"},
        {"deepseek2",
         R"("architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_key_value_heads": 8,
            "intermediate_size": 64, "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2,
            "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1, "routed_scaling_factor": 1.0,
            "norm_topk_prob": false, "scoring_func": "softmax", "topk_method": "group_limited_greedy", "q_lora_rank": null,
            "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8)"},
        {"mixtral", R"("architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_key_value_heads": 4,
            "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2)"},
        // Two layers of multi-token prediction, one of them behind the other.
        {"deepseek3-mtp",
         R"("architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 8,
            "intermediate_size": 64, "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "n_group": 4, "topk_group": 2, "first_k_dense_replace": 3, "moe_layer_freq": 1, "routed_scaling_factor": 2.5,
            "norm_topk_prob": true, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "q_lora_rank": 24, "kv_lora_rank": 16,
            "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "num_nextn_predict_layers": 2)"},
        {"gptoss",
         R"("architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_key_value_heads": 4, "head_dim": 8,
            "intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "attention_bias": true, "sliding_window": 5,
            "swiglu_limit": 2.5, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": false, "original_max_position_embeddings": 16})"},
        // Factors of embeddings, scores, sums and logits.
        {"granite", R"("architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared",
            "num_key_value_heads": 4, "intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2,
            "shared_intermediate_size": 32, "embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7,
            "logits_scaling": 1.5)"},
        // Norms over all heads, and projections that are cut.
        {"olmoe", R"("architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "num_key_value_heads": 4,
            "intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": true, "clip_qkv": 1.5)"},
        // Gates of the output by column, norms behind, windows, layers that turn nothing, scaled embeddings.
        {"afmoe",
         R"("architectures": ["AfmoeForCausalLM"], "model_type": "afmoe", "num_key_value_heads": 4, "head_dim": 8,
            "intermediate_size": 64, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "num_dense_layers": 1,
            "num_shared_experts": 1, "route_scale": 1.5, "sliding_window": 5, "global_attn_every_n_layers": 2, "mup_enabled": true)"},
        // Gates by head (softplus), and rotations by kind of layer.
        {"laguna",
         R"("architectures": ["LagunaForCausalLM"], "model_type": "laguna", "num_key_value_heads": 4, "head_dim": 8,
            "intermediate_size": 64, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 32, "moe_routed_scaling_factor": 1.5, "sliding_window": 5, "gating": true,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
            "partial_rotary_factor": 0.5, "original_max_position_embeddings": 16}, "sliding_attention": {"rope_type": "default",
            "rope_theta": 100.0, "partial_rotary_factor": 1.0}})"},
        // Values narrower than keys and multiplied by a factor, sinks in layers of windows.
        {"mimo",
         R"("architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "num_key_value_heads": 4,
            "head_dim": 8, "v_head_dim": 4, "swa_num_key_value_heads": 8, "intermediate_size": 64, "moe_intermediate_size": 16,
            "n_routed_experts": 8, "num_experts_per_tok": 2, "sliding_window": 5, "attention_value_scale": 0.7,
            "partial_rotary_factor": 0.5, "swa_rope_theta": 100.0, "hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq":
            [0, 1, 1, 1])"},
        // Norms behind the rotation.
        {"hunyuan",
         R"("architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "num_key_value_heads": 4,
            "head_dim": 8, "intermediate_size": 16, "num_experts": 8, "moe_topk": 2, "num_shared_expert": 1)"},
        // A selection bias beside a softmax.
        {"ernie",
         R"("architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "num_key_value_heads": 4,
            "intermediate_size": 64, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1)"},
        // LayerNorm with bias around MLPs without a gate.
        {"nemotron", R"("architectures": ["NemotronForCausalLM"], "model_type": "nemotron", "num_key_value_heads": 4,
            "intermediate_size": 64, "hidden_act": "relu2", "partial_rotary_factor": 0.5)"},
        {"gpt",
         R"("architectures": ["Megatron GPT"], "num_key_value_heads": 4, "intermediate_size": 64, "hidden_act": "gelu")"},
        // LayerNorm without bias, cut projections.
        {"dbrx",
         R"("architectures": ["DbrxForCausalLM"], "d_model": 32, "n_heads": 8, "n_layers": 4, "attn_config": {"clip_qkv":
            0.3, "kv_n_heads": 4, "rope_theta": 500.0}, "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 8,
            "moe_top_k": 2})"},
        // Queries scaled by their position, in latent attention.
        {"mistral4", R"("architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4", "num_key_value_heads": 8,
            "intermediate_size": 64, "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank":
            16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "rope_parameters": {"rope_type": "yarn",
            "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 6, "llama_4_scaling_beta": 0.5})"},
        // Weights on the experts' input, chunks, norms without weights.
        {"llama4", R"("architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "num_key_value_heads": 4,
            "head_dim": 8, "intermediate_size": 16, "intermediate_size_mlp": 64, "num_local_experts": 8, "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 1, "attention_chunk_size": 5, "no_rope_layer_interval": 2, "floor_scale": 6,
            "attn_scale": 0.5)"},
        // Gated delta nets on two layers of three, gates inside the projection of queries, norms that are stored
        // less 1.
        {"qwen3next",
         R"("architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_key_value_heads": 4, "head_dim": 8,
            "intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 32, "norm_topk_prob": true, "partial_rotary_factor": 0.5,
            "full_attention_interval": 3, "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 6,
            "linear_value_head_dim": 4, "linear_conv_kernel_dim": 4)"},
        // The same before dense MLPs.
        {"qwen3.5", R"("architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_key_value_heads": 4,
            "head_dim": 8, "intermediate_size": 64, "partial_rotary_factor": 0.5, "full_attention_interval": 2,
            "linear_num_key_heads": 8, "linear_num_value_heads": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3)"},
        // Layers of one part each: Mamba-2, a plain MLP, attention that turns nothing; steps that a bound cuts.
        {"nemotronh",
         R"("architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hybrid_override_pattern": "M-*M",
            "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 64, "mlp_hidden_act": "relu2", "mamba_num_heads": 16,
            "mamba_head_dim": 6, "ssm_state_size": 10, "n_groups": 8, "conv_kernel": 4, "time_step_limit": [0.02, 0.4])"},
        // The same with experts of a latent width.
        {"nemotron3",
         R"("architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hybrid_override_pattern": "ME*E",
            "num_key_value_heads": 4, "head_dim": 8, "mlp_hidden_act": "relu2", "mamba_num_heads": 8, "mamba_head_dim": 8,
            "ssm_state_size": 6, "n_groups": 8, "conv_kernel": 3, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 32, "moe_latent_size": 24, "n_group": 4,
            "topk_group": 2, "routed_scaling_factor": 2.5)"},
        // Mamba-2 or attention beside experts and a shared MLP, and the factors of Granite.
        {"granite4",
         R"("architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "num_key_value_heads": 4,
            "layer_types": ["mamba", "attention", "mamba", "mamba"], "intermediate_size": 16, "num_local_experts": 8,
            "num_experts_per_tok": 2, "shared_intermediate_size": 32, "mamba_n_heads": 16, "mamba_n_groups": 8,
            "mamba_d_state": 6, "mamba_d_conv": 4, "embedding_multiplier": 3.0, "attention_multiplier": 0.3,
            "residual_multiplier": 0.7, "logits_scaling": 1.5)"},
        // Norms of values, router and experts, keys as values, pairs that do not turn, capped logits, scaled layers.
        {"gemma4",
         R"("architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "num_key_value_heads": 8, "head_dim": 8,
            "global_head_dim": 12, "num_global_key_value_heads": 4, "attention_k_eq_v": true, "intermediate_size": 64,
            "moe_intermediate_size": 16, "enable_moe_block": true, "num_experts": 8, "top_k_experts": 2, "sliding_window": 5,
            "hidden_size_per_layer_input": 0, "final_logit_softcapping": 6.0, "tie_word_embeddings": true,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"])"},
        // Heads by kind of layer with a gate each, and bounds of MLPs behind their activation.
        {"step",
         R"("architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "num_attention_groups": 4, "head_dim": 8,
            "attention_other_setting": {"num_attention_heads": 16, "num_attention_groups": 4, "head_dim": 8},
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "moe_layers_enum": "1,2,3", "intermediate_size": 64, "moe_intermediate_size": 16, "moe_num_experts": 8,
            "moe_top_k": 2, "share_expert_dim": 32, "sliding_window": 5, "moe_router_scaling_factor": 1.5,
            "rope_theta": [5000.0, 100.0, 100.0, 5000.0], "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
            "swiglu_limits": [0.0, 0.0, 0.02, 0.02], "swiglu_limits_shared": [0.02, 0.0, 0.0, 0.03])"},
        // Experts picked one after another, LayerNorm, biases of attention and head.
        {"phimoe",
         R"("architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "num_key_value_heads": 4, "intermediate_size": 16,
            "num_local_experts": 8, "num_experts_per_tok": 2, "attention_bias": true, "lm_head_bias": true,
            "router_jitter_noise": 0.3)"},
        // Biases everywhere, in the shared expert and the head too.
        {"erniebias",
         R"("architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "num_key_value_heads": 4,
            "intermediate_size": 64, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1,
            "use_bias": true)"},
        {"llama",
         R"("architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 4, "intermediate_size": 64)"},
    };
    return all;
}

} // namespace

std::shared_ptr<const model::Model> small_model(const std::string& kind, const Fields& changed) {
    const std::string text =
        std::string("{") + common + configs().at(kind) + R"(, "megatron": {"vocab_size_divisor": 4}})";
    nlohmann::json config = nlohmann::json::parse(text);
    for (const auto& [field, value] : changed) config[field] = nlohmann::json::parse(value);
    return std::make_shared<const model::Model>(families::model_from_json(config.dump(), kind));
}

std::shared_ptr<const model::Model> wide_model(const std::string& kind, const Fields& changed) {
    Fields fields{{"hidden_size", "256"}, {"num_hidden_layers", "2"}, {"intermediate_size", "256"}};
    if (kind != "mixtral") fields.emplace_back("moe_intermediate_size", "256");
    if (kind == "deepseek3")
        fields.insert(fields.end(), {{"q_lora_rank", "128"},
                                     {"kv_lora_rank", "128"},
                                     {"qk_nope_head_dim", "32"},
                                     {"qk_rope_head_dim", "16"},
                                     {"v_head_dim", "32"}});
    else
        fields.insert(fields.end(), {{"head_dim", "32"}, {"num_key_value_heads", "8"}});
    fields.insert(fields.end(), changed.begin(), changed.end());
    return small_model(kind, fields);
}

plan::Plan small_plan(const std::string& model, int ranks, const Fields& fields) {
    return small_plan(small_model(model), ranks, fields);
}

plan::Plan small_plan(std::shared_ptr<const model::Model> model, int ranks, const Fields& fields, SmallBatch batch) {
    plan::Plan plan;
    plan.model = std::move(model);
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("cpu-local"));
    plan.stack = "moe-plan";
    plan.gpus = ranks;
    plan.seq = batch.seq;
    plan.gbs = batch.gbs;
    plan.precision = machine::Precision::fp32;
    const auto join = [&plan](int ranks) {
        machine::Hardware domains = *plan.hardware;
        domains.nvlink_domain = domains.nvlink_domain_used = ranks;
        plan.hardware = std::make_shared<const machine::Hardware>(std::move(domains));
    };
    for (const auto& [field, value] : fields)
        if (field == "domain")
            join(std::stoi(value));
        else
            plan::set_field(plan, field, value);
    if (plan.cp_comm == plan::ContextComm::hierarchical) join(2 * plan.tp); // two members of a CP group in a domain
    plan.dp = ranks / (plan.tp * plan.cp * plan.pp);
    plan.edp = ranks / (plan.ep * plan.etp * plan.pp);
    if (const plan::PlanFault fault = plan::check_plan(plan)) refuse("test plan: {}", fault.message);
    return plan;
}

train::SampleSource made_up_tokens(std::int64_t vocab, std::uint64_t seed) {
    const auto tokens = [vocab, seed](std::int64_t sample, std::span<std::int32_t> out) {
        std::uint64_t x = seed + 1000003u * static_cast<std::uint64_t>(sample);
        std::int64_t token = static_cast<std::int64_t>(x % static_cast<std::uint64_t>(vocab));
        for (std::int32_t& to : out) {
            x = x * 6364136223846793005u + 1442695040888963407u;
            // Three times in four the successor is fixed.
            token = x >> 62 == 0 ? static_cast<std::int64_t>((x >> 33) % static_cast<std::uint64_t>(vocab))
                                 : (7 * token + 3) % vocab;
            to = static_cast<std::int32_t>(token);
        }
    };
    const auto documents = [seed](std::int64_t sample, std::span<std::int32_t> starts) {
        std::uint64_t x = seed + 7919u * static_cast<std::uint64_t>(sample);
        std::int32_t start = 0;
        for (std::size_t at = 0; at < starts.size(); ++at) {
            x = x * 6364136223846793005u + 1442695040888963407u;
            if (at > 0 && (x >> 33) % 8 == 0) start = static_cast<std::int32_t>(at);
            starts[at] = start;
        }
    };
    return {tokens, documents};
}

train::SampleSource made_up_samples(const plan::Plan& plan) {
    train::SampleSource source = made_up_tokens(plan.model->vocab);
    if (plan.masks_documents())
        source.counts = [](std::int64_t sample, std::span<std::int32_t> counts) {
            std::uint64_t x = 104729u * static_cast<std::uint64_t>(sample);
            std::int32_t answer = 0;
            for (std::int32_t& count : counts) {
                x = x * 6364136223846793005u + 1442695040888963407u;
                if ((x >> 33) % 6 == 0) answer = 1 - answer;
                count = answer;
            }
        };
    return source;
}

double relative_distance(const std::vector<float>& a, const std::vector<float>& b) {
    double difference = 0.0, norm = 0.0;
    for (std::size_t i = 0; i < b.size(); ++i) {
        difference += std::pow(static_cast<double>(a.at(i)) - static_cast<double>(b[i]), 2);
        norm += std::pow(static_cast<double>(b[i]), 2);
    }
    return norm > 0.0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}
