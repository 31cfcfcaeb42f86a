// The models that the microbenchmark trains: sizes of published layers and fractions of them, and how ranks share them.
#include "engine/bench/microbench_grid.hpp"

#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan.hpp"

#include <algorithm>

namespace moe::bench {

// TP 2, PP 2, DP 2, and experts over EP 4 (folded over TP x DP) or EP 2 x ETP 2; one family without TP, whose
// vocabulary is then whole.
std::vector<Point> grid_of_cores() {
    struct Size {
        int hidden;
        std::int64_t seq, mbs;
        bool all_families;
    };
    const Sharing experts{.ranks = 8, .tp = 2, .pp = 2, .dp = 2, .ep = 4};
    const Sharing expert_tensor{.ranks = 8, .tp = 2, .pp = 2, .dp = 2, .ep = 2, .etp = 2};
    const Sharing whole{.ranks = 8, .pp = 2, .dp = 4, .ep = 4};
    std::vector<Point> points;
    for (const Size& s : std::initializer_list<Size>{{64, 64, 1, true},
                                                     {128, 128, 1, true},
                                                     {128, 256, 2, false},
                                                     {256, 256, 1, true},
                                                     {512, 256, 1, false},
                                                     {512, 512, 2, false}})
        for (const machine::Precision precision : {machine::Precision::fp32, machine::Precision::bf16}) {
            const int h = s.hidden;
            points.push_back({"qwen3", h, h / 16, h / 32, 32, h, 8, 2, 3 * h, 4 * h, s.seq, s.mbs, precision, experts});
            if (precision == machine::Precision::bf16) {
                for (const bool fp8_wgrad : {false, true}) {
                    points.push_back({"qwen3", h, h / 16, h / 32, 32, h, 8, 2, 3 * h, 4 * h, s.seq, s.mbs,
                                      machine::Precision::fp8_blockwise, experts});
                    points.back().fp8_wgrad = fp8_wgrad;
                }
            }
            if (!s.all_families) continue;
            points.push_back(
                {"qwen2", h, h / 16, h / 16, 16, h, 8, 2, 2 * h, 4 * h, s.seq, s.mbs, precision, expert_tensor});
            points.push_back(
                {"deepseek", h, h / 16, h / 16, 16, h, 8, 2, 3 * h, 4 * h, s.seq, s.mbs, precision, whole});
        }
    return points;
}

// Widths, experts and sequences of published MoE models and fractions of them, none of them a whole model. Those in
// blockwise FP8, wgrad in FP8 in all but two, have heads and sequences of their own, since their attention is in BF16
// too: from a launch that leaves multiprocessors idle to many waves of them. Three have long sequences: from 4,096
// tokens attention was predicted up to 15 % too fast at 32,768 (profiles/measured/h200-2026-11-23-offload.json). They
// are as wide as such models are: beside small products the gradient of the same attention is 9 to 18 % faster, since
// the card holds a higher clock (profiles/measured/h200-2026-11-23-clocks.json). One sends activations to the host and
// back, 8 to 67 MB at a time. Four have windows without sinks: priced as full attention, those of K-EXAONE and Laguna
// took half and three quarters of what was predicted (profiles/measured/h200-2026-11-28-whole-check.json).
std::vector<Point> grid_of_gpus() {
    constexpr machine::Precision fp32 = machine::Precision::fp32, bf16 = machine::Precision::bf16,
                                 fp8 = machine::Precision::fp8_blockwise;
    constexpr unsigned away =
        plan::offload::core_attn | plan::offload::attn_proj | plan::offload::expert_fc1 | plan::offload::moe_act;
    return {{"qwen3", 256, 4, 1, 64, 256, 8, 2, 768, 1024, 256, 1, fp32},
            {"deepseek", 256, 4, 4, 64, 256, 8, 2, 768, 1024, 256, 1, fp32},
            {"qwen2", 256, 4, 4, 64, 256, 8, 2, 512, 1024, 256, 1, fp32},
            {"gptoss", 512, 8, 2, 64, 512, 8, 2, 0, 4096, 512, 1},
            {"qwen3", 512, 8, 2, 64, 256, 8, 2, 1536, 4096, 512, 2},
            {"mixtral", 512, 8, 2, 64, 512, 8, 2, 128, 4096, 512, 1},
            {"qwen3next", 512, 4, 2, 128, 256, 8, 2, 256, 4096, 512, 1},
            {"nemotron", 512, 4, 2, 128, 512, 8, 2, 1024, 4096, 512, 1},
            {"sparse", 512, 16, 16, 64, 256, 8, 2, 1536, 4096, 1024, 1},
            {"qwen3next", 1024, 8, 2, 256, 512, 16, 4, 512, 16384, 1024, 2},
            {"nemotron", 1024, 8, 2, 128, 1024, 16, 4, 2048, 16384, 1024, 2},
            {"sparse", 1024, 64, 64, 128, 512, 16, 4, 2048, 8192, 2048, 2},
            {"mixtral", 1024, 16, 4, 128, 512, 16, 4, 512, 8192, 2048, 2},
            {"mixtral", 2048, 32, 4, 128, 768, 16, 4, 128, 8192, 4096, 1},
            {"qwen3next", 2048, 12, 2, 128, 512, 32, 8, 512, 16384, 4096, 1},
            {"nemotron", 3072, 24, 4, 128, 1536, 16, 4, 3072, 16384, 2048, 2},
            {"sparse", 2048, 64, 64, 128, 1024, 16, 4, 8192, 8192, 4096, 1},
            {"sparse", 3072, 128, 128, 128, 1024, 8, 2, 8192, 8192, 4096, 1},
            {"qwen2", 512, 8, 8, 64, 512, 8, 4, 1024, 8192, 1024, 1},
            {"deepseek", 512, 8, 8, 64, 384, 16, 4, 1536, 8192, 512, 2},
            {"qwen3", 1024, 16, 8, 128, 768, 8, 2, 3072, 16384, 1024, 1},
            {"deepseek", 1024, 16, 16, 128, 512, 16, 4, 2048, 8192, 1024, 2},
            {"qwen3", 1024, 16, 4, 128, 384, 32, 8, 3072, 32768, 2048, 2},
            {"qwen2", 1024, 8, 8, 128, 704, 32, 4, 2816, 16384, 2048, 1},
            {"deepseek", 1536, 12, 12, 128, 768, 16, 2, 4096, 16384, 1024, 4},
            {"mixtral", 1536, 12, 4, 128, 2048, 8, 2, 0, 32768, 2048, 1},
            {"gptoss", 1024, 16, 4, 64, 1024, 16, 4, 0, 32768, 2048, 2},
            {"qwen3", 1024, 8, 2, 128, 512, 16, 4, 3072, 16384, 2048, 4},
            {"qwen3", 1536, 12, 4, 128, 512, 16, 4, 4096, 16384, 4096, 1},
            {"deepseek", 1536, 20, 20, 128, 640, 16, 4, 4096, 16384, 3072, 2},
            {"qwen3", 1536, 24, 8, 128, 640, 32, 4, 4096, 32768, 4096, 2},
            {"qwen3", 2048, 16, 4, 128, 1024, 16, 2, 6144, 32768, 1024, 4},
            {"mixtral", 2048, 32, 8, 64, 4096, 8, 2, 0, 32768, 2048, 2},
            {"deepseek", 2048, 16, 16, 128, 1408, 32, 6, 8192, 65536, 2048, 1},
            {"qwen3", 2048, 32, 4, 128, 768, 64, 8, 6144, 65536, 4096, 1},
            {"deepseek", 2048, 32, 32, 128, 1024, 16, 4, 8192, 32768, 4096, 1},
            {"qwen2", 2048, 16, 16, 128, 1408, 16, 4, 5632, 65536, 4096, 1},
            {"deepseek", 1024, 8, 8, 128, 512, 16, 4, 2048, 8192, 2048, 1, fp8},
            {"qwen3", 512, 16, 4, 64, 256, 8, 2, 1536, 4096, 512, 2, fp8, {}, false, 0, true},
            {"qwen3", 1024, 12, 2, 128, 384, 32, 8, 3072, 8192, 2048, 2, fp8, {}, false, 0, true},
            {"qwen3", 2048, 10, 2, 128, 1024, 16, 2, 6144, 8192, 1024, 4, fp8, {}, false, 0, true},
            {"qwen2", 2048, 16, 16, 128, 1408, 16, 4, 5632, 8192, 2048, 2, fp8},
            {"qwen3", 2048, 20, 4, 128, 768, 64, 8, 6144, 8192, 4096, 1, fp8, {}, false, 0, true},
            {"mixtral", 4096, 48, 8, 128, 7168, 4, 2, 0, 8192, 2048, 1, fp8, {}, false, 0, true},
            {"qwen3", 2048, 32, 4, 128, 768, 128, 8, 6144, 8192, 4096, 2, fp8, {}, false, 0, true},
            {"qwen3next", 2048, 20, 4, 256, 512, 16, 4, 512, 16384, 8192, 1},
            {"nemotron", 4096, 28, 4, 128, 2048, 16, 4, 4096, 16384, 8192, 1},
            {"sparse", 4096, 128, 128, 128, 1024, 8, 2, 12288, 8192, 8192, 1},
            {"mixtral", 2048, 32, 8, 128, 768, 16, 4, 2048, 8192, 8192, 1},
            {"deepseek", 4096, 24, 24, 128, 1408, 8, 2, 12288, 8192, 16384, 1},
            {"qwen3", 2048, 32, 4, 128, 768, 32, 8, 6144, 8192, 16384, 1},
            {"qwen2", 4096, 32, 8, 128, 1408, 16, 4, 11008, 8192, 32768, 1},
            {"qwen3", 2048, 16, 4, 128, 1024, 64, 8, 6144, 8192, 4096, 4},
            {"qwen3", 2048, 32, 4, 128, 768, 128, 8, 6144, 131072, 4096, 2},
            {"gptoss", 2880, 64, 8, 64, 2880, 8, 4, 0, 65536, 4096, 1},
            {"mixtral", 4096, 32, 8, 128, 7168, 4, 2, 0, 32768, 2048, 1},
            {"mixtral", 4096, 32, 8, 128, 14336, 4, 2, 0, 32768, 4096, 2},
            {"deepseek", 4096, 64, 64, 128, 2048, 16, 8, 12288, 65536, 4096, 1},
            {"qwen3", 1024, 8, 2, 128, 512, 16, 4, 3072, 16384, 2048, 4, bf16, {}, true},
            {"gptoss", 1024, 16, 4, 64, 1024, 16, 4, 0, 32768, 2048, 2, bf16, {}, true, away},
            {"deepseek", 1536, 20, 20, 128, 640, 16, 4, 4096, 16384, 3072, 2, bf16, {}, true},
            {"qwen3", 2048, 32, 4, 128, 768, 64, 8, 6144, 65536, 4096, 1, bf16, {}, true}};
}

namespace {

std::shared_ptr<const model::Model> model_of(const Point& p) {
    std::string config = fmt::format(
        R"({{"vocab_size": {}, "hidden_size": {}, "num_hidden_layers": 2, "num_attention_heads": {}, "num_key_value_heads": {},
        "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "rope_theta": 10000.0, "hidden_act": "silu", "moe_intermediate_size": {},
        "num_experts_per_tok": {}, )",
        p.vocab, p.hidden, p.heads, p.kv_heads, p.ffn, p.top_k);
    if (p.family == "qwen3")
        config += fmt::format(
            R"("architectures": ["Qwen3MoeForCausalLM"], "head_dim": {}, "num_experts": {}, "intermediate_size": {},
            "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": []}})",
            p.head_dim, p.experts, p.shared);
    else if (p.family == "qwen2")
        config += fmt::format(
            R"("architectures": ["Qwen2MoeForCausalLM"], "num_experts": {}, "shared_expert_intermediate_size": {},
            "intermediate_size": {}, "norm_topk_prob": false, "decoder_sparse_step": 1, "mlp_only_layers": []}})",
            p.experts, p.shared, p.shared);
    else if (p.family == "mixtral")
        config += fmt::format(
            R"("architectures": ["MixtralForCausalLM"], "head_dim": {}, "num_local_experts": {}, "intermediate_size": {}{}}})",
            p.head_dim, p.experts, p.ffn, p.shared > 0 ? fmt::format(R"(, "sliding_window": {})", p.shared) : "");
    else if (p.family == "gptoss")
        config += fmt::format(
            R"("architectures": ["GptOssForCausalLM"], "head_dim": {}, "num_local_experts": {}, "intermediate_size": {},
            "attention_bias": true, "sliding_window": 128, "swiglu_limit": 7.0}})",
            p.head_dim, p.experts, p.ffn);
    else if (p.family == "qwen3next") // a gated delta net of twice as many value heads as heads, then attention
        config += fmt::format(
            R"("architectures": ["Qwen3NextForCausalLM"], "head_dim": {}, "num_experts": {}, "shared_expert_intermediate_size": {},
            "intermediate_size": {}, "norm_topk_prob": true, "full_attention_interval": 2, "partial_rotary_factor": 0.25,
            "linear_num_key_heads": {}, "linear_num_value_heads": {}, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}})",
            p.head_dim, p.experts, p.shared, p.shared, p.heads, 2 * p.heads);
    else if (p.family == "nemotron") // Mamba-2 of four times as many heads as heads, then experts
        config += fmt::format(
            R"("architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "ME", "head_dim": {}, "n_routed_experts": {},
            "moe_shared_expert_intermediate_size": {}, "intermediate_size": {}, "mlp_hidden_act": "relu2", "n_group": 1,
            "topk_group": 1, "mamba_num_heads": {}, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": {},
            "conv_kernel": 4}})",
            p.head_dim, p.experts, p.shared, p.shared, 4 * p.heads, p.heads);
    else if (p.family ==
             "sparse") // latent keys and the number of picked ones as all models have them, or half of the sequence
        config += fmt::format(
            R"("architectures": ["DeepseekV32ForCausalLM"], "n_routed_experts": {}, "intermediate_size": {},
            "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
            "routed_scaling_factor": 2.5, "norm_topk_prob": true, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
            "q_lora_rank": {}, "kv_lora_rank": 512, "qk_nope_head_dim": {}, "qk_rope_head_dim": 64, "v_head_dim": {},
            "index_n_heads": {}, "index_head_dim": 128, "index_topk": {}, "num_nextn_predict_layers": 0}})",
            p.experts, p.shared, p.hidden / 2, p.head_dim, p.head_dim, p.heads / 2,
            std::min<std::int64_t>(p.seq / 2, 2048));
    else
        config += fmt::format(
            R"("architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": {}, "intermediate_size": {},
            "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1,
            "routed_scaling_factor": 2.5, "norm_topk_prob": true, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
            "q_lora_rank": {}, "kv_lora_rank": {}, "qk_nope_head_dim": {}, "qk_rope_head_dim": {}, "v_head_dim": {},
            "num_nextn_predict_layers": 0}})",
            p.experts, p.shared, p.hidden / 2, p.hidden / 4, p.head_dim, p.head_dim >= 32 ? p.head_dim / 2 : p.head_dim,
            p.head_dim);
    return std::make_shared<const model::Model>(families::model_from_json(config, "microbench"));
}

} // namespace

