// Prices the candidates of one family: memory first, then time, with what cannot win left out by bound or dominance.
//
// Bound. Layers of a family cost the same per micro-batch, so the seconds that a rank spends on them, summed over the
// step, are the same for every pipeline and data parallelism: a plan with half the stages has half the micro-batches
// per rank and twice the layers. One estimate, without its bubble, its parts that depend on the mapping and its
// recompute, and spread evenly over the ranks, is therefore a floor for the whole family at that micro-batch size; and
// since larger micro-batches only use the device better, also for smaller ones. What a candidate's own pipeline adds
// (its bubble and the rank with most layers) multiplies the floor. `margin` covers what is not exactly additive.
//
// Dominance. Of two recompute sets that both fit, the one that contains the other is slower; FP32 moments move more
// bytes than BF16 ones. Only the lesser is priced.
#include "planner/search_family.hpp"

#include "planner/error.hpp"

#include <algorithm>
#include <limits>
#include <tuple>

namespace moe {
namespace {

constexpr double margin = 0.9;

// The modules that a set recomputes, those inside of larger ones included.
unsigned covered(unsigned set) {
    if ((set & recompute::full) != 0) return ~0U;
    if ((set & recompute::moe) != 0) set |= recompute::moe_act | recompute::shared_experts;
    return set;
}

bool contains(unsigned large, unsigned small) { return (covered(large) & covered(small)) == covered(small); }

auto fields(const Plan& p) {
    return std::tie(p.precision, p.pp, p.vpp, p.tp, p.cp, p.etp, p.ep, p.mbs, p.recompute, p.optimizer.bf16_moments,
                    p.layout, p.schedule, p.dispatcher, p.cuda_graph, p.ep_overlap);
}

class FamilySearch {
public:
    FamilySearch(const SearchSpace& space, const Family& family, Estimator& estimator, const Podium& incumbents,
                 bool exhaustive)
        : space_(space),
          family_(family),
          estimator_(estimator),
          podium_(incumbents),
          exhaustive_(exhaustive),
          capacity_(space.base().hardware->memory_bytes) {}

    FamilyResult run() {
        for (const Mapping& mapping : family_.mappings)
            for (const int vpp : space_.chunk_counts(mapping.pp)) price_pipeline(mapping, vpp);
        result_.rejected.add({"memory", "memory"}, memory_);
        result_.rejected.add({"bound", "bound"}, bound_);
        result_.rejected.add({"dominated", "dominated"}, dominated_);
        return std::move(result_);
    }

private:
    // One micro-batch size; `plan` is as candidate() made it, `fault` what check() says of it with the first set.
    struct Size {
        Plan plan;
        PlanFault fault;
    };

    std::int64_t sound_choices() const {
        return static_cast<std::int64_t>(space_.recompute_sets().size() * space_.optimizers().size());
    }

    void price_pipeline(const Mapping& mapping, int vpp) {
        const std::vector<Cut>& cuts = space_.cuts(mapping.pp, vpp);
        std::vector<Size> sizes;
        for (const std::int64_t mbs : space_.micro_batch_sizes(mapping.dp)) {
            Size size{space_.candidate(family_, mapping, vpp, mbs), {}};
            size.plan.layout = cuts.front().layout;
            Plan checked = size.plan;
            size.fault = space_.check(checked);
            sizes.push_back(std::move(size));
        }
        for (const Cut& cut : cuts) price_cut(sizes, cut, &cut == &cuts.front());
    }

    // Balanced cuts are sound where the first one is; where it is not, they are asked anew.
    void price_cut(std::vector<Size>& sizes, const Cut& cut, bool first) {
        std::vector<Plan> fits;
        bool too_large = false;
        for (Size& size : sizes) {
            size.plan.layout = cut.layout;
            PlanFault fault = size.fault;
            if (fault && !first) {
                Plan checked = size.plan;
                fault = space_.check(checked);
            }
            if (fault) {
                result_.rejected.add(fault, space_.choices());
                continue;
            }
            for (const auto& [counter, reason] : space_.unsound_sets().reasons)
                result_.rejected.add({counter, reason.message},
                                     reason.count * static_cast<std::int64_t>(space_.optimizers().size()));
            if (too_large)
                memory_ += sound_choices();
            else
                too_large = !choose(size.plan, cut, fits) && !exhaustive_;
        }
        // Larger micro-batches first: their floor serves the smaller ones.
        for (auto plan = fits.rbegin(); plan != fits.rend(); ++plan) price(*plan, cut);
    }

