// The ends of the model: vocabulary-parallel embedding, final norm with LM head and cross-entropy, and the input of MTP
// layers.
#include "planner/lower/layers/layers.hpp"
#include "planner/plan/stack_traits.hpp"

namespace moe::layers {

namespace {

// True where the forward makes the logits' gradient too, in their place: nothing but the loss's scale goes into it, so
// that they are read once and need no second buffer. A vocabulary cut over TP is reduced in between.
bool at_once(const plan::Plan& plan) { return plan.tp == 1 && plan::stack_traits(plan).fuses_cross_entropy; }

program::Parameter of_vocabulary(const model::Model& model, const plan::Plan& plan, const char* name, std::int64_t cols,
                                 double std) {
    program::Parameter p = matrix(name, plan::Domain::dense, model.vocab, cols, 0, std);
    p.padded_rows = plan.padded_vocab();
    return p;
}

program::Parameter vocabulary_matrix(const model::Model& model, const plan::Plan& plan, const char* name) {
    return of_vocabulary(model, plan, name, model.hidden, 0.02);
}

} // namespace

void EmbeddingLayer::declare(emit::ParameterSet& set, const plan::Plan& plan) const {
    if (!set.has("embedding"))
        set.declare("embedding", {vocabulary_matrix(model_, plan, "model.embed_tokens.weight")}, false);
}

program::TensorId EmbeddingLayer::forward(emit::Builder& b, program::TensorId ids) {
    b.layer = -1;
    b.phase = program::Phase::forward;
    b.module = program::Module::embedding;
    const emit::Weight table = b.weight("embedding", b.plan().padded_vocab() / b.plan().tp, model_.hidden);
    const program::TensorId x = b.activation("embedding", b.gathered_tokens(), model_.hidden);
    program::Op& op = b.emit(program::OpKind::embedding, {ids, table.value}, {x});
    op.bytes = 2.0 * b.at(x).expected_bytes(); // Only the rows looked up are read.
    const program::TensorId local = b.scatter_tokens(x, "embedding_local");
    return model_.embedding_scale == 1.0 ? local : b.scale(local, model_.embedding_scale, "embedding_scaled");
}

void EmbeddingLayer::backward(emit::Builder& b, program::TensorId ids, program::TensorId dx) {
    b.layer = -1;
    b.phase = program::Phase::wgrad;
    b.module = program::Module::embedding;
    const emit::Weight table = b.weight("embedding", b.plan().padded_vocab() / b.plan().tp, model_.hidden);
    if (!b.trains(table)) return;
    if (model_.embedding_scale != 1.0) dx = b.scale(dx, model_.embedding_scale, "dembedding_scaled");
    const program::TensorId full = b.gather_tokens(dx, "dembedding");
    program::Op& op = b.emit(program::OpKind::embedding_grad, {ids, full}, {table.gradient});
    op.bytes = b.at(full).expected_bytes() +
               8.0 * static_cast<double>(b.gathered_tokens()) * static_cast<double>(model_.hidden);
}

void HeadLayer::declare(emit::ParameterSet& set, const plan::Plan& plan) const {
    if (!norm_name_.empty()) Norm::declare(set, model_, key_ + ".norm", norm_name_, model_.hidden);
    const std::string weight = model_.tied_embeddings ? "embedding" : "lm_head";
    const char* name = model_.tied_embeddings ? "model.embed_tokens.weight" : "lm_head.weight";
    if (!set.has(weight))
        set.declare(weight, {vocabulary_matrix(model_, plan, name)}, plan.head_precision.has_value(), true, 1,
                    plan.head_precision);
    if (model_.head_bias && !set.has("lm_head_bias"))
        set.declare("lm_head_bias", {of_vocabulary(model_, plan, "lm_head.bias", 1, 0.0)}, false, false);
}

program::TensorId HeadLayer::labels(const emit::Builder& b) const {
    const program::ProgramIo& io = b.program().io;
    return depth_ == 0 ? io.labels : io.mtp_labels[static_cast<std::size_t>(depth_ - 1)];
}

// The operands of a loss, with the share of its labels behind them where documents mask some.
program::Operands HeadLayer::with_share(const emit::Builder& b, program::Operands in) const {
    if (b.plan().masks_documents()) in.push_back(b.program().io.label_shares[static_cast<std::size_t>(depth_)]);
    return in;
}

program::TensorId HeadLayer::forward(emit::Builder& b, program::TensorId x) {
    const plan::Plan& plan = b.plan();
    const std::int64_t rows = b.gathered_tokens(), local = plan.padded_vocab() / plan.tp;
    b.layer = -1;
    b.phase = program::Phase::forward;
    b.module = program::Module::head;
    norm_.key = key_ + ".norm";
    const program::TensorId normed = norm_name_.empty() ? x : norm_.forward(b, x, model_.hidden, key_ + ".norm_out");
    head_.weight = b.weight(model_.tied_embeddings ? "embedding" : "lm_head", local, model_.hidden);
    head_.name = key_ + ".logits";
    head_.gather = plan.tp > 1;
    // The factor of the logits is taken on the narrow side of the head.
    const program::TensorId in =
        model_.logit_scale == 1.0 ? normed : b.scale(normed, model_.logit_scale, key_ + ".normed_scaled");
    logits_ = emit::linear_forward(b, head_, in, b.activation_dtype());
    if (model_.head_bias) {
        bias_ = b.weight("lm_head_bias", local, 1);
        b.emit(program::OpKind::bias_add, {logits_, bias_.value}, {logits_});
    }
    if (model_.logit_cap > 0.0) {
        uncapped_ = logits_;
        logits_ = b.activation(key_ + ".logits_capped", rows, local);
        b.emit(program::OpKind::clip, {uncapped_}, {logits_}, program::ClipAttr{model_.logit_cap, true});
    }
    if (b.cached_keys > 0) {
        b.program().io.logits = logits_;
        return normed;
    }
    // The last `depth` positions of a sample have no label.
    const double tokens = static_cast<double>(plan.gbs) * static_cast<double>(plan.seq - depth_);
    loss_ = gradient_ = {rows, local, model_.vocab, 1.0 / tokens};
    if (depth_ > 0) gradient_.scale *= 0.1 / static_cast<double>(model_.mtp.size());
    const program::ProgramIo& io = b.program().io;
    const program::TensorId loss = depth_ == 0 ? io.loss : io.mtp_loss;
    const program::TensorId local_max = b.tensor(key_ + ".max_local", program::Dtype::f32, rows, 1);
    const program::TensorId local_stat = b.tensor(key_ + ".stat_local", program::Dtype::f32, rows, 2);
    if (at_once(plan) && b.with_backward) {
        loss_.gradient_scale = gradient_.scale;
        b.emit(program::OpKind::cross_entropy, with_share(b, {logits_, labels(b)}),
               {logits_, local_max, local_stat, loss}, loss_);
        return normed;
    }
    const auto summed = [&](program::TensorId partial, bool max, const char* name) {
        if (plan.tp == 1) return partial;
        const program::TensorId whole =
            b.tensor(key_ + name, program::Dtype::f32, b.at(partial).rows, b.at(partial).cols);
        b.communicate(program::OpKind::all_reduce, emit::groups::tensor, program::Stream::tensor, {partial}, {whole},
                      program::ReduceAttr{max});
        return whole;
    };
    b.emit(program::OpKind::ce_max, {logits_}, {local_max}, loss_);
    max_ = summed(local_max, true, ".max");
    b.emit(program::OpKind::ce_sum, {logits_, max_, labels(b)}, {local_stat}, loss_);
    stat_ = summed(local_stat, false, ".stat");
    b.emit(program::OpKind::ce_loss, with_share(b, {max_, stat_}), {loss}, loss_);
    return normed;
}

program::TensorId HeadLayer::backward(emit::Builder& b, program::TensorId dnormed) {
    b.layer = -1;
    b.phase = program::Phase::dgrad;
    b.module = program::Module::head;
    program::TensorId dlogits = logits_;
    if (!at_once(b.plan())) {
        dlogits = b.activation(key_ + ".dlogits", b.at(logits_).rows, b.at(logits_).cols);
        b.emit(program::OpKind::ce_grad, with_share(b, {logits_, max_, stat_, labels(b)}), {dlogits}, gradient_);
    }
    if (model_.logit_cap > 0.0)
        b.emit(program::OpKind::clip_grad, {dlogits, uncapped_}, {dlogits}, program::ClipAttr{model_.logit_cap, true});
    if (model_.head_bias && b.trains(bias_)) {
        b.phase = program::Phase::wgrad;
        b.emit(program::OpKind::bias_grad, {dlogits}, {bias_.gradient});
        b.phase = program::Phase::dgrad;
    }
    program::TensorId d = emit::linear_backward(b, head_, dlogits);
    if (model_.logit_scale != 1.0) d = b.scale(d, model_.logit_scale, key_ + ".dnormed_scaled");
    if (dnormed != program::no_tensor) d = b.add(d, dnormed, key_ + ".dnormed");
    return norm_name_.empty() ? d : norm_.backward(b, d);
}

void MtpInput::declare(emit::ParameterSet& set) const {
    const std::int64_t h = model_.hidden;
    Norm::declare(set, model_, key_ + ".hnorm", hf_ + "hnorm.weight", h);
    Norm::declare(set, model_, key_ + ".enorm", hf_ + "enorm.weight", h);
    // eh_proj [h, 2h], kept as its two halves: a sum of two products needs no concatenated input.
    set.declare(key_ + ".eproj", {matrix(hf_ + "eh_proj.weight.embedding", plan::Domain::dense, h, h, -1, 0.02)}, true);
    set.declare(key_ + ".hproj", {matrix(hf_ + "eh_proj.weight.hidden", plan::Domain::dense, h, h, -1, 0.02)}, true);
}

program::TensorId MtpInput::forward(emit::Builder& b, program::TensorId h, program::TensorId embedded) {
    b.phase = program::Phase::forward;
    b.module = program::Module::mtp;
    hidden_norm_.key = key_ + ".hnorm";
    embed_norm_.key = key_ + ".enorm";
    hidden_.weight = b.weight(key_ + ".hproj", model_.hidden, model_.hidden);
    embed_.weight = b.weight(key_ + ".eproj", model_.hidden, model_.hidden);
    hidden_.name = key_ + ".hproj";
    embed_.name = key_ + ".eproj";
    const program::TensorId from_h =
        emit::linear_forward(b, hidden_, hidden_norm_.forward(b, h, model_.hidden, "mtp_hnorm"), b.activation_dtype());
    const program::TensorId from_e = emit::linear_forward(
        b, embed_, embed_norm_.forward(b, embedded, model_.hidden, "mtp_enorm"), b.activation_dtype());
    return b.add(from_h, from_e, "mtp_in");
}

std::pair<program::TensorId, program::TensorId> MtpInput::backward(emit::Builder& b, program::TensorId dy) {
    b.phase = program::Phase::dgrad;
    b.module = program::Module::mtp;
    const program::TensorId dh = hidden_norm_.backward(b, emit::linear_backward(b, hidden_, dy));
    const program::TensorId de = embed_norm_.backward(b, emit::linear_backward(b, embed_, dy));
    return {dh, de};
}

} // namespace moe::layers
