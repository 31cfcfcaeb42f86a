// Emits a chunk stage by stage: messages or embedding, decoder layers, MTP, loss, and all of it in reverse.
#include "planner/lower/chunk.hpp"

#include "planner/base/error.hpp"
#include "planner/plan/stack_traits.hpp"

#include <utility>

namespace moe::lower {

class DecoderLayer {
public:
    DecoderLayer(const model::Model& model, const model::LayerKind& kind, const std::string& key, const std::string& hf,
                 int index)
        : bf16_(kind.bf16),
          parallel_(kind.parallel),
          scales_(kind.output_scale),
          index_(index),
          key_(key + ".output_scale"),
          name_(hf + "layer_scalar") {
        if (kind.attention.kind != model::AttentionKind::none)
            attention_.emplace(model, kind.attention, key + ".attn", hf, index);
        if (kind.moe) moe_.emplace(model, kind, key + ".moe", hf, index);
        if (kind.dense()) mlp_.emplace(model, kind, kind.dense_ffn, false, key + ".mlp", hf, index);
    }
    void declare(emit::ParameterSet& set, const plan::Plan& plan) const {
        set.keep_bf16(bf16_);
        if (attention_) attention_->declare(set);
        if (moe_) moe_->declare(set, plan);
        if (mlp_) mlp_->declare(set);
        // It gets no gradient, so the optimizer leaves it alone.
        if (scales_) set.declare(key_, {layers::norm_weight(name_, 1)}, false, false);
        set.keep_bf16(false);
    }
    // keys: the keys that the last indexer has picked.
    program::TensorId forward(emit::Builder& b, program::TensorId x, program::TensorId& keys) {
        b.bf16 = bf16_;
        if (attention_) x = attention_->forward(b, x, keys);
        const program::TensorId given = parallel_ ? attention_->normed() : program::no_tensor;
        if (moe_) x = moe_->forward(b, x, given);
        if (mlp_) x = mlp_->forward(b, x, given);
        x = scaled(b, x, "layer_scaled");
        b.bf16 = false;
        return x;
    }
    program::TensorId backward(emit::Builder& b, program::TensorId dy) {
        b.bf16 = bf16_;
        b.phase = program::Phase::dgrad;
        dy = scaled(b, dy, "dlayer_scaled");
        if (parallel_) {
            const program::TensorId dnormed = mlp_ ? mlp_->backward(b, dy) : moe_->backward(b, dy);
            b.phase = program::Phase::dgrad;
            dy = attention_->backward(b, dy, dnormed);
        } else {
            if (mlp_) dy = mlp_->backward(b, dy);
            if (moe_) dy = moe_->backward(b, dy);
            if (attention_) dy = attention_->backward(b, dy);
        }
        b.bf16 = false;
        return dy;
    }

private:
    program::TensorId scaled(emit::Builder& b, program::TensorId x, const char* name) const {
        if (!scales_) return x;
        b.layer = index_;
        b.module = program::Module::residual;
        const program::TensorId y = b.activation(name, b.at(x).rows, b.at(x).cols);
        b.emit(program::OpKind::scale, {x, b.weight(key_, 1, 1).value}, {y}, program::ScaleAttr{});
        return y;
    }

