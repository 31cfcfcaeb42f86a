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

// Over 11,000 estimates of four searches (DeepSeek-V3, Qwen3-30B and 235B; GB200, H100) 99 % of the floors lay
// below 1.07 of the estimate that followed, the highest at 1.12.
constexpr double margin = 0.9;
constexpr double memory_margin = 1.05;
// Tokens per rank from which on larger micro-batches hardly use the device better, and what they may still gain.
constexpr std::int64_t saturating_tokens = 16384;
constexpr double saturated = 0.95;

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
          capacity_(space.base().hardware->memory_bytes) {
        const std::vector<unsigned>& sets = space.recompute_sets();
        first_is_least_ =
            std::all_of(sets.begin(), sets.end(), [&](unsigned set) { return contains(set, sets.front()); });
    }

    FamilyResult run() {
        if (!exhaustive_ && podium_.worst() < std::numeric_limits<double>::infinity()) probe();
        // Most stages first: what does not fit there does not fit in fewer, see SmallestMemory.
        for (auto mapping = family_.mappings.rbegin(); mapping != family_.mappings.rend(); ++mapping)
            for (const int vpp : space_.chunk_counts(mapping->pp)) price_pipeline(*mapping, vpp);
        result_.rejected.add({"memory", "memory"}, memory_);
        result_.rejected.add({"bound", "bound"}, bound_);
        result_.rejected.add({"dominated", "dominated"}, dominated_);
        return std::move(result_);
    }

