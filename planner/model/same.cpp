// The fields of a model, by structured bindings: a field that is added does not compile until it has a place here.
#include "planner/model/same.hpp"

#include "planner/model/model.hpp"

#include <tuple>

namespace moe::model {

namespace {

auto fields(const Model& model) {
    const auto& [name, architecture, hidden, vocab, vocab_divisor, tied_embeddings, head_bias, layer_norm,
                 layer_norm_bias, norms_from_one, post_norms, norm_eps, rope_theta, rope_interleaved, rope_scaling,
                 embedding_scale, residual_scale, logit_scale, logit_cap, kinds, layers, mtp, residual_streams,
                 unmixed_streams, other_weights, hybrid, not_executable, left_out, config_json] = model;
    return std::tie(architecture, hidden, vocab, vocab_divisor, tied_embeddings, head_bias, layer_norm, layer_norm_bias,
                    norms_from_one, post_norms, norm_eps, rope_theta, rope_interleaved, rope_scaling, embedding_scale,
                    residual_scale, logit_scale, logit_cap, kinds, layers, mtp, residual_streams, unmixed_streams,
                    other_weights, hybrid);
}

} // namespace

bool same_computation(const Model& a, const Model& b) { return fields(a) == fields(b); }

} // namespace moe::model
