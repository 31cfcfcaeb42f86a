// Costs of layers: the terms of each segment of the model for one plan, and floors of a step from these alone.
//
// Floors of every cut take ranks to hold an even share of all layers on average. Early terms come from the two parts of
// a layer (part_floors.hpp), mostly without lowering anything.
#include "simulator/bound/bound_model.hpp"

#include "planner/lower/emit/builder.hpp"
#include "planner/lower/passes/first_gradients.hpp"
#include "planner/model/model.hpp"

#include <algorithm>

namespace moe::bound {

void FastBoundModel::list_segments(const std::shared_ptr<const model::Model>& model) {
    if (model_ == model) return;
    forget();
    dense_parts_.clear();
    routed_parts_.clear();
    known_stages_.clear();
    known_visits_.clear();
    model_ = model;
    segments_.clear();
    counts_.clear();
    const auto add = [&](estimate::SegmentId id, int count) {
        const auto i = static_cast<std::size_t>(segment(id));
        if (i == segments_.size()) {
            segments_.push_back(id);
            counts_.push_back(0);
        }
        counts_[i] += count;
    };
    add({lower::SegmentKind::embedding, 0}, 1);
    for (const int kind : model->layers) add({lower::SegmentKind::layer, kind}, 1);
    for (const int kind : model->mtp) add({lower::SegmentKind::mtp, kind}, 1);
    add({lower::SegmentKind::head, 0}, 1);
    // Some cuts have these in their place, and nothing more of the model.
    for (const int kind : model->mtp) add({lower::SegmentKind::mtp_body, kind}, 0);
    if (!model->mtp.empty()) add({lower::SegmentKind::all_heads, 0}, 0);
}

int FastBoundModel::placement(const plan::Plan& plan) {
    const plan::PlanKey<plan::Subject::place> mesh(plan);
    if (last_mesh_ != mesh) {
        const auto known = known_places_.try_emplace(mesh, -1).first;
        if (known->second < 0) known->second = find_placement(plan);
        last_place_ = known->second;
        last_mesh_ = mesh;
    }
    return last_place_;
}

int FastBoundModel::find_placement(const plan::Plan& plan) {
    const estimate::Placements found = sources_.segments.placements(plan);
    const auto it = std::find(placements_.begin(), placements_.end(), found);
    if (it != placements_.end()) return static_cast<int>(it - placements_.begin());
    placements_.push_back(found);
    part_places_.push_back(sources_.parts.places(found));
    return static_cast<int>(placements_.size()) - 1;
}

void FastBoundModel::forget() {
    terms_.forget();
    layers_.clear();
    own_terms_.clear();
    stages_.clear();
    if (known_stages_.size() > most_stages) known_stages_.clear();
}

int FastBoundModel::layer_costs(const plan::Plan& plan) { return add_layers(plan, nullptr); }

int FastBoundModel::add_layers(const plan::Plan& plan, std::vector<Terms>* early) {
    list_segments(plan.model);
    Layers result;
    result.plan = plan;
    result.early = early;
    result.terms.assign(segments_.size(), nullptr);
    for (std::size_t i = 0; i < segments_.size(); ++i)
        if (counts_[i] > 0) find_terms(result, i);
    find_pools(result);
    result.message_bytes = static_cast<double>(
        program::bytes_of(emit::activation_dtype(plan.precision), plan.tokens_local() * plan.model->hidden));
    layers_.push_back(std::move(result));
    return static_cast<int>(layers_.size()) - 1;
}

void FastBoundModel::find_terms(Layers& layers, std::size_t segment) {
    const plan::Plan& plan = layers.plan;
    const cost::CostModel costs(plan, sources_.segments.stack(), sources_.segments.machine());
    const int place = placement(plan);
    const estimate::Placements& places = placements_[static_cast<std::size_t>(place)];
    if (layers.early == nullptr) {
        layers.terms[segment] = &terms_.of(plan, segments_[segment], place, places, costs);
        return;
    }
    constexpr auto data = static_cast<std::size_t>(program::Stream::data);
    Terms& early = (*layers.early)[segment];
    Terms coarse = terms_.coarse(plan, segments_[segment], place, places, costs);
    for (int side = 0; side < 2; ++side) coarse.sides[side].busy[data] = early.sides[side].busy[data];
    early = coarse;
    layers.terms[segment] = &early;
}

void FastBoundModel::complete(Layers& layers, const Stages& stages) {
    if (!stages.rare || std::find(layers.terms.begin(), layers.terms.end(), nullptr) == layers.terms.end()) return;
    for (std::size_t i = 0; i < segments_.size(); ++i)
        if (layers.terms[i] == nullptr) find_terms(layers, i);
    find_pools(layers);
}

void FastBoundModel::find_pools(Layers& layers) {
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

int FastBoundModel::pools_of(std::vector<int> pools) {
    const auto same = std::find(pools_.begin(), pools_.end(), pools);
    const auto number = static_cast<int>(same - pools_.begin());
    if (same == pools_.end()) pools_.push_back(std::move(pools));
    return number;
}

// Terms of what is known of the parts: neither what the host does nor bytes.
std::vector<Terms> FastBoundModel::early_terms(const plan::Plan& asked) {
    const plan::Plan plan = priced_as(asked, sources_.segments.stack());
    list_segments(plan.model);
    const int place = placement(plan);
    const std::array<int, 2> places = part_places_[static_cast<std::size_t>(place)];
    const plan::Plan named = named_as(asked, sources_.segments.stack());
    PartFloors::Key<plan::Subject::dense> dense_key{plan::PlanKey<plan::Subject::dense>(named), {}, places[0]};
    PartFloors::Key<plan::Subject::routed> routed_key{plan::PlanKey<plan::Subject::routed>(named), {}, places[1]};
    Parts& dense = dense_parts_[dense_key];
    Parts& routed = routed_parts_[routed_key];
    dense.resize(segments_.size());
    routed.resize(segments_.size());
    std::vector<Terms> early(segments_.size());
    static const LayerPart nothing{};
    const auto head = static_cast<std::size_t>(segment({lower::SegmentKind::head, 0}));
    for (std::size_t i = 0; i < segments_.size(); ++i) {
        const estimate::SegmentId id = segments_[i];
        const bool layer = id.kind == lower::SegmentKind::layer || lower::is_mtp(id.kind);
        if (!layer && i != head) continue; // The model's beginning is small, and few cuts have other ends.
        if (!layer) routed[i] = &nothing;
        dense_key.id = routed_key.id = {layer ? lower::SegmentKind::layer : id.kind, id.layer_kind};
        const auto look = [&] {
            if (dense[i] == nullptr) dense[i] = sources_.parts.find(dense_key);
            if (routed[i] == nullptr) routed[i] = sources_.parts.find(routed_key);
            return dense[i] != nullptr && routed[i] != nullptr;
        };
        if (look()) continue;
        const cost::CostModel costs(plan, sources_.segments.stack(), sources_.segments.machine());
        sources_.parts.learn(named, dense_key.id, places, terms_.priced(plan, dense_key.id, place, costs));
        look();
    }
    for (std::size_t i = 0; i < segments_.size(); ++i) {
        if (dense[i] == nullptr) continue;
        LayerPart others = *dense[i];                                                      // all but routed rows
        if (segments_[i].kind == lower::SegmentKind::mtp) others.add_behind(*dense[head]); // It takes these, and more.
        if (!offloads(plan)) {
            const auto most = [&](int side) {
                return static_cast<std::int64_t>(std::max(others.work[side], routed[i]->work[side]));
            };
            early[i].workspace = {most(0), most(1)};
        }
        early[i].first_saves = others.first_saves + routed[i]->first_saves;
        for (int side = 0; side < 2; ++side) {
            SideTerms& t = early[i].sides[side];
            t.device = t.together = t.before_input = least_seconds(others, *routed[i], side);
            t.lead_after = replay::far_ahead;
            for (std::size_t s = 0; s < program::stream_count; ++s)
                t.busy[s] = others.busy[side][s] + routed[i]->busy[side][s];
            t.merged = std::min(t.device,
                                t.busy[static_cast<std::size_t>(program::Stream::compute)] + routed[i]->held_up[side]);
        }
    }
    return early;
}

// Floors say nothing of what layers save, but for the inputs of layers.
int FastBoundModel::add_floors(const plan::Plan& plan, const std::vector<Terms>& terms) {
    Layers result;
    result.plan = plan;
    for (const Terms& t : terms) result.terms.push_back(&t);
    std::vector<int> pools; // pools of layers' inputs
    for (const estimate::SegmentId id : segments_)
        pools.push_back(id.kind == lower::SegmentKind::layer || lower::is_mtp(id.kind) ? 0 : -1);
    result.pools = pools_of(std::move(pools));
    result.pool_bytes = {kept_bytes(plan)};
    layers_.push_back(std::move(result));
    return static_cast<int>(layers_.size()) - 1;
}

int FastBoundModel::early_layer_costs(const plan::Plan& plan) {
    return add_floors(plan, own_terms_.emplace_back(early_terms(plan)));
}

int FastBoundModel::near_layer_costs(const plan::Plan& asked) {
    plan::Plan plan = asked;
    plan.recompute = 0;
    std::vector<Terms> floors = early_terms(plan);
    const auto most = static_cast<std::size_t>(std::max_element(counts_.begin(), counts_.end()) - counts_.begin());
    Layers one;
    one.plan = plan;
    one.early = coarse(plan) ? &floors : nullptr;
    one.terms.assign(segments_.size(), nullptr);
    find_terms(one, most);
    const Terms own = *one.terms[most];
    std::copy(std::begin(own.sides), std::end(own.sides), std::begin(floors[most].sides));
    floors[most].first_saves = own.first_saves;
    return add_floors(plan, own_terms_.emplace_back(std::move(floors)));
}

int FastBoundModel::coarse_layer_costs(const plan::Plan& plan) {
    // Tensors that are stashed or offloaded depend on what is recomputed, so that sets share nothing.
    if (!coarse(plan)) return layer_costs(plan);
    list_segments(plan.model);
    return add_layers(plan, &own_terms_.emplace_back(early_terms(plan)));
}

// The segments that few cuts have in place of the model's own consist of ops of these, and are no slower where they are
// not.
std::vector<double> FastBoundModel::dominance_key(int handle) {
    const Layers& layers = layers_[static_cast<std::size_t>(handle)];
    std::vector<double> list;
    for (std::size_t i = 0; i < segments_.size(); ++i) {
        if (counts_[i] == 0) continue;
        list.push_back(-layers.terms[i]->first_saves);
        for (const SideTerms& side : layers.terms[i]->sides) {
            list.insert(list.end(), {side.device, side.device - side.before_input, side.host, side.together,
                                     side.waits ? -side.lead_after : -replay::far_ahead});
            if (layers.plan.ep_overlap) list.insert(list.end(), side.busy.begin(), side.busy.end());
        }
    }
    return list;
}

// A layer's first norm reads its input in the backward pass as well, and nothing in the layer can compute it again.
double FastBoundModel::kept_bytes(const plan::Plan& plan) {
    if (offloads(plan)) return 0.0;
    return static_cast<double>(
        program::bytes_of(emit::activation_dtype(plan.precision), plan.tokens_local() * plan.model->hidden));
}

double FastBoundModel::step_bound(int handle) {
    const Layers& layers = layers_[static_cast<std::size_t>(handle)];
    return spread(layers.plan, layers.terms);
}

// A floor of smaller micro-batches as well. Where products compute for longer than they wait for memory, a first
// backward saves little; that of one sequence saves most.
double FastBoundModel::early_step_bound(const plan::Plan& plan) {
    std::vector<Terms> early = early_terms(plan);
    if (plan.mbs > 1 && passes::sets_first_gradients(plan)) {
        plan::Plan least = plan;
        least.mbs = 1;
        auto most = early.begin();
        for (const Terms& t : early_terms(least)) {
            most->first_saves = std::max(most->first_saves, t.first_saves);
            ++most;
        }
    }
    std::vector<const Terms*> terms;
    for (const Terms& t : early) terms.push_back(&t);
    return spread(plan, terms);
}

double FastBoundModel::spread(const plan::Plan& plan, const std::vector<const Terms*>& terms) {
    const double micro_batches = static_cast<double>(plan.gbs) / static_cast<double>(plan.mbs);
    const double share = micro_batches * plan.tp * plan.cp / plan.gpus;
    double saved = 0.0; // bytes that the first backward of every layer saves
    for (std::size_t i = 0; i < counts_.size(); ++i)
        if (counts_[i] > 0) saved += counts_[i] * terms[i]->first_saves;
    const Passing least = least_of_all(plan, terms);
    const double even = std::max(share * least.computing - saved / plan.pp, share * least.other);
    return (even + least_visit(plan) + sources_.segments.stack().costs.step_seconds) *
           (offloads(plan) ? tiers_apart : 1.0);
}

// Seconds that FSDP moves weights and gradients of a micro-batch, at least: what the last layer of a kind gathered for
// its forward may still be there for its backward.
double FastBoundModel::resharding_seconds(const std::vector<const Terms*>& terms) const {
    constexpr auto data = static_cast<std::size_t>(program::Stream::data);
    double sum = 0.0;
    for (std::size_t i = 0; i < counts_.size(); ++i) {
        if (counts_[i] == 0) continue;
        const Terms& t = *terms[i];
        sum += counts_[i] * t.sides[0].busy[data] + std::max(0, counts_[i] - 1) * t.sides[1].busy[data];
    }
    return sum;
}

FastBoundModel::Passing FastBoundModel::least_of_all(const plan::Plan& plan,
                                                     const std::vector<const Terms*>& terms) const {
    double device = 0.0, merged = 0.0, split = 0.0; // seconds apart, side by side, and of backwards in two slots
    Busy busy{};
    constexpr auto compute = static_cast<std::size_t>(program::Stream::compute);
    for (std::size_t i = 0; i < counts_.size(); ++i) {
        if (counts_[i] == 0) continue;
        const Terms& t = *terms[i];
        device += counts_[i] * (t.sides[0].device + t.sides[1].device);
        for (std::size_t s = 0; s < program::stream_count; ++s)
            busy[s] += counts_[i] * (t.sides[0].busy[s] + t.sides[1].busy[s]);
        merged += counts_[i] * (t.sides[0].merged + t.sides[1].merged);
        split += counts_[i] * (t.sides[0].device + t.sides[1].busy[compute]);
    }
    const double moved = plan.reshards() ? resharding_seconds(terms) : 0.0;
    if (!plan.ep_overlap && !plan::splits_backward(plan.schedule)) return {device, moved};
    if (plan.reshards()) busy[static_cast<std::size_t>(program::Stream::data)] = moved;
    Passing least{busy[compute], 0.0};
    for (std::size_t s = 0; s < program::stream_count; ++s)
        if (s != compute) least.other = std::max(least.other, busy[s]);
    if (!plan.ep_overlap)
        least.computing = std::max(least.computing, split);
    else if (!plan::splits_backward(plan.schedule))
        least.computing = std::max(least.computing, merged);
    return least;
}

} // namespace moe::bound
