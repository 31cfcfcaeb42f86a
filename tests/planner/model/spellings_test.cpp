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
            "time_step_limit": [0.0, Infinity])";
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
