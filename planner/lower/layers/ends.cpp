// The ends of the model: vocabulary-parallel embedding, final norm with LM head and cross-entropy, and the input of MTP
// layers.
#include "planner/lower/layers/layers.hpp"
#include "planner/plan/stack_traits.hpp"

namespace moe {

namespace {

// Whether the forward makes the logits' gradient too, in their place: nothing but the loss's scale goes into it, so
// that they are read once and need no second buffer. A vocabulary cut over TP is reduced in between.
bool at_once(const Plan& plan) { return plan.tp == 1 && stack_traits(plan).fuses_cross_entropy; }

Parameter vocabulary_matrix(const Model& model, const Plan& plan, const char* name) {
    Parameter p = matrix(name, Domain::dense, model.vocab, model.hidden, 0, 0.02);
    p.padded_rows = model.padded_vocab(plan.tp);
    return p;
}

} // namespace

void EmbeddingLayer::declare(ParameterSet& set, const Plan& plan) const {
    if (!set.has("embedding"))
        set.declare("embedding", {vocabulary_matrix(model_, plan, "model.embed_tokens.weight")}, false);
}

TensorId EmbeddingLayer::forward(Builder& b, TensorId ids) {
    b.layer = -1;
    b.phase = Phase::forward;
    b.module = Module::embedding;
    const Weight table = b.weight("embedding", model_.padded_vocab(b.plan().tp) / b.plan().tp, model_.hidden);
    const TensorId x = b.activation("embedding", b.gathered_tokens(), model_.hidden);
    Op& op = b.emit(OpKind::embedding, {ids, table.value}, {x});
    op.bytes = 2.0 * b.at(x).expected_bytes(); // only the rows looked up are read
    return b.scatter_tokens(x, "embedding_local");
}

void EmbeddingLayer::backward(Builder& b, TensorId ids, TensorId dx) {
    b.layer = -1;
    b.phase = Phase::wgrad;
    b.module = Module::embedding;
    const Weight table = b.weight("embedding", model_.padded_vocab(b.plan().tp) / b.plan().tp, model_.hidden);
    const TensorId full = b.gather_tokens(dx, "dembedding");
    Op& op = b.emit(OpKind::embedding_grad, {ids, full}, {table.gradient});
    op.bytes = b.at(full).expected_bytes() +
               8.0 * static_cast<double>(b.gathered_tokens()) * static_cast<double>(model_.hidden);
}

void HeadLayer::declare(ParameterSet& set, const Plan& plan) const {
    if (!norm_name_.empty()) Norm::declare(set, key_ + ".norm", norm_name_, model_.hidden);
    const std::string weight = model_.tied_embeddings ? "embedding" : "lm_head";
    const char* name = model_.tied_embeddings ? "model.embed_tokens.weight" : "lm_head.weight";
    if (!set.has(weight))
        set.declare(weight, {vocabulary_matrix(model_, plan, name)}, plan.head_precision.has_value(), true, 1,
                    plan.head_precision);
}

TensorId HeadLayer::labels(const Builder& b) const {
    const ProgramIo& io = b.program().io;
    return depth_ == 0 ? io.labels : io.mtp_labels[static_cast<std::size_t>(depth_ - 1)];
}

TensorId HeadLayer::forward(Builder& b, TensorId x) {
    const Plan& plan = b.plan();
    const std::int64_t rows = b.gathered_tokens(), local = model_.padded_vocab(plan.tp) / plan.tp;
    b.layer = -1;
    b.phase = Phase::forward;
    b.module = Module::head;
    norm_.key = key_ + ".norm";
    const TensorId normed = norm_name_.empty() ? x : norm_.forward(b, x, model_.hidden, key_ + ".norm_out");
    head_.weight = b.weight(model_.tied_embeddings ? "embedding" : "lm_head", local, model_.hidden);
    head_.name = key_ + ".logits";
    head_.gather = plan.tp > 1;
    logits_ = linear_forward(b, head_, normed, b.activation_dtype());
    // The last `depth` positions of a sample have no label.
    const double tokens = static_cast<double>(plan.gbs) * static_cast<double>(plan.seq - depth_);
    loss_ = gradient_ = {rows, local, model_.vocab, 1.0 / tokens};
    if (depth_ > 0) gradient_.scale *= 0.1 / static_cast<double>(model_.mtp.size());
    const ProgramIo& io = b.program().io;
    const TensorId loss = depth_ == 0 ? io.loss : io.mtp_loss;
    const TensorId local_max = b.tensor(key_ + ".max_local", Dtype::f32, rows, 1);
    const TensorId local_stat = b.tensor(key_ + ".stat_local", Dtype::f32, rows, 2);
    if (at_once(plan)) {
        loss_.gradient_scale = gradient_.scale;
        b.emit(OpKind::cross_entropy, {logits_, labels(b)}, {logits_, local_max, local_stat, loss}, loss_);
        return normed;
    }
    const auto summed = [&](TensorId partial, bool max, const char* name) {
        if (plan.tp == 1) return partial;
        const TensorId whole = b.tensor(key_ + name, Dtype::f32, b.at(partial).rows, b.at(partial).cols);
        b.communicate(OpKind::all_reduce, groups::tensor, Stream::tensor, {partial}, {whole}, ReduceAttr{max});
        return whole;
    };
    b.emit(OpKind::ce_max, {logits_}, {local_max}, loss_);
    max_ = summed(local_max, true, ".max");
    b.emit(OpKind::ce_sum, {logits_, max_, labels(b)}, {local_stat}, loss_);
    stat_ = summed(local_stat, false, ".stat");
    b.emit(OpKind::ce_loss, {max_, stat_}, {loss}, loss_);
    return normed;
}

TensorId HeadLayer::backward(Builder& b, TensorId dnormed) {
    b.layer = -1;
    b.phase = Phase::dgrad;
    b.module = Module::head;
    TensorId dlogits = logits_;
    if (!at_once(b.plan())) {
        dlogits = b.activation(key_ + ".dlogits", b.at(logits_).rows, b.at(logits_).cols);
        b.emit(OpKind::ce_grad, {logits_, max_, stat_, labels(b)}, {dlogits}, gradient_);
    }
    TensorId d = linear_backward(b, head_, dlogits);
    if (dnormed != no_tensor) d = b.add(d, dnormed, key_ + ".dnormed");
    return norm_name_.empty() ? d : norm_.backward(b, d);
}

void MtpInput::declare(ParameterSet& set) const {
    const std::int64_t h = model_.hidden;
    Norm::declare(set, key_ + ".hnorm", hf_ + "hnorm.weight", h);
    Norm::declare(set, key_ + ".enorm", hf_ + "enorm.weight", h);
    // eh_proj [h, 2h], kept as its two halves: a sum of two products needs no concatenated input.
    set.declare(key_ + ".eproj", {matrix(hf_ + "eh_proj.weight.embedding", Domain::dense, h, h, -1, 0.02)}, true);
    set.declare(key_ + ".hproj", {matrix(hf_ + "eh_proj.weight.hidden", Domain::dense, h, h, -1, 0.02)}, true);
}

TensorId MtpInput::forward(Builder& b, TensorId h, TensorId embedded) {
    b.phase = Phase::forward;
    b.module = Module::mtp;
    hidden_norm_.key = key_ + ".hnorm";
    embed_norm_.key = key_ + ".enorm";
    hidden_.weight = b.weight(key_ + ".hproj", model_.hidden, model_.hidden);
    embed_.weight = b.weight(key_ + ".eproj", model_.hidden, model_.hidden);
    hidden_.name = "mtp_hidden";
    embed_.name = "mtp_embedding";
    const TensorId from_h =
        linear_forward(b, hidden_, hidden_norm_.forward(b, h, model_.hidden, "mtp_hnorm"), b.activation_dtype());
    const TensorId from_e =
        linear_forward(b, embed_, embed_norm_.forward(b, embedded, model_.hidden, "mtp_enorm"), b.activation_dtype());
    return b.add(from_h, from_e, "mtp_in");
}

std::pair<TensorId, TensorId> MtpInput::backward(Builder& b, TensorId dy) {
    b.phase = Phase::dgrad;
    b.module = Module::mtp;
    const TensorId dh = hidden_norm_.backward(b, linear_backward(b, hidden_, dy));
    const TensorId de = embed_norm_.backward(b, linear_backward(b, embed_, dy));
    return {dh, de};
}

} // namespace moe
