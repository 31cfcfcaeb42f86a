// The logits of attention in a model's first layer, computed in double from a trainer's weights and tokens alone.
#pragma once

#include "engine/train/trainer.hpp"

#include <cstdint>
#include <vector>

// The largest logit of each query head of layer 0 over the first `samples` samples of a source, each one document.
// Grouped-query and latent attention, without windows, norms of heads or scaled rotations.
std::vector<double> first_logits(const moe::train::Trainer& trainer, const moe::train::SampleSource& source,
                                 std::int64_t samples);
