// One config.json with the facts under the names of all families; each architecture reads those that it knows.
#include "tools/import/model_of_facts.hpp"

#include "planner/base/error.hpp"
#include "planner/base/json.hpp"
#include "planner/base/profile.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/stack/plan_words.hpp"
#include "tools/engines/engine_value.hpp"

#include <algorithm>
#include <memory>
#include <optional>

namespace moe::tools {
namespace {

using Json = nlohmann::ordered_json;

std::string get(const Facts& facts, const std::string& name, const std::string& otherwise = {}) {
    const auto found = facts.find(name);
    return found == facts.end() ? otherwise : found->second;
}

std::int64_t number(const Facts& facts, const std::string& name, std::int64_t otherwise = 0) {
    const Json value = literal(get(facts, name));
    if (value.is_number()) return static_cast<std::int64_t>(value.get<double>());
    return otherwise;
}

std::int64_t needed(const Facts& facts, const std::string& name, const std::string& place) {
    const std::int64_t value = number(facts, name);
    if (value < 1)
        refuse("{}: says no {}: give the model by --model, a config.json or the name of a profile{}", place,
               name.substr(name.find('.') + 1),
               name == "model.vocab" ? ", or the size of its vocabulary in one more file, as the engine writes it"
                                     : "");
    return value;
}

bool on(const Facts& facts, const std::string& name) { return get(facts, name) == "on"; }

bool equal_words(const std::string& a, const std::string& b) {
    const Json left = literal(a), right = literal(b);
    if (left.is_number() && right.is_number()) return left.get<double>() == right.get<double>();
    return a == b;
}

std::string word_of_model(const std::shared_ptr<const model::Model>& model, const std::string& fact) {
    plan::Plan plan;
    plan.model = model;
    return stack::plan_word(plan, fact);
}

std::vector<FactDifference> differences_of(const Facts& facts, const std::shared_ptr<const model::Model>& model,
                                           const ReaderTable& reader, std::size_t enough, bool cosmetic = false) {
    std::vector<FactDifference> list;
    for (const auto& [name, value] : facts) {
        if (reader.is_cosmetic(name) != cosmetic) continue;
        const std::string word = word_of_model(model, name);
        if (!equal_words(value, word)) list.push_back({name, value, word});
        if (list.size() >= enough) break;
    }
    return list;
}

// Layers without experts, by the list of marks.
std::vector<int> dense_layers(const Facts& facts) {
    std::vector<int> dense;
    const Json marks = literal(get(facts, "model.moe_layers", "[]"));
    for (std::size_t layer = 0; marks.is_array() && layer < marks.size(); ++layer)
        if (marks[layer] == 0) dense.push_back(static_cast<int>(layer));
    return dense;
}

void add_experts(Json& config, const Facts& facts, const std::string& place) {
    const std::int64_t experts = number(facts, "model.experts"), width = needed(facts, "model.expert_ffn", place);
    for (const char* name : {"num_experts", "num_local_experts", "n_routed_experts"}) config[name] = experts;
    config["num_experts_per_tok"] = needed(facts, "model.top_k", place);
    config["moe_intermediate_size"] = width;
    const std::int64_t shared = number(facts, "model.shared_ffn");
    config["shared_expert_intermediate_size"] = shared;
    config["shared_expert_gate"] = on(facts, "model.shared_gate");
    if (number(facts, "model.latent") > 0) config["moe_latent_size"] = number(facts, "model.latent");
    config["probs_on_input"] = on(facts, "model.probs_on_input");
    config["n_shared_experts"] = shared % width == 0 ? shared / width : 0;
    config["norm_topk_prob"] = get(facts, "model.router_weights", "of chosen") == "of chosen";
    config["scoring_func"] = get(facts, "model.router_score", "softmax");
    config["routed_scaling_factor"] = literal(get(facts, "model.router_scale", "1"));
    const std::int64_t groups = number(facts, "model.router_groups", 1);
    config["n_group"] = std::max<std::int64_t>(1, groups);
    config["topk_group"] = std::max<std::int64_t>(1, number(facts, "model.router_groups_kept", 1));
    config["topk_method"] = on(facts, "model.selection_bias") ? "noaux_tc"
                            : groups > 1                      ? "group_limited_greedy"
                                                              : "greedy";
    if (const Json marks = literal(get(facts, "model.moe_layers", "[]")); marks.is_array() && !marks.empty())
        config["moe_layer_freq"] = marks;
    const std::vector<int> dense = dense_layers(facts);
    config["mlp_only_layers"] = dense;
    std::size_t first = 0; // number of leading layers without experts
    while (first < dense.size() && dense[first] == static_cast<int>(first)) ++first;
    config["first_k_dense_replace"] = first;
}

void add_latent(Json& config, const Facts& facts, const std::string& place) {
    config["kv_lora_rank"] = needed(facts, "model.kv_lora", place);
    config["q_lora_rank"] = nullptr;
    if (number(facts, "model.q_lora") > 0) config["q_lora_rank"] = number(facts, "model.q_lora");
    config["qk_nope_head_dim"] = needed(facts, "model.qk_nope_dim", place);
    config["qk_rope_head_dim"] = needed(facts, "model.rope_dim", place);
    config["v_head_dim"] = needed(facts, "model.v_dim", place);
    if (!on(facts, "model.sparse_attention")) return;
    config["index_n_heads"] = needed(facts, "model.indexer_heads", place);
    config["index_head_dim"] = needed(facts, "model.indexer_dim", place);
    config["index_topk"] = needed(facts, "model.indexer_top_k", place);
    config["index_topk_freq"] = std::max<std::int64_t>(1, number(facts, "model.index_frequency", 1));
    config["index_skip_topk_offset"] = number(facts, "model.index_offset", 1);
}

// Layers whose attention is linear, and those that see a window, by the lists of marks.
void add_layer_types(Json& config, const Facts& facts) {
    const std::int64_t layers = number(facts, "model.layers"), window = number(facts, "model.window");
    std::vector<std::string> types(static_cast<std::size_t>(layers), "full_attention");
    const auto mark = [&](const char* fact, const char* type) {
        const Json marks = literal(get(facts, fact, "[]"));
        for (std::size_t layer = 0; marks.is_array() && layer < std::min(marks.size(), types.size()); ++layer)
            if (marks[layer] == 1) types[layer] = type;
    };
    if (window > 0) {
        config["sliding_window"] = window + 1; // positions that a query sees, itself included
        config["use_sliding_window"] = true;
        mark("model.window_layers", "sliding_attention");
    }
    if (on(facts, "model.gated_delta")) {
        config["linear_num_key_heads"] = number(facts, "model.key_heads");
        config["linear_num_value_heads"] = number(facts, "model.value_heads");
        config["linear_key_head_dim"] = number(facts, "model.key_dim");
        config["linear_value_head_dim"] = number(facts, "model.value_dim");
        config["linear_conv_kernel_dim"] = number(facts, "model.conv_kernel", 4);
        mark("model.linear_layers", "linear_attention");
    }
    if (window > 0 || on(facts, "model.gated_delta")) config["layer_types"] = types;
}

// Which share of a head's columns turns, in which layers, and by which frequencies.
void add_rotation(Json& config, const Facts& facts) {
    config["rope_theta"] = literal(get(facts, "model.rope_theta", "10000"));
    if (!on(facts, "model.mla")) config["partial_rotary_factor"] = literal(get(facts, "model.rotary_percent", "1"));
    if (on(facts, "model.partly_rotated")) {
        const Json stays = literal(get(facts, "model.unrotated_layers", "[]"));
        for (std::size_t layer = 0; stays.is_array() && layer < stays.size(); ++layer)
            config["no_rope_layers"].push_back(stays[layer] == 1 ? 0 : 1);
    }
    const std::string type = get(facts, "model.rope_scaling", "none");
    const Json factor = literal(get(facts, "model.rope_factor", "1"));
    if (type == "none" || factor == 1.0) return;
    Json& scaling = config["rope_scaling"] = {{"rope_type", type}, {"factor", factor}};
    scaling["original_max_position_embeddings"] = number(facts, "model.rope_positions", type == "llama3" ? 8192 : 4096);
    for (const char* name : {"mscale", "mscale_all_dim", "beta_fast", "beta_slow"})
        if (const auto value = facts.find(std::string("model.") + name); value != facts.end())
            scaling[name] = literal(value->second);
}

// The letters of a hybrid's layers, without the bars between stages and what follows for multi-token prediction.
std::string letters_of(const Facts& facts) {
    std::string pattern = get(facts, "model.pattern");
    pattern = pattern.substr(0, pattern.find('/'));
    std::erase(pattern, '|');
    return pattern;
}

void add_hybrid(Json& config, const Facts& facts) {
    config["hybrid_override_pattern"] = letters_of(facts);
    config["mlp_hidden_act"] = get(facts, "model.activation", "relu2");
    config["mamba_num_heads"] = number(facts, "model.mamba_heads");
    config["mamba_head_dim"] = number(facts, "model.mamba_head_dim");
    config["n_groups"] = number(facts, "model.mamba_groups");
    config["ssm_state_size"] = number(facts, "model.mamba_state");
    if (number(facts, "model.experts") > 0)
        config["moe_shared_expert_intermediate_size"] = number(facts, "model.shared_ffn");
}

Json config_of(const Facts& facts, const std::string& place) {
    Json config;
    config["hidden_size"] = needed(facts, "model.hidden", place);
    config["num_hidden_layers"] = needed(facts, "model.layers", place);
    config["num_attention_heads"] = needed(facts, "model.heads", place);
    const std::int64_t heads = config["num_attention_heads"].get<std::int64_t>();
    config["num_key_value_heads"] = number(facts, "model.kv_heads", heads);
    config["head_dim"] = number(facts, "model.head_dim", config["hidden_size"].get<std::int64_t>() / heads);
    config["vocab_size"] = needed(facts, "model.vocab", place);
    config["tie_word_embeddings"] = on(facts, "model.tied_embeddings");
    for (const char* name : {"rms_norm_eps", "layer_norm_eps", "norm_eps"})
        config[name] = literal(get(facts, "model.norm_eps", "1e-5"));
    config["hidden_act"] = get(facts, "model.activation", "silu");
    config["mlp_gated"] = on(facts, "model.gated");
    const std::string bias = get(facts, "model.bias", "none");
    config["attention_bias"] = bias != "none";
    config["qkv_bias"] = bias == "qkv";
    config["mlp_bias"] = bias == "all";
    config["normalization"] = get(facts, "model.normalization", "RMSNorm");
    config["attn_output_gate"] = on(facts, "model.output_gate");
    config["attention_sinks"] = on(facts, "model.sinks");
    if (number(facts, "model.swiglu_limit") > 0) config["swiglu_limit"] = literal(get(facts, "model.swiglu_limit"));
    config["use_qk_norm"] = on(facts, "model.qk_norm");
    config["num_nextn_predict_layers"] = number(facts, "model.mtp");
    if (number(facts, "model.vocab_divisor") > 0)
        config["megatron"]["make_vocab_size_divisible_by"] = number(facts, "model.vocab_divisor");
    if (number(facts, "model.ffn") > 0) config["intermediate_size"] = number(facts, "model.ffn");
    if (number(facts, "model.experts") > 0) add_experts(config, facts, place);
    if (on(facts, "model.mla")) add_latent(config, facts, place);
    add_layer_types(config, facts);
    add_rotation(config, facts);
    if (on(facts, "model.hybrid")) add_hybrid(config, facts);
    return config;
}

// Published architectures of the kind, then Megatron's own, which has whatever its arguments compose.
std::vector<std::string> architectures(const Facts& facts) {
    if (on(facts, "model.hybrid")) return {"NemotronHForCausalLM"};
    std::vector<std::string> list{"LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM",
                                  "NemotronForCausalLM"};
    if (number(facts, "model.experts") > 0)
        list = {"MixtralForCausalLM",  "Qwen3MoeForCausalLM",  "Qwen2MoeForCausalLM",
                "Glm4MoeForCausalLM",  "Dots1ForCausalLM",     "GptOssForCausalLM",
                "DeepseekForCausalLM", "Qwen3NextForCausalLM", "Grok-1"};
    if (on(facts, "model.mla")) list = {"DeepseekV3ForCausalLM", "GlmMoeDsaForCausalLM", "DeepseekV2ForCausalLM"};
    list.insert(list.end(), {"Megatron GPT", "GPT-3"});
    return list;
}

bool composes(const std::string& architecture) { return architecture == "Megatron GPT" || architecture == "GPT-3"; }

// Families whose intermediate_size is that of an expert.
bool names_expert_width(const std::string& architecture) {
    return architecture == "MixtralForCausalLM" || architecture == "GptOssForCausalLM" || architecture == "Grok-1";
}

std::optional<model::Model> model_read(const Json& config, const std::string& place) {
    try {
        return families::model_from_json(json_text(config), place);
    } catch (const Error&) {
        return std::nullopt; // The model is not of this architecture.
    }
}

// The architecture that fewest facts speak against, of equal ones that of fewest without effect on time and memory.
model::Model built(const Facts& facts, const ReaderTable& reader, const std::string& place) {
    const Json common = config_of(facts, place);
    std::optional<model::Model> best;
    std::pair<std::size_t, std::size_t> fewest;
    for (const std::string& architecture : architectures(facts)) {
        Json config = {{"name", "imported"}, {"architectures", {architecture}}};
        config.update(common);
        if (names_expert_width(architecture)) config["intermediate_size"] = config["moe_intermediate_size"];
        if (composes(architecture)) config["attention_bias"] = get(facts, "model.bias", "none") == "all";
        std::optional<model::Model> model = model_read(config, place);
        if (!model) continue;
        model->name = "imported";
        const auto shared = std::make_shared<const model::Model>(*model);
        const std::pair differ{differences_of(facts, shared, reader, 1000).size(),
                               differences_of(facts, shared, reader, 1000, true).size()};
        if (best && differ >= fewest) continue;
        fewest = differ;
        best = std::move(model);
    }
    if (!best) refuse("{}: no architecture that is known has these sizes: give the model by --model", place);
    return *best;
}

// Whether the vocabulary is the likely one, or that with its padding, which is less than a twentieth.
bool has_vocabulary(const Facts& likely, const model::Model& model) {
    const std::int64_t size = number(likely, "model.vocab", model.vocab);
    return model.vocab >= size && model.vocab <= size + size / 20;
}

// A profile with another number of multi-token-prediction layers.
std::optional<model::Model> with_mtp(const model::Model& profile, std::int64_t depth, const std::string& place) {
    Json config = parse_json<Json>(profile.config_json, place);
    config["num_nextn_predict_layers"] = depth;
    std::optional<model::Model> model = model_read(config, place);
    if (model) model->name = fmt::format("{}-mtp{}", profile.name, depth);
    return model;
}

} // namespace

std::vector<FactDifference> differing_facts(const Facts& facts, const model::Model& model, const ReaderTable& reader) {
    return differences_of(facts, std::make_shared<const model::Model>(model), reader, 1000);
}

void complete_facts(Facts& facts, bool unclear_layers) {
    const std::string letters = letters_of(facts), pattern = get(facts, "model.pattern");
    if (on(facts, "model.hybrid") && !letters.empty()) { // Letters stand over --num-layers, which may be absent.
        facts["model.layers"] = fmt::format("{}", letters.size());
        if (const auto depths = std::count(pattern.begin(), pattern.end(), '/'); depths > 0)
            facts["model.mtp"] = fmt::format("{}", depths);
    }
    const std::int64_t hidden = number(facts, "model.hidden"), heads = number(facts, "model.heads");
    const auto fill = [&facts](const char* name, std::int64_t value) {
        if (value > 0) facts.try_emplace(name, fmt::format("{}", value));
    };
    if (!on(facts, "model.mla")) {
        fill("model.kv_heads", heads);
        if (heads > 0) fill("model.head_dim", hidden / heads);
    }
    // Megatron-LM's arguments.py: 4 times the width, of a gated MLP two thirds of it in steps of 64.
    fill("model.ffn", on(facts, "model.gated") ? hidden * 4 * 2 / 3 / 64 * 64 : hidden * 4);
    // Megatron-Core's mamba_mixer.py: an inner width of twice the model's.
    const std::int64_t width = number(facts, "model.mamba_head_dim");
    if (on(facts, "model.hybrid") && width > 0) fill("model.mamba_heads", 2 * hidden / width);
    if (on(facts, "model.hybrid")) return; // its pattern says which layers have experts
    const std::int64_t layers = number(facts, "model.layers");
    if (number(facts, "model.experts") < 1 || layers < 1 || layers > 1 << 14) return;
    fill("model.expert_ffn", number(facts, "model.ffn"));
    if (unclear_layers) { // Whether some are dense, and as wide, is not known either.
        facts.erase("model.moe_layers");
        facts.erase("model.ffn");
        return;
    }
    std::string all = "[";
    for (std::int64_t layer = 0; layer < layers; ++layer) all += layer > 0 ? ",1" : "1";
    facts.try_emplace("model.moe_layers", all + "]");
    // Without dense layers their width is of no layer.
    if (facts["model.moe_layers"].find('0') == std::string::npos) facts.erase("model.ffn");
}

model::Model model_of_facts(const Facts& facts, const Facts& likely, const std::string& named,
                            const ReaderTable& reader, const std::string& place) {
    for (const char* size : {"model.layers", "model.hidden", "model.heads"}) needed(facts, size, place);
    if (facts.count("model.vocab") > 0 && !likely.empty()) return model_of_facts(facts, {}, named, reader, place);
    Facts apart = facts;
    apart.erase("model.mtp");
    std::shared_ptr<const model::Model> best; // the profile of fewest differences without effect on time and memory
    std::pair<std::size_t, std::size_t> fewest;
    for (const std::string& name : profile_names("models")) {
        const auto profile = std::make_shared<const model::Model>(families::load_model(name));
        if (!differences_of(apart, profile, reader, 1).empty() || !has_vocabulary(likely, *profile)) continue;
        const std::pair differ{differences_of(facts, profile, reader, 1).size(),
                               differences_of(facts, profile, reader, 1000, true).size()};
        if (best != nullptr && (name == named ? differ > fewest : differ >= fewest)) continue;
        fewest = differ;
        best = profile;
    }
    if (best != nullptr && fewest.first == 0) return *best;
    if (best != nullptr)
        if (auto model = with_mtp(*best, number(facts, "model.mtp"), place)) return *model;
    Facts all = facts;
    all.insert(likely.begin(), likely.end());
    return built(all, reader, place);
}

model::Model with_mtp_of(const Facts& facts, const model::Model& model, const std::string& place) {
    if (facts.count("model.mtp") == 0) return model;
    const std::int64_t depth = number(facts, "model.mtp");
    if (depth == static_cast<std::int64_t>(model.mtp.size())) return model;
    return with_mtp(model, depth, place).value_or(model);
}

} // namespace moe::tools
