// The fields of a model, by structured bindings: a field that is added does not compile until it has a place here.
#include "planner/model/same.hpp"

#include "planner/model/model.hpp"

#include <tuple>

namespace moe::model {

namespace {

auto fields(const RopeScaling& rope) {
    const auto& [type, factor, beta_fast, beta_slow, mscale, mscale_all_dim, attention_factor, low_freq_factor,
                 high_freq_factor, truncate, original_positions] = rope;
    return std::tie(type, factor, beta_fast, beta_slow, mscale, mscale_all_dim, attention_factor, low_freq_factor,
                    high_freq_factor, truncate, original_positions);
}

auto fields(const Model& model) {
    const auto& [name, architecture, hidden, vocab, vocab_divisor, tied_embeddings, layer_norm_bias, post_norms,
                 norm_eps, rope_theta, rope_interleaved, rope_scaling, kinds, layers, mtp, residual_streams, hybrid,
                 not_executable, left_out, config_json] = model;
    return std::tie(architecture, hidden, vocab, vocab_divisor, tied_embeddings, layer_norm_bias, post_norms, norm_eps,
                    rope_theta, rope_interleaved, kinds, layers, mtp, residual_streams, hybrid);
}

} // namespace

bool same_computation(const Model& a, const Model& b) {
    return fields(a) == fields(b) && fields(a.rope_scaling) == fields(b.rope_scaling);
}

} // namespace moe::model
