// What keeps the experts of a layer evenly loaded: counts, losses and their gradient, and the drop of copies beyond an
// expert's capacity.
#include "planner/lower/layers/layers.hpp"
#include "planner/plan/mesh.hpp"

#include <algorithm>
#include <cmath>

namespace moe {

namespace {

RouterIo* router_io(Builder& b, int layer) {
    for (RouterIo& io : b.program().io.routers)
        if (io.layer == layer) return &io;
    return nullptr;
}

// Ranks that share one micro-batch.
constexpr Group micro_batch_ranks{Domain::dense, axis::tensor | axis::context};

} // namespace

BalanceAttr MoeLayer::balance_attr(const Builder& b) const {
    const Plan& plan = b.plan();
    const RouterTraining& r = plan.router;
    const double all = static_cast<double>(plan.gbs) * static_cast<double>(plan.seq);
    BalanceAttr attr;
    attr.tokens = b.local_tokens();
    attr.experts = moe_.experts;
    attr.top_k = moe_.top_k;
    attr.router = moe_.router;
    attr.z = r.z_loss / all;
    if (r.aux_loss <= 0.0) return attr;
    // The loss is a mean over `parts` of tokens that are balanced among themselves.
    double parts = 1.0;
    if (r.load_balancing == LoadBalancing::sequence) {
        attr.sequences = plan.mbs;
        parts = static_cast<double>(plan.gbs);
    } else if (r.load_balancing == LoadBalancing::micro_batch) {
        parts = static_cast<double>(plan.gbs / plan.mbs);
    }
    const double tokens = all / parts;
    attr.aux = r.aux_loss * moe_.experts / (moe_.top_k * tokens * tokens) / parts;
    return attr;
}

void MoeLayer::balance(Builder& b) {
    const RouterTraining& r = b.plan().router;
    const RouterIo* io = router_io(b, layer_);
    if (io == nullptr || !r.has_loss()) return;
    const BalanceAttr attr = balance_attr(b);
    b.module = Module::router;
    if (attr.aux > 0.0) {
        TensorId load = b.tensor("score_load", Dtype::f32, attr.sequences, moe_.experts);
        b.emit(OpKind::router_load, {logits_}, {load}, attr);
        if (r.load_balancing == LoadBalancing::global) {
            b.emit(OpKind::add, {io->score_load, load}, {io->score_load});
            load = io->last_load;
        } else if (group_size(b.plan(), micro_batch_ranks) > 1) {
            const TensorId whole = b.tensor("score_load_all", Dtype::f32, attr.sequences, moe_.experts);
            b.communicate(OpKind::all_reduce, micro_batch_ranks, Stream::tensor, {load}, {whole}, ReduceAttr{false});
            load = whole;
        }
        balance_load_ = load;
    }
    b.emit(OpKind::router_loss, {logits_, balance_load_}, {io->loss}, attr);
}

TensorId MoeLayer::balance_backward(Builder& b, TensorId dlogits) {
    if (router_io(b, layer_) == nullptr || !b.plan().router.has_loss()) return dlogits;
    const TensorId sum = b.tensor("dlogits_balanced", Dtype::f32, b.local_tokens(), moe_.experts);
    b.emit(OpKind::router_loss_grad, {logits_, balance_load_, dlogits}, {sum}, balance_attr(b));
    return sum;
}

// Drops what exceeds the capacity of an expert on this rank alone: no other rank's tokens are asked for.
void MoeLayer::drop(Builder& b) {
    kept_ = index_;
    const RouterTraining& r = b.plan().router;
    if (r.expert_capacity <= 0.0) return;
    kept_ = b.tensor("expert_index_kept", Dtype::i32, b.local_tokens(), moe_.top_k);
    const TensorId weight = b.tensor("expert_weight_kept", Dtype::f32, b.local_tokens(), moe_.top_k);
    b.emit(OpKind::drop_copies, {index_, weight_}, {kept_, weight},
           DropAttr{b.local_tokens(), expert_capacity(b), moe_.experts, moe_.top_k, r.drop_policy});
    weight_ = weight;
}

std::int64_t MoeLayer::expert_capacity(const Builder& b) const {
    const double balanced = static_cast<double>(b.local_tokens()) * moe_.top_k / moe_.experts;
    return std::min(b.local_tokens(), static_cast<std::int64_t>(std::ceil(balanced * b.plan().router.expert_capacity)));
}

std::int64_t MoeLayer::padded(const Builder& b) const {
    return b.plan().router.pad_to_capacity ? expert_capacity(b) : 0;
}

std::int64_t MoeLayer::sent_rows(const Builder& b) const {
    const std::int64_t rows = padded(b);
    return rows > 0 ? rows * moe_.experts : b.local_tokens() * moe_.top_k;
}

void MoeLayer::count_load(Builder& b, TensorId counts) {
    if (RouterIo* io = router_io(b, layer_)) {
        b.emit(OpKind::add_counts, {counts}, {io->load});
        if (b.plan().router.bias_update > 0.0 && moe_.router.expert_bias) io->bias = select_bias_.value;
    }
}

} // namespace moe
