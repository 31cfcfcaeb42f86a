// Families with parts that are only priced: exact weights, published counts, and what their layers are lowered to.
#include "planner/lower/lower.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/model/model.hpp"
#include "planner/program/program.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/support/nearly.hpp"
#include "tests/support/published_plan.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

using namespace moe;

namespace {

struct Published {
    const char* name;
    double total, active; // billions, as model cards and reports say; 0: not said
    std::string config;
};

// Layers of Kimi-K3 with latent attention, from 1: every fourth and the last.
std::string kimi_layers(bool latent) {
    std::string list;
    for (int layer = 1; layer <= 93; ++layer)
        if ((layer % 4 == 0 || layer == 93) == latent) list += (list.empty() ? "" : ",") + std::to_string(layer);
    return "[" + list + "]";
}

const std::string kimi_k3 =
    R"({"architectures": ["KimiK3ForConditionalGeneration"], "text_config": {"hidden_size": 7168,
    "num_hidden_layers": 93, "num_attention_heads": 96, "intermediate_size": 33792, "moe_intermediate_size": 3072,
    "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2, "first_k_dense_replace": 1,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "mla_use_output_gate": true, "attn_res_block_size": 12, "routed_expert_hidden_size": 3584,
    "latent_moe_use_norm": true, "vocab_size": 163840, "linear_attn_config": {"num_heads": 96, "head_dim": 128,
    "short_conv_kernel_size": 4, "use_full_rank_gate": true, "kda_layers": )" +
    kimi_layers(false) + R"(, "full_attn_layers": )" + kimi_layers(true) + "}}}";

const std::vector<Published> published{
    {"LFM2-8B-A1B", 8.3, 1.5, R"({"architectures": ["Lfm2MoeForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 24, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
        "conv_L_cache": 3, "vocab_size": 65536, "layer_types": ["conv", "conv", "full_attention", "conv", "conv",
        "conv", "full_attention", "conv", "conv", "conv", "full_attention", "conv", "conv", "conv", "full_attention",
        "conv", "conv", "conv", "full_attention", "conv", "conv", "full_attention", "conv", "conv"]})"},
    {"LFM2-1.2B", 1.17, 0, R"({"architectures": ["Lfm2ForCausalLM"], "hidden_size": 2048, "block_ff_dim": 12288,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 16, "vocab_size": 65536,
        "intermediate_size": 12288, "full_attn_idxs": [2, 5, 8, 10, 12, 14]})"},
    {"Jamba-1.5-Mini", 51.6, 12, R"({"architectures": ["JambaForCausalLM"], "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
        "num_experts": 16, "num_experts_per_tok": 2, "vocab_size": 65536})"},
    {"Jamba-1.5-Large", 398, 94, R"({"architectures": ["JambaForCausalLM"], "hidden_size": 8192,
        "intermediate_size": 24576, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 72,
        "num_experts": 16, "num_experts_per_tok": 2, "vocab_size": 65536})"},
    {"Falcon-H1-34B", 33.6, 0, R"({"architectures": ["FalconH1ForCausalLM"], "hidden_size": 5120,
        "intermediate_size": 21504, "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128,
        "num_hidden_layers": 72, "mamba_d_ssm": 4096, "mamba_n_heads": 32, "mamba_n_groups": 2, "mamba_d_state": 256,
        "vocab_size": 261120})"},
    {"Step-3", 316, 38, R"({"architectures": ["Step3VLForConditionalGeneration"], "text_config": {"hidden_size": 7168,
        "intermediate_size": 18432, "num_attention_heads": 64, "num_attention_groups": 1, "head_dim": 256,
        "share_q_dim": 2048, "num_hidden_layers": 61, "moe_num_experts": 48, "moe_top_k": 3,
        "moe_intermediate_size": 5120, "share_expert_dim": 5120, "vocab_size": 128815, "moe_layers_enum":
        "4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31,32,33,34,35,36,37,38,39,40,41,42,43,44,45,46,47,48,49,50,51,52,53,54,55,56,57,58,59"}})"},
    {"GroveMoE", 33, 3.28, R"({"architectures": ["GroveMoeForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "parallel_expert_intermediate_size": 128,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 48,
        "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936})"},
    {"Klear-46B-A2.5B", 46, 2.5, R"({"architectures": ["KlearMoeForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 8064, "moe_intermediate_size": 896, "num_attention_heads": 32, "num_key_value_heads": 4,
        "num_hidden_layers": 32, "num_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "vocab_size": 151936})"},
    {"JetMoE-8B", 8.5, 2.2, R"({"architectures": ["JetMoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 5632,
        "num_key_value_heads": 16, "kv_channels": 128, "num_hidden_layers": 24, "num_local_experts": 8,
        "num_experts_per_tok": 2, "vocab_size": 32000})"},
    {"Kimi-K3", 2780, 104, kimi_k3},
    {"Command-A", 111, 0, R"({"architectures": ["Cohere2ForCausalLM"], "hidden_size": 12288,
        "intermediate_size": 36864, "num_attention_heads": 96, "num_key_value_heads": 8, "num_hidden_layers": 64,
        "vocab_size": 256000})"},
    {"Command-R-plus", 104, 0, R"({"architectures": ["CohereForCausalLM"], "hidden_size": 12288,
        "intermediate_size": 33792, "num_attention_heads": 96, "num_key_value_heads": 8, "num_hidden_layers": 64,
        "vocab_size": 256000, "use_qk_norm": true})"},
    {"Falcon-Mamba-7B", 7.27, 0, R"({"architectures": ["FalconMambaForCausalLM"], "hidden_size": 4096, "expand": 16,
        "intermediate_size": 8192, "num_hidden_layers": 64, "state_size": 16, "vocab_size": 65024, "tie_word_embeddings": false})"},
};

