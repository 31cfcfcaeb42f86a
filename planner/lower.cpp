// Lowering of plans to Programs: chunk by chunk, forward and backward, then the order of slots.
#include "planner/lower.hpp"

#include "planner/error.hpp"
#include "planner/layers/layers.hpp"
#include "planner/passes/data_parallel.hpp"
#include "planner/passes/delay_wgrad.hpp"
#include "planner/passes/offload.hpp"
#include "planner/passes/recompute.hpp"
#include "planner/passes/reshard.hpp"
#include "planner/passes/stash.hpp"

#include <algorithm>
#include <memory>
#include <variant>

namespace moe {

namespace {

// What one chunk holds, in execution order.
struct ChunkSpec {
    int chunk = 0, stage = 0;
    bool embedding = false, loss = false;
    std::vector<std::pair<int, int>> layers; // (global index, kind)
    std::vector<int> mtp;                    // kinds
    bool receives = false, sends = false;    // false at the model's ends and in segments
    bool mtp_before = false; // the MTP branch was computed by an earlier stage and arrives beside the trunk
};

class DecoderLayer {
public:
    DecoderLayer(const Model& model, const LayerKind& kind, const std::string& key, const std::string& hf, int index)
        : attention_(model, kind.attention, key + ".attn", hf, index) {
        if (kind.moe)
            moe_.emplace(model, kind, key + ".moe", hf, index);
        else
            mlp_.emplace(model, kind, kind.dense_ffn, false, key + ".mlp", hf, index);
    }
    void declare(ParameterSet& set, const Plan& plan) const {
        attention_.declare(set);
        if (moe_) moe_->declare(set, plan);
        if (mlp_) mlp_->declare(set);
    }
    TensorId forward(Builder& b, TensorId x) {
        x = attention_.forward(b, x);
        return moe_ ? moe_->forward(b, x) : mlp_->forward(b, x);
    }
    TensorId backward(Builder& b, TensorId dy) {
        dy = moe_ ? moe_->backward(b, dy) : mlp_->backward(b, dy);
        return attention_.backward(b, dy);
    }

private:
    AttentionLayer attention_;
    std::optional<MoeLayer> moe_;
    std::optional<MlpLayer> mlp_;
};

struct MtpLayer {
    MtpInput input;
    DecoderLayer layer;
    HeadLayer head;
};

// One chunk's emitters; they keep what backward needs between the two templates.
class Chunk {
public:
    Chunk(const Plan& plan, const ChunkSpec& spec)
        : plan_(plan), model_(*plan.model), spec_(spec), embedding_(model_), head_(model_, "head", 1.0) {
        for (const auto& [index, kind] : spec.layers)
            layers_.push_back(std::make_unique<DecoderLayer>(model_, model_.kinds[static_cast<std::size_t>(kind)],
                                                             fmt::format("layers.{}", index),
                                                             fmt::format("model.layers.{}.", index), index));
        // MTP's loss has weight 0.1 / depth (papers: DeepSeek-V3's lambda).
        const double weight = 0.1 / static_cast<double>(std::max<std::size_t>(1, model_.mtp.size()));
        for (std::size_t i = 0; i < spec.mtp.size(); ++i) {
            const int index = static_cast<int>(model_.layers.size() + i);
            const std::string key = fmt::format("mtp.{}", i), hf = fmt::format("model.layers.{}.", index);
            const LayerKind& kind = model_.kinds[static_cast<std::size_t>(spec.mtp[i])];
            mtp_.push_back(std::make_unique<MtpLayer>(
                MtpLayer{{model_, key, hf}, {model_, kind, key, hf, index}, {model_, key, weight}}));
        }
        if (spec.mtp_before) late_mtp_head_.emplace(model_, "mtp.0", weight);
    }