plan::Plan plan_of(const Point& p, const ops::Backend& backend) {
    plan::Plan plan;
    plan.model = model_of(p);
    auto hardware = std::make_shared<machine::Hardware>();
    hardware->name = "cpu-local";
    hardware->cpu = !backend.can_replay;
    for (const machine::Precision precision :
         {machine::Precision::fp32, machine::Precision::bf16, machine::Precision::fp8_blockwise})
        hardware->peak_flops[static_cast<std::size_t>(precision)] = 1e9;
    plan.hardware = hardware;
    plan.stack = "moe-plan";
    const Sharing& s = p.sharing;
    plan.gpus = s.ranks;
    plan.tp = s.tp;
    plan.pp = s.pp;
    plan.dp = s.dp;
    plan.ep = s.ep;
    plan.etp = s.etp;
    plan.edp = s.ranks / (s.pp * s.ep * s.etp);
    // Launched one by one, small ops would wait for the host, and their times would say so.
    if (backend.can_replay) plan.cuda_graph = plan::CudaGraph::full;
    plan.router.forced = s.ranks == 1; // Plans are priced for balanced routing.
    plan.seq = p.seq;
    plan.mbs = p.mbs;
    plan.gbs = 2 * plan.dp * plan.mbs;
    plan.precision = p.precision;
    plan.deterministic = p.deterministic;
    plan.offload = p.offload;
    plan.fp8_wgrad = p.fp8_wgrad;
    return plan;
}

} // namespace moe::bench