    // Collects what fits of one micro-batch size. Returns false when nothing does for want of memory: then nothing of a
    // larger size fits either.
    bool choose(const Plan& base, const Cut& cut, std::vector<Plan>& fits) {
        std::vector<unsigned> fitting;
        bool other_reason = false;
        for (const unsigned set : space_.recompute_sets()) {
            const auto optimizers = static_cast<std::int64_t>(space_.optimizers().size());
            Plan plan = base;
            plan.recompute = set;
            if (const PlanFault fault = space_.check(plan)) {
                result_.rejected.add(fault, optimizers);
                other_reason = true;
            } else if (!exhaustive_ && bound(plan, cut) > podium_.worst()) {
                bound_ += optimizers;
                other_reason = true;
            } else if (!exhaustive_ && std::any_of(fitting.begin(), fitting.end(),
                                                   [&](unsigned small) { return contains(set, small); })) {
                dominated_ += optimizers;
            } else if (const Fit fit = choose_optimizer(plan, fits); fit == Fit::yes) {
                fitting.push_back(set);
            } else if (fit == Fit::unknown) {
                other_reason = true;
            }
        }
        return !fitting.empty() || other_reason;
    }

    enum class Fit { yes, no, unknown };

    Fit choose_optimizer(Plan plan, std::vector<Plan>& fits) {
        Fit result = Fit::no;
        for (const OptimizerChoice& optimizer : space_.optimizers()) {
            if (!exhaustive_ && result == Fit::yes) {
                ++dominated_;
                continue;
            }
            plan.optimizer = optimizer;
            double bytes = 0.0;
            try {
                bytes = estimator_.memory_bytes(plan);
            } catch (const Error& error) {
                reject(error);
                result = Fit::unknown;
                continue;
            }
            if (bytes <= capacity_) {
                fits.push_back(plan);
                result = Fit::yes;
            } else {
                too_large(plan, bytes);
            }
        }
        return result;
    }

    void too_large(const Plan& plan, double bytes) {
        ++memory_;
        if (result_.smallest && bytes >= result_.least_memory) return;
        result_.least_memory = bytes;
        result_.smallest = plan;
    }

    // What the estimator has no price for is a reason like others; a failure while running is not.
    void reject(const Error& error) {
        if (error.fault() != Fault::bad_input) throw error;
        result_.rejected.add({"not priced", error.what()}, 1);
    }

    void price(const Plan& plan, const Cut& cut) {
        if (!exhaustive_ && bound(plan, cut) > podium_.worst()) {
            ++bound_;
            return;
        }
        Estimate estimate;
        try {
            estimate = estimator_.estimate(plan);
        } catch (const Error& error) {
            reject(error);
            return;
        }
        learn(plan, cut, estimate);
        if (!estimate.fits) {
            too_large(plan, estimate.memory_bytes);
            return;
        }
        ++result_.evaluated;
        if (podium_.add({plan, estimate})) result_.found.emplace_back(plan, estimate);
    }

    // Seconds that every plan of the family with this micro-batch and these switches spends on its layers at least.
    struct Floor {
        bool ep_overlap;
        CudaGraph cuda_graph;
        std::int64_t mbs;
        double seconds;
    };

    void learn(const Plan& plan, const Cut& cut, const Estimate& estimate) {
        const Breakdown& b = estimate.breakdown;
        const double busy = estimate.step_seconds - b.bubble - b.pipeline - b.data - b.optimizer - b.recompute - b.host;
        floors_.push_back({plan.ep_overlap, plan.cuda_graph, plan.mbs, busy / std::max(1.0, cut.heaviest_rank)});
    }

    double bound(const Plan& plan, const Cut& cut) const {
        double floor = 0.0;
        for (const Floor& f : floors_)
            if (f.ep_overlap == plan.ep_overlap && f.cuda_graph == plan.cuda_graph && f.mbs >= plan.mbs)
                floor = std::max(floor, f.seconds);
        const double fill = (plan.pp - 1.0) / (static_cast<double>(plan.vpp) * plan.micro_batches());
        return margin * floor * std::max(cut.most_layers, 1.0 + fill * cut.lightest_chunk);
    }

    const SearchSpace& space_;
    const Family& family_;
    Estimator& estimator_;
    Podium podium_;
    bool exhaustive_;
    double capacity_;
    std::int64_t memory_ = 0, bound_ = 0, dominated_ = 0;
    std::vector<Floor> floors_;
    FamilyResult result_;
};

} // namespace

bool better(const Ranked& a, const Ranked& b) {
    if (a.second.step_seconds != b.second.step_seconds) return a.second.step_seconds < b.second.step_seconds;
    return fields(a.first) < fields(b.first);
}

bool Podium::add(Ranked ranked) {
    const auto place = std::upper_bound(plans_.begin(), plans_.end(), ranked, better);
    if (static_cast<std::size_t>(place - plans_.begin()) >= most_) return false;
    plans_.insert(place, std::move(ranked));
    if (plans_.size() > most_) plans_.pop_back();
    return true;
}

double Podium::worst() const {
    return plans_.size() < most_ ? std::numeric_limits<double>::infinity() : plans_.back().second.step_seconds;
}

FamilyResult search_family(const SearchSpace& space, const Family& family, Estimator& estimator,
                           const Podium& incumbents, bool exhaustive) {
    return FamilySearch(space, family, estimator, incumbents, exhaustive).run();
}

} // namespace moe