    void declare(ParameterSet& set) const {
        if (spec_.embedding || !spec_.mtp.empty()) embedding_.declare(set, plan_);
        for (std::size_t i = 0; i < layers_.size(); ++i) {
            set.boundary(spec_.layers[i].first);
            layers_[i]->declare(set, plan_);
        }
        set.boundary(-1);
        for (std::size_t i = 0; i < mtp_.size(); ++i) {
            mtp_[i]->input.declare(set);
            set.boundary(static_cast<int>(model_.layers.size() + i));
            mtp_[i]->layer.declare(set, plan_);
            set.boundary(-1);
            if (spec_.loss || !spec_.sends) mtp_[i]->head.declare(set, plan_);
        }
        if (spec_.loss) head_.declare(set, plan_);
        if (late_mtp_head_) late_mtp_head_->declare(set, plan_);
    }

    void forward(Builder& b) {
        TensorId x = no_tensor;
        if (spec_.receives)
            x = receive(b, "stage_in", -1, 0, spec_.stage);
        else if (spec_.embedding)
            x = embedding_.forward(b);
        else
            x = b.activation("segment_in", b.local_tokens(), model_.hidden);
        TensorId branch = spec_.mtp_before ? receive(b, "mtp_branch_in", -1, 2, spec_.stage) : no_tensor;
        for (auto& layer : layers_) x = layer->forward(b, x);
        if (spec_.loss) head_.forward(b, x);
        TensorId h = x;
        for (auto& mtp : mtp_) {
            h = mtp->layer.forward(b, mtp->input.forward(b, h, embedding_.forward(b)));
            if (heads_here()) mtp->head.forward(b, h);
        }
        if (late_mtp_head_) late_mtp_head_->forward(b, branch);
        if (!spec_.sends) return;
        send(b, x, +1, 0, spec_.stage + 1);
        if (!heads_here() && !mtp_.empty()) send(b, h, +1, 2, spec_.stage + 1);
    }

    void backward(Builder& b) {
        b.layer = -1;
        b.phase = Phase::dgrad;
        TensorId dx = no_tensor, dbranch = no_tensor;
        if (spec_.sends) {
            dx = receive(b, "stage_dout", +1, 1, spec_.stage);
            if (!heads_here() && !mtp_.empty()) dbranch = receive(b, "mtp_branch_dout", +1, 3, spec_.stage);
        }
        TensorId dlate = no_tensor;
        if (late_mtp_head_) dlate = late_mtp_head_->backward(b);
        for (std::size_t i = mtp_.size(); i-- > 0;) {
            if (heads_here()) {
                const TensorId dhead = mtp_[i]->head.backward(b);
                dbranch = dbranch == no_tensor ? dhead : b.add(dbranch, dhead, "dmtp_sum");
            }
            const TensorId din = mtp_[i]->layer.backward(b, dbranch);
            b.layer = -1;
            const auto [dh, dembedded] = mtp_[i]->input.backward(b, din);
            embedding_.backward(b, dembedded);
            dbranch = dh;
        }
        if (spec_.loss) dx = head_.backward(b);
        if (dx == no_tensor && dbranch == no_tensor) dx = b.activation("segment_dout", b.local_tokens(), model_.hidden);
        b.layer = -1;
        b.phase = Phase::dgrad;
        if (dbranch != no_tensor) dx = dx == no_tensor ? dbranch : b.add(dx, dbranch, "dtrunk");
        for (std::size_t i = layers_.size(); i-- > 0;) dx = layers_[i]->backward(b, dx);
        b.layer = -1;
        if (spec_.receives)
            send(b, dx, -1, 1, spec_.stage - 1);
        else if (spec_.embedding)
            embedding_.backward(b, dx);
        if (dlate != no_tensor) send(b, dlate, -1, 3, spec_.stage - 1);
    }

private:
    bool heads_here() const { return spec_.loss || !spec_.sends; }

    TensorId receive(Builder& b, const char* name, int delta, int tag, int stage) {
        b.layer = -1;
        b.module = Module::pipeline;
        const TensorId x = b.activation(name, b.local_tokens(), model_.hidden);
        b.communicate(OpKind::recv, groups::pipeline, Stream::pipeline_in, {}, {x}, PeerAttr{delta, tag, stage});
        return x;
    }
    void send(Builder& b, TensorId x, int delta, int tag, int stage) {
        b.layer = -1;
        b.module = Module::pipeline;
        b.communicate(OpKind::send, groups::pipeline, Stream::pipeline_out, {x}, {}, PeerAttr{delta, tag, stage});
    }

