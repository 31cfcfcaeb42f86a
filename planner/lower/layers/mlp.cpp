// Dense MLP layers and the shared expert of MoE layers.
#include "planner/lower/layers/layers.hpp"
#include "planner/plan/stack_traits.hpp"

#include <algorithm>
#include <cmath>

namespace moe {

MlpLayer::MlpLayer(const Model& model, const LayerKind& kind, std::int64_t ffn, bool shared, std::string key,
                   std::string hf_prefix, int layer)
    : model_(model),
      kind_(kind),
      ffn_(ffn),
      shared_(shared),
      key_(std::move(key)),
      hf_(std::move(hf_prefix)),
      layer_(layer) {}

TensorId emit_activation(Builder& b, const ActivationAttr& attr, const std::vector<TensorId>& in,
                         const std::string& name, double expected_rows) {
    const bool low = quantizes_as_written(b, attr.ffn);
    const TensorId y = b.tensor(low ? name + ".row" : name, low ? b.quantized_dtype() : b.activation_dtype(), attr.rows,
                                attr.ffn, expected_rows);
    b.emit(OpKind::activation, in, low ? std::vector{no_tensor, y} : std::vector{y}, attr);
    return y;
}

void MlpLayer::declare(ParameterSet& set) const {
    const std::int64_t h = model_.hidden;
    const double out_std = 0.02 / std::sqrt(2.0 * static_cast<double>(std::max<std::size_t>(1, model_.layers.size())));
    // Shared experts: DeepSeek's name has a plural, Qwen2-MoE's has not.
    const std::string at =
        shared_ ? hf_ + (kind_.moe && kind_.moe->shared_gate ? "mlp.shared_expert." : "mlp.shared_experts.")
                : hf_ + "mlp.";
    if (!shared_) declare_mlp_norms(set, model_, key_, hf_);
    std::vector<Parameter> in, in_bias;
    if (kind_.gated) in.push_back(matrix(at + "gate_proj.weight", Domain::dense, ffn_, h, 0, 0.02));
    in.push_back(matrix(at + "up_proj.weight", Domain::dense, ffn_, h, 0, 0.02));
    set.declare(key_ + ".in", in, true);
    set.declare(key_ + ".out", {matrix(at + "down_proj.weight", Domain::dense, h, ffn_, 1, out_std)}, true);
    if (kind_.mlp_bias && !shared_) {
        if (kind_.gated) in_bias.push_back(matrix(at + "gate_proj.bias", Domain::dense, ffn_, 1, 0, 0.0));
        in_bias.push_back(matrix(at + "up_proj.bias", Domain::dense, ffn_, 1, 0, 0.0));
        set.declare(key_ + ".in_bias", in_bias, false, false);
        set.declare(key_ + ".out_bias", {matrix(at + "down_proj.bias", Domain::dense, h, 1, -1, 0.0)}, false, false);
    }
    if (shared_ && kind_.moe && kind_.moe->shared_gate)
        set.declare(key_ + ".gate", {matrix(hf_ + "mlp.shared_expert_gate.weight", Domain::dense, 1, h, -1, 0.02)},
                    false);
}

TensorId MlpLayer::forward(Builder& b, TensorId x) {
    const int tp = b.plan().tp;
    const std::int64_t local = ffn_ / tp, width = kind_.gated ? 2 * local : local;
    const std::string name = shared_ ? "shared_" : "mlp_";
    const Module module = shared_ ? Module::shared_experts : Module::mlp;
    b.layer = layer_;
    b.phase = Phase::forward;
    TensorId normed = x;
    if (!shared_) {
        b.module = Module::layernorm;
        norm_.key = key_ + ".norm";
        if (stack_traits(b.plan()).keeps_norm_with_product) norm_.within = Module::mlp;
        normed = norm_.forward(b, x, model_.hidden, "mlp_norm");
    }
    b.module = module;
    in_.weight = b.weight(key_ + ".in", width, model_.hidden);
    in_.name = name + "fc1";
    in_.gather = tp > 1;
    TensorId pre = linear_forward(b, in_, normed, b.activation_dtype());
    const bool bias = kind_.mlp_bias && !shared_;
    if (bias) {
        in_bias_ = b.weight(key_ + ".in_bias", width, 1);
        const TensorId biased = b.activation(name + "fc1_bias", b.at(pre).rows, width);
        b.emit(OpKind::bias_add, {pre, in_bias_.value}, {biased});
        pre = biased;
    }
    pre_ = pre;
    if (!shared_) b.module = Module::moe_act_dense;
    act_ = {b.at(pre).rows, local, kind_.activation, kind_.gated, kind_.swiglu_limit};
    const TensorId act =
        emit_activation(b, act_, {pre, no_tensor, no_tensor}, name + "act", static_cast<double>(act_.rows));
    b.module = module;
    out_.weight = b.weight(key_ + ".out", model_.hidden, local);
    out_.name = name + "fc2";
    TensorId y = linear_forward_scattered(b, out_, act, b.activation_dtype(), name + "fc2_local");
    if (bias) {
        out_bias_ = b.weight(key_ + ".out_bias", model_.hidden, 1);
        const TensorId biased = b.activation(name + "fc2_bias", b.at(y).rows, model_.hidden);
        b.emit(OpKind::bias_add, {y, out_bias_.value}, {biased});
        y = biased;
    }
    if (shared_) {
        if (!kind_.moe || !kind_.moe->shared_gate) return y;
        gate_.weight = b.weight(key_ + ".gate", 1, model_.hidden);
        gate_.name = "shared_gate";
        gate_.quantize = false;
        y_ = y;
        gate_logit_ = linear_forward(b, gate_, x, b.activation_dtype());
        const TensorId scaled = b.activation("shared_scaled", b.at(y).rows, model_.hidden);
        b.emit(OpKind::sigmoid_scale, {y, gate_logit_}, {scaled});
        return scaled;
    }
    if (model_.post_norms) {
        b.module = Module::layernorm;
        post_norm_.key = key_ + ".post_norm";
        y = post_norm_.forward(b, y, model_.hidden, "mlp_post_norm");
    }
    b.module = Module::residual;
    return b.residual(x, y, "mlp_residual");
}

TensorId MlpLayer::backward(Builder& b, TensorId dy) {
    const std::string name = shared_ ? "shared_" : "mlp_";
    const bool bias = kind_.mlp_bias && !shared_;
    const auto bias_grad = [&](TensorId d, const Weight& weight) {
        b.phase = Phase::wgrad;
        b.emit(OpKind::bias_grad, {d}, {weight.gradient});
        b.phase = Phase::dgrad;
    };
    b.layer = layer_;
    b.phase = Phase::dgrad;
    TensorId d = dy, dgate_input = no_tensor;
    if (model_.post_norms && !shared_) {
        b.module = Module::layernorm;
        d = post_norm_.backward(b, dy);
    }
    b.module = shared_ ? Module::shared_experts : Module::mlp;
    if (gate_logit_ != no_tensor) {
        const TensorId dscaled = d, dlogit = b.activation("dshared_gate", b.at(gate_logit_).rows, 1);
        d = b.activation("dshared", b.at(y_).rows, model_.hidden);
        b.emit(OpKind::sigmoid_scale_grad, {dscaled, y_, gate_logit_}, {d, dlogit});
        dgate_input = linear_backward(b, gate_, dlogit);
    }
    if (bias) bias_grad(d, out_bias_);
    const TensorId dact = linear_backward_gathered(b, out_, d, name + "dfc2");
    if (!shared_) b.module = Module::moe_act_dense;
    const TensorId dpre = b.activation(name + "dfc1", b.at(pre_).rows, b.at(pre_).cols);
    std::vector<TensorId> out{dpre, no_tensor};
    TensorId dpre_low = no_tensor;
    if (quantizes_as_written(b, act_.ffn, act_.gated ? 2 : 1)) {
        dpre_low = b.tensor(in_.name + ".grad.row", b.quantized_dtype(), b.at(dpre).rows, b.at(dpre).cols);
        out.insert(out.end(), {no_tensor, dpre_low});
    }
    b.emit(OpKind::activation_grad, {dact, pre_, no_tensor, no_tensor}, out, act_);
    b.module = shared_ ? Module::shared_experts : Module::mlp;
    if (bias) bias_grad(dpre, in_bias_);
    const TensorId dx = linear_backward(b, in_, dpre, dpre_low);
    if (shared_) return dgate_input == no_tensor ? dx : b.add(dx, dgate_input, "dshared_in");
    b.module = Module::layernorm;
    return norm_.backward(b, dx, dy);
}

} // namespace moe
