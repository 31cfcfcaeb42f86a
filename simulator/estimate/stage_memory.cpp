// Adds up what the chunks of each pipeline rank hold and finds the fullest rank.
#include "simulator/estimate/stage_memory.hpp"

#include "planner/lower/emit/parameters.hpp"
#include "planner/memory/library_memory.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/schedule.hpp"
#include "planner/program/communicators.hpp"

#include "planner/lower/emit/builder.hpp"
#include "planner/model/model.hpp"

#include <algorithm>
#include <bit>
#include <numeric>
#include <vector>

namespace moe::estimate {
namespace {

// Changes of a pool of segments of `bytes` in the order of a pair's layers. What lies outside of layers counts as one:
// before the first one of either lane, and between the layers of the model and each of MTP.
class Changes {
public:
    Changes(const SavedSegments& forward, const SavedSegments& backward, std::int64_t bytes) : bytes_(bytes) {
        std::size_t at = 0;
        for (const std::int64_t layer : forward.layers) add(taken_, ++at, layer);
        if (at > 0) ++at;
        for (const std::int64_t end : forward.ends) add(taken_, at, end);
        for (const std::int64_t layer : forward.mtp) add(taken_, at + 1, layer), at += 2;
        at = 0;
        for (auto layer = backward.mtp.rbegin(); layer != backward.mtp.rend(); ++layer, at += 2)
            add(released_, at + 1, *layer);
        for (const std::int64_t end : backward.ends) add(released_, at, end);
        for (auto layer = backward.layers.rbegin(); layer != backward.layers.rend(); ++layer)
            add(released_, ++at, *layer);
    }
    // The height to which the pair takes the pool above its state before: a layer of the forward takes its place before
    // that of the backward beside it gives one free, behind the loss, beside which the forward has no layer yet.
    int rise() const {
        int now = 0, most = 0;
        for (std::size_t at = 0; at < std::max(taken_.size(), released_.size()); ++at) {
            if (at < taken_.size()) most = std::max(most, now += taken_[at]);
            if (at < released_.size()) now -= released_[at];
        }
        return most;
    }

private:
    void add(std::vector<int>& list, std::size_t at, std::int64_t bytes) const {
        if (list.size() <= at) list.resize(at + 1, 0);
        if (bytes == bytes_) ++list[at];
    }

