// Readers of config.json by architecture family: each fills everything of a Model that its configuration class means.
//
// Defaults of missing fields are those of the Hugging Face configuration class of the same name (transformers 4.57);
// sizes have none: a config without its sizes is refused.
#pragma once

#include "planner/model/families/config.hpp"

namespace moe::families {

// qwen.cpp
void read_qwen2(const JsonObject& json, model::Model& model);
void read_qwen3(const JsonObject& json, model::Model& model);
void read_qwen2_moe(const JsonObject& json, model::Model& model);
void read_qwen3_moe(const JsonObject& json, model::Model& model);
void read_qwen3_vl_moe(const JsonObject& json, model::Model& model);
void read_qwen3_5(const JsonObject& json, model::Model& model);
void read_qwen3_next(const JsonObject& json, model::Model& model);

// deepseek.cpp
void read_deepseek_v1(const JsonObject& json, model::Model& model);
void read_deepseek_ocr2(const JsonObject& json, model::Model& model);
void read_deepseek_v2(const JsonObject& json, model::Model& model);
void read_deepseek_v3(const JsonObject& json, model::Model& model);
void read_deepseek_v4(const JsonObject& json, model::Model& model);
void read_glm4_moe(const JsonObject& json, model::Model& model);
void read_glm4_moe_lite(const JsonObject& json, model::Model& model);
void read_glm_moe_dsa(const JsonObject& json, model::Model& model);
void read_dots1(const JsonObject& json, model::Model& model);
void read_hy_v4(const JsonObject& json, model::Model& model);
void read_axk2(const JsonObject& json, model::Model& model);
void read_axk1(const JsonObject& json, model::Model& model);
void read_sarvam(const JsonObject& json, model::Model& model);
void read_youtu(const JsonObject& json, model::Model& model);

// cohere.cpp
void read_cohere(const JsonObject& json, model::Model& model);

// dense.cpp
void read_apertus(const JsonObject& json, model::Model& model);
void read_arcee(const JsonObject& json, model::Model& model);
void read_exaone4(const JsonObject& json, model::Model& model);
void read_gemma3(const JsonObject& json, model::Model& model);
void read_glm(const JsonObject& json, model::Model& model);
void read_granite(const JsonObject& json, model::Model& model);
void read_ministral3(const JsonObject& json, model::Model& model);
void read_olmo(const JsonObject& json, model::Model& model);
void read_phi3(const JsonObject& json, model::Model& model);
void read_seed_oss(const JsonObject& json, model::Model& model);
void read_smollm3(const JsonObject& json, model::Model& model);
void read_windowed(const JsonObject& json, model::Model& model);

// ernie.cpp
void read_ernie(const JsonObject& json, model::Model& model);
void read_ernie_dense(const JsonObject& json, model::Model& model);
void read_hunyuan_dense(const JsonObject& json, model::Model& model);
void read_hunyuan_moe(const JsonObject& json, model::Model& model);

// extra_parts.cpp
void read_jetmoe(const JsonObject& json, model::Model& model);
void read_grove(const JsonObject& json, model::Model& model);
void read_minimax_m3(const JsonObject& json, model::Model& model);
void read_step3(const JsonObject& json, model::Model& model);

// hybrids.cpp
void read_falcon_h1(const JsonObject& json, model::Model& model);
void read_jamba(const JsonObject& json, model::Model& model);
void read_lfm2(const JsonObject& json, model::Model& model);
void read_mamba1(const JsonObject& json, model::Model& model);

// kimi.cpp
void read_kimi_linear(const JsonObject& json, model::Model& model);

// laguna.cpp
void read_mellum(const JsonObject& json, model::Model& model);
void read_flint(const JsonObject& json, model::Model& model);
void read_laguna(const JsonObject& json, model::Model& model);

// ling.cpp
void read_bailing(const JsonObject& json, model::Model& model);
void read_bailing_hybrid(const JsonObject& json, model::Model& model);
void read_minimax_01(const JsonObject& json, model::Model& model);

// llama.cpp
void read_llama(const JsonObject& json, model::Model& model);
void read_mistral(const JsonObject& json, model::Model& model);
void read_llama4(const JsonObject& json, model::Model& model);
void read_gpt_oss(const JsonObject& json, model::Model& model);
void read_nemotron(const JsonObject& json, model::Model& model);

// megatron.cpp
void read_megatron_gpt(const JsonObject& json, model::Model& model);
void read_gpt3(const JsonObject& json, model::Model& model);

// gated.cpp
void read_beam(const JsonObject& json, model::Model& model);
void read_lara_mini(const JsonObject& json, model::Model& model);
void read_muse_spark(const JsonObject& json, model::Model& model);

// gemma.cpp
void read_gemma4(const JsonObject& json, model::Model& model);

// granite.cpp
void read_bamba(const JsonObject& json, model::Model& model);
void read_granite_hybrid(const JsonObject& json, model::Model& model);
void read_granite_swa(const JsonObject& json, model::Model& model);

// hy.cpp
void read_solar_open(const JsonObject& json, model::Model& model);
void read_hy_v3(const JsonObject& json, model::Model& model);
void read_mistral4(const JsonObject& json, model::Model& model);

// nemotron_h.cpp
void read_nemotron_h(const JsonObject& json, model::Model& model);

// mixtral.cpp
void read_mixtral(const JsonObject& json, model::Model& model);
void read_grok(const JsonObject& json, model::Model& model);
void read_olmoe(const JsonObject& json, model::Model& model);
void read_phimoe(const JsonObject& json, model::Model& model);
void read_granite_moe(const JsonObject& json, model::Model& model);
void read_minimax_m2(const JsonObject& json, model::Model& model);
void read_dbrx(const JsonObject& json, model::Model& model);

// published_code.cpp
void read_arctic(const JsonObject& json, model::Model& model);
void read_aria(const JsonObject& json, model::Model& model);
void read_grok2(const JsonObject& json, model::Model& model);
void read_klear(const JsonObject& json, model::Model& model);
void read_kolibri(const JsonObject& json, model::Model& model);
void read_longcat(const JsonObject& json, model::Model& model);
void read_pangu_pro(const JsonObject& json, model::Model& model);
void read_pangu_ultra(const JsonObject& json, model::Model& model);
void read_skywork(const JsonObject& json, model::Model& model);
void read_smallthinker(const JsonObject& json, model::Model& model);
void read_xverse(const JsonObject& json, model::Model& model);

// sparse_latent.cpp
void read_glm5_next(const JsonObject& json, model::Model& model);
void read_mistral_large4(const JsonObject& json, model::Model& model);

// sliding.cpp
void read_mimo_v2(const JsonObject& json, model::Model& model);
void read_step3p5(const JsonObject& json, model::Model& model);
void read_afmoe(const JsonObject& json, model::Model& model);
void read_exaone_moe(const JsonObject& json, model::Model& model);

} // namespace moe::families