    bool bf16_, parallel_, scales_;
    int index_;
    std::string key_, name_;
    std::optional<layers::AttentionLayer> attention_;
    std::optional<layers::MoeLayer> moe_;
    std::optional<layers::MlpLayer> mlp_;
};

struct MtpLayer {
    layers::MtpInput input;
    DecoderLayer layer;
    layers::HeadLayer head;
};

namespace {

std::string branch_name(const char* end, int depth) {
    return fmt::format("mtp_branch{}_{}", depth == 0 ? "" : std::to_string(depth), end);
}

} // namespace

Chunk::Chunk(const plan::Plan& plan, const ChunkSpec& spec)
    : plan_(plan),
      model_(*plan.model),
      spec_(spec),
      embedding_(model_),
      head_(model_, "head",
            spec.branches > 0 && plan::stack_traits(plan).final_norm_with_mtp ? "" : "model.norm.weight", 0) {
    for (const auto& [index, kind] : spec.layers)
        layers_.push_back(std::make_unique<DecoderLayer>(model_, model_.kinds[static_cast<std::size_t>(kind)],
                                                         fmt::format("layers.{}", index),
                                                         fmt::format("model.layers.{}.", index), index));
    for (std::size_t i = 0; i < spec.mtp.size(); ++i) {
        const int index = static_cast<int>(model_.layers.size() + i);
        const std::string key = fmt::format("mtp.{}", i), hf = fmt::format("model.layers.{}.", index);
        const model::LayerKind& kind = model_.kinds[static_cast<std::size_t>(spec.mtp[i])];
        mtp_.push_back(std::make_unique<MtpLayer>(
            MtpLayer{{model_, key, hf},
                     {model_, kind, key, hf, index},
                     {model_, key, hf + "shared_head.norm.weight", static_cast<int>(i) + 1}}));
    }
    for (int i = 0; spec_.loss && i < spec_.branches; ++i)
        late_heads_.emplace_back(
            model_, fmt::format("mtp.{}", i),
            fmt::format("model.layers.{}.shared_head.norm.weight", model_.layers.size() + static_cast<std::size_t>(i)),
            i + 1);
}

Chunk::~Chunk() = default;

void Chunk::declare(emit::ParameterSet& set) const {
    if (spec_.embedding || !spec_.mtp.empty()) embedding_.declare(set, plan_);
    for (std::size_t i = 0; i < layers_.size(); ++i) {
        set.boundary(spec_.layers[i].first);
        layers_[i]->declare(set, plan_);
    }
    set.boundary(-1);
    if (norm_with_mtp()) layers::Norm::declare(set, model_, "head.norm", "model.norm.weight", model_.hidden);
    for (std::size_t i = 0; i < mtp_.size(); ++i) {
        mtp_[i]->input.declare(set);
        set.boundary(static_cast<int>(model_.layers.size() + i));
        mtp_[i]->layer.declare(set, plan_);
        set.boundary(-1);
        if (!spec_.heads_behind) mtp_[i]->head.declare(set, plan_);
    }
    if (spec_.loss) head_.declare(set, plan_);
    for (const layers::HeadLayer& head : late_heads_) head.declare(set, plan_);
}

void Chunk::forward(emit::Builder& b) {
    program::TensorId x = program::no_tensor;
    if (spec_.receives)
        x = receive(b, "stage_in", spec_.previous, 0, spec_.stage);
    else if (spec_.embedding)
        x = embedding_.forward(b, b.program().io.ids);
    else
        x = b.program().io.segment_in = b.activation("segment_in", b.local_tokens(), model_.hidden);
    branches_.clear();
    for (int i = 0; i < spec_.branches; ++i)
        branches_.push_back(spec_.receives ? receive(b, branch_name("in", i), spec_.previous, 2 + 2 * i, spec_.stage)
                                           : b.activation(branch_name("in", i), b.local_tokens(), model_.hidden));
    program::TensorId keys = program::no_tensor;
    for (auto& layer : layers_) x = layer->forward(b, x, keys);
    if (norm_with_mtp()) {
        b.layer = -1;
        b.module = program::Module::head;
        final_norm_.key = "head.norm";
        x = final_norm_.forward(b, x, model_.hidden, "head.norm_out");
    }
    const program::TensorId normed = spec_.loss ? head_.forward(b, x) : x;
    if (b.cached_keys > 0) return;
    forward_mtp(b, normed);
    for (std::size_t i = 0; i < late_heads_.size(); ++i) late_heads_[i].forward(b, branches_[i]);
    if (!spec_.sends) return;
    send(b, x, spec_.next, 0, spec_.stage + 1);
    for (std::size_t i = 0; i < branches_.size(); ++i)
        send(b, branches_[i], spec_.next, 2 + 2 * static_cast<int>(i), spec_.stage + 1);
}

void Chunk::forward_mtp(emit::Builder& b, program::TensorId h) {
    for (std::size_t i = 0; i < mtp_.size(); ++i) {
        MtpLayer& mtp = *mtp_[i];
        program::TensorId keys = program::no_tensor;
        h = mtp.layer.forward(b, mtp.input.forward(b, h, embedding_.forward(b, mtp_ids(b, i))), keys);
        if (spec_.heads_behind)
            branches_.push_back(h);
        else
            mtp.head.forward(b, h);
    }
}

program::TensorId Chunk::segment_dout(emit::Builder& b) const {
    return b.program().io.segment_dout = b.activation("segment_dout", b.local_tokens(), model_.hidden);
}

void Chunk::backward(emit::Builder& b) {
    b.layer = -1;
    b.phase = program::Phase::dgrad;
    program::TensorId dx = program::no_tensor;
    const std::size_t passing = spec_.loss ? 0 : branches_.size();
    if (spec_.sends) {
        dx = receive(b, "stage_dout", spec_.next, 1, spec_.stage);
        for (std::size_t i = 0; i < passing; ++i) {
            const int depth = static_cast<int>(i);
            branches_[i] = receive(b, branch_name("dout", depth), spec_.next, 3 + 2 * depth, spec_.stage);
        }
    } else if (passing > 0) { // MTP alone, as a segment
        dx = segment_dout(b);
        for (std::size_t i = 0; i < passing; ++i)
            branches_[i] = b.activation(branch_name("dout", static_cast<int>(i)), b.local_tokens(), model_.hidden);
    }
    for (std::size_t i = 0; i < late_heads_.size(); ++i) branches_[i] = late_heads_[i].backward(b);
    program::TensorId dbranch = backward_mtp(b);
    if (spec_.beside_mtp) dbranch = segment_dout(b);
    if (spec_.loss) dx = head_.backward(b, std::exchange(dbranch, program::no_tensor));
    if (dx == program::no_tensor && dbranch == program::no_tensor) dx = segment_dout(b);
    b.layer = -1;
    b.phase = program::Phase::dgrad;
    if (dbranch != program::no_tensor) dx = dx == program::no_tensor ? dbranch : b.add(dx, dbranch, "dtrunk");
    if (norm_with_mtp()) {
        b.module = program::Module::head;
        dx = final_norm_.backward(b, dx);
    }
    for (std::size_t i = layers_.size(); i-- > 0;) dx = layers_[i]->backward(b, dx);
    b.layer = -1;
    if (spec_.receives)
        send(b, dx, spec_.previous, 1, spec_.stage - 1);
    else if (spec_.embedding)
        embedding_.backward(b, b.program().io.ids, dx);
    for (int i = 0; spec_.receives && i < spec_.branches; ++i)
        send(b, branches_[static_cast<std::size_t>(i)], spec_.previous, 3 + 2 * i, spec_.stage - 1);
}

program::TensorId Chunk::backward_mtp(emit::Builder& b) {
    program::TensorId dbranch = program::no_tensor;
    for (std::size_t i = mtp_.size(); i-- > 0;) {
        const program::TensorId dhead = spec_.heads_behind ? branches_[i] : mtp_[i]->head.backward(b);
        dbranch = dbranch == program::no_tensor ? dhead : b.add(dbranch, dhead, "dmtp_sum");
        const program::TensorId din = mtp_[i]->layer.backward(b, dbranch);
        b.layer = -1;
        const auto [dh, dembedded] = mtp_[i]->input.backward(b, din);
        embedding_.backward(b, mtp_ids(b, i), dembedded);
        dbranch = dh;
    }
    return dbranch;
}

// The token after the one that depth i predicts from, which the depth before has as its label.
program::TensorId Chunk::mtp_ids(const emit::Builder& b, std::size_t i) {
    const program::ProgramIo& io = b.program().io;
    return i == 0 ? io.labels : io.mtp_labels[i - 1];
}

program::TensorId Chunk::receive(emit::Builder& b, const std::string& name, int delta, int tag, int stage) {
    b.layer = -1;
    b.module = program::Module::pipeline;
    const program::TensorId x = b.activation(name, b.local_tokens(), model_.hidden);
    b.communicate(program::OpKind::recv, emit::groups::pipeline, program::Stream::pipeline_in, {}, {x},
                  program::PeerAttr{delta, tag, stage});
    return x;
}

void Chunk::send(emit::Builder& b, program::TensorId x, int delta, int tag, int stage) {
    b.layer = -1;
    b.module = program::Module::pipeline;
    b.communicate(program::OpKind::send, emit::groups::pipeline, program::Stream::pipeline_out, {x}, {},
                  program::PeerAttr{delta, tag, stage});
}

ChunkSpec spec_of(const plan::Plan& plan, const std::vector<plan::Stage>& all, int stage) {
    const plan::Stage& s = all[static_cast<std::size_t>(stage)];
    ChunkSpec spec;
    spec.stage = stage;
    spec.chunk = stage / plan.pp; // This holds in a V as well: the way back is the second chunk.
    spec.embedding = s.embedding;
    spec.loss = s.loss;
    for (int i = 0; i < s.layers; ++i) {
        const int layer = s.first_layer + i;
        spec.layers.emplace_back(layer, plan.model->layers[static_cast<std::size_t>(layer)]);
    }
    for (int i = 0; i < s.mtp; ++i) spec.mtp.push_back(plan.model->mtp[static_cast<std::size_t>(i)]);
    const int rank = plan::rank_of_stage(plan.schedule, plan.pp, stage);
    if (plan::in_a_v(plan.schedule)) {
        spec.previous = plan::rank_of_stage(plan.schedule, plan.pp, stage - 1) - rank;
        spec.next = plan::rank_of_stage(plan.schedule, plan.pp, stage + 1) - rank;
    }
    spec.receives = stage > 0;
    spec.sends = stage + 1 < static_cast<int>(all.size());
    spec.heads_behind = !s.loss;
    for (int before = 0; before < stage; ++before) spec.branches += all[static_cast<std::size_t>(before)].mtp;
    return spec;
}

} // namespace moe::lower
