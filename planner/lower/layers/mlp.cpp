// Dense MLP layers and the shared expert of MoE layers.
#include "planner/lower/layers/layers.hpp"
#include "planner/plan/stack_traits.hpp"

#include <algorithm>
#include <cmath>

namespace moe::layers {

MlpLayer::MlpLayer(const model::Model& model, const model::LayerKind& kind, std::int64_t ffn, bool shared,
                   std::string key, std::string hf_prefix, int layer)
    : model_(model),
      kind_(kind),
      ffn_(ffn),
      shared_(shared),
      key_(std::move(key)),
      hf_(std::move(hf_prefix)),
      layer_(layer) {}

program::TensorId emit_activation(emit::Builder& b, const program::ActivationAttr& attr, const program::Operands& in,
                                  const std::string& name, double expected_rows) {
    const bool low = emit::quantizes_as_written(b, attr.ffn);
    const program::TensorId y = b.tensor(low ? name + ".row" : name, low ? b.quantized_dtype() : b.activation_dtype(),
                                         attr.rows, attr.ffn, expected_rows);
    b.emit(program::OpKind::activation, in, low ? std::vector{program::no_tensor, y} : std::vector{y}, attr);
    return y;
}

void MlpLayer::declare(emit::ParameterSet& set) const {
    const std::int64_t h = model_.hidden;
    const double out_std = 0.02 / std::sqrt(2.0 * static_cast<double>(std::max<std::size_t>(1, model_.layers.size())));
    // Shared experts: DeepSeek's name has a plural, Qwen2-MoE's has not.
    const std::string at =
        shared_ ? hf_ + (kind_.moe && kind_.moe->shared_gate ? "mlp.shared_expert." : "mlp.shared_experts.")
                : hf_ + "mlp.";
    if (own_norm()) declare_mlp_norms(set, model_, key_, hf_);
    std::vector<program::Parameter> in, in_bias;
    if (kind_.gated) in.push_back(matrix(at + "gate_proj.weight", plan::Domain::dense, ffn_, h, 0, 0.02));
    in.push_back(matrix(at + "up_proj.weight", plan::Domain::dense, ffn_, h, 0, 0.02));
    set.declare_adapted(plan::adapted::dense, key_ + ".in", in, true);
    set.declare_adapted(plan::adapted::dense, key_ + ".out",
                        {matrix(at + "down_proj.weight", plan::Domain::dense, h, ffn_, 1, out_std)}, true);
    if (biased()) {
        if (kind_.gated) in_bias.push_back(matrix(at + "gate_proj.bias", plan::Domain::dense, ffn_, 1, 0, 0.0));
        in_bias.push_back(matrix(at + "up_proj.bias", plan::Domain::dense, ffn_, 1, 0, 0.0));
        set.declare(key_ + ".in_bias", in_bias, false, false);
        set.declare(key_ + ".out_bias", {matrix(at + "down_proj.bias", plan::Domain::dense, h, 1, -1, 0.0)}, false,
                    false);
    }
    if (shared_ && kind_.moe && kind_.moe->shared_gate)
        set.declare(key_ + ".gate",
                    {matrix(hf_ + "mlp.shared_expert_gate.weight", plan::Domain::dense, 1, h, -1, 0.02)}, false);
}

program::TensorId MlpLayer::forward(emit::Builder& b, program::TensorId x, program::TensorId given) {
    const int tp = b.plan().tp;
    const std::int64_t local = ffn_ / tp, width = kind_.gated ? 2 * local : local;
    const std::string name = shared_ ? "shared_" : "mlp_";
    const program::Module module = shared_ ? program::Module::shared_experts : program::Module::mlp;
    b.layer = layer_;
    b.phase = program::Phase::forward;
    program::TensorId normed = given != program::no_tensor ? given : x;
    if (own_norm()) {
        b.module = program::Module::layernorm;
        norm_.key = key_ + ".norm";
        if (plan::stack_traits(b.plan()).keeps_norm_with_product) norm_.within = program::Module::mlp;
        normed = norm_.forward(b, x, model_.hidden, "mlp_norm");
    }
    b.module = module;
    emit::bind(b, in_, key_ + ".in", width, model_.hidden);
    in_.name = name + "fc1";
    in_.gather = tp > 1;
    program::TensorId pre = emit::linear_forward(b, in_, normed, b.activation_dtype());
    const bool bias = biased();
    if (bias) {
        in_bias_ = b.weight(key_ + ".in_bias", width, 1);
        const program::TensorId biased = b.activation(name + "fc1_bias", b.at(pre).rows, width);
        b.emit(program::OpKind::bias_add, {pre, in_bias_.value}, {biased});
        pre = biased;
    }
    pre_ = pre;
    if (!shared_) b.module = program::Module::moe_act_dense;
    act_ = {b.at(pre).rows,    local, kind_.activation, kind_.gated, shared_ ? kind_.shared_limit : kind_.swiglu_limit,
            kind_.limit_behind};
    const program::TensorId act = emit_activation(b, act_, {pre, program::no_tensor, program::no_tensor}, name + "act",
                                                  static_cast<double>(act_.rows));
    b.module = module;
    emit::bind(b, out_, key_ + ".out", model_.hidden, local);
    out_.name = name + "fc2";
    program::TensorId y = emit::linear_forward_scattered(b, out_, act, b.activation_dtype(), name + "fc2_local");
    if (bias) {
        out_bias_ = b.weight(key_ + ".out_bias", model_.hidden, 1);
        const program::TensorId biased = b.activation(name + "fc2_bias", b.at(y).rows, model_.hidden);
        b.emit(program::OpKind::bias_add, {y, out_bias_.value}, {biased});
        y = biased;
    }
    if (shared_) {
        if (!kind_.moe || !kind_.moe->shared_gate) return y;
        gate_.weight = b.weight(key_ + ".gate", 1, model_.hidden);
        gate_.name = "shared_gate";
        gate_.quantize = false;
        y_ = y;
        gate_logit_ = emit::linear_forward(b, gate_, x, b.activation_dtype());
        const program::TensorId scaled = b.activation("shared_scaled", b.at(y).rows, model_.hidden);
        b.emit(program::OpKind::sigmoid_scale, {y, gate_logit_}, {scaled});
        return scaled;
    }
    if (model_.post_norms) {
        b.module = program::Module::layernorm;
        post_norm_.key = key_ + ".post_norm";
        y = post_norm_.forward(b, y, model_.hidden, "mlp_post_norm");
    }
    return b.residual(x, y, "mlp_residual");
}

program::TensorId MlpLayer::backward(emit::Builder& b, program::TensorId dy) {
    const std::string name = shared_ ? "shared_" : "mlp_";
    const bool bias = biased();
    const auto bias_grad = [&](program::TensorId d, const emit::Weight& weight) {
        if (!b.trains(weight)) return;
        b.phase = program::Phase::wgrad;
        b.emit(program::OpKind::bias_grad, {d}, {weight.gradient});
        b.phase = program::Phase::dgrad;
    };
    b.layer = layer_;
    b.phase = program::Phase::dgrad;
    program::TensorId d = shared_ ? dy : b.residual_gradient(dy, "dmlp_residual"), dgate_input = program::no_tensor;
    if (model_.post_norms && !shared_) {
        b.module = program::Module::layernorm;
        d = post_norm_.backward(b, d);
    }
    b.module = shared_ ? program::Module::shared_experts : program::Module::mlp;
    if (gate_logit_ != program::no_tensor) {
        const program::TensorId dscaled = d, dlogit = b.activation("dshared_gate", b.at(gate_logit_).rows, 1);
        d = b.activation("dshared", b.at(y_).rows, model_.hidden);
        b.emit(program::OpKind::sigmoid_scale_grad, {dscaled, y_, gate_logit_}, {d, dlogit});
        dgate_input = emit::linear_backward(b, gate_, dlogit);
    }
    if (bias) bias_grad(d, out_bias_);
    const program::TensorId dact = emit::linear_backward_gathered(b, out_, d, name + "dfc2");
    if (!shared_) b.module = program::Module::moe_act_dense;
    const program::TensorId dpre = b.activation(name + "dfc1", b.at(pre_).rows, b.at(pre_).cols);
    program::Operands out{dpre, program::no_tensor};
    program::TensorId dpre_low = program::no_tensor;
    if (emit::quantizes_as_written(b, act_.ffn, act_.gated ? 2 : 1)) {
        dpre_low = b.tensor(in_.name + ".grad.row", b.quantized_dtype(), b.at(dpre).rows, b.at(dpre).cols);
        out.append({program::no_tensor, dpre_low});
    }
    b.emit(program::OpKind::activation_grad, {dact, pre_, program::no_tensor, program::no_tensor}, out, act_);
    b.module = shared_ ? program::Module::shared_experts : program::Module::mlp;
    if (bias) bias_grad(dpre, in_bias_);
    const program::TensorId dx = emit::linear_backward(b, in_, dpre, dpre_low);
    if (shared_) return dgate_input == program::no_tensor ? dx : b.add(dx, dgate_input, "dshared_in");
    if (!own_norm()) return dx;
    b.module = program::Module::layernorm;
    return norm_.backward(b, dx, dy);
}

} // namespace moe::layers
