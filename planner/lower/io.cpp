// Tensors between a Program and its trainer.
#include "planner/lower/io.hpp"

#include "planner/lower/emit/builder.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/overflow_retry.hpp"
#include "planner/plan/stack_traits.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace moe::lower {

void add_io(program::Program& program, const plan::Plan& plan) {
    program::ProgramIo& io = program.io;
    const std::int64_t tokens = plan.tokens_gathered();
    io.ids = emit::add_flat(program, "ids", program::Dtype::i32, program::Storage::input, tokens);
    io.labels = emit::add_flat(program, "labels", program::Dtype::i32, program::Storage::input, tokens);
    io.positions =
        emit::add_flat(program, "positions", program::Dtype::i32, program::Storage::input, plan.seq / plan.cp);
    program.tensors[static_cast<std::size_t>(io.positions)].per_micro_batch = false;
    for (std::size_t d = 0; d < plan.model->mtp.size(); ++d)
        io.mtp_labels.push_back(emit::add_flat(program, fmt::format("mtp_labels{}", d + 1), program::Dtype::i32,
                                               program::Storage::input, tokens));
    if (plan.masks_documents()) {
        io.document_positions =
            emit::add_flat(program, "document_positions", program::Dtype::i32, program::Storage::input, tokens);
        io.document_starts = emit::add_flat(program, "document_starts", program::Dtype::i32, program::Storage::input,
                                            plan.attention_rows());
        if (plan.passes_states())
            io.sequence_starts = emit::add_flat(program, "sequence_starts", program::Dtype::i32,
                                                program::Storage::input, plan.seq * plan.mbs);
        for (std::size_t d = 0; d <= plan.model->mtp.size(); ++d) {
            io.label_shares.push_back(emit::add_flat(program, fmt::format("label_share{}", d), program::Dtype::f32,
                                                     program::Storage::input, 1));
            program.tensors[static_cast<std::size_t>(io.label_shares.back())].per_micro_batch = false;
        }
    }
    const auto chunked = [](const model::LayerKind& kind) { return kind.attention.chunk > 0; };
    if (std::any_of(plan.model->kinds.begin(), plan.model->kinds.end(), chunked)) {
        io.chunk_starts = emit::add_flat(program, "chunk_starts", program::Dtype::i32, program::Storage::input,
                                         plan.attention_rows());
    }
    if (plan.router.input_jitter > 0.0 || plan.rounds_stochastically())
        io.noise = emit::add_flat(program, "noise", program::Dtype::i32, program::Storage::input, 3);
    if (plan.keeps_scales()) {
        // Layers take their places as they are emitted.
        io.scale_windows = emit::add_flat(program, "scale_windows", program::Dtype::f32, program::Storage::input, 0);
        program.tensors[static_cast<std::size_t>(io.scale_windows)].per_micro_batch = false;
        io.scale_largest = emit::add_flat(program, "scale_largest", program::Dtype::f32, program::Storage::scalar, 0);
    }
    if (!io.mtp_labels.empty())
        io.mtp_loss = emit::add_flat(program, "mtp_loss", program::Dtype::f32, program::Storage::scalar, 1);
    io.loss = emit::add_flat(program, "loss", program::Dtype::f32, program::Storage::scalar, 1);
    io.gradient_norm = emit::add_flat(program, "gradient_norm", program::Dtype::f32, program::Storage::scalar, 1);
    io.step_sums = io.gradient_norm;
    if (plan::may_overflow(plan)) {
        io.overflow = emit::add_flat(program, "overflow", program::Dtype::f32, program::Storage::scalar, 1);
        io.step_sums = emit::add_flat(program, "step_sums", program::Dtype::f32, program::Storage::scalar, 2);
        for (const program::TensorId id : {io.gradient_norm, io.overflow}) {
            program.tensors[static_cast<std::size_t>(id)].base = io.step_sums;
            program.tensors[static_cast<std::size_t>(id)].offset = id == io.overflow ? 1 : 0;
        }
    }
    io.hyper = emit::add_flat(program, "hyper", program::Dtype::f32, program::Storage::scalar, 9);
}

namespace {

// Layers of a chunk by their global index, those of MTP behind the model's.
std::vector<std::pair<int, const model::LayerKind*>> layers_of(const plan::Plan& plan, const ChunkSpec& spec) {
    std::vector<std::pair<int, const model::LayerKind*>> list;
    const auto add = [&](int layer, int kind) {
        list.emplace_back(layer, &plan.model->kinds[static_cast<std::size_t>(kind)]);
    };
    for (const auto& [layer, kind] : spec.layers) add(layer, kind);
    for (std::size_t i = 0; i < spec.mtp.size(); ++i) add(static_cast<int>(plan.model->layers.size() + i), spec.mtp[i]);
    return list;
}

} // namespace

void add_layer_sums(program::Program& program, const plan::Plan& plan, const std::vector<ChunkSpec>& specs) {
    const plan::RouterTraining& r = plan.router;
    const bool reports = plan::stack_traits(plan).counts_load, routers = r.counts_load() || reports;
    const bool indexers = reports && plan.indexer.loss > 0.0,
               global = r.aux_loss > 0.0 && r.load_balancing == plan::LoadBalancing::global;
    std::int64_t elements = 0;
    std::vector<std::pair<program::TensorId, std::int64_t>> views;
    const auto view = [&](const char* name, int layer, std::int64_t rows) {
        const program::TensorId id = emit::add_flat(program, fmt::format("layer{}.{}", layer, name),
                                                    program::Dtype::f32, program::Storage::scalar, rows);
        views.emplace_back(id, elements);
        elements += rows;
        return id;
    };
    for (const ChunkSpec& spec : specs)
        for (const auto& [layer, kind] : layers_of(plan, spec)) {
            if (indexers && kind->attention.indexes())
                program.io.indexers.push_back({layer, view("indexer_loss", layer, 1)});
            if (!routers || !kind->moe) continue;
            const int experts = kind->moe->experts;
            program::RouterIo io;
            io.layer = layer;
            io.experts = experts;
            io.load = view("router_load", layer, experts);
            io.loss = view("router_loss", layer, 2);
            if (global) {
                io.score_load = view("router_score_load", layer, experts);
                io.last_load = emit::add_flat(program, fmt::format("layer{}.last_load", layer), program::Dtype::f32,
                                              program::Storage::input, experts);
                program.tensors[static_cast<std::size_t>(io.last_load)].per_micro_batch = false;
            }
            program.io.routers.push_back(io);
        }
    if (elements == 0) return;
    program.io.layer_sums =
        emit::add_flat(program, "layer_sums", program::Dtype::f32, program::Storage::scalar, elements);
    for (const auto& [id, offset] : views) {
        program.tensors[static_cast<std::size_t>(id)].base = program.io.layer_sums;
        program.tensors[static_cast<std::size_t>(id)].offset = offset;
    }
}

} // namespace moe::lower
