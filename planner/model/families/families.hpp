// Readers of config.json by architecture family: each fills everything of a Model that its configuration class means.
//
// Defaults of missing fields are those of the Hugging Face configuration class of the same name (transformers 4.57);
// sizes have none: a config without its sizes is refused.
#pragma once

#include "planner/model/families/config.hpp"

namespace moe::config {

// qwen.cpp
void read_qwen2(const JsonObject& json, Model& model);
void read_qwen3(const JsonObject& json, Model& model);
void read_qwen2_moe(const JsonObject& json, Model& model);
void read_qwen3_moe(const JsonObject& json, Model& model);
void read_qwen3_next(const JsonObject& json, Model& model);

// deepseek.cpp
void read_deepseek_v1(const JsonObject& json, Model& model);
void read_deepseek_v2(const JsonObject& json, Model& model);
void read_deepseek_v3(const JsonObject& json, Model& model);
void read_deepseek_v4(const JsonObject& json, Model& model);
void read_glm4_moe(const JsonObject& json, Model& model);
void read_glm4_moe_lite(const JsonObject& json, Model& model);
void read_glm_moe_dsa(const JsonObject& json, Model& model);
void read_dots1(const JsonObject& json, Model& model);

// ernie.cpp
void read_ernie(const JsonObject& json, Model& model);
void read_hunyuan_moe(const JsonObject& json, Model& model);
void read_bailing(const JsonObject& json, Model& model);

// llama.cpp
void read_llama(const JsonObject& json, Model& model);
void read_mistral(const JsonObject& json, Model& model);
void read_llama4(const JsonObject& json, Model& model);
void read_gpt_oss(const JsonObject& json, Model& model);
void read_nemotron(const JsonObject& json, Model& model);
void read_megatron_gpt(const JsonObject& json, Model& model);
void read_gpt3(const JsonObject& json, Model& model);

// gemma.cpp
void read_gemma4(const JsonObject& json, Model& model);

// granite.cpp
void read_granite_hybrid(const JsonObject& json, Model& model);

// hy.cpp
void read_solar_open(const JsonObject& json, Model& model);
void read_hy_v3(const JsonObject& json, Model& model);
void read_mistral4(const JsonObject& json, Model& model);

// nemotron_h.cpp
void read_nemotron_h(const JsonObject& json, Model& model);

// mixtral.cpp
void read_mixtral(const JsonObject& json, Model& model);
void read_grok(const JsonObject& json, Model& model);
void read_olmoe(const JsonObject& json, Model& model);
void read_phimoe(const JsonObject& json, Model& model);
void read_granite_moe(const JsonObject& json, Model& model);
void read_minimax_m2(const JsonObject& json, Model& model);
void read_dbrx(const JsonObject& json, Model& model);

// sliding.cpp
void read_mimo_v2(const JsonObject& json, Model& model);
void read_step3p5(const JsonObject& json, Model& model);
void read_afmoe(const JsonObject& json, Model& model);
void read_exaone_moe(const JsonObject& json, Model& model);
void read_laguna(const JsonObject& json, Model& model);

} // namespace moe::config
