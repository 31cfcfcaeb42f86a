// Spellings of configs that tools leave or newer releases write, each beside the published file of its profile.
#include "planner/base/files.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/model/model.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/support/changed.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <string>
#include <vector>

using namespace moe;
using Json = nlohmann::ordered_json;

namespace {

std::string profile(const std::string& name) { return read_file(profiles_folder() + "/models/" + name + ".json"); }

model::Model read(const std::string& text) { return families::model_from_json(text, "c.json"); }
std::int64_t count(const std::string& text) { return model::count_parameters(read(text)).total; }
std::string fault(const std::string& text) {
    return fault_of([&] { read(text); });
}
bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::string without(const std::string& config, const std::string& field) {
    Json whole = Json::parse(config);
    REQUIRE(whole.erase(field) == 1);
    return whole.dump();
}

// Qwen3-VL-30B-A3B as transformers writes it, cut to what the reader looks at (huggingface.co/Qwen, config.json).
std::string qwen_vl(const std::string& outer, const std::string& inner) {
    return R"({"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe")" + outer +
           R"(, "text_config": {"model_type": "qwen3_vl_moe_text", "hidden_size": 2048, "intermediate_size": 6144,
               "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
               "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "vocab_size": 151936)" +
           inner + "}}";
}

} // namespace

TEST_CASE("spellings: what stands at the top of a nested config counts") {
    const std::int64_t table = 2048LL * 151936;
    const std::int64_t separate = count(qwen_vl(R"(, "tie_word_embeddings": false)", ""));
    CHECK(separate == 30'532'122'624); // the model card's 30.5 billion, of Qwen3-30B-A3B
    CHECK(count(qwen_vl(R"(, "tie_word_embeddings": true)", "")) == separate - table);
    // Transformers 5 writes the text's default beside the top's word, which alone counts.
    CHECK(count(qwen_vl(R"(, "tie_word_embeddings": false)", R"(, "tie_word_embeddings": true)")) == separate);
    CHECK(count(qwen_vl("", R"(, "tie_word_embeddings": true)")) == separate - table);
    CHECK(read(qwen_vl(R"(, "num_nextn_predict_layers": 1)", "")).mtp.size() == 1);
    CHECK(read(qwen_vl(R"(, "vision_config": {"hidden_size": 9})", "")).hidden == 2048);
    // Its class divides the chosen weights by their sum, which Qwen3-MoE's does only where a file says so.
    CHECK(read(qwen_vl("", "")).kinds.front().moe->router.normalize);
    CHECK(holds(fault(qwen_vl("", R"(, "norm_topk_prob": false)")), "norm_topk_prob = false"));
}

TEST_CASE("spellings: sizes that are missing are never another number") {
    const std::string deepseek = profile("DeepSeek-V3"), qwen = profile("Qwen3-30B-A3B");
    const std::string dense = fault(without(deepseek, "n_routed_experts"));
    CHECK(holds(dense, "2: c.json: field \"n_routed_experts\" is missing"));
    const std::string typo = changed(without(deepseek, "n_routed_experts"), R"("n_routed_experts_": 256)");
    CHECK(holds(fault(typo), "field \"n_routed_experts\" is missing: did you mean n_routed_experts_?"));
    const std::string renamed = changed(without(deepseek, "n_routed_experts"), R"("num_experts": 256)");
    CHECK(holds(fault(renamed), "field \"n_routed_experts\" is missing"));
    CHECK(holds(fault(without(deepseek, "q_lora_rank")), "field \"q_lora_rank\" is missing"));
    CHECK(read(changed(deepseek, R"("q_lora_rank": null)")).kinds.front().attention.q_lora == 0);
    CHECK(holds(fault(without(qwen, "num_key_value_heads")), "field \"num_key_value_heads\" is missing"));
    CHECK(holds(fault(without(profile("GPT-OSS-20B"), "head_dim")), "field \"head_dim\" is missing"));
    CHECK(holds(fault(changed(deepseek, R"("num_experts_per_tok": null)")),
                "c.json: num_experts_per_tok = null: must be given a value"));
}

TEST_CASE("spellings: lists and words of newer releases") {
    const std::string deepseek = profile("DeepSeek-V3");
    Json freq = Json::array();
    for (int layer = 0; layer < 61; ++layer) freq.push_back(layer < 3 ? 0 : 1);
    CHECK(count(changed(deepseek, R"("moe_layer_freq": )" + freq.dump())) == count(deepseek));
    freq.erase(0);
    CHECK(holds(fault(changed(deepseek, R"("moe_layer_freq": )" + freq.dump())), "must have num_hidden_layers = 61"));
    const std::string glm = profile("GLM-5"), layers = R"("layer_types": )";
    for (const char* word : {"deepseek_sparse_attention", "indexed_attention"})
        CHECK(count(changed(glm, layers + Json(std::vector<std::string>(78, word)).dump())) == count(glm));
    CHECK(holds(fault(changed(glm, layers + Json(std::vector<std::string>(78, "full_attention")).dump())),
                "layer_types: \"full_attention\" is not known"));
    const std::string nemotron =
        R"({"architectures": ["NemotronHForCausalLM"], "hidden_size": 512, "vocab_size": 1024, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 64, "mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 2,
            "ssm_state_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
            "moe_shared_expert_intermediate_size": 128, "time_step_limit": [0.0, Infinity])";
    const std::int64_t letters = count(nemotron + R"(, "num_hidden_layers": 4, "hybrid_override_pattern": "ME*E"})");
    CHECK(count(nemotron + R"(, "layers_block_type": ["mamba", "moe", "attention", "moe"]})") == letters);
    CHECK(count(nemotron + R"(, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]})") ==
          letters);
    CHECK(holds(fault(nemotron + R"(, "layers_block_type": ["mamba", "conv"]})"), "layers_block_type: \"conv\""));
    // What Python wrote stays in the config that a plan or a checkpoint keeps.
    CHECK(holds(read(nemotron + R"(, "layers_block_type": ["mamba"]})").config_json, "[0.0,Infinity]"));
    CHECK(count(changed(profile("Qwen3-30B-A3B"), R"("x": 1)")) ==
          count(R"({"x": NaN, )" + profile("Qwen3-30B-A3B").substr(1)));
}

