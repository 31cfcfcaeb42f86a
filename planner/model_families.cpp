// Which architecture a config.json names, and the reader that belongs to it.
#include "planner/model_families.hpp"

#include "planner/error.hpp"
#include "planner/names.hpp"

#include <array>

namespace moe {
namespace {

using namespace config;

struct Family {
    const char* written;    // as "architectures" says, without remarks in parentheses
    const char* model_type; // "" = has none
    const char* architecture;
    void (*read)(const JsonObject&, Model&);
};

constexpr std::array families{
    Family{"DeepseekV2ForCausalLM", "deepseek_v2", "DeepseekV2ForCausalLM", read_deepseek_v2},
    Family{"DeepseekV3ForCausalLM", "deepseek_v3", "DeepseekV3ForCausalLM", read_deepseek_v3},
    Family{"DeepseekV4", "", "DeepseekV4ForCausalLM", read_deepseek_v4},
    Family{"DeepseekV4ForCausalLM", "deepseek_v4", "DeepseekV4ForCausalLM", read_deepseek_v4},
    Family{"GPT-3", "", "GPT-3", read_gpt3},
    Family{"Glm4MoeForCausalLM", "glm4_moe", "Glm4MoeForCausalLM", read_glm4_moe},
    Family{"GptOssForCausalLM", "gpt_oss", "GptOssForCausalLM", read_gpt_oss},
    Family{"Grok-1", "", "Grok-1", read_grok},
    Family{"Llama3-70B upcycled MoE", "", "MixtralForCausalLM", read_mixtral},
    Family{"Llama4ForCausalLM", "llama4_text", "Llama4ForCausalLM", read_llama4},
    Family{"Llama4ForConditionalGeneration", "llama4", "Llama4ForCausalLM", read_llama4},
    Family{"LlamaForCausalLM", "llama", "LlamaForCausalLM", read_llama},
    Family{"Megatron GPT", "", "Megatron GPT", read_megatron_gpt},
    Family{"MixtralForCausalLM", "mixtral", "MixtralForCausalLM", read_mixtral},
    Family{"NemotronForCausalLM", "nemotron", "NemotronForCausalLM", read_nemotron},
    Family{"Qwen2ForCausalLM", "qwen2", "Qwen2ForCausalLM", read_qwen2},
    Family{"Qwen2MoeForCausalLM", "qwen2_moe", "Qwen2MoeForCausalLM", read_qwen2_moe},
    Family{"Qwen3ForCausalLM", "qwen3", "Qwen3ForCausalLM", read_qwen3},
    Family{"Qwen3MoeForCausalLM", "qwen3_moe", "Qwen3MoeForCausalLM", read_qwen3_moe},
    Family{"Qwen3NextForCausalLM", "qwen3_next", "Qwen3NextForCausalLM", read_qwen3_next},
};

const Family& family_of(const JsonObject& json) {
    std::string written = json.string_or("model_type", "");
    const bool by_type = !json.has("architectures");
    if (by_type && written.empty()) refuse("{}: field \"architectures\" is missing", json.place());
    if (!by_type) {
        const std::vector<std::string> list = json.strings("architectures");
        if (list.empty()) json.refuse_value("architectures", "must name the architecture");
        written = list[0].substr(0, list[0].find(" ("));
    }
    if (written.starts_with("NemotronH") || written == "nemotron_h" || json.has("hybrid_override_pattern"))
        refuse("{}: architectures = \"{}\": hybrid Mamba layers are not supported", json.place(), shown(written));
    std::vector<std::string> known;
    for (const Family& family : families) {
        if (written == (by_type ? family.model_type : family.written)) return family;
        if (!by_type || family.model_type[0] != '\0') known.emplace_back(by_type ? family.model_type : family.written);
    }
    refuse("{}: {} = \"{}\": unknown architecture{}; known are {}", json.place(),
           by_type ? "model_type" : "architectures", shown(written), did_you_mean(written, known),
           fmt::join(known, ", "));
}

} // namespace

void read_family(const JsonObject& json, Model& model) {
    const Family& family = family_of(json);
    model.architecture = family.architecture;
    // Vision-language files keep the language model in text_config.
    const JsonObject text = json.is_object("text_config") ? json.object("text_config") : json;
    family.read(text, model);
    check_model(text, model);
    model.not_executable = obstacle(text, model);
}

} // namespace moe