    std::int64_t bytes_;
    std::vector<int> taken_, released_;
};

} // namespace

void SavedSegments::add(lower::SegmentKind kind, int count, std::int64_t bytes) {
    std::vector<std::int64_t>& list = lower::is_mtp(kind)                                             ? mtp
                                      : kind == lower::SegmentKind::embedding || lower::is_head(kind) ? ends
                                                                                                      : layers;
    list.insert(list.end(), static_cast<std::size_t>(count), bytes);
}

bool merges(const std::vector<plan::Kept>& kept) {
    return std::any_of(kept.begin(), kept.end(), [](const plan::Kept& state) { return state.forward >= 0; });
}

void StageMemory::add_states(const plan::Plan& plan, const passes::BucketSize& bucket) {
    states += state_bytes(plan, bucket);
    if (!plan.steps_on_host())
        ((plan.offload & plan::offload::optimizer) != 0 ? visiting : states) += passes::optimizer_bytes(plan, bucket);
    muon = std::max(muon, static_cast<double>(bucket.muon_bytes));
    copies += plan.optimizer_copy_bytes() * static_cast<double>(bucket.elements) / bucket.group_size;
}

void StageMemory::add_tables(const plan::Plan& plan, const plan::Stage& stage) {
    if (!stage.embedding && stage.mtp == 0 && !(stage.loss && plan.model->tied_embeddings)) return;
    const std::size_t copies = emit::table_holders(plan).size();
    if (copies > 1) tables = static_cast<double>(copies - 1) * passed_table_bytes(plan);
}

std::map<std::int64_t, int> most_kept(const std::vector<const SavedSegments*>& chunks,
                                      const std::vector<plan::Kept>& kept) {
    std::map<std::int64_t, std::vector<int>> pools; // segments by chunk, by bytes
    for (std::size_t c = 0; c < chunks.size(); ++c)
        for (const auto* list : {&chunks[c]->layers, &chunks[c]->mtp, &chunks[c]->ends})
            for (const std::int64_t bytes : *list) {
                std::vector<int>& counts = pools[bytes];
                counts.resize(chunks.size(), 0);
                ++counts[c];
            }
    std::map<std::int64_t, int> result;
    for (const auto& [bytes, counts] : pools) {
        int& most = result[bytes];
        for (const plan::Kept& state : kept) {
            const int before =
                std::inner_product(state.micro_batches.begin(), state.micro_batches.end(), counts.begin(), 0);
            const int above = state.forward < 0 ? 0
                                                : Changes(*chunks[static_cast<std::size_t>(state.forward)],
                                                          *chunks[static_cast<std::size_t>(state.backward)], bytes)
                                                      .rise();
            most = std::max(most, before + above);
        }
    }
    return result;
}

int enough_micro_batches(const plan::Plan& plan) {
    const int m = plan.micro_batches();
    return std::min(m, 4 * plan.pp + m % plan.pp);
}

namespace {

// The messages that a pipeline rank sends and receives: activations and their gradients.
struct Messages {
    int boxes = 0; // number of boxes: one for each of its chunks in either direction, but at the model's ends
    int lines = 0; // lines, two for each neighbour, in a V of both chunks; interleaved chunks go round a ring
};
Messages messages_of(const plan::Plan& plan, int rank) {
    const bool v = plan::in_a_v(plan.schedule), ring = plan.vpp > 1 && !v;
    const bool first = rank == 0, last = rank + 1 == plan.pp, loss = v ? first : last;
    const int neighbours = ring ? 2 : (first ? 0 : 1) + (last ? 0 : 1);
    return {2 * plan.vpp - (first ? 1 : 0) - (loss ? 1 : 0), neighbours * (v ? 4 : 2)};
}

// Counts communicators as communicators_of() does. Every group of published stacks has one.
double communicator_bytes(const plan::Plan& plan, const plan::Mesh& mesh, int rank, std::uint64_t used,
                          std::int64_t slots) {
    if (!program::joins_devices(plan))
        return machine::bytes_among(plan.hardware->communicators.collective, 2) * std::popcount(used);
    struct Known {
        program::Stream stream;
        plan::Group group;
        int size;
    };
    std::vector<Known> known;
    program::Communicators all;
    for (int bit = 0; bit < 64; ++bit) {
        if ((used >> bit & 1) == 0) continue;
        const plan::Group group = group_of_bit(bit);
        if (group == emit::groups::pipeline) continue;
        const bool data = (group.axes & (plan::axis::any_data | plan::axis::pipeline)) != 0,
                   dense = group.domain == plan::Domain::dense;
        const Known one{data    ? program::Stream::data
                        : dense ? program::Stream::tensor
                                : program::Stream::expert,
                        group, plan::group_size(plan, group)};
        const auto same = [&](const Known& k) {
            return k.stream == one.stream && k.size == one.size && mesh.same_members(k.group, group);
        };
        if (std::any_of(known.begin(), known.end(), same)) continue;
        known.push_back(one);
        const bool exchanges =
            !dense && ((group.axes & plan::axis::expert_outer) != 0 ||
                       ((group.axes & plan::axis::expert) != 0 && plan.dispatcher == plan::Dispatcher::alltoall));
        const bool pairwise = !data && (exchanges || (dense && (group.axes & plan::axis::any_context) != 0));
        (pairwise ? all.pairwise : all.collective).push_back(one.size);
    }
    all.buffer_bytes = slots;
    if (plan.pp > 1) {
        const Messages messages = messages_of(plan, rank);
        all.messages = messages.lines;
        all.buffer_bytes += messages.boxes * program::bytes_of(emit::activation_dtype(plan.precision),
                                                               plan.tokens_local() * plan.model->hidden);
    }
    return all.bytes(plan.hardware->communicators);
}

} // namespace

double micro_batch_input_bytes(const plan::Plan& plan) {
    const auto tokens = static_cast<double>(plan.tokens_gathered());
    const double states = plan.passes_states() ? static_cast<double>(plan.seq * plan.mbs) : 0.0;
    const double documents =
        plan.masks_documents() ? tokens + states + static_cast<double>(plan.attention_rows()) : 0.0;
    const auto chunked = [](const model::LayerKind& kind) { return kind.attention.chunk > 0; };
    const bool chunks = std::any_of(plan.model->kinds.begin(), plan.model->kinds.end(), chunked);
    return 4.0 * (tokens * (2.0 + static_cast<double>(plan.model->mtp.size())) + documents +
                  (chunks ? static_cast<double>(plan.attention_rows()) : 0.0));
}

double peak_bytes(const plan::Plan& plan, const plan::Mesh& mesh, const std::vector<StageMemory>& stages,
                  const std::vector<int>& of_stage, const std::vector<KeptActivations>& kept) {
    const double inputs =
        micro_batch_input_bytes(plan) * plan.micro_batches() + 4.0 * static_cast<double>(plan.seq / plan.cp);
    const std::uint64_t common =
        (plan.pp > 1 ? group_bit(emit::groups::pipeline) : 0) | (plan.gpus > 1 ? group_bit(emit::groups::world) : 0);
    const double library = memory::library_memory(plan);
    double worst = 0.0;
    for (int r = 0; r < plan.pp; ++r) {
        double bytes = inputs, visiting = 0.0, muon = 0.0, tables = 0.0,
               activations = kept[static_cast<std::size_t>(r)].bytes;
        Workspace workspace;
        std::uint64_t used = common;
        std::int64_t slots = 0;
        for (int c = 0; c < plan.vpp; ++c) {
            const StageMemory& stage = stages[static_cast<std::size_t>(
                of_stage[static_cast<std::size_t>(plan::stage_of(plan.schedule, plan.pp, r, c))])];
            bytes += stage.states;
            visiting += stage.visiting + stage.copies;
            muon = std::max(muon, stage.muon);
            tables = std::max(tables, stage.tables);
            activations -= stage.counted_twice;
            workspace.forward = std::max(workspace.forward, stage.workspace.forward);
            workspace.backward = std::max(workspace.backward, stage.workspace.backward);
            used |= stage.groups;
            slots = std::max(slots, stage.slots);
        }
        activations += static_cast<double>(kept[static_cast<std::size_t>(r)].merges
                                               ? workspace.forward + workspace.backward
                                               : std::max(workspace.forward, workspace.backward));
        bytes +=
            std::max({activations, visiting + muon, tables}) + library + communicator_bytes(plan, mesh, r, used, slots);
        worst = std::max(worst, bytes);
    }
    // Ranks on CPUs share the memory of one machine.
    return plan.hardware->cpu ? worst * plan.gpus : worst;
}

} // namespace moe::estimate
