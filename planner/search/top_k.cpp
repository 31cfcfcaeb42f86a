// Keeps the top plans sorted and free of a second plan of the same mapping.
#include "planner/search/top_k.hpp"

#include <algorithm>
#include <limits>
#include <tuple>

namespace moe::search {
namespace {

auto fields(const plan::Plan& p) {
    return std::tie(p.precision, p.pp, p.vpp, p.tp, p.cp, p.etp, p.ep, p.mbs, p.recompute, p.optimizer.moments,
                    p.layout, p.schedule, p.offload, p.delay_wgrad, p.dispatcher, p.cuda_graph, p.ep_overlap,
                    p.tp_overlap, p.cp_comm, p.fsdp);
}

} // namespace

bool better(const Ranked& a, const Ranked& b) {
    if (a.second.step_seconds != b.second.step_seconds) return a.second.step_seconds < b.second.step_seconds;
    return fields(a.first) < fields(b.first);
}

ParallelConfigKey parallel_config_of(const plan::Plan& p) { return {p.tp, p.cp, p.dp, p.pp, p.ep, p.etp, p.mbs}; }

void TopK::add(Ranked ranked) {
    if (ranked.second.step_seconds > slowest_) return;
    if (!similar_) {
        const ParallelConfigKey place = place_of(parallel_config_of(ranked.first));
        const auto same = std::find_if(plans_.begin(), plans_.end(), [&](const Ranked& other) {
            return place_of(parallel_config_of(other.first)) == place;
        });
        if (same != plans_.end()) {
            if (!better(ranked, *same)) return;
            plans_.erase(same);
        }
    }
    plans_.insert(std::upper_bound(plans_.begin(), plans_.end(), ranked, better), std::move(ranked));
    if (plans_.size() > most_) plans_.pop_back();
}

double TopK::worst() const {
    return plans_.size() < most_ ? slowest_ : std::min(slowest_, plans_.back().second.step_seconds);
}

double TopK::limit(const ParallelConfigKey& mapping) const {
    if (!similar_)
        for (const Ranked& ranked : plans_)
            if (place_of(parallel_config_of(ranked.first)) == place_of(mapping))
                return std::min(slowest_, ranked.second.step_seconds);
    return worst();
}

} // namespace moe::search
