// Lowering of plans to Programs: chunk by chunk, forward and backward, then the order of slots.
#include "planner/lower/lower.hpp"

#include "planner/base/error.hpp"
#include "planner/lower/chunk.hpp"
#include "planner/lower/passes/data_parallel.hpp"
#include "planner/lower/passes/delay_wgrad.hpp"
#include "planner/lower/passes/first_gradients.hpp"
#include "planner/lower/passes/merge.hpp"
#include "planner/lower/passes/offload.hpp"
#include "planner/lower/passes/recompute.hpp"
#include "planner/lower/passes/reshard.hpp"
#include "planner/lower/passes/split_backward.hpp"
#include "planner/lower/passes/stash.hpp"
#include "planner/plan/overflow_retry.hpp"
#include "planner/plan/stack_traits.hpp"

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <variant>

namespace moe {

namespace {

void add_io(Program& program, const Plan& plan) {
    ProgramIo& io = program.io;
    const std::int64_t tokens = plan.tokens_gathered();
    io.ids = add_flat(program, "ids", Dtype::i32, Storage::input, tokens);
    io.labels = add_flat(program, "labels", Dtype::i32, Storage::input, tokens);
    io.positions = add_flat(program, "positions", Dtype::i32, Storage::input, plan.seq / plan.cp);
    program.tensors[static_cast<std::size_t>(io.positions)].per_micro_batch = false;
    for (std::size_t d = 0; d < plan.model->mtp.size(); ++d)
        io.mtp_labels.push_back(
            add_flat(program, fmt::format("mtp_labels{}", d + 1), Dtype::i32, Storage::input, tokens));
    if (!io.mtp_labels.empty()) io.mtp_loss = add_flat(program, "mtp_loss", Dtype::f32, Storage::scalar, 1);
    io.loss = add_flat(program, "loss", Dtype::f32, Storage::scalar, 1);
    io.gradient_norm = add_flat(program, "gradient_norm", Dtype::f32, Storage::scalar, 1);
    io.step_sums = io.gradient_norm;
    if (may_overflow(plan)) {
        io.overflow = add_flat(program, "overflow", Dtype::f32, Storage::scalar, 1);
        io.step_sums = add_flat(program, "step_sums", Dtype::f32, Storage::scalar, 2);
        for (const TensorId id : {io.gradient_norm, io.overflow}) {
            program.tensors[static_cast<std::size_t>(id)].base = io.step_sums;
            program.tensors[static_cast<std::size_t>(id)].offset = id == io.overflow ? 1 : 0;
        }
    }
    io.hyper = add_flat(program, "hyper", Dtype::f32, Storage::scalar, 8);
}

// MoE layers of a chunk by their global index, those of MTP behind the model's.
std::vector<std::pair<int, int>> expert_layers(const Plan& plan, const ChunkSpec& spec) {
    std::vector<std::pair<int, int>> list; // (layer, experts)
    const auto add = [&](int layer, int kind) {
        if (const std::optional<Moe>& moe = plan.model->kinds[static_cast<std::size_t>(kind)].moe)
            list.emplace_back(layer, moe->experts);
    };
    for (const auto& [layer, kind] : spec.layers) add(layer, kind);
    for (std::size_t i = 0; i < spec.mtp.size(); ++i) add(static_cast<int>(plan.model->layers.size() + i), spec.mtp[i]);
    return list;
}

// Loads and losses of all routers of a rank, views of one tensor that is summed over the ranks at once.
void add_routers(Program& program, const Plan& plan, const std::vector<ChunkSpec>& specs) {
    const RouterTraining& r = plan.router;
    if (!r.counts_load()) return;
    const bool global = r.aux_loss > 0.0 && r.load_balancing == LoadBalancing::global;
    std::int64_t elements = 0;
    std::vector<std::pair<TensorId, std::int64_t>> views;
    const auto view = [&](const char* name, int layer, std::int64_t rows) {
        const TensorId id =
            add_flat(program, fmt::format("layer{}.{}", layer, name), Dtype::f32, Storage::scalar, rows);
        views.emplace_back(id, elements);
        elements += rows;
        return id;
    };
    for (const ChunkSpec& spec : specs)
        for (const auto& [layer, experts] : expert_layers(plan, spec)) {
            RouterIo io;
            io.layer = layer;
            io.experts = experts;
            io.load = view("router_load", layer, experts);
            io.loss = view("router_loss", layer, 2);
            if (global) {
                io.score_load = view("router_score_load", layer, experts);
                io.last_load =
                    add_flat(program, fmt::format("layer{}.last_load", layer), Dtype::f32, Storage::input, experts);
                program.tensors[static_cast<std::size_t>(io.last_load)].per_micro_batch = false;
            }
            program.io.routers.push_back(io);
        }
    if (elements == 0) return;
    program.io.router_sums = add_flat(program, "router_sums", Dtype::f32, Storage::scalar, elements);
    for (const auto& [id, offset] : views) {
        program.tensors[static_cast<std::size_t>(id)].base = program.io.router_sums;
        program.tensors[static_cast<std::size_t>(id)].offset = offset;
    }
}

// How the slots of a chunk run its backward: whole, in two halves, or some so and some so.
struct Backwards {
    bool whole = true, split = false;
};

struct EmittedChunk {
    int forward = -1, backward = -1, dgrad = -1, wgrad = -1; // templates
    TensorId table_gradient = no_tensor;                     // of the embedding table, where the chunk holds it
};

// Puts the halves of a chunk's backward beside it, or in its place where it is not run whole.
void emit_halves(Program& program, EmittedChunk& chunk, bool keep_whole) {
    SplitBackward split = split_backward(program, program.templates[static_cast<std::size_t>(chunk.forward)],
                                         program.templates[static_cast<std::size_t>(chunk.backward)], keep_whole);
    if (keep_whole) {
        chunk.dgrad = static_cast<int>(program.templates.size());
        program.templates.push_back(std::move(split.dgrad));
    } else {
        chunk.dgrad = std::exchange(chunk.backward, -1);
        program.templates[static_cast<std::size_t>(chunk.dgrad)] = std::move(split.dgrad);
    }
    chunk.wgrad = static_cast<int>(program.templates.size());
    program.templates.push_back(std::move(split.wgrad));
}

// Templates of a chunk, passes applied.
EmittedChunk emit_chunk(const Plan& plan, Program& program, const ChunkSpec& spec, ParameterSet& parameters,
                        Backwards backwards, bool list_parameters) {
    Chunk chunk(plan, spec);
    chunk.declare(parameters);
    parameters.seal(program, list_parameters);
    Builder builder(plan, program, parameters);
    const int forward = builder.open(SlotKind::forward, spec.chunk);
    chunk.forward(builder);
    const int backward = builder.open(SlotKind::backward, spec.chunk);
    chunk.backward(builder);
    recompute_pass(program, program.templates[static_cast<std::size_t>(forward)],
                   program.templates[static_cast<std::size_t>(backward)], plan.recompute,
                   stack_traits(plan).recompute_keeps_core);
    if (plan.paged_stash)
        stash_pass(program, program.templates[static_cast<std::size_t>(forward)],
                   program.templates[static_cast<std::size_t>(backward)]);
    if ((plan.offload & ~offload::optimizer) != 0)
        offload_pass(program, program.templates[static_cast<std::size_t>(forward)],
                     program.templates[static_cast<std::size_t>(backward)], plan.offload,
                     stack_traits(plan).offloads_planned_rows ? our_offload : megatron_offload);
    if (plan.delay_wgrad) delay_wgrad_pass(program.templates[static_cast<std::size_t>(backward)]);
    if (plan.reshards())
        reshard_pass(program, program.templates[static_cast<std::size_t>(forward)],
                     program.templates[static_cast<std::size_t>(backward)]);
    EmittedChunk emitted{forward, backward, -1, -1, no_tensor};
    if (backwards.split) emit_halves(program, emitted, backwards.whole);
    if (parameters.has("embedding"))
        emitted.table_gradient =
            builder.weight("embedding", plan.model->padded_vocab(plan.tp) / plan.tp, plan.model->hidden).gradient;
    return emitted;
}

// What opens finish on a rank that holds a copy of the embedding table: gradients go round the holders and are added up
// in the order of holders, so that all copies stay the same bits.
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
    const int tag = first_table_tag(*plan.model);
    TensorId travelling = gradient;
    std::vector<TensorId> values(holders.size(), gradient); // by holder
    for (int step = 0; step + 1 < n; ++step) {
        Tensor arrival = table;
        arrival.name = "embedding.gradient_of_peer";
        arrival.storage = Storage::activation;
        arrival.base = no_tensor;
        arrival.offset = 0;
        arrival.shard_group = {};
        arrival.chunk = -1;
        program.tensors.push_back(std::move(arrival));
        const auto received = static_cast<TensorId>(program.tensors.size() - 1);
        Op& out = emit(OpKind::send, Stream::pipeline_out, {travelling}, {}, bytes);
        out.group = groups::pipeline;
        out.attr = PeerAttr{next - program.pipeline_rank, tag + step, next};
        Op& in = emit(OpKind::recv, Stream::pipeline_in, {}, {received}, bytes);
        in.group = groups::pipeline;
        in.attr = PeerAttr{previous - program.pipeline_rank, tag + step, program.pipeline_rank};
        values[static_cast<std::size_t>((index + n - 1 - step) % n)] = received;
        travelling = received;
    }
    TensorId sum = values.front();
    for (std::size_t k = 1; k < values.size(); ++k) {
        const TensorId arrival = sum == gradient ? values[k] : sum, out = k + 1 == values.size() ? gradient : arrival;
        emit(OpKind::add, Stream::compute, {sum, values[k]}, {out}, 3.0 * bytes);
        sum = out;
    }
    return ops;
}

} // namespace