    const Plan& plan_;
    const Model& model_;
    ChunkSpec spec_;
    EmbeddingLayer embedding_;
    HeadLayer head_;
    std::vector<std::unique_ptr<DecoderLayer>> layers_;
    std::vector<std::unique_ptr<MtpLayer>> mtp_;
    std::optional<HeadLayer> late_mtp_head_;
};

ChunkSpec spec_of(const Plan& plan, const std::vector<Stage>& all, int stage) {
    const Stage& s = all[static_cast<std::size_t>(stage)];
    ChunkSpec spec;
    spec.stage = stage;
    spec.chunk = stage / plan.pp;
    spec.embedding = s.embedding;
    spec.loss = s.loss;
    for (int i = 0; i < s.layers; ++i) {
        const int layer = s.first_layer + i;
        spec.layers.emplace_back(layer, plan.model->layers[static_cast<std::size_t>(layer)]);
    }
    for (int i = 0; i < s.mtp; ++i) spec.mtp.push_back(plan.model->mtp[static_cast<std::size_t>(i)]);
    spec.receives = stage > 0;
    spec.sends = stage + 1 < static_cast<int>(all.size());
    spec.mtp_before = s.loss && s.mtp == 0 && !plan.model->mtp.empty();
    return spec;
}

TensorId add_tensor(Program& program, std::string name, Dtype dtype, Storage storage, std::int64_t rows, int chunk,
                    bool per_micro_batch) {
    Tensor t;
    t.name = std::move(name);
    t.dtype = dtype;
    t.storage = storage;
    t.rows = rows;
    t.expected_rows = static_cast<double>(rows);
    t.chunk = chunk;
    t.per_micro_batch = per_micro_batch;
    program.tensors.push_back(std::move(t));
    return static_cast<TensorId>(program.tensors.size() - 1);
}

void add_io(Program& program, const Plan& plan) {
    ProgramIo& io = program.io;
    const std::int64_t tokens = plan.tokens_gathered();
    io.ids = add_tensor(program, "ids", Dtype::i32, Storage::input, tokens, -1, true);
    io.labels = add_tensor(program, "labels", Dtype::i32, Storage::input, tokens, -1, true);
    io.positions = add_tensor(program, "positions", Dtype::i32, Storage::input, plan.seq / plan.cp, -1, false);
    io.loss = add_tensor(program, "loss", Dtype::f32, Storage::scalar, 1, -1, false);
    io.gradient_norm = add_tensor(program, "gradient_norm", Dtype::f32, Storage::scalar, 1, -1, false);
    io.hyper = add_tensor(program, "hyper", Dtype::f32, Storage::scalar, 8, -1, false);
}

struct EmittedChunk {
    int forward = 0, backward = 0;       // templates
    TensorId table_gradient = no_tensor; // of the embedding table, where the chunk holds it
};

// Forward and backward templates of a chunk, passes applied.
EmittedChunk emit_chunk(const Plan& plan, Program& program, const ChunkSpec& spec, bool list_parameters) {
    ParameterSet parameters(plan, spec.chunk);
    Chunk chunk(plan, spec);
    chunk.declare(parameters);
    parameters.seal(program, list_parameters);
    Builder builder(plan, program, parameters);
    const int forward = builder.open(SlotKind::forward, spec.chunk);
    chunk.forward(builder);
    const int backward = builder.open(SlotKind::backward, spec.chunk);
    chunk.backward(builder);
    recompute_pass(program, program.templates[static_cast<std::size_t>(forward)],
                   program.templates[static_cast<std::size_t>(backward)], plan.recompute);
    if (plan.paged_stash)
        stash_pass(program, program.templates[static_cast<std::size_t>(forward)],
                   program.templates[static_cast<std::size_t>(backward)]);
    if ((plan.offload & ~offload::optimizer) != 0)
        offload_pass(program, program.templates[static_cast<std::size_t>(forward)],
                     program.templates[static_cast<std::size_t>(backward)], plan.offload);
    if (plan.delay_wgrad) delay_wgrad_pass(program.templates[static_cast<std::size_t>(backward)]);
    if (plan.reshards())
        reshard_pass(program, program.templates[static_cast<std::size_t>(forward)],
                     program.templates[static_cast<std::size_t>(backward)]);
    TensorId table = no_tensor;
    if (parameters.has("embedding"))
        table = builder.weight("embedding", plan.model->padded_vocab(plan.tp) / plan.tp, plan.model->hidden).gradient;
    return {forward, backward, table};
}

// What opens finish on a rank that holds a copy of the embedding table: gradients go round the holders and are added up
// (Megatron-LM's embedding group).
std::vector<Op> add_tables(const Plan& plan, Program& program, TensorId gradient) {
    const std::vector<int> holders = table_holders(plan);
    const auto me = std::find(holders.begin(), holders.end(), program.pipeline_rank);
    std::vector<Op> ops;
    if (holders.size() < 2 || me == holders.end() || gradient == no_tensor) return ops;
    const Tensor table = program.tensors[static_cast<std::size_t>(gradient)];
    const double bytes = table.expected_bytes();
    const int n = static_cast<int>(holders.size()), index = static_cast<int>(me - holders.begin());
    const int next = holders[static_cast<std::size_t>((index + 1) % n)],
              previous = holders[static_cast<std::size_t>((index + n - 1) % n)];
    const auto emit = [&](OpKind kind, Stream stream, std::vector<TensorId> in, std::vector<TensorId> out,
                          double moved) -> Op& {
        Op op;
        op.kind = kind;
        op.stream = stream;
        op.module = Module::embedding;
        op.phase = Phase::step;
        op.in = std::move(in);
        op.out = std::move(out);
        op.bytes = moved;
        ops.push_back(std::move(op));
        return ops.back();
    };
    TensorId travelling = gradient;
    for (int step = 0; step + 1 < n; ++step) {
        Tensor arrival = table;
        arrival.name = "embedding.gradient_of_peer";
        arrival.storage = Storage::activation;
        arrival.base = no_tensor;
        arrival.offset = 0;
        arrival.chunk = -1;
        program.tensors.push_back(std::move(arrival));
        const auto received = static_cast<TensorId>(program.tensors.size() - 1);
        Op& out = emit(OpKind::send, Stream::pipeline_out, {travelling}, {}, bytes);
        out.group = groups::pipeline;
        out.attr = PeerAttr{next - program.pipeline_rank, 4 + step, next};
        Op& in = emit(OpKind::recv, Stream::pipeline_in, {}, {received}, bytes);
        in.group = groups::pipeline;
        in.attr = PeerAttr{previous - program.pipeline_rank, 4 + step, program.pipeline_rank};
        emit(OpKind::add, Stream::compute, {gradient, received}, {gradient}, 3.0 * bytes);
        travelling = received;
    }
    return ops;
}

} // namespace

Program lower(const Plan& plan, int pipeline_rank) {
    // Both ends would hold a copy of the table and have to add their gradients.
    if (plan.model->tied_embeddings && plan.pp > 1 && plan.stack == "moe-plan")
        refuse(
            "tie_word_embeddings: true with pp {}: the stack 'moe-plan' keeps tied embeddings on one stage; use pp 1",
            plan.pp);
    Program program;
    program.pipeline_rank = pipeline_rank;
    program.merged = plan.ep_overlap;
    add_io(program, plan);
    const std::vector<Stage> all = stages(plan);
    struct Indices {
        int forward, backward, last_backward;
    };
    std::vector<Indices> chunks;
    TensorId table = no_tensor;
    for (int c = 0; c < plan.vpp; ++c) {
        const int stage = c * plan.pp + pipeline_rank;
        ChunkSpec spec = spec_of(plan, all, stage);
        program.chunks.push_back(all[static_cast<std::size_t>(stage)]);
        const auto [forward, backward, gradient] = emit_chunk(plan, program, spec, true);
        if (gradient != no_tensor) table = gradient;
        Template last = with_gradient_reduction(program, program.templates[static_cast<std::size_t>(backward)]);
        program.templates.push_back(std::move(last));
        chunks.push_back({forward, backward, static_cast<int>(program.templates.size()) - 1});
    }
    program.templates.push_back(begin_template(program));
    const int begin = static_cast<int>(program.templates.size()) - 1;
    program.templates.push_back(finish_template(program, plan));
    const std::vector<Op> tables = add_tables(plan, program, table);
    std::vector<Op>& closing = program.templates.back().ops;
    closing.insert(closing.begin(), tables.begin(), tables.end());
    const int finish = begin + 1;

    const std::vector<Turn> turns =
        order(plan.schedule, plan.pp, plan.vpp, plan.micro_batches(), pipeline_rank, plan.ep_overlap);
    program.in_flight = in_flight(turns, plan.vpp);
    program.slots.reserve(turns.size() + 2);
    program.slots.push_back({begin, 0});
    std::vector<int> backwards_left(static_cast<std::size_t>(plan.vpp), plan.micro_batches());
    for (const Turn& turn : turns) {
        const Indices& c = chunks[static_cast<std::size_t>(turn.chunk)];
        const bool last = !turn.forward && --backwards_left[static_cast<std::size_t>(turn.chunk)] == 0;
        program.slots.push_back({turn.forward ? c.forward : last ? c.last_backward : c.backward, turn.micro_batch});
    }
    program.slots.push_back({finish, 0});
    return program;
}

Program lower_segment(const Plan& plan, SegmentKind segment, int layer_kind) {
    Program program;
    add_io(program, plan);
    ChunkSpec spec;
    switch (segment) {
    case SegmentKind::embedding:
        spec.embedding = true;
        break;
    case SegmentKind::layer:
        spec.layers.emplace_back(0, layer_kind);
        break;
    case SegmentKind::mtp:
        spec.mtp.push_back(layer_kind);
        break;
    case SegmentKind::head:
        spec.loss = true;
        break;
    }
    program.in_flight = {1};
    program.chunks = {Stage{}};
    emit_chunk(plan, program, spec, false);
    return program;
}

std::vector<int> table_holders(const Plan& plan) {
    std::vector<int> ranks;
    if (plan.pp == 1) return {0};
    const std::vector<Stage> all = stages(plan);
    for (std::size_t s = 0; s < all.size(); ++s)
        if (all[s].embedding || all[s].mtp > 0 || (all[s].loss && plan.model->tied_embeddings))
            ranks.push_back(static_cast<int>(s) % plan.pp);
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
}

std::vector<BucketSize> bucket_sizes(const Plan& plan, const Stage& stage) {
    ChunkSpec spec;
    spec.embedding = stage.embedding;
    spec.loss = stage.loss;
    for (int i = 0; i < stage.layers; ++i)
        spec.layers.emplace_back(stage.first_layer + i,
                                 plan.model->layers[static_cast<std::size_t>(stage.first_layer + i)]);
    for (int i = 0; i < stage.mtp; ++i) spec.mtp.push_back(plan.model->mtp[static_cast<std::size_t>(i)]);
    spec.sends = !stage.loss;
    spec.mtp_before = stage.loss && stage.mtp == 0 && !plan.model->mtp.empty();
    ParameterSet parameters(plan, 0);
    Chunk(plan, spec).declare(parameters);
    Program program;
    parameters.seal(program, false);
    std::vector<BucketSize> sizes;
    for (const Bucket& b : program.buckets) {
        const TensorId weights = b.resharded() ? b.gathered : b.weights;
        sizes.push_back({b.domain, b.elements, b.group, b.group_size,
                         program.tensors[static_cast<std::size_t>(weights)].dtype, b.layer});
    }
    return sizes;
}

} // namespace moe