TEST_CASE("spellings: the reference lists the names that are read") {
    const std::string page = read_file(profiles_folder() + "/../docs/reference/profiles.md");
    const std::vector<std::string> names = families::architecture_names();
    CHECK(names.size() > 50);
    for (const std::string& name : names) CHECK_MESSAGE(holds(page, "`" + name + "`"), name);
}

TEST_CASE("spellings: prefixes of trainers, and names that nobody knows") {
    const std::string qwen = profile("Qwen3-30B-A3B");
    CHECK(count(changed(qwen, R"("architectures": ["FSDPQwen3MoeForCausalLM"])")) == count(qwen));
    CHECK(count(changed(qwen, R"("architectures": ["MyQwen3MoeForCausalLM"], "model_type": "qwen3_moe")")) ==
          count(qwen));
    CHECK(holds(fault(changed(qwen, R"("architectures": ["MyQwen3MoeForCausalLM"], "model_type": "mine")")),
                "\"MyQwen3MoeForCausalLM\": unknown architecture"));
    // No list of all names, and no hint at a family that only looks alike.
    const std::string unknown = fault(changed(qwen, R"("architectures": ["Qwen9MegaForCausalLM"])"));
    CHECK(holds(unknown, "unknown architecture"));
    CHECK(!holds(unknown, "did you mean"));
    CHECK(unknown.size() < 200);
    CHECK(
        holds(fault(changed(qwen, R"("architectures": ["Qwen3MoeForCausaLM"])")), "did you mean Qwen3MoeForCausalLM?"));
}

TEST_CASE("spellings: the first Nemotron-H files name the width of a head otherwise") {
    const std::string ours = profile("Nemotron-H-56B"), bare = without(ours, "head_dim");
    CHECK(count(changed(bare, R"("attention_head_dim": 128)")) == count(ours));
    CHECK(count(changed(ours, R"("attention_head_dim": 64)")) == count(ours));
    CHECK(holds(fault(bare), "field \"head_dim\" is missing"));
}

TEST_CASE("spellings: which layers a window of Qwen's models is meant for") {
    const auto windows = [](const std::string& name, const std::string& fields) {
        const model::Model model = read(changed(profile(name), R"("use_sliding_window": true)" + fields));
        std::string layers;
        for (int layer = 0; layer < 6; ++layer) layers += model.kind_of(layer).attention.window > 0 ? 'w' : '.';
        return layers + " " + std::to_string(model.kind_of(4).attention.window);
    };
    const std::string at = R"(, "sliding_window": 64, "max_window_layers": )", mixed = R"(, "layer_types": )";
    std::vector<std::string> types(48, "full_attention");
    types[1] = "sliding_attention";
    CHECK(windows("Qwen3-30B-A3B", at + "3") == "wwwwww 64"); // The class knows no max_window_layers.
    CHECK(windows("Qwen3-30B-A3B", R"(, "sliding_window": null)") == "...... 0");
    CHECK(windows("Qwen3-30B-A3B", at + "3" + mixed + Json(types).dump()) == "wwwwww 64");
    CHECK(windows("Qwen2-57B-A14B", at + "5") == "w.w.w. 64");
    types.resize(28);
    CHECK(windows("Qwen2-57B-A14B", at + "5" + mixed + Json(types).dump()) == ".w.... 0");
    CHECK(windows("Qwen3-8B", at + "3") == "...www 64");
}

TEST_CASE("spellings: a file that is silent about the window of Qwen's models means the classes' own") {
    const std::string silent =
        R"({"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "vocab_size": 100,
            "moe_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2, "use_sliding_window": true})";
    CHECK(read(silent).kinds.front().attention.window == 4096);
}

