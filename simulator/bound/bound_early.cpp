// Floors from the parts of layers: cheap, mostly without lowering anything.
#include "simulator/bound/bound_model.hpp"

#include <algorithm>

namespace moe {

// Terms of what is known of the parts: neither what the host does nor bytes.
std::vector<Terms> FastQuoter::early_terms(const Plan& asked) {
    const Plan plan = priced_as(asked, sources_.segments.stack());
    list_segments(plan.model);
    const int place = placement(plan);
    const std::array<int, 2> places = part_places_[static_cast<std::size_t>(place)];
    // What a search varies, in a few words.
    const auto number = [](auto value) { return static_cast<std::uint64_t>(value); };
    const std::uint64_t common =
        number(plan.precision) << 56 | number(plan.reshards()) << 55 | number(plan.ep_overlap) << 54;
    Parts& dense = known_[0][{common | number(plan.tp_overlap) << 53 | number(plan.cp_comm) << 48 |
                                  number(plan.tp) << 24 | number(plan.cp),
                              number(plan.mbs) << 16 | number(places[0])}];
    Parts& routed =
        known_[1][{common | number(plan.tokens_local()),
                   number(plan.ep) << 40 | number(plan.etp) << 24 | number(plan.dispatcher) << 16 | number(places[1])}];
    dense.resize(segments_.size());
    routed.resize(segments_.size());
    std::vector<Terms> early(segments_.size());
    for (std::size_t i = 0; i < segments_.size(); ++i) {
        SegmentId id = segments_[i];
        if (is_mtp(id.kind)) id.kind = SegmentKind::layer; // and more
        if (id.kind != SegmentKind::layer) continue;       // the ends of the model are small
        const auto look = [&] {
            if (dense[i] == nullptr) dense[i] = sources_.parts.find(PartKind::dense, plan, id, places[0]);
            if (routed[i] == nullptr) routed[i] = sources_.parts.find(PartKind::routed, plan, id, places[1]);
            return dense[i] != nullptr && routed[i] != nullptr;
        };
        if (!look()) {
            const CostModel costs(plan, sources_.segments.stack(), sources_.segments.machine());
            sources_.parts.learn(plan, id, places, terms_.priced(plan, id, place, costs));
            look();
        }
        if (!offloads(plan)) {
            const auto most = [&](int side) {
                return static_cast<std::int64_t>(std::max(dense[i]->work[side], routed[i]->work[side]));
            };
            early[i].workspace = {most(0), most(1)};
        }
        early[i].first_saves = dense[i]->first_saves + routed[i]->first_saves;
        for (int side = 0; side < 2; ++side) {
            SideTerms& t = early[i].sides[side];
            t.device = t.together = t.before_input = least_seconds(*dense[i], *routed[i], side);
            t.lead_after = far_ahead;
            for (std::size_t s = 0; s < stream_count; ++s)
                t.busy[s] = dense[i]->busy[side][s] + routed[i]->busy[side][s];
            t.merged = std::min(t.device, t.busy[static_cast<std::size_t>(Stream::compute)] + routed[i]->held_up[side]);
        }
    }
    return early;
}

double FastQuoter::early_floor(const Plan& plan) {
    const std::vector<Terms> early = early_terms(plan);
    std::vector<const Terms*> terms;
    for (const Terms& t : early) terms.push_back(&t);
    return spread(plan, terms);
}

int FastQuoter::early_layers(const Plan& plan) {
    const std::vector<Terms>& early = own_terms_.emplace_back(early_terms(plan));
    Layers result;
    result.plan = plan;
    for (const Terms& t : early) result.terms.push_back(&t);
    std::vector<int> pools; // each layer keeps its input
    for (const SegmentId id : segments_) pools.push_back(id.kind == SegmentKind::layer || is_mtp(id.kind) ? 0 : -1);
    result.pools = pools_of(std::move(pools));
    result.pool_bytes = {kept_bytes(plan)};
    layers_.push_back(std::move(result));
    return static_cast<int>(layers_.size()) - 1;
}

int FastQuoter::coarse_layers(const Plan& plan) {
    // What is stashed or offloaded depends on what is recomputed, so that sets share nothing.
    if (!plan.reshards() || plan.paged_stash || plan.offload != 0) return layers(plan);
    list_segments(plan.model);
    return add_layers(plan, &own_terms_.emplace_back(early_terms(plan)));
}

} // namespace moe
