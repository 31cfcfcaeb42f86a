// The MoE layer: router and what joins it with routed experts (experts.cpp); the movement of rows is in dispatch.cpp.
#include "planner/lower/emit/grouped.hpp"
#include "planner/lower/emit/rounding.hpp"
#include "planner/lower/layers/layers.hpp"

#include "planner/base/error.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace moe::layers {

MoeLayer::MoeLayer(const model::Model& model, const model::LayerKind& kind, std::string key, std::string hf_prefix,
                   int layer)
    : model_(model), kind_(kind), moe_(*kind.moe), key_(std::move(key)), hf_(std::move(hf_prefix)), layer_(layer) {
    if (moe_.shared_ffn > 0) shared_.emplace(model, kind, moe_.shared_ffn, true, key_ + ".shared", hf_, layer);
}

void MoeLayer::declare(emit::ParameterSet& set, const plan::Plan& plan) const {
    const std::int64_t h = model_.hidden, f = moe_.ffn, w = width();
    const double out_std = 0.02 / std::sqrt(2.0 * static_cast<double>(std::max<std::size_t>(1, model_.layers.size())));
    const bool mixtral = model_.architecture.rfind("Mixtral", 0) == 0;
    const std::string gate = model_.architecture == "GptOssForCausalLM" ? "router" : "gate";
    const std::string at = hf_ + (mixtral ? "block_sparse_moe." : "mlp.");
    if (!kind_.parallel) declare_mlp_norms(set, model_, key_, hf_);
    if (moe_.branch_norms) {
        Norm::declare(set, model_, key_ + ".router_norm", hf_ + "router.scale", h);
        Norm::declare(set, model_, key_ + ".expert_norm", hf_ + "pre_feedforward_layernorm_2.weight", h);
        Norm::declare(set, model_, key_ + ".shared_post", hf_ + "post_feedforward_layernorm_1.weight", h);
        Norm::declare(set, model_, key_ + ".expert_post", hf_ + "post_feedforward_layernorm_2.weight", h);
        set.declare(key_ + ".expert_scale", {norm_weight(hf_ + "router.per_expert_scale", moe_.experts)}, false, false);
    }
    set.declare(key_ + ".gate", {matrix(at + gate + ".weight", plan::Domain::dense, moe_.experts, h, -1, 0.02)}, false);
    if (moe_.router.linear_bias)
        set.declare(key_ + ".gate_bias", {matrix(at + gate + ".bias", plan::Domain::dense, moe_.experts, 1, -1, 0.0)},
                    false, false);
    // The selection bias gets no gradient, so the optimizer leaves it alone; load balancing moves it.
    if (moe_.router.expert_bias)
        set.declare(key_ + ".select_bias",
                    {matrix(at + "gate.e_score_correction_bias", plan::Domain::dense, moe_.experts, 1, -1, 0.0)}, false,
                    false, 1, plan.router.bias_update > 0.0 ? std::optional(machine::Precision::fp32) : std::nullopt);
    std::vector<program::Parameter> in, out, in_bias, out_bias;
    const auto expert = [&](std::vector<program::Parameter>& list, const char* name, std::int64_t rows,
                            std::int64_t cols, int dim, double std) {
        list.push_back(matrix(at + "experts.{}." + name, plan::Domain::expert, rows, cols, dim, std));
    };
    if (kind_.gated) expert(in, mixtral ? "w1.weight" : "gate_proj.weight", f, w, 0, 0.02);
    expert(in, mixtral ? "w3.weight" : "up_proj.weight", f, w, 0, 0.02);
    expert(out, mixtral ? "w2.weight" : "down_proj.weight", w, f, 1, out_std);
    const int local_experts = moe_.experts / plan.ep;
    set.declare_adapted(plan::adapted::experts, key_ + ".fc1", in, true, local_experts);
    set.declare_adapted(plan::adapted::experts, key_ + ".fc2", out, true, local_experts);
    if (moe_.expert_bias) {
        if (kind_.gated) expert(in_bias, "gate_proj.bias", f, 1, 0, 0.0);
        expert(in_bias, "up_proj.bias", f, 1, 0, 0.0);
        expert(out_bias, "down_proj.bias", w, 1, -1, 0.0);
        set.declare(key_ + ".fc1_bias", in_bias, false, false, local_experts);
        set.declare(key_ + ".fc2_bias", out_bias, false, false, local_experts);
    }
    if (moe_.latent > 0) {
        set.declare(key_ + ".latent_down", {matrix(at + "fc1_latent_proj.weight", plan::Domain::dense, w, h, -1, 0.02)},
                    true);
        set.declare(key_ + ".latent_up",
                    {matrix(at + "fc2_latent_proj.weight", plan::Domain::dense, h, w, -1, out_std)}, true);
    }
    if (shared_) shared_->declare(set);
}