TEST_CASE("spellings: what a class means by silence, and by null") {
    // GPT-OSS scales its rotation where a file says nothing of it; MiMo-V2-Flash its values.
    const model::Model oss = read(changed(profile("GPT-OSS-20B"), R"("rope_scaling": null)"));
    CHECK(oss.rope_scaling.type == "yarn");
    CHECK(oss.rope_scaling.factor == 32.0);
    CHECK_FALSE(oss.rope_scaling.truncate);
    const std::string mimo = profile("MiMo-V2-Flash"), mistral = profile("Mistral-Small-4");
    CHECK(read(without(mimo, "attention_value_scale")).kinds.front().attention.value_scale == 0.707);
    CHECK(read(changed(mimo, R"("attention_value_scale": null)")).kinds.front().attention.value_scale == 1.0);
    // The positions before the query, which sees itself as well.
    CHECK(read(changed(mimo, R"("sliding_window_size": 128)")).kind_of(1).attention.window == 129);
    CHECK_FALSE(read(changed(profile("DeepSeek-V3"), R"("norm_topk_prob": null)")).kind_of(3).moe->router.normalize);
    CHECK_FALSE(read(changed(profile("DeepSeek-V3"), R"("rope_interleave": null)")).rope_interleaved);
    CHECK(read(without(profile("GLM-4.7-Flash"), "routed_scaling_factor")).kind_of(1).moe->router.scale == 1.8);
    CHECK(read(without(profile("Hy3"), "router_scaling_factor")).kind_of(1).moe->router.scale == 2.826);
}

TEST_CASE("spellings: Llama 4 lists chunks and rotations apart") {
    const std::string config =
        R"({"architectures": ["Llama4ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 32, "intermediate_size_mlp": 96,
            "num_local_experts": 4, "num_experts_per_tok": 1, "vocab_size": 256, "attention_bias": true,
            "no_rope_layers": [1, 0], "layer_types": ["full_attention", "chunked_attention"],
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}})";
    const model::Model model = read(config);
    CHECK(model.kind_of(0).attention.chunk == 0);
    CHECK(model.kind_of(0).attention.rope_dim == 16);
    CHECK(model.kind_of(1).attention.chunk == 8192);
    CHECK(model.kind_of(1).attention.rope_dim == 0);
    CHECK(model.kind_of(1).attention.out_bias);
    CHECK(model.rope_scaling.attention_factor == 1.0); // The norm behind the rotation takes it out again.
}

TEST_CASE("spellings: fields that a class reads and we do not are refused by name") {
    const auto refused = [](const std::string& name, const std::string& field, const std::string& value) {
        const std::string said = fault(changed(profile(name), "\"" + field + "\": " + value));
        CAPTURE(said);
        CHECK(holds(said, "c.json: " + field + " = "));
    };
    refused("Qwen3-30B-A3B", "partial_rotary_factor", "0.5");
    refused("OLMoE-1B-7B", "clip_qkv", "0.0");
    refused("DeepSeek-V2", "mlp_bias", "true");
    refused("Hy3", "mlp_bias", "true");
    refused("ERNIE-4.5-21B-A3B", "moe_norm_min", "0.5");
    refused("Hunyuan-A13B", "num_shared_expert", "2");
    refused("Qwen3-Next-80B-A3B", "hidden_act", "\"gelu\"");
    refused("Qwen3.5-35B-A3B", "attention_bias", "true");
    CHECK(holds(fault(changed(profile("Hunyuan-A13B"), R"("moe_topk": 0)")), "no expert is chosen"));
    CHECK(holds(read(changed(profile("DeepSeek-V3"), R"("attention_bias": true)")).not_executable, "attention_bias"));
    CHECK(read(changed(profile("Nemotron-3-Nano"), R"("partial_rotary_factor": 1.0)")).kind_of(5).attention.rope_dim ==
          0);
}

TEST_CASE("spellings: what no name of a field hides from training") {
    const auto obstacle = [](const std::string& name, const std::string& fields) {
        return read(changed(profile(name), fields)).not_executable;
    };
    CHECK(obstacle("Qwen3-30B-A3B", R"("resid_pdrop": 0.1)") == "resid_pdrop: must be 0");
    CHECK(obstacle("Qwen3-30B-A3B", R"("hidden_dropout_prob": 0.1)") == "hidden_dropout_prob: must be 0");
    CHECK(obstacle("Qwen3-30B-A3B", R"("classifier_dropout": 0.1, "embedding_dropout": 0.0)").empty());
    CHECK(obstacle("DBRX", R"("attn_config": {"kv_n_heads": 8, "attn_pdrop": 0.1})") ==
          "attn_config.attn_pdrop: must be 0");
    // LongRoPE has a factor for each pair of columns, and YaRN one of the rotated columns, beside a factor of 1.
    CHECK(holds(obstacle("Qwen3-30B-A3B", R"("rope_scaling": {"rope_type": "longrope", "factor": 1.0})"),
                "rope_scaling = longrope"));
    CHECK(obstacle("Qwen3-30B-A3B", R"("rope_scaling": {"rope_type": "dynamic", "factor": 1.0})").empty());
}
