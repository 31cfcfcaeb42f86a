// Mixers that are priced alone, as numbers of weights and multiply-accumulates: short convolutions, Mamba, lightning
// attention, Kimi delta attention, and what stands beside attention.
#pragma once

#include "planner/model/layer_kind.hpp"

#include <cstdint>

namespace moe::families {

// What an opaque part is made of; macs are those of the matrices and of the core.
struct OpaqueSizes {
    std::int64_t matrices = 0; // weights that every token multiplies once
    std::int64_t vectors = 0;  // weights that none does
    std::int64_t out = 0;      // columns that the last matrix takes back to the hidden width, 0: there is none
    double core = 0.0;         // multiply-accumulates per token beside the matrices
    double core_per_key = 0.0; // and for each key before it
};
model::OpaquePart opaque_part(const char* name, const OpaqueSizes& parts);
// Adds what stands beside a part, under its name.
void join(model::OpaquePart& part, const model::OpaquePart& more);
// A layer that is nothing but this mixer.
model::Attention opaque_mixer(const model::OpaquePart& part);

// Projections to two gates and to what a short convolution between them passes, each as wide as the model (LFM2).
model::OpaquePart short_convolution(std::int64_t hidden, int taps, bool bias);

// Lightning attention: square heads whose state decays by a fixed factor, with an output gate; a product with the state
// and one that adds to it. `norms`: weights of its norms.
model::OpaquePart lightning_attention(std::int64_t hidden, int heads, int width, std::int64_t norms);

// Kimi delta attention of equal heads: a gated delta net whose decay, by channel, and output gate are products of
// latents as wide as a head (arXiv 2510.26692) or whole matrices.
struct DeltaByChannel {
    int heads = 0, width = 0, taps = 0;
    bool whole_decay = false, whole_gate = false;
};
model::OpaquePart delta_by_channel(std::int64_t hidden, const DeltaByChannel& delta);

// Mamba (arXiv 2312.00752): channels with a state and a step each, which a latent of `rank` columns projects.
struct Mamba1 {
    std::int64_t inner = 0;
    int state = 0, taps = 0, rank = 0;
    bool conv_bias = true, bias = false, norms = false; // norms of steps, B and C (Jamba)
};
model::OpaquePart mamba1(std::int64_t hidden, const Mamba1& mamba);

// Mamba-2 (arXiv 2405.21060) beside attention, whose inner width is its own.
struct Mamba2 {
    std::int64_t inner = 0;
    int heads = 0, groups = 0, state = 0, taps = 0;
    bool conv_bias = true, bias = false, out_bias = false, norm = false;
};
model::OpaquePart mamba2(std::int64_t hidden, const Mamba2& mamba);

} // namespace moe::families
