// Readers of parts that several families share: which layers have experts, their sizes, DeepSeek-V3's router, linear
// attention.
#pragma once

#include "planner/model/families/config.hpp"

#include <initializer_list>
#include <string>
#include <vector>

namespace moe::families {

// Layers whose number from 1 the step divides; those whose index leaves a rest by the period.
std::vector<bool> every(int step, int layers);
std::vector<bool> one_of_each(int period, int offset, int layers);
// Refuses a list with another number of entries than there are layers.
void check_length(const JsonObject& json, const std::string& key, std::size_t found, int layers);
// False for the first so many layers.
std::vector<bool> after(int first, int layers);
// A list with one of two words for each layer: where it is the first.
std::vector<bool> layers_that_are(const JsonObject& json, const std::string& key, const std::string& word,
                                  const std::string& other, int layers);
// "dense" or "sparse" for each layer in mlp_layer_types, as transformers 5 writes it.
std::vector<bool> sparse_of_types(const JsonObject& json, int layers);
// A list of zeros and ones, one for each layer.
std::vector<bool> flags(const JsonObject& json, const std::string& key, int layers);
// A size that per_layer_config gives to each of the layers marked, the same to all and to no other; `fallback` where it
// gives none. Source: HeterogeneousConfigMixin of transformers 5.24, whose keys are indices of layers, padded by zeros.
int size_of_layers(const JsonObject& json, const std::string& key, const std::vector<bool>& marked, int fallback,
                   std::int64_t high);
// Layers with experts in DeepSeek's words: as mlp_layer_types or a list moe_layer_freq says, else those behind
// first_k_dense_replace whose index moe_layer_freq divides.
std::vector<bool> layers_with_experts(const JsonObject& json, int first_dense);
// Layers that take the keys which one before them has picked (GLM-5.2's IndexShare): as listed or as a pattern of
// letters says, else every one but each `index_topk_freq`-th behind the first few. Source: transformers 5.23,
// configuration_glm_moe_dsa.py; Megatron-LM's is_dsa_skip_topk_layer() counts layers from 1.
std::vector<bool> layers_that_share(const JsonObject& json);
// Refuses any other value of a field that may be missing.
void must_be(const JsonObject& json, const std::string& key, const std::string& only);
// Fields that a family's files have and its class does not compute with: unread_of() is silent about them.
void pass_over(const JsonObject& json, std::initializer_list<const char*> keys);

// The first name, or the second where it alone is given.
const char* spelled(const JsonObject& json, const char* name, const char* other);
// Refuses a config without rope_parameters and rope_scaling, for which the class has a scaling of its own.
void need_rotation(const JsonObject& json);
// Queries that grow with their position, as rope_parameters has it under llama_4_scaling_beta (Mistral).
model::QueryScale read_query_scale(const JsonObject& json, const model::Model& model);

// Sigmoid scores, a bias that only selects, chosen scores divided by their sum and scaled; fields of the family's
// names.
model::Router selecting_router(const JsonObject& json, const char* normalize, const char* scale, double fallback_scale);
// The share of a head's columns that a kind of layer turns, which transformers 5 keeps under the kind's name.
// `fallback`: without an object of that name; `silent`: where one does not say.
double rotary_share(const JsonObject& json, const std::string& type, double fallback, double silent = 1.0);
// Granite's factors of embeddings, sums and logits; that of the scores is returned.
double read_granite_factors(const JsonObject& json, model::Model& model);
// Routed and shared experts of one width, their numbers under the family's names; no name: no shared ones here.
model::Moe read_experts(const JsonObject& json, const char* routed, const std::string& shared,
                        std::int64_t fallback_shared);
// A gated delta net of the sizes linear_num_key_heads and its like.
model::Attention read_gated_delta(const JsonObject& json);

} // namespace moe::families
