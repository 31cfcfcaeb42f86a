// The halves of quotes: what one micro-batch costs in each kind of layer, and how layers and batch are cut.
#include "simulator/bound/bound_model.hpp"

#include "planner/lower/emit/builder.hpp"
#include "planner/lower/passes/first_gradients.hpp"
#include "planner/memory/library_memory.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/mesh.hpp"
#include "simulator/estimate/bucket_costs.hpp"

#include <algorithm>

namespace moe {
namespace {

// Seconds in which so many bytes of a rank's optimizer states come from the host and go back, one after the other.
double visit_seconds(const CostModel& costs, double bytes) {
    if (bytes == 0.0) return 0.0;
    return price_bytes(costs, OpKind::copy_from_host, bytes, Dtype::f32) +
           price_bytes(costs, OpKind::copy_to_host, bytes, Dtype::f32);
}

} // namespace

void FastQuoter::list_segments(const std::shared_ptr<const Model>& model) {
    if (model_ == model) return;
    forget();
    for (auto& known : known_) known.clear();
    known_stages_.clear();
    model_ = model;
    segments_.clear();
    counts_.clear();
    const auto add = [&](SegmentId id, int count) {
        const auto i = static_cast<std::size_t>(segment(id));
        if (i == segments_.size()) {
            segments_.push_back(id);
            counts_.push_back(0);
        }
        counts_[i] += count;
    };
    add({SegmentKind::embedding, 0}, 1);
    for (const int kind : model->layers) add({SegmentKind::layer, kind}, 1);
    for (const int kind : model->mtp) add({SegmentKind::mtp, kind}, 1);
    add({SegmentKind::head, 0}, 1);
    // What some cuts have in their place: nothing more of the model.
    for (const int kind : model->mtp) add({SegmentKind::mtp_body, kind}, 0);
    if (!model->mtp.empty()) add({SegmentKind::all_heads, 0}, 0);
}

int FastQuoter::placement(const Plan& plan) {
    const std::array<int, 8> mesh{plan.gpus, plan.tp, plan.cp, plan.dp, plan.pp, plan.ep, plan.etp, plan.edp};
    if (mesh == last_mesh_ && plan.rank_order == last_order_) return last_place_;
    last_mesh_ = mesh;
    last_order_ = plan.rank_order;
    return last_place_ = find_placement(plan);
}

int FastQuoter::find_placement(const Plan& plan) {
    const std::array<Placement, 5> found = sources_.segments.placements(plan);
    const auto it = std::find(placements_.begin(), placements_.end(), found);
    if (it != placements_.end()) return static_cast<int>(it - placements_.begin());
    placements_.push_back(found);
    part_places_.push_back(sources_.parts.places(found));
    return static_cast<int>(placements_.size()) - 1;
}

void FastQuoter::forget() {
    terms_.forget();
    layers_.clear();
    own_terms_.clear();
    stages_.clear();
    if (known_stages_.size() > most_stages) known_stages_.clear();
}

int FastQuoter::layers(const Plan& plan) { return add_layers(plan, nullptr); }

int FastQuoter::add_layers(const Plan& plan, std::vector<Terms>* early) {
    list_segments(plan.model);
    Layers result;
    result.plan = plan;
    result.early = early;
    result.terms.assign(segments_.size(), nullptr);
    for (std::size_t i = 0; i < segments_.size(); ++i)
        if (counts_[i] > 0) find_terms(result, i);
    find_pools(result);
    result.message_bytes =
        static_cast<double>(bytes_of(activation_dtype(plan.precision), plan.tokens_local() * plan.model->hidden));
    layers_.push_back(std::move(result));
    return static_cast<int>(layers_.size()) - 1;
}

void FastQuoter::find_terms(Layers& layers, std::size_t segment) {
    const Plan& plan = layers.plan;
    const CostModel costs(plan, sources_.segments.stack(), sources_.segments.machine());
    if (layers.early == nullptr) {
        layers.terms[segment] = &terms_.of(plan, segments_[segment], placement(plan), costs);
        return;
    }
    constexpr auto data = static_cast<std::size_t>(Stream::data);
    Terms& early = (*layers.early)[segment];
    Terms coarse = terms_.coarse(plan, segments_[segment], placement(plan), costs);
    for (int side = 0; side < 2; ++side) coarse.sides[side].busy[data] = early.sides[side].busy[data];
    early = coarse;
    layers.terms[segment] = &early;
}

void FastQuoter::complete(Layers& layers, const Stages& stages) {
    if (!stages.rare || std::find(layers.terms.begin(), layers.terms.end(), nullptr) == layers.terms.end()) return;
    for (std::size_t i = 0; i < segments_.size(); ++i)
        if (layers.terms[i] == nullptr) find_terms(layers, i);
    find_pools(layers);
}

void FastQuoter::find_pools(Layers& layers) {
    layers.pool_bytes.clear();
    std::vector<int> pools;
    for (const Terms* t : layers.terms) {
        const double bytes = t == nullptr ? 0.0 : static_cast<double>(t->saved);
        const auto pool = std::find(layers.pool_bytes.begin(), layers.pool_bytes.end(), bytes);
        pools.push_back(bytes > 0.0 ? static_cast<int>(pool - layers.pool_bytes.begin()) : -1);
        if (bytes > 0.0 && pool == layers.pool_bytes.end()) layers.pool_bytes.push_back(bytes);
    }
    layers.pools = pools_of(std::move(pools));
}

int FastQuoter::pools_of(std::vector<int> pools) {
    const auto same = std::find(pools_.begin(), pools_.end(), pools);
    const auto number = static_cast<int>(same - pools_.begin());
    if (same == pools_.end()) pools_.push_back(std::move(pools));
    return number;
}

// Layers share no parameters, so a stage's buckets are those of its layers and those of its ends.
std::vector<BucketSize> FastQuoter::buckets(const Plan& plan, const Stage& stage, const Segments& segments) {
    Stage ends = stage;
    ends.first_layer = ends.layers = 0;
    std::vector<BucketSize> sizes;
    if (ends.embedding || ends.loss || ends.mtp > 0) sizes = sources_.segments.stage_buckets(plan, ends);
    for (const auto& [id, count] : segments) {
        if (id.kind != SegmentKind::layer) continue;
        for (BucketSize b : sources_.segments.buckets(plan, id)) {
            b.elements *= count;
            b.group_size = group_size(plan, b.group);
            sizes.push_back(b);
        }
    }
    return sizes;
}

int FastQuoter::stages(const Plan& plan) {
    list_segments(plan.model);
    std::unique_ptr<Stages>& known = known_stages_[{plan.precision,
                                                    {plan.tp, plan.cp, plan.ep, plan.etp, plan.pp, plan.vpp, plan.dp},
                                                    plan.schedule,
                                                    plan.fsdp,
                                                    plan.optimizer.bf16_moments,
                                                    plan.layout}];
    if (!known) {
        // Without what layers alone depend on: who asks first must not matter.
        Plan bare = plan;
        bare.mbs = 1;
        bare.recompute = 0;
        bare.dispatcher = Plan{}.dispatcher;
        bare.cuda_graph = CudaGraph::none;
        bare.cp_comm = Plan{}.cp_comm;
        bare.ep_overlap = bare.tp_overlap = false;
        known = std::make_unique<Stages>(stages_of(bare)); // again where this is refused
    }
    stages_.push_back(known.get());
    return static_cast<int>(stages_.size()) - 1;
}

FastQuoter::Stages FastQuoter::stages_of(const Plan& plan) {
    Stages result;
    result.plan = plan;
    result.shape = &sources_.shapes.of(plan);
    const CostModel costs(plan, sources_.segments.stack(), sources_.segments.machine());
    result.lost = costs.beside_communication().to_collectives;
    std::vector<double> update, squares, zeroed, visits;
    result.moved.resize(result.shape->distinct.size());
    if (!plan.reshards())
        for (int r = 0; r < plan.pp; ++r) {
            const auto d = static_cast<std::size_t>(
                result.shape->of_stage[static_cast<std::size_t>(stage_of(plan.schedule, plan.pp, r, 0))]);
            if (result.moved[d].empty()) result.moved[d] = moved_of(plan, costs, result.shape->distinct[d]);
        }
    for (const StageShape& stage : result.shape->distinct) {
        std::vector<std::pair<int, int>> parts;
        for (const auto& [id, count] : stage.segments) {
            parts.emplace_back(segment(id), count);
            result.rare = result.rare || counts_[static_cast<std::size_t>(parts.back().first)] == 0;
        }
        result.parts.push_back(std::move(parts));
        StageMemory memory;
        double updated = 0.0, summed = 0.0, zero = 0.0;
        for (const BucketSize& b : buckets(plan, stage.stage, stage.segments)) {
            memory.add_states(plan, b);
            memory.groups |= group_bit(b.group);
            updated += step_op(plan, b, StepWork::update).bytes;
            summed += step_op(plan, b, StepWork::square).bytes;
            // Where products set gradients what is left is little: embeddings, norms and biases.
            if (!is_quantized(b.weight_dtype) && !plan.reshards() && !sets_first_gradients(plan))
                zero += step_op(plan, b, StepWork::zero).bytes;
        }
        if (plan.reshards() && stage.stage.mtp > 0) { // the LM head's gathered weights, which MTP reads as well
            Stage head;
            head.loss = true;
            for (const BucketSize& b : buckets(plan, head, {{{SegmentKind::head, 0}, 1}}))
                if (b.group_size > 1) memory.counted_twice += stage.stage.mtp * weight_bytes(b);
        }
        memory.add_tables(plan, stage.stage);
        if (stage.stage.loss && plan.dp * plan.cp > 1) memory.groups |= group_bit(groups::samples);
        result.memory.push_back(memory);
        update.push_back(updated);
        visits.push_back(memory.visiting);
        squares.push_back(summed);
        zeroed.push_back(zero);
    }
    const auto rank_sum = [&](const std::vector<double>& of, int rank) {
        double sum = 0.0;
        for (int c = 0; c < plan.vpp; ++c)
            sum += of[static_cast<std::size_t>(
                result.shape->of_stage[static_cast<std::size_t>(stage_of(plan.schedule, plan.pp, rank, c))])];
        return sum;
    };
    double most = 0.0;
    for (int r = 0; r < plan.pp; ++r) most = std::max(most, rank_sum(update, r));
    const auto seconds = [&](OpKind kind, double bytes) {
        return bytes > 0.0 ? price_bytes(costs, kind, bytes, Dtype::f32) : 0.0;
    };
    result.zero = seconds(OpKind::zero, rank_sum(zeroed, 0));
    double visiting = 0.0; // of the fullest rank
    for (int r = 0; r < plan.pp; ++r) visiting = std::max(visiting, rank_sum(visits, r));
    result.closing = std::max(seconds(OpKind::adamw, most), visit_seconds(costs, visiting)) +
                     seconds(OpKind::sum_squares, rank_sum(squares, 0)) + sources_.segments.stack().costs.step_seconds;
    if (plan.pp > 1) {
        constexpr double far = 1e9; // bytes
        result.message_start = price_bytes(costs, OpKind::send, 0.0, Dtype::bf16, groups::pipeline);
        result.message_per_byte =
            (price_bytes(costs, OpKind::send, far, Dtype::bf16, groups::pipeline) - result.message_start) / far;
    }
    return result;
}

// What few cuts have in place of the model's own segments consists of ops of these, and is no slower where they are
// not.
std::vector<double> FastQuoter::slowness(int handle) {
    const Layers& layers = layers_[static_cast<std::size_t>(handle)];
    std::vector<double> list;
    for (std::size_t i = 0; i < segments_.size(); ++i) {
        if (counts_[i] == 0) continue;
        list.push_back(-layers.terms[i]->first_saves);
        for (const SideTerms& side : layers.terms[i]->sides) {
            list.insert(list.end(), {side.device, side.device - side.before_input, side.host, side.together,
                                     side.waits ? -side.lead_after : -far_ahead});
            if (layers.plan.ep_overlap) list.insert(list.end(), side.busy.begin(), side.busy.end());
        }
    }
    return list;
}

StageMemory FastQuoter::whole_model(const Plan& plan) {
    list_segments(plan.model);
    Segments layers;
    for (std::size_t i = 0; i < segments_.size(); ++i)
        if (segments_[i].kind == SegmentKind::layer) layers.emplace_back(segments_[i], counts_[i]);
    Stage ends;
    ends.embedding = ends.loss = true;
    ends.mtp = static_cast<int>(plan.model->mtp.size());
    StageMemory all;
    for (const BucketSize& b : buckets(plan, ends, layers)) all.add_states(plan, b);
    return all;
}

double FastQuoter::least_bytes(const Plan& plan) {
    const StageMemory all = whole_model(plan);
    return (all.states + all.visiting) / plan.pp + library_memory(plan);
}

double FastQuoter::least_visit(const Plan& plan) {
    if ((plan.offload & offload::optimizer) == 0) return 0.0;
    const CostModel costs(plan, sources_.segments.stack(), sources_.segments.machine());
    return visit_seconds(costs, whole_model(plan).visiting / plan.pp);
}

// A layer's first norm reads its input in the backward pass as well, and nothing in the layer can compute it again.
double FastQuoter::kept_bytes(const Plan& plan) {
    if (offloads(plan)) return 0.0;
    return static_cast<double>(bytes_of(activation_dtype(plan.precision), plan.tokens_local() * plan.model->hidden));
}

} // namespace moe
