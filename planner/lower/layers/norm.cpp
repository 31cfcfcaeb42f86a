// RMSNorm as every layer uses it, and the parameter shorthands of the emitters.
#include "planner/lower/layers/layers.hpp"

namespace moe {

Parameter matrix(std::string name, Domain domain, std::int64_t rows, std::int64_t cols, int shard_dim, double std) {
    Parameter p;
    p.name = std::move(name);
    p.domain = domain;
    p.rows = rows;
    p.cols = cols;
    p.shard_dim = shard_dim;
    p.init_std = std;
    return p;
}

Parameter norm_weight(std::string name, std::int64_t cols) {
    Parameter p;
    p.name = std::move(name);
    p.rows = cols;
    p.init_std = 0.0;
    p.ones = true;
    return p;
}

void declare_mlp_norms(ParameterSet& set, const Model& model, const std::string& key, const std::string& hf) {
    const char* before = model.post_norms ? "pre_mlp_layernorm.weight" : "post_attention_layernorm.weight";
    Norm::declare(set, key + ".norm", hf + before, model.hidden);
    if (model.post_norms) Norm::declare(set, key + ".post_norm", hf + "post_mlp_layernorm.weight", model.hidden);
}

void Norm::declare(ParameterSet& set, const std::string& key, const std::string& name, std::int64_t cols) {
    set.declare(key, {norm_weight(name, cols)}, false, false);
}

TensorId Norm::forward(Builder& b, TensorId input, std::int64_t width, const std::string& name) {
    x = input;
    cols = width;
    const std::int64_t rows = b.at(x).rows;
    y = b.activation(name, rows, cols);
    rstd = b.tensor(name + ".rstd", Dtype::f32, rows, 1);
    b.emit(OpKind::rmsnorm, {x, b.weight(key, cols, 1).value}, {y, rstd},
           NormAttr{rows, cols, b.at(x).cols, eps > 0.0 ? eps : b.model().norm_eps, within});
    return y;
}

TensorId Norm::backward(Builder& b, TensorId dy, TensorId dresidual, TensorId dx) const {
    const Tensor shape = b.at(x);
    if (dx == no_tensor)
        dx = b.activation(b.at(y).name.substr(b.at(y).name.find('.') + 1) + ".dx", shape.rows, shape.cols);
    const Weight w = b.weight(key, cols, 1);
    Op& op = b.emit(OpKind::rmsnorm_grad, {dy, x, w.value, rstd, dresidual}, {dx, w.gradient},
                    NormAttr{shape.rows, cols, shape.cols, eps > 0.0 ? eps : b.model().norm_eps});
    // Hyper-connections: gradients and values of all streams are read and gradients written, twice a layer.
    if (dresidual != no_tensor && b.model().residual_streams > 1)
        op.bytes += (6.0 * b.model().residual_streams - 2.0) * shape.expected_bytes();
    return dx;
}

} // namespace moe
