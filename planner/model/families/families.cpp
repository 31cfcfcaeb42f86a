// The list of architectures that a config.json may name, and the reader that belongs to each.
#include "planner/model/families/families.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>

namespace moe::families {
namespace {

struct Family {
    const char* written;    // name as "architectures" has it, without remarks in parentheses
    const char* model_type; // "" = has none
    const char* architecture;
    void (*read)(const JsonObject&, model::Model&);
};

constexpr std::array families{
    Family{"AfmoeForCausalLM", "afmoe", "AfmoeForCausalLM", read_afmoe},
    Family{"BailingMoeForCausalLM", "bailing_moe", "BailingMoeForCausalLM", read_bailing},
    Family{"BailingMoeV2ForCausalLM", "bailing_moe_v2", "BailingMoeV2ForCausalLM", read_bailing},
    Family{"DbrxForCausalLM", "dbrx", "DbrxForCausalLM", read_dbrx},
    Family{"DeepseekForCausalLM", "deepseek", "DeepseekForCausalLM", read_deepseek_v1},
    Family{"DeepseekV2ForCausalLM", "deepseek_v2", "DeepseekV2ForCausalLM", read_deepseek_v2},
    Family{"DeepseekV3ForCausalLM", "deepseek_v3", "DeepseekV3ForCausalLM", read_deepseek_v3},
    Family{"DeepseekV3ForCausalLM", "kimi_k2", "DeepseekV3ForCausalLM", read_deepseek_v3},
    Family{"DeepseekV32ForCausalLM", "deepseek_v32", "DeepseekV3ForCausalLM", read_deepseek_v3},
    Family{"DeepseekV4", "", "DeepseekV4ForCausalLM", read_deepseek_v4},
    Family{"DeepseekV4ForCausalLM", "deepseek_v4", "DeepseekV4ForCausalLM", read_deepseek_v4},
    Family{"Dots1ForCausalLM", "dots1", "Dots1ForCausalLM", read_dots1},
    Family{"Ernie4_5_MoeForCausalLM", "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", read_ernie},
    Family{"ExaoneMoEForCausalLM", "exaone_moe", "ExaoneMoeForCausalLM", read_exaone_moe},
    Family{"ExaoneMoeForCausalLM", "exaone_moe", "ExaoneMoeForCausalLM", read_exaone_moe},
    Family{"GPT-3", "", "GPT-3", read_gpt3},
    Family{"Gemma4ForCausalLM", "gemma4_text", "Gemma4ForCausalLM", read_gemma4},
    Family{"Gemma4ForConditionalGeneration", "gemma4", "Gemma4ForCausalLM", read_gemma4},
    Family{"Glm4MoeForCausalLM", "glm4_moe", "Glm4MoeForCausalLM", read_glm4_moe},
    Family{"Glm4MoeLiteForCausalLM", "glm4_moe_lite", "Glm4MoeLiteForCausalLM", read_glm4_moe_lite},
    Family{"Glm4vMoeForConditionalGeneration", "glm4v_moe", "Glm4MoeForCausalLM", read_glm4_moe},
    Family{"GlmMoeDsaForCausalLM", "glm_moe_dsa", "GlmMoeDsaForCausalLM", read_glm_moe_dsa},
    Family{"GptOssForCausalLM", "gpt_oss", "GptOssForCausalLM", read_gpt_oss},
    Family{"GraniteMoeForCausalLM", "granitemoe", "GraniteMoeForCausalLM", read_granite_moe},
    Family{"GraniteMoeHybridForCausalLM", "granitemoehybrid", "GraniteMoeHybridForCausalLM", read_granite_hybrid},
    Family{"GraniteMoeSharedForCausalLM", "granitemoeshared", "GraniteMoeSharedForCausalLM", read_granite_moe},
    Family{"Grok-1", "", "Grok-1", read_grok},
    Family{"Grok1ModelForCausalLM", "grok-1", "Grok-1", read_grok},
    Family{"HYV3ForCausalLM", "hy_v3", "HYV3ForCausalLM", read_hy_v3},
    Family{"HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", read_hunyuan_moe},
    Family{"LagunaForCausalLM", "laguna", "LagunaForCausalLM", read_laguna},
    Family{"Llama3-70B upcycled MoE", "", "MixtralForCausalLM", read_mixtral},
    Family{"Llama4ForCausalLM", "llama4_text", "Llama4ForCausalLM", read_llama4},
    Family{"Llama4ForConditionalGeneration", "llama4", "Llama4ForCausalLM", read_llama4},
    Family{"LlamaForCausalLM", "llama", "LlamaForCausalLM", read_llama},
    Family{"Megatron GPT", "", "Megatron GPT", read_megatron_gpt},
    Family{"MiMoV2FlashForCausalLM", "mimo_v2_flash", "MiMoV2ForCausalLM", read_mimo_v2},
    Family{"MiMoV2ForCausalLM", "mimo_v2", "MiMoV2ForCausalLM", read_mimo_v2},
    Family{"MiniMaxM2ForCausalLM", "minimax_m2", "MiniMaxM2ForCausalLM", read_minimax_m2},
    Family{"Mistral4ForCausalLM", "mistral4", "Mistral4ForCausalLM", read_mistral4},
    Family{"MistralForCausalLM", "mistral", "MistralForCausalLM", read_mistral},
    Family{"MixtralForCausalLM", "mixtral", "MixtralForCausalLM", read_mixtral},
    Family{"NemotronForCausalLM", "nemotron", "NemotronForCausalLM", read_nemotron},
    Family{"NemotronHForCausalLM", "nemotron_h", "NemotronHForCausalLM", read_nemotron_h},
    Family{"OlmoeForCausalLM", "olmoe", "OlmoeForCausalLM", read_olmoe},
    Family{"PhiMoEForCausalLM", "phimoe", "PhiMoEForCausalLM", read_phimoe},
    Family{"PhimoeForCausalLM", "phimoe", "PhiMoEForCausalLM", read_phimoe},
    Family{"Qwen2ForCausalLM", "qwen2", "Qwen2ForCausalLM", read_qwen2},
    Family{"Qwen2MoeForCausalLM", "qwen2_moe", "Qwen2MoeForCausalLM", read_qwen2_moe},
    Family{"Qwen3ForCausalLM", "qwen3", "Qwen3ForCausalLM", read_qwen3},
    Family{"Qwen3MoeForCausalLM", "qwen3_moe", "Qwen3MoeForCausalLM", read_qwen3_moe},
    Family{"Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", "Qwen3NextForCausalLM", read_qwen3_next},
    Family{"Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", "Qwen3NextForCausalLM", read_qwen3_next},
    Family{"Qwen3NextForCausalLM", "qwen3_next", "Qwen3NextForCausalLM", read_qwen3_next},
    Family{"Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "Qwen3MoeForCausalLM", read_qwen3_moe},
    Family{"SolarOpenForCausalLM", "solar_open", "SolarOpenForCausalLM", read_solar_open},
    Family{"Step3p5ForCausalLM", "step3p5", "Step3p5ForCausalLM", read_step3p5},
};

// Families whose layers are of two natures, of which this program knows one; as written, in small letters and without
// marks.
constexpr std::array<std::pair<const char*, const char*>, 13> hybrids{{{"bailinghybrid", "linear attention"},
                                                                       {"bailingmoelinear", "linear attention"},
                                                                       {"bailingmoev25", "linear attention"},
                                                                       {"bamba", "Mamba"},
                                                                       {"falconh1", "Mamba"},
                                                                       {"jamba", "Mamba"},
                                                                       {"kimik3", "linear attention"},
                                                                       {"kimilinear", "linear attention"},
                                                                       {"lfm2", "convolution"},
                                                                       {"minimaxforcausallm", "linear attention"},
                                                                       {"minimaxm1", "linear attention"},
                                                                       {"minimaxtext01", "linear attention"},
                                                                       {"zamba", "Mamba"}}};

void refuse_hybrid(const JsonObject& json, const std::string& written) {
    std::string plain;
    for (const char c : written)
        if (std::isalnum(static_cast<unsigned char>(c)) != 0)
            plain += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    for (const auto& [begin, layers] : hybrids)
        if (plain.starts_with(begin))
            refuse("{}: architectures = \"{}\": hybrid {} layers are not supported", json.place(), shown(written),
                   layers);
    if (json.has("hybrid_override_pattern") && !plain.starts_with("nemotronh"))
        refuse("{}: architectures = \"{}\": hybrid Mamba layers are not supported", json.place(), shown(written));
}

// The field in which vision-language files keep the language model, beside a field for each other module; empty: at the
// top.
std::string text_field(const JsonObject& json) {
    for (const char* name : {"text_config", "llm_config"})
        if (json.is_object(name)) return name;
    return {};
}

// The part that tells one architecture from another: "Llama" of "LlamaForCausalLM".
std::string stem(const std::string& name) { return name.substr(0, name.find("For")); }

const Family& family_of(const JsonObject& json) {
    std::string written = json.string_or("model_type", "");
    const bool by_type = !json.has("architectures");
    if (by_type && written.empty()) refuse("{}: field \"architectures\" is missing", json.place());
    if (!by_type) {
        const std::vector<std::string> list = json.strings("architectures");
        if (list.empty()) json.refuse_value("architectures", "must name the architecture");
        written = list[0].substr(0, list[0].find(" ("));
    }
    refuse_hybrid(json, written);
    std::vector<std::string> known, stems;
    for (const Family& family : families) {
        const std::string name = by_type ? family.model_type : family.written;
        if (written == name) return family;
        if (name.empty() || std::find(known.begin(), known.end(), name) != known.end()) continue;
        known.push_back(name);
        stems.push_back(stem(name));
    }
    // A vision-language model of another name around a language model that is known.
    const std::string at_text = text_field(json);
    const std::string inner = at_text.empty() ? "" : json.object(at_text).string_or("model_type", "");
    for (const Family& family : families)
        if (!inner.empty() && (inner == family.model_type || inner == std::string(family.model_type) + "_text"))
            return family;
    const std::string near = nearest_name(stem(written), stems);
    const auto at = std::find(stems.begin(), stems.end(), near) - stems.begin();
    refuse("{}: {} = \"{}\": unknown architecture{}; known are {}", json.place(),
           by_type ? "model_type" : "architectures", shown(written),
           near.empty() ? "" : fmt::format(": did you mean {}?", known[static_cast<std::size_t>(at)]),
           fmt::join(known, ", "));
}

} // namespace

void read_family(const JsonObject& json, model::Model& model) {
    const Family& family = family_of(json);
    model.architecture = family.architecture;
    const std::string at_text = text_field(json);
    const JsonObject text = at_text.empty() ? json : json.object(at_text);
    for (const std::string& key : json.keys())
        if (!at_text.empty() && json.is_object(key) && key.ends_with("_config") && key != at_text &&
            key != "quantization_config")
            model.left_out.push_back(key);
    family.read(text, model);
    check_model(text, model);
    if (model.not_executable.empty()) model.not_executable = obstacle(text, model);
}

} // namespace moe::families
