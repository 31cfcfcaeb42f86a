// Numbers of mixers that are priced alone, from their modules in transformers 5.24 and in the published code.
#include "planner/model/families/opaque_parts.hpp"

namespace moe::families {

model::OpaquePart opaque_part(const char* name, const OpaqueSizes& parts) {
    return {name,
            parts.matrices + parts.vectors,
            0,
            parts.out,
            static_cast<double>(parts.matrices) + parts.core,
            parts.core_per_key};
}

void join(model::OpaquePart& part, const model::OpaquePart& more) {
    if (part.weights == 0) part.name = more.name;
    part.weights += more.weights;
    part.idle += more.idle;
    part.out += more.out;
    part.macs += more.macs;
    part.macs_per_key += more.macs_per_key;
}

model::Attention opaque_mixer(const model::OpaquePart& part) {
    model::Attention attention;
    attention.kind = model::AttentionKind::opaque;
    attention.opaque = part;
    return attention;
}

model::OpaquePart short_convolution(std::int64_t hidden, int taps, bool bias) {
    return opaque_part("short convolution",
                       {4 * hidden * hidden + taps * hidden, bias ? 5 * hidden : 0, hidden, 0.0, 0.0});
}

model::OpaquePart lightning_attention(std::int64_t hidden, int heads, int width, std::int64_t norms) {
    const std::int64_t inner = std::int64_t{heads} * width;
    return opaque_part("lightning attention",
                       {5 * inner * hidden, norms, inner, 2.0 * static_cast<double>(inner) * width, 0.0});
}

// Vectors are decays, their bias and the norm of a head. The state is read, corrected, added to and asked.
model::OpaquePart delta_by_channel(std::int64_t hidden, const DeltaByChannel& delta) {
    const std::int64_t inner = std::int64_t{delta.heads} * delta.width;
    const auto gate = [&](bool whole) { return whole ? hidden * inner : delta.width * (hidden + inner); };
    const std::int64_t matrices = hidden * (4 * inner + delta.heads) + gate(delta.whole_decay) +
                                  gate(delta.whole_gate) + std::int64_t{3} * delta.taps * inner;
    return opaque_part("Kimi delta attention", {matrices, delta.heads + inner + delta.width, inner,
                                                4.0 * static_cast<double>(inner) * delta.width, 0.0});
}

// Megatron's 3.5 multiply-accumulates for each element of the state.
constexpr double of_state = 3.5;

model::OpaquePart mamba1(std::int64_t hidden, const Mamba1& mamba) {
    const std::int64_t inner = mamba.inner, narrow = mamba.rank + std::int64_t{2} * mamba.state;
    const std::int64_t matrices = 3 * hidden * inner + inner * (narrow + mamba.rank) + inner * mamba.taps;
    // The bias of steps, the skip and the decays; then what may be there.
    std::int64_t vectors = inner * (2 + mamba.state) + (mamba.conv_bias ? inner : 0) + (mamba.norms ? narrow : 0);
    if (mamba.bias) vectors += 2 * inner + hidden;
    return opaque_part("Mamba", {matrices, vectors, inner, of_state * static_cast<double>(inner) * mamba.state, 0.0});
}

model::OpaquePart mamba2(std::int64_t hidden, const Mamba2& mamba) {
    const std::int64_t inner = mamba.inner, convolved = inner + std::int64_t{2} * mamba.groups * mamba.state,
                       projected = inner + convolved + mamba.heads;
    const std::int64_t matrices = hidden * (projected + inner) + convolved * mamba.taps;
    std::int64_t vectors = std::int64_t{3} * mamba.heads + (mamba.norm ? inner : 0);
    if (mamba.conv_bias) vectors += convolved;
    if (mamba.bias) vectors += projected;
    if (mamba.out_bias) vectors += hidden;
    return opaque_part("Mamba-2", {matrices, vectors, inner, of_state * static_cast<double>(inner) * mamba.state, 0.0});
}

} // namespace moe::families
