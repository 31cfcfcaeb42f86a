// The parts of a config.json reader that every architecture shares; the other files here add what differs.
#pragma once

#include "planner/base/json_object.hpp"
#include "planner/model/model.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace moe::families {

// Bounds that keep every size this program multiplies inside 64 bits; each is far above any published model.
inline constexpr std::int64_t max_hidden = 1 << 20, max_ffn = 1 << 24, max_vocab = 1 << 27, max_experts = 1 << 16,
                              max_heads = 1 << 16, max_dim = 1 << 16, max_layers = 1 << 14, max_window = 1 << 30;

int integer(const JsonObject& json, const std::string& key, std::int64_t high);
int integer_or(const JsonObject& json, const std::string& key, int fallback, std::int64_t low, std::int64_t high);

// True or false; null is false, as classes take it, and only a missing field is the fallback.
bool says(const JsonObject& json, const std::string& key, bool fallback);

int layer_count(const JsonObject& json);                          // num_hidden_layers
std::int64_t ffn(const JsonObject& json, const std::string& key); // a required MLP width

// A rotation as "rope_parameters" or "rope_scaling" writes it; `config` has the positions that a model knows.
model::Rope read_rope(const JsonObject& rope, const JsonObject& config, double theta);
// That of the layers of one type, where rope_parameters has an object for each (transformers 5); else empty.
std::optional<model::Rope> rope_of_type(const JsonObject& json, const std::string& type, double theta);
// hidden, vocab, padding, embeddings, norm epsilon, RoPE base and scaling.
void read_common(const JsonObject& json, model::Model& model, double eps, double theta);
// Query and key/value heads with their width. `rotary`: the share of columns that turn where partial_rotary_factor does
// not say another; 0: none whatever it says; nothing: all, and another share is refused, as the class knows none.
// Without head_dim the heads divide the hidden width, or `rounds_down` to whole columns.
model::Attention read_gqa(const JsonObject& json, const model::Model& model, std::optional<double> rotary = {},
                          bool rounds_down = false);
model::Attention read_mla(const JsonObject& json);
model::Activation read_activation(const JsonObject& json, const std::string& fallback);

// Tells of each decoder layer whether its entry of `layer_types` is `type`; without the list all are `fallback`.
std::vector<bool> layers_of_type(const JsonObject& json, const std::string& type, int layers,
                                 const std::vector<bool>& fallback);

// Refuses the experts that a config gives to an architecture without any.
void refuse_experts(const JsonObject& json, const model::Model& model);

// Appends a decoder layer (or MTP layer) of this kind; equal kinds are stored once.
void add_layer(model::Model& model, const model::LayerKind& kind);
void add_mtp(model::Model& model, const model::LayerKind& kind);
// MTP layers of the last decoder layer's kind, as many as `field` says (0 where it is missing).
void repeat_last_as_mtp(const JsonObject& json, model::Model& model, const char* field = "num_nextn_predict_layers");

// Refuses numbers that contradict each other, naming field and value.
void check_model(const JsonObject& json, const model::Model& model);
// Names the field that execute cannot train yet, as "field = value: reason", or "".
std::string obstacle(const JsonObject& json, const model::Model& model);

} // namespace moe::families

namespace moe::families {
// Fills architecture, kinds, layers and everything else from the config of a known architecture; refuses others by
// name. What is returned are the language model's fields, watched (unread.hpp).
JsonObject read_family(const JsonObject& json, model::Model& model);
} // namespace moe::families
