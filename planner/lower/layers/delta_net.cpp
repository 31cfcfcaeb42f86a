// The weights of gated delta nets (Qwen3-Next, Qwen3.5); their ops are those of every layer with a state.
#include "planner/lower/layers/layers.hpp"

#include <algorithm>
#include <cmath>

namespace moe::layers {

// Names are those of Qwen3.5's modules, but for what they keep in one matrix, of which ranks of TP split each part.
void AttentionLayer::declare_delta(emit::ParameterSet& set) const {
    const program::StateAttr d = state_of(1);
    const std::string at = hf_ + "linear_attn.";
    const auto part = [&at](const char* name, std::int64_t rows, std::int64_t cols, double std) {
        return matrix(at + name, plan::Domain::dense, rows, cols, 0, std);
    };
    const std::int64_t h = model_.hidden;
    set.declare(key_ + ".qkv",
                {part("in_proj_q.weight", d.keys(), h, 0.02), part("in_proj_k.weight", d.keys(), h, 0.02),
                 part("in_proj_v.weight", d.values(), h, 0.02), part("in_proj_z.weight", d.values(), h, 0.02),
                 part("in_proj_b.weight", d.value_heads, h, 0.02), part("in_proj_a.weight", d.value_heads, h, 0.02)},
                true);
    const double taps = 1.0 / std::sqrt(3.0 * d.kernel); // as uniform numbers up to 1 / sqrt(kernel) have
    set.declare(key_ + ".conv",
                {part("conv1d_q.weight", d.keys(), d.kernel, taps), part("conv1d_k.weight", d.keys(), d.kernel, taps),
                 part("conv1d_v.weight", d.values(), d.kernel, taps)},
                false);
    set.declare(key_ + ".a_log", {part("A_log", d.value_heads, 1, 1.0)}, false, false);
    program::Parameter bias = part("dt_bias", d.value_heads, 1, 0.0);
    bias.init = program::Init::ones;
    set.declare(key_ + ".dt_bias", {bias}, false, false);
    set.declare(key_ + ".gated_norm", {norm_weight(at + "norm.weight", d.value_dim)}, false, false);
    const double out_std = 0.02 / std::sqrt(2.0 * static_cast<double>(std::max<std::size_t>(1, model_.layers.size())));
    set.declare(key_ + ".out", {matrix(at + "out_proj.weight", plan::Domain::dense, h, d.values(), 1, out_std)}, true);
}

} // namespace moe::layers
