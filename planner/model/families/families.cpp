// The list of architectures that a config.json may name, and the reader that belongs to each.
#include "planner/model/families/families.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "planner/model/families/lacking.hpp"
#include "planner/model/families/load_model.hpp"

#include <algorithm>
#include <array>
#include <set>
#include <utility>

namespace moe::families {
namespace {

struct Family {
    const char* written;    // name as "architectures" has it, without remarks in parentheses
    const char* model_type; // "" = has none
    const char* architecture;
    void (*read)(const JsonObject&, model::Model&);
    // Sizes that a file of it must state: the class has a number of its own for them, which follows from no other size
    // (configuration classes of transformers 5.24, and of the published code for those that it does not know).
    std::array<const char*, 2> stated{};
};

constexpr std::array<const char*, 2> kv{"num_key_value_heads"}, head{"head_dim"}, kv_head{kv[0], head[0]},
    latent{"q_lora_rank"}, latent_first{latent[0], "first_k_dense_replace"};

constexpr std::array families{
    Family{"AXK1ForCausalLM", "axk1", "AXK1ForCausalLM", read_axk1, latent},
    Family{"AXK2ForCausalLM", "axk2", "AXK2ForCausalLM", read_axk2, latent},
    Family{"AfmoeForCausalLM", "afmoe", "AfmoeForCausalLM", read_afmoe, head},
    Family{"ApertusForCausalLM", "apertus", "ApertusForCausalLM", read_apertus},
    Family{"ArceeForCausalLM", "arcee", "ArceeForCausalLM", read_arcee},
    Family{"ArcticForCausalLM", "arctic", "ArcticForCausalLM", read_arctic},
    Family{"AriaForConditionalGeneration", "aria", "AriaTextForCausalLM", read_aria},
    Family{"AriaTextForCausalLM", "aria_text", "AriaTextForCausalLM", read_aria},
    Family{"BailingHybridForCausalLM", "bailing_hybrid", "BailingHybridForCausalLM", read_bailing_hybrid},
    Family{"BailingMoeForCausalLM", "bailing_moe", "BailingMoeForCausalLM", read_bailing},
    Family{"BailingMoeLinearForCausalLM", "bailing_moe_linear", "BailingMoeLinearV2ForCausalLM", read_bailing_hybrid},
    Family{"BailingMoeLinearV2ForCausalLM", "bailing_moe_linear", "BailingMoeLinearV2ForCausalLM", read_bailing_hybrid},
    Family{"BailingMoeV2ForCausalLM", "bailing_moe_v2", "BailingMoeV2ForCausalLM", read_bailing},
    Family{"BailingMoeV2_5ForCausalLM", "", "BailingMoeV2_5ForCausalLM", read_bailing_hybrid},
    Family{"BailingMoeV3ForCausalLM", "", "BailingHybridForCausalLM", read_bailing_hybrid},
    Family{"BambaForCausalLM", "bamba", "BambaForCausalLM", read_bamba, kv},
    Family{"BeamForCausalLM", "beam", "BeamForCausalLM", read_beam, kv_head},
    Family{"Cohere2ForCausalLM", "cohere2", "Cohere2ForCausalLM", read_cohere},
    Family{"Cohere2MoeForCausalLM", "cohere2_moe", "Cohere2MoeForCausalLM", read_cohere, head},
    Family{"CohereForCausalLM", "cohere", "CohereForCausalLM", read_cohere},
    Family{"CwmForCausalLM", "cwm", "CwmForCausalLM", read_windowed, kv_head},
    Family{"DbrxForCausalLM", "dbrx", "DbrxForCausalLM", read_dbrx},
    Family{"DeepseekForCausalLM", "deepseek", "DeepseekForCausalLM", read_deepseek_v1},
    Family{"DeepseekOcr2ForConditionalGeneration", "deepseek_ocr2", "DeepseekForCausalLM", read_deepseek_ocr2, kv},
    Family{"DeepseekV2ForCausalLM", "deepseek_v2", "DeepseekV2ForCausalLM", read_deepseek_v2, latent},
    Family{"DeepseekV32ForCausalLM", "deepseek_v32", "DeepseekV3ForCausalLM", read_deepseek_v3, latent},
    Family{"DeepseekV3ForCausalLM", "deepseek_v3", "DeepseekV3ForCausalLM", read_deepseek_v3, latent},
    Family{"DeepseekV3ForCausalLM", "kimi_k2", "DeepseekV3ForCausalLM", read_deepseek_v3, latent},
    Family{"DeepseekV3ForCausalLM", "sarvam_mla", "DeepseekV3ForCausalLM", read_deepseek_v3, latent_first},
    Family{"DeepseekV4", "", "DeepseekV4ForCausalLM", read_deepseek_v4},
    Family{"DeepseekV4ForCausalLM", "deepseek_v4", "DeepseekV4ForCausalLM", read_deepseek_v4},
    Family{"Dots1ForCausalLM", "dots1", "Dots1ForCausalLM", read_dots1, kv},
    Family{"Ernie4_5ForCausalLM", "ernie4_5", "Ernie4_5ForCausalLM", read_ernie_dense, kv_head},
    Family{"Ernie4_5_MoeForCausalLM", "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", read_ernie, kv},
    Family{"Ernie4_5_VLMoeForConditionalGeneration", "ernie4_5_vl_moe", "Ernie4_5_MoeForCausalLM", read_ernie, kv},
    Family{"Ernie4_5_VLMoeForConditionalGeneration", "ernie4_5_moe_vl", "Ernie4_5_MoeForCausalLM", read_ernie, kv},
    Family{"Exaone4ForCausalLM", "exaone4", "Exaone4ForCausalLM", read_exaone4, kv},
    Family{"ExaoneMoEForCausalLM", "exaone_moe", "ExaoneMoeForCausalLM", read_exaone_moe, kv},
    Family{"ExaoneMoeForCausalLM", "exaone_moe", "ExaoneMoeForCausalLM", read_exaone_moe, kv},
    Family{"FalconH1ForCausalLM", "falcon_h1", "FalconH1ForCausalLM", read_falcon_h1, kv},
    Family{"FalconMambaForCausalLM", "falcon_mamba", "MambaForCausalLM", read_mamba1},
    Family{"FlexOlmoForCausalLM", "flex_olmo", "FlexOlmoForCausalLM", read_olmo},
    Family{"FlintForCausalLM", "flint", "FlintForCausalLM", read_flint, kv_head},
    Family{"GPT-3", "", "GPT-3", read_gpt3},
    Family{"Gemma2ForCausalLM", "gemma2", "Gemma2ForCausalLM", read_gemma3, kv_head},
    Family{"Gemma3ForCausalLM", "gemma3_text", "Gemma3ForCausalLM", read_gemma3, kv_head},
    Family{"Gemma3ForConditionalGeneration", "gemma3", "Gemma3ForCausalLM", read_gemma3, kv_head},
    Family{"Gemma4ForCausalLM", "gemma4_text", "Gemma4ForCausalLM", read_gemma4, kv_head},
    Family{"Gemma4ForConditionalGeneration", "gemma4", "Gemma4ForCausalLM", read_gemma4, kv_head},
    Family{"Glm4ForCausalLM", "glm4", "Glm4ForCausalLM", read_glm, kv_head},
    Family{"Glm4MoeForCausalLM", "glm4_moe", "Glm4MoeForCausalLM", read_glm4_moe, kv},
    Family{"Glm4MoeForCausalLM", "sarvam_moe", "Glm4MoeForCausalLM", read_glm4_moe, kv_head},
    Family{"Glm4MoeLiteForCausalLM", "glm4_moe_lite", "Glm4MoeLiteForCausalLM", read_glm4_moe_lite, latent},
    Family{"Glm4vForConditionalGeneration", "glm4v", "Glm4ForCausalLM", read_glm, kv},
    Family{"Glm4vMoeForConditionalGeneration", "glm4v_moe", "Glm4MoeForCausalLM", read_glm4_moe, kv},
    Family{"Glm5NextForConditionalGeneration", "glm5_next", "Glm5NextForCausalLM", read_glm5_next, latent},
    Family{"GlmForCausalLM", "glm", "GlmForCausalLM", read_glm, kv_head},
    Family{"GlmMoeDsaForCausalLM", "glm_moe_dsa", "GlmMoeDsaForCausalLM", read_glm_moe_dsa, latent},
    Family{"GptOssForCausalLM", "gpt_oss", "GptOssForCausalLM", read_gpt_oss, kv_head},
    Family{"GraniteForCausalLM", "granite", "GraniteForCausalLM", read_granite},
    Family{"GraniteMoeForCausalLM", "granitemoe", "GraniteMoeForCausalLM", read_granite_moe},
    Family{"GraniteMoeHybridForCausalLM", "granitemoehybrid", "GraniteMoeHybridForCausalLM", read_granite_hybrid},
    Family{"GraniteMoeSWAForCausalLM", "granitemoe_swa", "GraniteMoeSWAForCausalLM", read_granite_swa},
    Family{"GraniteMoeSharedForCausalLM", "granitemoeshared", "GraniteMoeSharedForCausalLM", read_granite_moe},
    Family{"Grok-1", "", "Grok-1", read_grok},
    Family{"Grok1ForCausalLM", "", "Grok-2", read_grok2, kv_head},
    Family{"Grok1ModelForCausalLM", "grok-1", "Grok-1", read_grok},
    Family{"GroveMoeForCausalLM", "grove_moe", "GroveMoeForCausalLM", read_grove, kv},
    Family{"HYV3ForCausalLM", "hy_v3", "HYV3ForCausalLM", read_hy_v3, kv_head},
    Family{"HYV4ForCausalLM", "hy_v4", "HYV4ForCausalLM", read_hy_v4, latent},
    Family{"HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", read_hunyuan_dense},
    Family{"HunYuanForCausalLM", "hunyuan", "HunYuanMoEV1ForCausalLM", read_hunyuan_moe},
    Family{"HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", read_hunyuan_moe},
    Family{"JambaForCausalLM", "jamba", "JambaForCausalLM", read_jamba, kv},
    Family{"JetMoeForCausalLM", "jetmoe", "JetMoeForCausalLM", read_jetmoe},
    Family{"KimiK3ForConditionalGeneration", "kimi_k3", "KimiK3ForCausalLM", read_kimi_linear},
    Family{"KimiLinearForCausalLM", "kimi_linear", "KimiLinearForCausalLM", read_kimi_linear},
    Family{"KlearMoeForCausalLM", "Klear", "KlearMoeForCausalLM", read_klear, kv},
    Family{"Kolibri1ForCausalLM", "kolibri1", "Kolibri1ForCausalLM", read_kolibri, kv_head},
    Family{"LagunaForCausalLM", "laguna", "LagunaForCausalLM", read_laguna, kv_head},
    Family{"LaraMiniForCausalLM", "lara_mini", "LaraMiniForCausalLM", read_lara_mini, kv_head},
    Family{"Lfm2ForCausalLM", "lfm2", "Lfm2ForCausalLM", read_lfm2, kv},
    Family{"Lfm2MoeForCausalLM", "lfm2_moe", "Lfm2MoeForCausalLM", read_lfm2, kv},
    Family{"Llama3-70B upcycled MoE", "", "MixtralForCausalLM", read_mixtral},
    Family{"Llama4ForCausalLM", "llama4_text", "Llama4ForCausalLM", read_llama4, kv_head},
    Family{"Llama4ForConditionalGeneration", "llama4", "Llama4ForCausalLM", read_llama4, kv_head},
    Family{"LlamaForCausalLM", "llama", "LlamaForCausalLM", read_llama},
    Family{"LongcatCausalLM", "longcat", "LongcatFlashForCausalLM", read_longcat, latent},
    Family{"LongcatFlashForCausalLM", "longcat_flash", "LongcatFlashForCausalLM", read_longcat, latent},
    Family{"Megatron GPT", "", "Megatron GPT", read_megatron_gpt},
    Family{"MambaForCausalLM", "mamba", "MambaForCausalLM", read_mamba1},
    Family{"MellumForCausalLM", "mellum", "MellumForCausalLM", read_mellum, kv_head},
    Family{"MiMoV2FlashForCausalLM", "mimo_v2_flash", "MiMoV2ForCausalLM", read_mimo_v2},
    Family{"MiMoV2ForCausalLM", "mimo_v2", "MiMoV2ForCausalLM", read_mimo_v2},
    Family{"MiniMaxForCausalLM", "minimax", "MiniMaxText01ForCausalLM", read_minimax_01, kv},
    Family{"MiniMaxM1ForCausalLM", "minimax_m1", "MiniMaxText01ForCausalLM", read_minimax_01, kv},
    Family{"MiniMaxM2ForCausalLM", "minimax_m2", "MiniMaxM2ForCausalLM", read_minimax_m2, kv_head},
    Family{"MiniMaxM3SparseForCausalLM", "minimax_m3", "MiniMaxM3ForCausalLM", read_minimax_m3, kv_head},
    Family{"MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl", "MiniMaxM3ForCausalLM", read_minimax_m3,
           kv_head},
    Family{"MiniMaxM3VLForCausalLM", "minimax_m3_vl_text", "MiniMaxM3ForCausalLM", read_minimax_m3, kv_head},
    Family{"MiniMaxM3VLForConditionalGeneration", "minimax_m3_vl", "MiniMaxM3ForCausalLM", read_minimax_m3, kv_head},
    Family{"MiniMaxText01ForCausalLM", "minimax_text_01", "MiniMaxText01ForCausalLM", read_minimax_01, kv},
    Family{"Ministral3ForCausalLM", "ministral3", "Ministral3ForCausalLM", read_ministral3, kv_head},
    Family{"MinistralForCausalLM", "ministral", "MinistralForCausalLM", read_windowed, kv},
    Family{"Mistral4ForCausalLM", "mistral4", "Mistral4ForCausalLM", read_mistral4, latent},
    Family{"MistralForCausalLM", "mistral", "MistralForCausalLM", read_mistral, kv},
    Family{"MistralLarge4ForConditionalGeneration", "mistral_large4", "MistralLarge4ForCausalLM", read_mistral_large4},
    Family{"MixtralForCausalLM", "mixtral", "MixtralForCausalLM", read_mixtral, kv},
    Family{"MuseSparkForConditionalGeneration", "muse_spark", "MuseSparkForCausalLM", read_muse_spark, kv_head},
    Family{"NemotronForCausalLM", "nemotron", "NemotronForCausalLM", read_nemotron},
    Family{"NemotronHForCausalLM", "nemotron_h", "NemotronHForCausalLM", read_nemotron_h, kv},
    Family{"Olmo2ForCausalLM", "olmo2", "Olmo2ForCausalLM", read_olmo},
    Family{"Olmo3ForCausalLM", "olmo3", "Olmo3ForCausalLM", read_olmo},
    Family{"OlmoeForCausalLM", "olmoe", "OlmoeForCausalLM", read_olmoe},
    Family{"PanguProMoEForCausalLM", "PanguProMoE", "PanguProMoEForCausalLM", read_pangu_pro, kv},
    Family{"PanguUltraMoEForCausalLM", "pangu_ultra_moe", "PanguUltraMoEForCausalLM", read_pangu_ultra},
    Family{"Phi3ForCausalLM", "phi3", "Phi3ForCausalLM", read_phi3},
    Family{"PhiMoEForCausalLM", "phimoe", "PhiMoEForCausalLM", read_phimoe, kv},
    Family{"PhimoeForCausalLM", "phimoe", "PhiMoEForCausalLM", read_phimoe, kv},
    Family{"Qwen2ForCausalLM", "qwen2", "Qwen2ForCausalLM", read_qwen2, kv},
    Family{"Qwen2MoeForCausalLM", "qwen2_moe", "Qwen2MoeForCausalLM", read_qwen2_moe, kv},
    Family{"Qwen2VLForConditionalGeneration", "qwen2_vl", "Qwen2ForCausalLM", read_qwen2, kv},
    Family{"Qwen2_5OmniForConditionalGeneration", "qwen2_5_omni", "Qwen2ForCausalLM", read_qwen2, kv},
    Family{"Qwen2_5OmniModel", "qwen2_5_omni", "Qwen2ForCausalLM", read_qwen2, kv},
    Family{"Qwen2_5OmniThinkerForConditionalGeneration", "qwen2_5_omni_thinker", "Qwen2ForCausalLM", read_qwen2, kv},
    Family{"Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "Qwen2ForCausalLM", read_qwen2, kv},
    Family{"Qwen3ForCausalLM", "qwen3", "Qwen3ForCausalLM", read_qwen3, kv_head},
    Family{"Qwen3MoeForCausalLM", "qwen3_moe", "Qwen3MoeForCausalLM", read_qwen3_moe, kv},
    Family{"Qwen3NextForCausalLM", "qwen3_next", "Qwen3NextForCausalLM", read_qwen3_next, kv_head},
    Family{"Qwen3OmniMoeForConditionalGeneration", "qwen3_omni_moe", "Qwen3MoeForCausalLM", read_qwen3_vl_moe, kv},
    Family{"Qwen3OmniMoeThinkerForConditionalGeneration", "qwen3_omni_moe_thinker", "Qwen3MoeForCausalLM",
           read_qwen3_vl_moe, kv},
    Family{"Qwen3VLForConditionalGeneration", "qwen3_vl", "Qwen3ForCausalLM", read_qwen3, kv_head},
    Family{"Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "Qwen3MoeForCausalLM", read_qwen3_vl_moe, kv},
    Family{"Qwen3_5ForCausalLM", "qwen3_5_text", "Qwen3_5ForCausalLM", read_qwen3_5, kv_head},
    Family{"Qwen3_5ForConditionalGeneration", "qwen3_5", "Qwen3_5ForCausalLM", read_qwen3_5, kv_head},
    Family{"Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", read_qwen3_next, kv_head},
    Family{"Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", "Qwen3_5MoeForCausalLM", read_qwen3_next, kv_head},
    Family{"SarvamMLAForCausalLM", "sarvam_mla", "SarvamMLAForCausalLM", read_sarvam, latent},
    Family{"SarvamMoEForCausalLM", "sarvam_moe", "SarvamMoEForCausalLM", read_sarvam, kv_head},
    Family{"SeedOssForCausalLM", "seed_oss", "SeedOssForCausalLM", read_seed_oss, kv_head},
    Family{"SkyworkForCausalLM", "skywork", "SkyworkForCausalLM", read_skywork},
    Family{"SmallThinkerForCausalLM", "smallthinker", "SmallThinkerForCausalLM", read_smallthinker, kv_head},
    Family{"SmolLM3ForCausalLM", "smollm3", "SmolLM3ForCausalLM", read_smollm3, kv},
    Family{"SolarOpenForCausalLM", "solar_open", "SolarOpenForCausalLM", read_solar_open, kv_head},
    Family{"Step3TextForCausalLM", "step3_text", "Step3TextForCausalLM", read_step3},
    Family{"Step3VLForConditionalGeneration", "step3_vl", "Step3TextForCausalLM", read_step3},
    Family{"Step3p5ForCausalLM", "step3p5", "Step3p5ForCausalLM", read_step3p5},
    Family{"XverseForCausalLM", "xverse", "XverseForCausalLM", read_xverse},
    Family{"YoutuForCausalLM", "youtu", "YoutuForCausalLM", read_youtu, latent},
};

// Refuses families whose layers this program lacks. A pattern of Mamba layers under another name tells as much.
void refuse_lacking(const JsonObject& json, const std::string& written) {
    const bool pattern =
        json.has("hybrid_override_pattern") && !written.starts_with("NemotronH") && written != "nemotron_h";
    const std::string part = pattern ? "hybrid Mamba layers" : lacking_part(written);
    if (!part.empty())
        refuse("{}: {} = \"{}\": {} are not supported", json.place(),
               json.has("architectures") ? "architectures" : "model_type", shown(written), part);
}

// The field in which vision-language files keep the language model, beside a field for each other module; empty: at the
// top.
std::string text_field(const JsonObject& json) {
    for (const char* name : {"text_config", "llm_config", "language_config"})
        if (json.is_object(name)) return name;
    return {};
}

// The language model's fields. What stands beside them, at the top, counts where they are silent, as in files whose
// class passes it down; of tied embeddings the top speaks alone, whose class owns both (transformers' tie_weights()).
JsonObject text_of(const JsonObject& json, const std::string& at_text) {
    if (at_text.empty()) return json;
    JsonObject text = json.object(at_text);
    for (const std::string& key : json.keys()) {
        const bool names = key == "architectures" || key == "model_type" || key == "name" || json.is_object(key);
        if (key == "tie_word_embeddings" || (!names && !text.states(key))) text = text.with_field(key, json);
    }
    return text;
}

// A family's name behind a prefix that a trainer has left: FSDP2 saves its own class, "FSDPQwen3MoeForCausalLM"; others
// are known by the model_type beside them.
bool is_wrapped(const JsonObject& json, const std::string& written, const Family& family) {
    const std::string name = family.written, type = family.model_type;
    if (written.size() <= name.size() || !written.ends_with(name)) return false;
    return written == "FSDP" + name || (!type.empty() && json.string_or("model_type", "") == type);
}

const Family& family_of(const JsonObject& json) {
    std::string written = json.string_or("model_type", "");
    const bool by_type = !json.has("architectures");
    if (by_type && written.empty()) refuse("{}: field \"architectures\" is missing", json.place());
    if (!by_type) {
        const std::vector<std::string> list = json.strings("architectures");
        if (list.empty()) json.refuse_value("architectures", "must name the architecture");
        written = list[0].substr(0, list[0].find(" ("));
    }
    std::vector<std::string> known;
    const std::string type = json.string_or("model_type", "");
    for (const Family& family : families) // Classes of one family that configs of several kinds name.
        if (!by_type && written == family.written && type == family.model_type) return family;
    for (const Family& family : families) {
        const std::string name = by_type ? family.model_type : family.written;
        if (written == name || (!by_type && is_wrapped(json, written, family))) return family;
        if (!name.empty()) known.push_back(name);
    }
    refuse_lacking(json, written);
    // A vision-language model of another name around a language model that is known.
    const std::string at_text = text_field(json);
    const std::string inner = at_text.empty() ? "" : json.object(at_text).string_or("model_type", "");
    for (const Family& family : families)
        if (!inner.empty() && (inner == family.model_type || inner == std::string(family.model_type) + "_text"))
            return family;
    if (!at_text.empty() && json.object(at_text).has("architectures")) return family_of(json.object(at_text));
    // Another family's name may be near by chance: only what looks like a slip of the pen is a hint.
    constexpr int slip = 2; // letters
    const std::string near = nearest_name(written, known);
    const bool meant = !near.empty() && edit_distance(near, written) <= slip;
    refuse("{}: {} = \"{}\": unknown architecture{}", json.place(), by_type ? "model_type" : "architectures",
           shown(written),
           meant ? ": did you mean " + near + "?" : "; docs/reference/profiles.md lists those that are read");
}

} // namespace

std::vector<std::string> architecture_names() {
    std::set<std::string> names;
    for (const Family& family : families) names.insert(family.written);
    return {names.begin(), names.end()};
}

std::string model_type_of(const std::string& config, const std::string& place) {
    const JsonObject json = JsonObject::parse(config, place);
    return json.string_or("model_type", family_of(json).model_type);
}

JsonObject read_family(const JsonObject& whole, model::Model& model) {
    const Family& family = family_of(whole);
    model.architecture = family.architecture;
    // Qwen3-Omni: the thinker, which writes text, beside what speaks.
    const bool thinks = whole.is_object("thinker_config");
    const JsonObject json = thinks ? whole.object("thinker_config") : whole;
    for (const std::string& key : whole.keys())
        if (thinks && whole.is_object(key) && key.ends_with("_config") && key != "thinker_config")
            model.left_out.push_back(key);
    const std::string at_text = text_field(json);
    JsonObject text = text_of(json, at_text).watched();
    if (!at_text.empty()) // What stands beside the text is mostly of towers: nobody has to ask for it.
        for (const std::string& key : json.keys())
            if (!json.object(at_text).states(key)) text.states(key);
    for (const char* size : family.stated)
        if (size != nullptr && !text.states(size))
            refuse("{}: field \"{}\" is missing: no other size gives it", text.place(), size);
    for (const std::string& key : json.keys()) {
        const bool tower = key == "vision_config" || key == "audio_config"; // these lie beside fields at the top, too
        if ((tower || !at_text.empty()) && json.is_object(key) && key.ends_with("_config") && key != at_text &&
            key != "quantization_config")
            model.left_out.push_back(key);
    }
    family.read(text, model);
    check_model(text, model);
    if (model.not_executable.empty()) model.not_executable = obstacle(text, model);
    return text;
}

} // namespace moe::families