namespace {

Backwards backwards_of(const std::vector<Turn>& turns, int chunk) {
    Backwards result{false, false};
    for (const Turn& turn : turns) {
        if (turn.chunk != chunk) continue;
        result.whole = result.whole || turn.kind == SlotKind::backward;
        result.split = result.split || turn.kind == SlotKind::dgrad;
    }
    return result;
}

int template_of(const EmittedChunk& chunk, SlotKind kind) {
    switch (kind) {
    case SlotKind::forward:
        return chunk.forward;
    case SlotKind::dgrad:
        return chunk.dgrad;
    case SlotKind::wgrad:
        return chunk.wgrad;
    default:
        return chunk.backward;
    }
}

// The slots of a rank between begin and finish; the first of each chunk that adds to gradients sets what it can, the
// last also reduces them.
void add_slots(Program& program, const Plan& plan, const std::vector<EmittedChunk>& chunks,
               const std::vector<Turn>& turns, FirstGradients* first) {
    std::vector<std::size_t> last(chunks.size(), 0);
    std::set<int> seen;
    for (std::size_t i = 0; i < turns.size(); ++i)
        if (turns[i].last()) last[static_cast<std::size_t>(turns[i].chunk)] = i;
    const std::size_t begin = program.slots.size();
    for (std::size_t i = 0; i < turns.size(); ++i) {
        const auto c = static_cast<std::size_t>(turns[i].chunk);
        int index = template_of(chunks[c], turns[i].kind);
        std::optional<Template> own; // of this slot alone
        const Template& usual = program.templates[static_cast<std::size_t>(index)];
        if (first != nullptr && seen.insert(index).second) own = first->next(usual);
        if (i == last[c]) own = with_gradient_reduction(program, plan, own ? *own : usual);
        if (own) {
            program.templates.push_back(std::move(*own));
            index = static_cast<int>(program.templates.size()) - 1;
        }
        program.slots.push_back({index, turns[i].micro_batch});
    }
    for (std::size_t i = 0; i < turns.size(); ++i)
        if (turns[i].merged) {
            Slot& slot = program.slots[begin + i];
            slot.merge = merge_templates(program, slot.index, program.slots[begin + i + 1].index);
        }
}

} // namespace

