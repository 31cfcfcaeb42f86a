// Balancing of a layer's experts: counts, losses and their gradient, and the drop of copies beyond an expert's
// capacity.
#include "planner/lower/layers/layers.hpp"
#include "planner/plan/mesh.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

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

// What the ranks that share this rank's sequences have for each of their tokens: in the order of the CP ranks, and
// within each of them by position.
program::TensorId MoeLayer::of_sequences(emit::Builder& b, program::TensorId x) const {
    const auto gather = [&](plan::Group group, int ranks) {
        if (ranks == 1) return;
        const program::Tensor own = b.at(x); // The copy stays valid while a tensor is added.
        const program::TensorId all = b.tensor(own.name + ".sequences", own.dtype, own.rows * ranks, own.cols);
        b.communicate(program::OpKind::all_gather, group, program::Stream::tensor, {x}, {all});
        x = all;
    };
    gather(emit::groups::tensor, b.plan().tp);
    gather(emit::groups::context, b.plan().cp);
    return x;
}

// Drops what exceeds the capacity of an expert: on this rank alone, asking for no other rank's tokens, or of whole
// sequences, over all ranks that share them.
void MoeLayer::drop(emit::Builder& b) {
    kept_ = index_;
    const plan::RouterTraining& r = b.plan().router;
    if (r.expert_capacity <= 0.0) return;
    kept_ = b.tensor("expert_index_kept", program::Dtype::i32, b.local_tokens(), moe_.top_k);
    const program::TensorId weight = b.tensor("expert_weight_kept", program::Dtype::f32, b.local_tokens(), moe_.top_k);
    program::DropAttr attr{b.local_tokens(),   b.local_tokens(), 1,          1,
                           expert_capacity(b), moe_.experts,     moe_.top_k, r.drop_policy};
    std::vector<program::TensorId> in{index_, weight_};
    if (r.drops_in_sequences()) {
        in = {of_sequences(b, index_), of_sequences(b, weight_)};
        attr.rivals = b.at(in[0]).rows;
        attr.tensor_ranks = b.plan().tp;
        attr.sequences = b.plan().mbs;
        if (b.plan().cp > 1) { // Only within one CP rank do rows stand by position.
            const program::TensorId own = b.program().io.positions;
            in.push_back(b.tensor("positions.sequences", program::Dtype::i32, b.at(own).rows * b.plan().cp, 1));
            b.communicate(program::OpKind::all_gather, emit::groups::context, program::Stream::tensor, {own},
                          {in.back()});
        }
    }
    b.emit(program::OpKind::drop_copies, in, {kept_, weight}, attr);
    weight_ = weight;
}

std::int64_t MoeLayer::expert_capacity(const emit::Builder& b) const {
    const plan::Plan& plan = b.plan();
    const std::int64_t together =
        plan.router.drops_in_sequences() ? b.local_tokens() * plan.tp * plan.cp / plan.mbs : b.local_tokens();
    const double balanced = static_cast<double>(together) * moe_.top_k / moe_.experts;
    return std::min(together, static_cast<std::int64_t>(std::ceil(balanced * plan.router.expert_capacity)));
}

std::int64_t MoeLayer::most_kept(const emit::Builder& b) const {
    const plan::Plan& plan = b.plan();
    const std::int64_t kept = expert_capacity(b);
    if (!plan.router.drops_in_sequences()) return kept * plan.ep;
    const plan::Mesh mesh(plan);
    std::int64_t most = 0;
    for (const int first : mesh.first_members(emit::groups::expert, mesh.size())) {
        std::map<int, std::int64_t> tokens; // of the members of the EP group, by the sequences that they hold
        for (const int rank : mesh.members(emit::groups::expert, first))
            tokens[mesh.coordinate(plan::Domain::dense, plan::axis::data, rank)] += b.local_tokens();
        std::int64_t rows = 0;
        for (const auto& [sequences, held] : tokens) rows += std::min(held, plan.mbs * kept);
        most = std::max(most, rows);
    }
    return most;
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