model::Model read(const std::string& config) { return families::model_from_json(config, "config.json"); }

// The Program of a small model of these fields on one rank of four, by a published stack.
program::Program lowered(const std::string& config, int tp = 1) {
    plan::Plan plan = published_plan("Qwen3-30B-A3B", "h100", "bridge-26.06");
    plan.model = std::make_shared<const model::Model>(read(config));
    plan.gpus = 4;
    plan.tp = tp;
    plan.dp = 4 / tp;
    plan.ep = plan.etp = 1;
    plan.edp = 4;
    plan.gbs = 4;
    plan.seq = 512;
    REQUIRE(plan::check_plan(plan).message == "");
    return lower::lower(plan, 0);
}

double weights_of(const program::Program& program) {
    double sum = 0.0;
    for (const program::Parameter& parameter : program.parameters) sum += double(parameter.local_elements());
    return sum;
}

constexpr const char* falcon = R"({"architectures": ["FalconH1ForCausalLM"], "hidden_size": 1024,
    "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 2,
    "mamba_d_ssm": 1024, "mamba_n_heads": 16, "mamba_d_state": 64, "vocab_size": 512})";

constexpr const char* command = R"({"architectures": ["Cohere2ForCausalLM"], "hidden_size": 256,
    "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 2,
    "vocab_size": 512})";

constexpr const char* step = R"({"architectures": ["Step3TextForCausalLM"], "hidden_size": 256,
    "intermediate_size": 512, "num_attention_heads": 8, "num_attention_groups": 4, "head_dim": 32, "share_q_dim": 64,
    "num_hidden_layers": 2, "moe_num_experts": 8, "moe_top_k": 2, "moe_intermediate_size": 128, "vocab_size": 512,
    "moe_layers_enum": "1"})";

} // namespace

TEST_CASE("opaque parts: as many parameters as cards and reports say, no field unread") {
    for (const Published& p : published) {
        CAPTURE(std::string(p.name));
        const model::Model model = read(p.config);
        const model::ParameterCount count = model::count_parameters(model);
        CHECK(static_cast<double>(count.total) / 1e9 == nearly(p.total).epsilon(0.015));
        const auto all = static_cast<double>(count.active), table = static_cast<double>(model.vocab * model.hidden);
        double nearest = 1.0;
        for (const double active : {all, all - table, all - 2.0 * table})
            nearest = std::min(nearest, std::abs(active / 1e9 - p.active) / p.active);
        CHECK((p.active == 0.0 || nearest <= 0.06));
        CHECK(families::unread_fields(model).empty());
        CHECK(model.not_executable.empty() == (std::string(p.name) == "Command-A"));
    }
}

TEST_CASE("opaque parts: FLOPs of a layer are six for each multiply-accumulate of its matrices and its core") {
    const auto of_layer = [](const std::string& name, const std::string& fields) {
        const auto flops = [&](int layers) {
            return model::model_flops_per_token(read("{\"architectures\": [\"" + name +
                                                     R"("], "hidden_size": 64, "intermediate_size": 96,
                    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "num_hidden_layers": )" +
                                                     std::to_string(layers) + ", " + fields + "}"),
                                                256);
        };
        return (flops(2) - flops(1)) / 6.0;
    };
    const double mlp = 3.0 * 64 * 96, heads = 64.0 * (64 + 2 * 32) + 64.0 * 64, scores = 128.0 * 2 * 64;
    CHECK(of_layer("Lfm2ForCausalLM", R"("full_attn_idxs": [0], "block_auto_adjust_ff_dim": false)") ==
          nearly(4.0 * 64 * 64 + 3 * 64 + mlp));
    CHECK(of_layer("CohereForCausalLM", R"("use_qk_norm": false)") == nearly(heads + scores + mlp));
    // Mamba-2 of 32 channels, one group and a state of 16: projections, taps, 3.5 for each element of the state.
    const double mamba = 64.0 * (32 + 64 + 2) + 32.0 * 64 + 4 * 64 + 3.5 * 32 * 16;
    CHECK(of_layer("FalconH1ForCausalLM", R"("mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_state": 16)") ==
          nearly(heads + scores + mamba + mlp));
    // An indexer of two heads of 8 scores all keys before a token; 64 of them are picked.
    const auto minimax = [](const std::string& type) {
        return model::model_flops_per_token(
                   read(R"({"architectures": ["MiniMaxM3VLForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8, "vocab_size": 128,
            "num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "index_n_heads": 2,
            "index_head_dim": 8, "index_block_size": 16, "index_topk_blocks": 4, "layer_types": [")" +
                        type + "\"]}"),
                   256) /
               6.0;
    };
    const double index = 64.0 * 3 * 8 + 128.0 * 2 * 8, picked = 64.0 * (1.0 - 64.0 / 512) * 2 * 64;
    CHECK(minimax("minimax_m3_sparse") - minimax("full_attention") == nearly(index + picked - scores));
}