Program lower(const Plan& plan, int pipeline_rank) {
    Program program;
    program.pipeline_rank = pipeline_rank;
    add_io(program, plan);
    const std::vector<Stage> all = stages(plan);
    const std::vector<Turn> turns =
        order(plan.schedule, plan.pp, plan.vpp, plan.micro_batches(), pipeline_rank, plan.ep_overlap);
    std::vector<std::unique_ptr<ParameterSet>> parameters;
    std::vector<EmittedChunk> chunks;
    TensorId table = no_tensor;
    std::vector<ChunkSpec> specs;
    for (int c = 0; c < plan.vpp; ++c)
        specs.push_back(spec_of(plan, all, stage_of(plan.schedule, plan.pp, pipeline_rank, c)));
    add_routers(program, plan, specs);
    for (int c = 0; c < plan.vpp; ++c) {
        const ChunkSpec& spec = specs[static_cast<std::size_t>(c)];
        program.chunks.push_back(all[static_cast<std::size_t>(spec.stage)]);
        parameters.push_back(
            std::make_unique<ParameterSet>(plan, c, parameters.empty() ? nullptr : parameters.back().get()));
        chunks.push_back(emit_chunk(plan, program, spec, *parameters.back(), backwards_of(turns, c), true));
        if (chunks.back().table_gradient != no_tensor) table = chunks.back().table_gradient;
    }
    program.in_flight = in_flight(turns, plan.vpp);
    program.slots.reserve(turns.size() + 2);
    program.templates.emplace_back(); // begin, once it is known what is to be zeroed
    program.slots.push_back({static_cast<int>(program.templates.size()) - 1, 0});
    FirstGradients first(program);
    add_slots(program, plan, chunks, turns, sets_first_gradients(plan) ? &first : nullptr);
    program.templates[static_cast<std::size_t>(program.slots.front().index)] = begin_template(program, plan, first);
    program.templates.push_back(finish_template(program, plan));
    program.slots.push_back({static_cast<int>(program.templates.size()) - 1, 0});
    if (table != no_tensor && shares_table(plan))
        for (const Bucket& b : program.buckets)
            if (b.gradients == program.tensors[static_cast<std::size_t>(table)].base) table = b.gradient_shard;
    const std::vector<Op> tables = add_tables(plan, program, table);
    std::vector<Op>& closing = program.templates.back().ops;
    closing.insert(closing.begin(), tables.begin(), tables.end());
    return program;
}