program::TensorId MoeLayer::forward(emit::Builder& b, program::TensorId x, program::TensorId given) {
    b.layer = layer_;
    b.phase = program::Phase::forward;
    b.module = program::Module::layernorm;
    norm_.key = key_ + ".norm";
    const program::TensorId normed = kind_.parallel ? given : norm_.forward(b, x, model_.hidden, "moe_norm");
    const auto branch = [&](Norm& norm, program::TensorId in, const char* name) {
        if (!moe_.branch_norms) return in;
        const program::Module module = std::exchange(b.module, program::Module::layernorm);
        norm.key = key_ + "." + name;
        const program::TensorId out = norm.forward(b, in, model_.hidden, std::string("moe_") + name);
        b.module = module;
        return out;
    };
    route(b, branch(router_norm_, moe_.branch_norms ? x : normed, "router_norm"));
    program::TensorId travels = branch(expert_norm_, moe_.branch_norms ? x : normed, "expert_norm");
    if (moe_.latent > 0) {
        latent_down_.weight = b.weight(key_ + ".latent_down", width(), model_.hidden);
        latent_down_.name = "latent_down";
        travels = emit::linear_forward(b, latent_down_, travels, b.activation_dtype());
    }
    const Rows rows = dispatch(b, travels, weight_, "expert_in");
    program::TensorId shared = program::no_tensor;
    if (shared_) shared = branch(shared_post_, shared_->forward(b, normed), "shared_post");
    program::TensorId y = combine(b, {experts(b, rows), program::no_tensor}, "expert_sum").rows;
    if (moe_.latent > 0) {
        latent_up_.weight = b.weight(key_ + ".latent_up", model_.hidden, width());
        latent_up_.name = "latent_up";
        y = emit::linear_forward(b, latent_up_, y, b.activation_dtype());
    }
    y = branch(expert_post_, y, "expert_post");
    b.module = program::Module::residual;
    if (shared != program::no_tensor) y = b.add(y, shared, "moe_out");
    if (model_.post_norms) {
        b.module = program::Module::layernorm;
        post_norm_.key = key_ + ".post_norm";
        y = post_norm_.forward(b, y, model_.hidden, "moe_post_norm");
        b.module = program::Module::residual;
    }
    return b.residual(x, y, "moe_residual");
}

program::TensorId MoeLayer::backward(emit::Builder& b, program::TensorId dy) {
    b.layer = layer_;
    b.phase = program::Phase::dgrad;
    program::TensorId dout = b.residual_gradient(dy, "dmoe_residual");
    if (model_.post_norms) {
        b.module = program::Module::layernorm;
        dout = post_norm_.backward(b, dout);
    }
    const auto branch = [&](const Norm& norm, program::TensorId d, program::TensorId residual) {
        if (!moe_.branch_norms) return d;
        b.module = program::Module::layernorm;
        return norm.backward(b, d, residual);
    };
    const program::TensorId dexperts = branch(expert_post_, dout, program::no_tensor);
    b.module = program::Module::combine;
    const program::TensorId dsum = moe_.latent > 0 ? emit::linear_backward(b, latent_up_, dexperts) : dexperts;
    const Rows drows_out = dispatch(b, dsum, program::no_tensor, "expert_dout");
    program::TensorId dshared = program::no_tensor;
    if (shared_) dshared = shared_->backward(b, branch(shared_post_, dout, program::no_tensor));
    const Rows drows = experts_backward(b, drows_out);
    const Rows din = combine(b, drows, "expert_din_sum");

    b.module = program::Module::router;
    const program::TensorId dweight = unscaled(b, din.probs),
                            dlogits = b.tensor("dlogits", program::Dtype::f32, b.local_tokens(), moe_.experts);
    b.emit(program::OpKind::router_grad, {dweight, logits_, index_}, {dlogits},
           program::RouterAttr{b.local_tokens(), moe_.experts, moe_.top_k, moe_.router, b.plan().mbs});
    program::TensorId dbalanced = balance_backward(b, dlogits);
    if (moe_.branch_norms) dbalanced = b.scale(dbalanced, logit_factor(), "drouter_logits");
    if (moe_.router.linear_bias && b.trains(gate_bias_)) {
        b.phase = program::Phase::wgrad;
        b.emit(program::OpKind::bias_grad, {dbalanced}, {gate_bias_.gradient});
        b.phase = program::Phase::dgrad;
    }
    const program::TensorId dtravels = moe_.latent > 0 ? emit::linear_backward(b, latent_down_, din.rows) : din.rows;
    const program::TensorId drouter = jittered(b, emit::linear_backward(b, gate_, dbalanced), "drouter_jittered");
    if (moe_.branch_norms) { // Three norms share one input: what each hands on joins the next.
        const program::TensorId dx = branch(expert_norm_, dtravels, branch(router_norm_, drouter, dy));
        return shared_ ? norm_.backward(b, dshared, dx) : dx;
    }
    program::TensorId dnormed = b.add(dtravels, drouter, "drouter_sum");
    if (dshared != program::no_tensor) {
        b.module = program::Module::shared_experts;
        dnormed = b.add(dnormed, dshared, "dmoe_norm");
    }
    b.module = program::Module::layernorm;
    return kind_.parallel ? dnormed : norm_.backward(b, dnormed, dy);
}

