// Balancing of a layer's experts: counts, losses and their gradient, and the drop of copies beyond an expert's
// capacity.
#include "planner/lower/layers/layers.hpp"
#include "planner/plan/mesh.hpp"

#include <algorithm>
#include <cmath>

namespace moe::layers {

namespace {

program::RouterIo* router_io(emit::Builder& b, int layer) {
    for (program::RouterIo& io : b.program().io.routers)
        if (io.layer == layer) return &io;
    return nullptr;
}

// Ranks that share one micro-batch.
constexpr plan::Group micro_batch_ranks{plan::Domain::dense, plan::axis::tensor | plan::axis::context};

} // namespace

program::BalanceAttr MoeLayer::balance_attr(const emit::Builder& b) const {
    const plan::Plan& plan = b.plan();
    const plan::RouterTraining& r = plan.router;
    const double all = static_cast<double>(plan.gbs) * static_cast<double>(plan.seq);
    program::BalanceAttr attr;
    attr.tokens = b.local_tokens();
    attr.experts = moe_.experts;
    attr.top_k = moe_.top_k;
    attr.router = moe_.router;
    attr.z = r.z_loss / all;
    if (r.aux_loss <= 0.0) return attr;
    // The loss is a mean over `parts` of tokens that are balanced among themselves.
    double parts = 1.0;
    if (r.load_balancing == plan::LoadBalancing::sequence) {
        attr.sequences = plan.mbs;
        parts = static_cast<double>(plan.gbs);
    } else if (r.load_balancing == plan::LoadBalancing::micro_batch) {
        const std::int64_t micro_batches = plan.gbs / plan.mbs;
        parts = static_cast<double>(micro_batches);
    }
    const double tokens = all / parts;
    attr.aux = r.aux_loss * moe_.experts / (moe_.top_k * tokens * tokens) / parts;
    return attr;
}

void MoeLayer::balance(emit::Builder& b) {
    const plan::RouterTraining& r = b.plan().router;
    const program::RouterIo* io = router_io(b, layer_);
    if (io == nullptr || !r.has_loss() || !b.with_backward) return;
    const program::BalanceAttr attr = balance_attr(b);
    b.module = program::Module::router;
    if (attr.aux > 0.0) {
        program::TensorId load = b.tensor("score_load", program::Dtype::f32, attr.sequences, moe_.experts);
        b.emit(program::OpKind::router_load, {logits_}, {load}, attr);
        if (r.load_balancing == plan::LoadBalancing::global) {
            b.emit(program::OpKind::add, {io->score_load, load}, {io->score_load});
            load = io->last_load;
        } else if (plan::group_size(b.plan(), micro_batch_ranks) > 1) {
            const program::TensorId whole =
                b.tensor("score_load_all", program::Dtype::f32, attr.sequences, moe_.experts);
            b.communicate(program::OpKind::all_reduce, micro_batch_ranks, program::Stream::tensor, {load}, {whole},
                          program::ReduceAttr{false});
            load = whole;
        }
        balance_load_ = load;
    }
    b.emit(program::OpKind::router_loss, {logits_, balance_load_}, {io->loss}, attr);
}

program::TensorId MoeLayer::balance_backward(emit::Builder& b, program::TensorId dlogits) {
    if (router_io(b, layer_) == nullptr || !b.plan().router.has_loss()) return dlogits;
    const program::TensorId sum = b.tensor("dlogits_balanced", program::Dtype::f32, b.local_tokens(), moe_.experts);
    b.emit(program::OpKind::router_loss_grad, {logits_, balance_load_, dlogits}, {sum}, balance_attr(b));
    return sum;
}

program::TensorId MoeLayer::jittered(emit::Builder& b, program::TensorId x, const std::string& name) const {
    const double eps = b.plan().router.input_jitter;
    if (eps == 0.0 || !b.with_backward) return x;
    const program::TensorId y = b.activation(name, b.local_tokens(), model_.hidden);
    b.emit(program::OpKind::jitter, {x, b.program().io.positions, b.program().io.noise}, {y},
           program::JitterAttr{b.local_tokens(), model_.hidden, b.plan().mbs, layer_, eps})
        .bytes = b.at(x).expected_bytes() + b.at(y).expected_bytes();
    return y;
}

// Drops what exceeds the capacity of an expert on this rank alone: no other rank's tokens are asked for.
void MoeLayer::drop(emit::Builder& b) {
    kept_ = index_;
    const plan::RouterTraining& r = b.plan().router;
    if (r.expert_capacity <= 0.0) return;
    kept_ = b.tensor("expert_index_kept", program::Dtype::i32, b.local_tokens(), moe_.top_k);
    const program::TensorId weight = b.tensor("expert_weight_kept", program::Dtype::f32, b.local_tokens(), moe_.top_k);
    b.emit(program::OpKind::drop_copies, {index_, weight_}, {kept_, weight},
           program::DropAttr{b.local_tokens(), expert_capacity(b), moe_.experts, moe_.top_k, r.drop_policy});
    weight_ = weight;
}

std::int64_t MoeLayer::expert_capacity(const emit::Builder& b) const {
    const double balanced = static_cast<double>(b.local_tokens()) * moe_.top_k / moe_.experts;
    return std::min(b.local_tokens(), static_cast<std::int64_t>(std::ceil(balanced * b.plan().router.expert_capacity)));
}

std::int64_t MoeLayer::padded(const emit::Builder& b) const {
    return b.plan().router.pad_to_capacity ? expert_capacity(b) : 0;
}

std::int64_t MoeLayer::sent_rows(const emit::Builder& b) const {
    const std::int64_t rows = padded(b);
    return rows > 0 ? rows * moe_.experts : b.local_tokens() * moe_.top_k;
}

void MoeLayer::count_load(emit::Builder& b, program::TensorId counts) {
    if (program::RouterIo* io = router_io(b, layer_)) {
        b.emit(program::OpKind::add_counts, {counts}, {io->load});
        if (b.plan().router.bias_update > 0.0 && moe_.router.expert_bias) io->bias = select_bias_.value;
    }
}

} // namespace moe::layers