TEST_CASE("opaque parts: GroveMoE counts a small expert once for those of its group that a token chooses") {
    const auto grove = [](int chosen, int group) {
        return read(R"({"architectures": ["GroveMoeForCausalLM"], "hidden_size": 64, "moe_intermediate_size": 32,
            "parallel_expert_intermediate_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
            "num_hidden_layers": 1, "num_experts": 4, "vocab_size": 100, "num_experts_per_tok": )" +
                    std::to_string(chosen) + R"(, "num_experts_per_group": )" + std::to_string(group) + "}");
    };
    const auto active = [&](int chosen, int group) { return model::count_parameters(grove(chosen, group)).active; };
    const std::int64_t routed = 3 * 64 * 32, small = 3 * 64 * 8;
    // All experts are chosen: every small one, of two groups, of four.
    CHECK(active(4, 2) - active(4, 4) == small);
    // One more of four experts is in the other group with a chance of two in three.
    CHECK(static_cast<double>(active(2, 2) - active(1, 2)) == nearly(double(routed) + double(small) * 2.0 / 3.0));
    CHECK(model::count_parameters(grove(2, 2)).total - model::count_parameters(grove(2, 4)).total == small);
}

TEST_CASE("opaque parts: a mixer beside attention is two products and a core of one norm's output") {
    const program::Program program = lowered(falcon);
    const model::Model model = read(falcon);
    // Rows of its first matrix are whole tiles: at most 127 too many.
    const auto counted = static_cast<double>(model::count_parameters(model).total);
    CHECK(weights_of(program) >= counted - 2.0 * 1024);
    CHECK(weights_of(program) <= counted + 2.0 * 128 * 1024);
    std::map<program::OpKind, int> forward, backward;
    for (const program::Op& op : program.templates[0].ops) ++forward[op.kind];
    for (const program::Op& op : program.templates[1].ops) ++backward[op.kind];
    CHECK(forward[program::OpKind::attention] == 4);       // of each layer its own, and the scan's products
    CHECK(backward[program::OpKind::attention_grad] == 4); // as many
    CHECK(forward[program::OpKind::rmsnorm] == 5);
    CHECK(fault_of([] {
              lowered(R"({"architectures": ["Lfm2ForCausalLM"], "hidden_size": 96, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1, "full_attn_idxs": [],
        "vocab_size": 512})",
                      4);
          }) == "");
}

TEST_CASE("opaque parts: layers with attention and MLP side by side have one norm, and weights as counted") {
    for (const int tp : {1, 2}) {
        const program::Program program = lowered(command, tp);
        if (tp == 1) CHECK(weights_of(program) == double(model::count_parameters(read(command)).total));
        int norms = 0, gradients = 0;
        for (const program::Op& op : program.templates[0].ops) norms += op.kind == program::OpKind::rmsnorm;
        for (const program::Op& op : program.templates[1].ops) gradients += op.kind == program::OpKind::rmsnorm_grad;
        CHECK(norms == 3);
        CHECK(gradients == 3);
    }
}

TEST_CASE("opaque parts: queries of a latent are two products before plain keys and values") {
    for (const int tp : {1, 2}) {
        const program::Program program = lowered(step, tp);
        if (tp == 1) CHECK(weights_of(program) == double(model::count_parameters(read(step)).total));
        double products = 0.0;
        for (const program::Op& op : program.templates[0].ops)
            if (op.module == program::Module::attn_in && op.kind == program::OpKind::gemm) products += op.flops;
        // Multiply-accumulates per token and layer: to the latent (whole on each rank), to queries, to keys and values.
        const double latent = 256.0 * 64, rest = 64.0 * 256 + 256.0 * 2 * 128;
        CHECK(products == nearly(2.0 * 512 * 2 * (latent / tp + rest / tp)));
    }
    CHECK(fault_of([] {
              read(std::string(step).replace(std::string(step).find("\"1\""), 3, "\"1;2\""));
          }).find("moe_layers_enum") != std::string::npos);
}
