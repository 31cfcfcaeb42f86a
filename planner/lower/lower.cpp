// Lowering of plans to Programs: chunk by chunk, forward and backward, then the order of slots.
#include "planner/lower/lower.hpp"

#include "planner/base/error.hpp"
#include "planner/lower/chunk.hpp"
#include "planner/lower/io.hpp"
#include "planner/lower/passes/data_parallel.hpp"
#include "planner/lower/passes/delay_wgrad.hpp"
#include "planner/lower/passes/first_gradients.hpp"
#include "planner/lower/passes/merge.hpp"
#include "planner/lower/passes/offload.hpp"
#include "planner/lower/passes/recompute.hpp"
#include "planner/lower/passes/reshard.hpp"
#include "planner/lower/passes/split_backward.hpp"
#include "planner/lower/passes/stash.hpp"
#include "planner/lower/tables.hpp"
#include "planner/lower/unnamed.hpp"
#include "planner/plan/overflow_retry.hpp"
#include "planner/plan/stack_traits.hpp"

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <variant>

namespace moe::lower {

namespace {

// The ways in which the slots of a chunk run its backward: whole, in two halves, or some so and some so.
struct Backwards {
    bool whole = true, split = false;
};

struct EmittedChunk {
    int forward = -1, backward = -1, dgrad = -1, wgrad = -1; // numbers of templates
    program::TensorId table_gradient = program::no_tensor;   // gradient of the embedding table, where the chunk has it
};

// Puts the halves of a chunk's backward beside it, or in its place where it is not run whole.
void emit_halves(program::Program& program, EmittedChunk& chunk, bool keep_whole) {
    passes::SplitBackward split =
        passes::split_backward(program, program.templates[static_cast<std::size_t>(chunk.forward)],
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

// The table's gradient on a rank that has the table.
program::TensorId table_gradient(emit::Builder& b) {
    if (!b.parameters().has("embedding")) return program::no_tensor;
    return b.weight("embedding", b.plan().padded_vocab() / b.plan().tp, b.model().hidden).gradient;
}

// The template of a chunk's forward where no backward follows.
int emit_forward(const plan::Plan& plan, program::Program& program, const ChunkSpec& spec,
                 emit::ParameterSet& parameters, const ForwardOnly& what) {
    Chunk chunk(plan, spec);
    chunk.declare(parameters);
    parameters.seal(program, true);
    emit::Builder builder(plan, program, parameters);
    builder.with_backward = false;
    builder.cached_keys = what.cached_keys;
    const int forward = builder.open(plan::SlotKind::forward, spec.chunk);
    chunk.forward(builder);
    if (plan.reshards()) passes::reshard_forward(program, plan, program.templates[static_cast<std::size_t>(forward)]);
    return forward;
}

// Templates of a chunk, passes applied.
EmittedChunk emit_chunk(const plan::Plan& plan, program::Program& program, const ChunkSpec& spec,
                        emit::ParameterSet& parameters, Backwards backwards, bool named) {
    Chunk chunk(plan, spec);
    chunk.declare(parameters);
    parameters.seal(program, named);
    emit::Builder builder(plan, program, parameters);
    builder.named = named;
    const int forward = builder.open(plan::SlotKind::forward, spec.chunk);
    chunk.forward(builder);
    const int backward = builder.open(plan::SlotKind::backward, spec.chunk);
    chunk.backward(builder);
    passes::recompute_pass(program, program.templates[static_cast<std::size_t>(forward)],
                           program.templates[static_cast<std::size_t>(backward)], plan.recompute,
                           plan::stack_traits(plan).recompute_keeps_core);
    if (plan.paged_stash)
        passes::stash_pass(program, program.templates[static_cast<std::size_t>(forward)],
                           program.templates[static_cast<std::size_t>(backward)]);
    if ((plan.offload & plan::offload::activations) != 0)
        passes::offload_pass(program, program.templates[static_cast<std::size_t>(forward)],
                             program.templates[static_cast<std::size_t>(backward)], plan.offload,
                             plan::stack_traits(plan).offloads_planned_rows ? passes::our_offload
                                                                            : passes::megatron_offload);
    if (plan.delay_wgrad) passes::delay_wgrad_pass(program.templates[static_cast<std::size_t>(backward)]);
    if (plan.reshards())
        passes::reshard_pass(program, plan, program.templates[static_cast<std::size_t>(forward)],
                             program.templates[static_cast<std::size_t>(backward)]);
    EmittedChunk emitted{forward, backward, -1, -1, program::no_tensor};
    if (backwards.split) emit_halves(program, emitted, backwards.whole);
    emitted.table_gradient = table_gradient(builder);
    return emitted;
}

Backwards backwards_of(const std::vector<plan::Turn>& turns, int chunk) {
    Backwards result{false, false};
    for (const plan::Turn& turn : turns) {
        if (turn.chunk != chunk) continue;
        result.whole = result.whole || turn.kind == plan::SlotKind::backward;
        result.split = result.split || turn.kind == plan::SlotKind::dgrad;
    }
    return result;
}

int template_of(const EmittedChunk& chunk, plan::SlotKind kind) {
    switch (kind) {
    case plan::SlotKind::forward:
        return chunk.forward;
    case plan::SlotKind::dgrad:
        return chunk.dgrad;
    case plan::SlotKind::wgrad:
        return chunk.wgrad;
    default:
        return chunk.backward;
    }
}

// The slots of a rank between begin and finish; the first of each chunk that adds to gradients sets what it can, the
// last also reduces them.
void add_slots(program::Program& program, const plan::Plan& plan, const std::vector<EmittedChunk>& chunks,
               const std::vector<plan::Turn>& turns, passes::FirstGradients* first) {
    std::vector<std::size_t> last(chunks.size(), 0);
    std::set<int> seen;
    for (std::size_t i = 0; i < turns.size(); ++i)
        if (turns[i].last()) last[static_cast<std::size_t>(turns[i].chunk)] = i;
    const std::size_t begin = program.slots.size();
    for (std::size_t i = 0; i < turns.size(); ++i) {
        const auto c = static_cast<std::size_t>(turns[i].chunk);
        int index = template_of(chunks[c], turns[i].kind);
        std::optional<program::Template> own; // template of this slot alone
        const program::Template& usual = program.templates[static_cast<std::size_t>(index)];
        if (first != nullptr && seen.insert(index).second) own = first->next(usual);
        if (i == last[c]) own = passes::with_gradient_reduction(program, plan, own ? *own : usual);
        if (own) {
            program.templates.push_back(std::move(*own));
            index = static_cast<int>(program.templates.size()) - 1;
        }
        program.slots.push_back({index, turns[i].micro_batch});
    }
    for (std::size_t i = 0; i < turns.size(); ++i)
        if (turns[i].merged) {
            program::Slot& slot = program.slots[begin + i];
            slot.merge = passes::merge_templates(program, slot.index, program.slots[begin + i + 1].index);
        }
}

} // namespace

namespace {

// The chunks of a rank, with inputs, scalars and routers in place. emit(spec, parameters) adds the templates of each.
template <class Emit>
program::Program lower_chunks(const plan::Plan& plan, int pipeline_rank, Emit emit) {
    program::Program program;
    program.pipeline_rank = pipeline_rank;
    add_io(program, plan);
    const std::vector<plan::Stage> all = plan::stages(plan);
    std::vector<std::unique_ptr<emit::ParameterSet>> parameters;
    std::vector<ChunkSpec> specs;
    for (int c = 0; c < plan.vpp; ++c)
        specs.push_back(spec_of(plan, all, plan::stage_of(plan.schedule, plan.pp, pipeline_rank, c)));
    add_layer_sums(program, plan, specs);
    for (int c = 0; c < plan.vpp; ++c) {
        const ChunkSpec& spec = specs[static_cast<std::size_t>(c)];
        program.chunks.push_back(all[static_cast<std::size_t>(spec.stage)]);
        parameters.push_back(
            std::make_unique<emit::ParameterSet>(plan, c, parameters.empty() ? nullptr : parameters.back().get()));
        emit(program, spec, *parameters.back());
    }
    return program;
}

program::Program lower(const plan::Plan& plan, int pipeline_rank, bool named) {
    const std::vector<plan::Turn> turns =
        plan::order(plan.schedule, plan.pp, plan.vpp, plan.micro_batches(), pipeline_rank, plan.ep_overlap);
    std::vector<EmittedChunk> chunks;
    program::TensorId table = program::no_tensor;
    program::Program program = lower_chunks(
        plan, pipeline_rank, [&](program::Program& into, const ChunkSpec& spec, emit::ParameterSet& parameters) {
            chunks.push_back(emit_chunk(plan, into, spec, parameters, backwards_of(turns, spec.chunk), named));
            if (chunks.back().table_gradient != program::no_tensor) table = chunks.back().table_gradient;
        });
    program.in_flight = plan::in_flight(turns, plan.vpp);
    program.slots.reserve(turns.size() + 2);
    program.templates.emplace_back(); // The begin template follows, once it is known what is to be zeroed.
    program.slots.push_back({static_cast<int>(program.templates.size()) - 1, 0});
    passes::FirstGradients first(program);
    add_slots(program, plan, chunks, turns, passes::sets_first_gradients(plan) ? &first : nullptr);
    program.templates[static_cast<std::size_t>(program.slots.front().index)] =
        passes::begin_template(program, plan, first);
    program.templates.push_back(passes::finish_template(program, plan));
    program.slots.push_back({static_cast<int>(program.templates.size()) - 1, 0});
    if (table != program::no_tensor && emit::shares_table(plan))
        for (const program::Bucket& b : program.buckets)
            if (b.gradients == program.tensors[static_cast<std::size_t>(table)].base) table = b.gradient_shard;
    const std::vector<program::Op> tables = add_tables(plan, program, table);
    std::vector<program::Op>& closing = program.templates.back().ops;
    closing.insert(closing.begin(), tables.begin(), tables.end());
    return program;
}

} // namespace

program::Program lower(const plan::Plan& plan, int pipeline_rank) { return lower(plan, pipeline_rank, true); }
program::Program lower_unnamed(const plan::Plan& plan, int pipeline_rank) { return lower(plan, pipeline_rank, false); }

program::Program lower_forward(const plan::Plan& plan, int pipeline_rank, const ForwardOnly& what) {
    std::vector<int> forwards; // templates by chunk
    program::Program program = lower_chunks(
        plan, pipeline_rank, [&](program::Program& into, const ChunkSpec& spec, emit::ParameterSet& parameters) {
            forwards.push_back(emit_forward(plan, into, spec, parameters, what));
        });
    program.in_flight.assign(static_cast<std::size_t>(plan.vpp), 1);
    program.templates.push_back(passes::gather_template(program, plan));
    program.slots.push_back({static_cast<int>(program.templates.size()) - 1, 0});
    // The forwards of the schedule, in its order, in which every message finds its receiver.
    for (const plan::Turn& turn :
         plan::order(plan.schedule, plan.pp, plan.vpp, plan.micro_batches(), pipeline_rank, plan.ep_overlap))
        if (turn.forward()) program.slots.push_back({forwards[static_cast<std::size_t>(turn.chunk)], turn.micro_batch});
    program.templates.push_back(passes::sum_template(program, plan));
    program.slots.push_back({static_cast<int>(program.templates.size()) - 1, 0});
    for (const program::Bucket& bucket : program.buckets) {
        if (!what.alone || bucket.staging != program::no_tensor) continue;
        for (const program::TensorId id : {bucket.gradients, bucket.exp_avg, bucket.exp_avg_sq})
            if (id != program::no_tensor) program.tensors[static_cast<std::size_t>(id)].rows = 0;
    }
    return program;
}

program::Program lower_segment(const plan::Plan& plan, SegmentKind segment, int layer_kind) {
    program::Program program;
    program.tensors.reserve(192); // Searches lower many segments, and growing moves every tensor.
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
        spec.beside_mtp = !plan.model->mtp.empty();
        break;
    }
    add_layer_sums(program, plan, {spec});
    program.in_flight = {1};
    program.chunks = {plan::Stage{}};
    emit::ParameterSet parameters(plan, 0);
    emit_chunk(plan, program, spec, parameters, {}, false);
    return program;
}

std::vector<passes::BucketSize> bucket_sizes(const plan::Plan& plan, const plan::Stage& stage) {
    ChunkSpec spec;
    spec.embedding = stage.embedding;
    spec.loss = stage.loss;
    for (int i = 0; i < stage.layers; ++i) {
        const int layer = stage.first_layer + i;
        spec.layers.emplace_back(layer, plan.model->layers[static_cast<std::size_t>(layer)]);
    }
    for (int i = 0; i < stage.mtp; ++i) spec.mtp.push_back(plan.model->mtp[static_cast<std::size_t>(i)]);
    spec.heads_behind = !stage.loss;
    if (stage.loss && stage.mtp == 0) spec.branches = static_cast<int>(plan.model->mtp.size());
    emit::ParameterSet parameters(plan, 0);
    Chunk(plan, spec).declare(parameters);
    program::Program program;
    parameters.seal(program, false);
    std::vector<passes::BucketSize> sizes;
    for (const program::Bucket& b : program.buckets) sizes.push_back(passes::size_of(program, b));
    return sizes;
}

} // namespace moe::lower
