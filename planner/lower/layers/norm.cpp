// RMSNorm or LayerNorm as every layer uses it, and the parameter shorthands of the emitters.
#include "planner/lower/layers/layers.hpp"

namespace moe::layers {

program::Parameter matrix(std::string name, plan::Domain domain, std::int64_t rows, std::int64_t cols, int shard_dim,
                          double std) {
    program::Parameter p;
    p.name = std::move(name);
    p.domain = domain;
    p.rows = rows;
    p.cols = cols;
    p.shard_dim = shard_dim;
    p.init_std = std;
    return p;
}

program::Parameter norm_weight(std::string name, std::int64_t cols) {
    program::Parameter p;
    p.name = std::move(name);
    p.rows = cols;
    p.init = program::Init::ones;
    return p;
}

void declare_mlp_norms(emit::ParameterSet& set, const model::Model& model, const std::string& key,
                       const std::string& hf) {
    const char* before = model.post_norms ? "pre_mlp_layernorm.weight" : "post_attention_layernorm.weight";
    Norm::declare(set, model, key + ".norm", hf + before, model.hidden);
    if (model.post_norms) Norm::declare(set, model, key + ".post_norm", hf + "post_mlp_layernorm.weight", model.hidden);
}

void Norm::declare(emit::ParameterSet& set, const model::Model& model, const std::string& key, const std::string& name,
                   std::int64_t cols) {
    set.declare(key, {norm_weight(name, cols)}, false, false);
    if (!model.layer_norm_bias) return;
    const std::string bias = name.substr(0, name.size() - std::string("weight").size()) + "bias";
    set.declare(key + "_bias", {matrix(bias, plan::Domain::dense, cols, 1, -1, 0.0)}, false, false);
}

program::TensorId Norm::forward(emit::Builder& b, program::TensorId input, std::int64_t width,
                                const std::string& name) {
    x = input;
    cols = width;
    const std::int64_t rows = b.at(x).rows;
    y = b.activation(name, rows, cols);
    rstd = b.tensor(name + ".rstd", program::Dtype::f32, rows, b.model().layer_norm ? 2 : 1);
    program::Operands in{x, b.weight(key, cols, 1).value};
    if (b.model().layer_norm_bias) in.push_back(b.weight(key + "_bias", cols, 1).value);
    b.emit(program::OpKind::rmsnorm, in, {y, rstd},
           program::NormAttr{rows, cols, b.at(x).cols, eps > 0.0 ? eps : b.model().norm_eps, within,
                             b.model().layer_norm});
    return y;
}

program::TensorId Norm::backward(emit::Builder& b, program::TensorId dy, program::TensorId dresidual,
                                 program::TensorId dx) const {
    const program::Tensor shape = b.at(x);
    if (dx == program::no_tensor)
        dx = b.activation(b.at(y).name.substr(b.at(y).name.find('.') + 1) + ".dx", shape.rows, shape.cols);
    const emit::Weight w = b.weight(key, cols, 1);
    program::Operands out{dx, w.gradient};
    if (b.model().layer_norm_bias) out.push_back(b.weight(key + "_bias", cols, 1).gradient);
    program::NormAttr attr{shape.rows, cols, shape.cols, eps > 0.0 ? eps : b.model().norm_eps};
    attr.centred = b.model().layer_norm;
    program::Op& op = b.emit(program::OpKind::rmsnorm_grad, {dy, x, w.value, rstd, dresidual}, out, attr);
    // Hyper-connections, twice a layer (Megatron-LM, hyper_connection.py). For n streams these read and write, in rows
    // of the hidden width: the gradient of the mix 3n + 2, of the sum that the layer reads 2n + 1, of the maps 3n, and
    // what adds up the three gradients of the streams 4n. Of these the norm's own op has counted one.
    if (dresidual != program::no_tensor && b.model().residual_streams > 1)
        op.bytes += (12.0 * b.model().residual_streams + 2.0) * shape.expected_bytes();
    return dx;
}

} // namespace moe::layers