private:
    // One micro-batch size; `plan` is as candidate() made it, `fault` what check() says of it with the first set.
    struct Size {
        Plan plan, checked;
        PlanFault fault;
    };

    std::int64_t sound_choices() const {
        return static_cast<std::int64_t>(space_.recompute_sets().size() * space_.optimizers().size());
    }

    void price_pipeline(const Mapping& mapping, int vpp) {
        const std::vector<Cut>& cuts = space_.cuts(mapping.pp, vpp);
        std::vector<Size> sizes;
        for (const std::int64_t mbs : space_.micro_batch_sizes(mapping.dp)) {
            Size size{space_.candidate(family_, mapping, vpp, mbs), {}, {}};
            size.plan.layout = cuts.front().layout;
            size.checked = size.plan;
            size.fault = space_.check(size.checked);
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
                size.checked = size.plan;
                fault = space_.check(size.checked);
            }
            if (fault) {
                result_.rejected.add(fault, space_.choices());
                continue;
            }
            for (const auto& [counter, reason] : space_.unsound_sets().reasons)
                result_.rejected.add({counter, reason.message},
                                     reason.count * static_cast<std::int64_t>(space_.optimizers().size()));
            if (too_large) {
                memory_ += sound_choices();
            } else if (first_is_least_ && excluded_either_way(size.checked, cut)) {
                bound_ += sound_choices(); // its first set recomputes least
            } else {
                too_large = !choose(size.plan, cut, fits) && !exhaustive_;
            }
        }
        // Larger micro-batches first: their floor serves the smaller ones.
        for (auto plan = fits.rbegin(); plan != fits.rend(); ++plan) price(*plan, cut);
    }

    // Collects what fits of one micro-batch size. Returns false when nothing does for want of memory: then nothing of a
    // larger size fits either. A set that does not fit rules out those it contains, which save less; one that fits
    // makes those that contain it dominated. The set that fitted last is asked first: mostly it and one more decide.
    bool choose(const Plan& base, const Cut& cut, std::vector<Plan>& fits) {
        const std::vector<unsigned>& sets = space_.recompute_sets();
        std::vector<Fit> known(sets.size(), Fit::unknown);
        bool other_reason = false;
        for (std::size_t i = next_set(known); i < sets.size(); i = next_set(known)) {
            Plan plan = base;
            plan.recompute = sets[i];
            if (const PlanFault fault = space_.check(plan)) {
                result_.rejected.add(fault, optimizers());
                known[i] = Fit::other;
            } else if (excluded(plan, cut)) {
                bound_ += optimizers();
                known[i] = Fit::other;
            } else if (hopeless(plan)) {
                memory_ += optimizers();
                known[i] = Fit::no;
            } else {
                known[i] = choose_optimizer(plan, cut, fits);
            }
            other_reason |= known[i] == Fit::other;
            if (exhaustive_) continue;
            if (known[i] == Fit::no) infer(known, Fit::no, [&](unsigned set) { return contains(sets[i], set); });
            if (known[i] != Fit::yes) continue;
            hint_ = i;
            infer(known, Fit::dominated, [&](unsigned set) { return contains(set, sets[i]); });
            // Found fitting from above: what was collected before and contains this set goes as well.
            const auto slower = [&](const Plan& p) {
                return p.mbs == base.mbs && p.recompute != sets[i] && contains(p.recompute, sets[i]);
            };
            const auto removed = std::erase_if(fits, slower);
            dominated_ += static_cast<std::int64_t>(removed);
        }
        return other_reason || std::find(known.begin(), known.end(), Fit::yes) != known.end();
    }

    enum class Fit { unknown, yes, no, dominated, other };

    std::int64_t optimizers() const { return static_cast<std::int64_t>(space_.optimizers().size()); }

    // The hint first, then from the largest set down.
    std::size_t next_set(const std::vector<Fit>& known) const {
        if (known[hint_] == Fit::unknown) return hint_;
        for (std::size_t i = known.size(); i-- > 0;)
            if (known[i] == Fit::unknown) return i;
        return known.size();
    }

    template <class Which>
    void infer(std::vector<Fit>& known, Fit fit, const Which& which) {
        for (std::size_t i = 0; i < known.size(); ++i) {
            if (known[i] != Fit::unknown || !which(space_.recompute_sets()[i])) continue;
            known[i] = fit;
            (fit == Fit::no ? memory_ : dominated_) += optimizers();
        }
    }

    // The optimizer with the smallest state first; the others are dominated where it fits and too large where not.
    Fit choose_optimizer(Plan plan, const Cut& cut, std::vector<Plan>& fits) {
        Fit result = Fit::unknown;
        for (const OptimizerChoice& optimizer : space_.optimizers()) {
            if (!exhaustive_ && result != Fit::unknown) {
                if (result == Fit::other)
                    result_.rejected.add({"not priced", "no price"}, 1);
                else
                    ++(result == Fit::yes ? dominated_ : memory_);
                continue;
            }
            plan.optimizer = optimizer;
            double bytes = 0.0;
            try {
                bytes = estimator_.memory_bytes(plan);
            } catch (const Error& error) {
                reject(error);
                if (result == Fit::unknown) result = Fit::other;
                continue;
            }
            if (bytes <= capacity_) {
                fits.push_back(plan);
                result = Fit::yes;
            } else {
                too_large(plan, bytes);
                if (result != Fit::yes) result = Fit::no;
            }
            remember_smallest(plan, cut, bytes);
        }
        return result;
    }

    // What plans of the family with this micro-batch, or a larger one, need at least if they recompute no more; from a
    // plan with one chunk per rank. Fewer stages hold more weights per rank and as many activations (fewer
    // micro-batches in flight, of more layers); optimizer state is spread over all ranks either way; more chunks and EP
    // overlap keep more activations in flight. A better cut can spare the heaviest rank's excess over the mean.
    struct SmallestMemory {
        std::int64_t mbs;
        unsigned recompute;
    };

    void remember_smallest(const Plan& plan, const Cut& cut, double bytes) {
        if (plan.vpp != 1 || plan.ep_overlap || plan.optimizer != space_.optimizers().front()) return;
        const double least = bytes / (memory_margin * std::max({1.0, cut.heaviest_rank, cut.most_held}));
        if (least > capacity_) smallest_.push_back({plan.mbs, plan.recompute});
    }

    bool hopeless(const Plan& plan) const {
        return !exhaustive_ && std::any_of(smallest_.begin(), smallest_.end(), [&](const SmallestMemory& s) {
            return s.mbs <= plan.mbs && contains(s.recompute, plan.recompute);
        });
    }

    void too_large(const Plan& plan, double bytes) {
        ++memory_;
        note(plan, bytes);
    }

    void note(const Plan& plan, double bytes) {
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
        if (excluded(plan, cut)) {
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

    // What one estimate says of others of the family: with its micro-batch or a smaller one and its switches, and,
    // where the device is saturated, with a larger one.
    struct Floor {
        bool ep_overlap;
        CudaGraph cuda_graph;
        std::int64_t mbs, tokens; // tokens of a micro-batch on one rank
        int pp;
        unsigned recompute;
        double hidden;         // seconds of every plan, EP overlap or not
        double layers;         // of plans with this EP overlap
        double with_recompute; // of plans that recompute at least as much
        double whole;          // of these, with as many pipeline ranks
    };

    // Prices one plan that uses the device as well as any of the family, whether it fits or not: families that lose by
    // its floor are left before anything of theirs is lowered again.
    void probe() {
        const Mapping& mapping = family_.mappings.front();
        const std::vector<std::int64_t> sizes = space_.micro_batch_sizes(mapping.dp);
        for (auto mbs = sizes.rbegin(); mbs != sizes.rend(); ++mbs) {
            const int vpp = space_.chunk_counts(mapping.pp).front();
            const Cut& cut = space_.cuts(mapping.pp, vpp).front();
            Plan plan = space_.candidate(family_, mapping, vpp, *mbs);
            plan.layout = cut.layout;
            plan.ep_overlap = space_.pinned("ep_overlap") && plan.ep_overlap;
            if (mbs + 1 != sizes.rend() && plan.tokens_local() > saturating_tokens) continue;
            if (space_.check(plan)) continue;
            try {
                learn(plan, cut, estimator_.estimate(plan));
            } catch (const Error& error) {
                if (error.fault() != Fault::bad_input) throw;
            }
            return;
        }
    }

    void learn(const Plan& plan, const Cut& cut, const Estimate& estimate) {
        const Breakdown& b = estimate.breakdown;
        const double share = std::max(1.0, cut.heaviest_rank);
        const double whole = estimate.step_seconds - b.bubble;
        const double with_recompute = whole - b.pipeline - b.data - b.optimizer - b.host;
        floors_.push_back({plan.ep_overlap, plan.cuda_graph, plan.mbs, plan.tokens_local(), plan.pp, plan.recompute,
                           (with_recompute - b.recompute - b.expert) / share, (with_recompute - b.recompute) / share,
                           with_recompute / share, whole / share});
    }

    bool excluded(const Plan& plan, const Cut& cut) const { return !exhaustive_ && bound(plan, cut) > podium_.worst(); }

    // Sets that EP overlap excludes run without it.
    bool excluded_either_way(Plan plan, const Cut& cut) const {
        if (!excluded(plan, cut)) return false;
        if (!plan.ep_overlap) return true;
        plan.ep_overlap = false;
        return excluded(plan, cut);
    }

    double bound(const Plan& plan, const Cut& cut) const {
        double floor = 0.0;
        for (const Floor& f : floors_) {
            if (f.cuda_graph != plan.cuda_graph) continue;
            if (f.mbs < plan.mbs && f.tokens < saturating_tokens / 2) continue;
            const double gain = f.mbs < plan.mbs ? saturated : 1.0;
            // Overlap hides at most the exchange of rows.
            if (f.ep_overlap != plan.ep_overlap) {
                if (plan.ep_overlap) floor = std::max(floor, gain * f.hidden);
                continue;
            }
            const bool more = contains(plan.recompute, f.recompute);
            floor = std::max(floor, gain * (!more ? f.layers : f.pp == plan.pp ? f.whole : f.with_recompute));
        }
        const double fill = (plan.pp - 1.0) / (static_cast<double>(plan.vpp) * plan.micro_batches());
        return margin * floor * std::max(cut.most_layers, 1.0 + fill * cut.lightest_chunk);
    }

    const SearchSpace& space_;
    const Family& family_;
    Estimator& estimator_;
    Podium podium_;
    bool exhaustive_;
    double capacity_;
    bool first_is_least_;  // the first recompute set is contained in all others
    std::size_t hint_ = 0; // the recompute set that fitted last
    std::int64_t memory_ = 0, bound_ = 0, dominated_ = 0;
    std::vector<Floor> floors_;
    std::vector<SmallestMemory> smallest_;
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
