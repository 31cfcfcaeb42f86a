// The choice of the next token from logits.
#pragma once

#include <cstdint>
#include <span>

namespace moe::train {

struct Sampling {
    double temperature = 0.0; // divides the logits; 0: the largest one is taken
    std::int64_t top_k = 0;   // only so many of the likeliest tokens, 0 = all
    double top_p = 1.0;       // of these the fewest whose probabilities come to this much
    std::uint64_t seed = 1;
};

// Throws Error (bad_input) for values outside their range, by the name of the command-line option.
void check_sampling(const Sampling& sampling);

// The token that is chosen as number `number` of a text: the same for the same logits, sampling and number. Of equal
// logits the lowest id comes first.
std::int32_t choose_token(std::span<const float> logits, const Sampling& sampling, std::int64_t number);

} // namespace moe::train