void MoeLayer::route(emit::Builder& b, program::TensorId normed) {
    const std::int64_t tokens = b.local_tokens();
    b.module = program::Module::router;
    gate_.weight = b.weight(key_ + ".gate", moe_.experts, model_.hidden);
    gate_.name = "router_logits";
    gate_.quantize = false;
    logits_ = emit::linear_forward(b, gate_, jittered(b, normed, "router_jittered"), program::Dtype::f32);
    if (moe_.branch_norms) logits_ = b.scale(logits_, logit_factor(), "router_logits_scaled");
    if (moe_.router.linear_bias) {
        gate_bias_ = b.weight(key_ + ".gate_bias", moe_.experts, 1);
        const program::TensorId biased = b.tensor("router_logits_bias", program::Dtype::f32, tokens, moe_.experts);
        b.emit(program::OpKind::bias_add, {logits_, gate_bias_.value}, {biased});
        logits_ = biased;
    }
    index_ = b.tensor("expert_index", program::Dtype::i32, tokens, moe_.top_k);
    weight_ = b.tensor("expert_weight", program::Dtype::f32, tokens, moe_.top_k);
    program::Operands in{logits_};
    if (moe_.router.expert_bias) {
        select_bias_ = b.weight(key_ + ".select_bias", moe_.experts, 1);
        in.push_back(select_bias_.value);
    }
    if (b.plan().router.forced) {
        in.resize(2, program::no_tensor);
        in.push_back(b.program().io.positions);
    }
    const program::RouterAttr attr{tokens, moe_.experts, moe_.top_k, moe_.router, b.plan().mbs};
    if (b.plan().router.load_balancing == plan::LoadBalancing::sinkhorn && b.with_backward) {
        in.resize(4, program::no_tensor);
        in[3] = b.tensor("expert_index_sinkhorn", program::Dtype::i32, tokens, moe_.top_k);
        b.emit(program::OpKind::sinkhorn, {logits_}, {in[3]}, attr).bytes =
            program::sinkhorn_iterations * b.at(logits_).expected_bytes() + b.at(in[3]).expected_bytes();
    }
    b.emit(program::OpKind::router, in, {index_, weight_}, attr);
    balance(b);
    drop(b);
    if (!moe_.branch_norms) return;
    scale_ = b.weight(key_ + ".expert_scale", moe_.experts, 1);
    unscaled_ = weight_;
    weight_ = b.tensor("expert_weight_scaled", program::Dtype::f32, tokens, moe_.top_k);
    b.emit(program::OpKind::expert_scale, {unscaled_, kept_, scale_.value}, {weight_});
}

// Gemma 4's router takes its input, normed, over the root of the hidden width.
double MoeLayer::logit_factor() const { return 1.0 / std::sqrt(static_cast<double>(model_.hidden)); }

// The gradient of the router's weights from that of what rows were multiplied by.
program::TensorId MoeLayer::unscaled(emit::Builder& b, program::TensorId dweight) {
    if (!moe_.branch_norms) return dweight;
    const program::TensorId d = b.tensor("dexpert_weight", program::Dtype::f32, b.local_tokens(), moe_.top_k);
    b.emit(program::OpKind::expert_scale_grad, {dweight, unscaled_, kept_, scale_.value}, {d, scale_.gradient});
    return d;
}

} // namespace moe::layers
