// Parameters from stored ones: by elements, with rows for tokens that are new.
#pragma once

#include "engine/train/huggingface.hpp"

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

namespace moe::train {

// Delivers the elements [first, first + out.size()) of a parameter.
using ReadPart = std::function<void(std::int64_t first, std::span<float> out)>;

// "model.layers.2.mlp.experts.5.up_proj.weight" taken apart.
struct ExpertName {
    std::string prefix; // "model.layers.2.mlp.experts."
    std::int64_t expert = 0;
    std::string leaf; // "up_proj.weight"
};
// None for parameters that belong to no routed expert.
std::optional<ExpertName> expert_name(const std::string& parameter);

// True for the parameters that have a row for each token: embedding and head.
bool has_token_rows(const std::string& parameter);
// A weight that is no number would make every loss one, steps later and without a name: throws Error (bad_input) naming
// file, tensor and element, of which the first given stands at `first` of its parameter.
void check_finite(const std::string& path, const std::string& tensor, std::int64_t first,
                  std::span<const float> values);
// A parameter of [rows, cols] of which the first `stored` rows are read; every row behind them is their mean, as if the
// tokens had been averaged (John Hewitt, "Initializing New Word Embeddings for Pretrained Language Models", 2021:
// what the model then says of the old tokens hardly changes).
ReadPart with_more_rows(const ReadPart& read, std::int64_t stored, std::int64_t cols);

// Fills every parameter with the weights of a checkpoint of execute, without its moments and its place in the data; the
// trainer's vocabulary may be larger. Throws Error (bad_input) naming the parameter that is missing or has another
// shape, and for a checkpoint of another architecture.
LoadReport load_weights(Trainer& trainer, const weights::StoredCheckpoint& checkpoint);

} // namespace moe::train