Program lower_segment(const Plan& plan, SegmentKind segment, int layer_kind) {
    Program program;
    program.tensors.reserve(192); // searches lower many segments, and growing moves every tensor
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
    case SegmentKind::mtp_body:
        spec.mtp.push_back(layer_kind);
        spec.heads_behind = segment == SegmentKind::mtp_body;
        break;
    case SegmentKind::all_heads:
        spec.branches = static_cast<int>(plan.model->mtp.size());
        spec.loss = true;
        break;
    case SegmentKind::head:
        spec.loss = true;
        break;
    }
    add_routers(program, plan, {spec});
    program.in_flight = {1};
    program.chunks = {Stage{}};
    ParameterSet parameters(plan, 0);
    emit_chunk(plan, program, spec, parameters, {}, false);
    return program;
}

std::vector<BucketSize> bucket_sizes(const Plan& plan, const Stage& stage) {
    ChunkSpec spec;
    spec.embedding = stage.embedding;
    spec.loss = stage.loss;
    for (int i = 0; i < stage.layers; ++i)
        spec.layers.emplace_back(stage.first_layer + i,
                                 plan.model->layers[static_cast<std::size_t>(stage.first_layer + i)]);
    for (int i = 0; i < stage.mtp; ++i) spec.mtp.push_back(plan.model->mtp[static_cast<std::size_t>(i)]);
    spec.heads_behind = !stage.loss;
    if (stage.loss && stage.mtp == 0) spec.branches = static_cast<int>(plan.model->mtp.size());
    ParameterSet parameters(plan, 0);
    Chunk(plan, spec).declare(parameters);
    Program program;
    parameters.seal(program, false);
    std::vector<BucketSize> sizes;
    for (const Bucket& b : program.buckets) sizes.push_back(size_of(program, b));
    return sizes;
}

} // namespace moe
