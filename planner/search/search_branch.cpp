// Bounds the plans of one branch, or counts them under the reason that excludes them.
//
// Bounds. A plan whose lower bound, less the tested margin, exceeds what its mapping needs for a place in the list is
// never priced. Before plans are bounded at all, floors leave out whole roots: layers whose work, spread evenly over
// all ranks, takes longer than the last of the top plans lose with every cut; with recomputed modules they take longer
// still, so that the floor without any holds for every set of them.
//
// Dominance. Where a plan fits, so does no faster one that recomputes more: a recomputed op takes its time and gives
// nothing but memory. Where a plan is too large, so is one that recomputes less: what recomputation works in for one
// layer, the other keeps for every layer under way (tests hold bounds to it, within their margin). Moments in BF16 take
// fewer bytes and less time than in FP32.
#include "planner/search/search_branch.hpp"

#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"

#include <algorithm>

namespace moe::search {
namespace {

constexpr int unasked = -2; // handle of what was not asked for
class BranchSearch {
public:
    BranchSearch(const SearchSpace& space, const SearchNode& branch, BoundModel& bound_model, const TopK& top_plans,
                 bool exhaustive)
        : space_(space),
          branch_(branch),
          family_(*branch.layer_options),
          any_(branch.shapes->front()),
          roots_(space.roots(family_.tp, family_.cp, family_.ep, family_.etp, any_.parallel_config->pp)),
          bound_model_(bound_model),
          top_plans_(top_plans),
          exhaustive_(exhaustive),
          optimizers_(static_cast<std::int64_t>(space.optimizers().size())),
          choices_(static_cast<std::int64_t>(space.recompute_sets().size()) * optimizers_),
          like_(space.without_graphs(family_.tp, family_.cp, family_.ep, family_.etp, any_.parallel_config->pp)),
          early_(roots_.size(), unasked),
          dominance_keys_(roots_.size()),
          stages_(2 * branch.shapes->size(), unasked) {}

    Found run() {
        const std::vector<std::size_t> open = open_roots();
        const std::vector<std::size_t> sound = sound_shapes(static_cast<std::int64_t>(open.size()) * choices_);
        for (const bool chunks : {false, true}) {
            std::vector<std::size_t> shapes;
            for (const std::size_t s : sound)
                if ((shape(s).vpp > 1) == chunks) shapes.push_back(s);
            if (shapes.empty()) continue;
            typical_ = sound.front();
            for (const std::size_t root : open) search_root(root, open, shapes, chunks);
        }
        found_.rejected.add({"memory", "memory"}, memory_);
        found_.rejected.add({"bound", "bound"}, bound_);
        found_.rejected.add({"dominated", "dominated"}, dominated_);
        return std::move(found_);
    }

private:
    const NodeShape& shape(std::size_t s) const { return (*branch_.shapes)[s]; }
    plan::Plan plan_at(std::size_t s, std::size_t root, std::size_t set) const {
        return plan_of(space_, candidate(s, root, set));
    }
    Candidate candidate(std::size_t s, std::size_t root, std::size_t set) const {
        return {
            0.0, branch_.mbs, &family_, shape(s), static_cast<std::uint16_t>(root), static_cast<std::uint16_t>(set)};
    }
    bool hopeless(double seconds) const { return !exhaustive_ && least_seconds(seconds) > top_plans_.worst(); }
    bool too_large(double bytes) const {
        return bytes * (1.0 - bound_memory_margin) > space_.base().hardware->memory_bytes;
    }

    std::vector<std::size_t> open_roots() {
        std::vector<std::size_t> open;
        for (const SearchNode::Root& root : branch_.roots)
            if (hopeless(root.floor))
                bound_ += candidates_of(space_, branch_, 1);
            else
                open.push_back(root.index);
        return open;
    }

    // Shapes that divide what they split; the others are counted with `choices` candidates each. A balanced cut is
    // sound where the even one is.
    std::vector<std::size_t> sound_shapes(std::int64_t choices) {
        std::vector<std::size_t> sound;
        for (const std::size_t s : branch_.divided) {
            const bool second = !sound.empty() && shape(sound.back()).parallel_config == shape(s).parallel_config &&
                                shape(sound.back()).vpp == shape(s).vpp;
            if (!second && choices > 0) {
                if (const plan::PlanFault fault = space_.fault_of_degrees(plan_at(s, 0, 0))) {
                    found_.rejected.add(fault, choices);
                    continue;
                }
            }
            sound.push_back(s);
        }
        return sound;
    }

    void search_root(std::size_t root, const std::vector<std::size_t>& open, const std::vector<std::size_t>& shapes,
                     bool chunks) {
        const auto count = static_cast<std::int64_t>(shapes.size());
        plan::Plan plan = plan_at(shapes.front(), root, 0);
        plan.recompute = 0;
        if (const plan::PlanFault fault = space_.fault_of(plan, root)) {
            found_.rejected.add(fault, count * choices_);
            return;
        }
        const RootSets& beside = sets_beside(root, chunks);
        for (const auto& [counter, reason] : beside.rejected.reasons)
            found_.rejected.add({counter, reason.message}, reason.count * optimizers_ * count);
        if (exhaustive_) return keep_all(root, shapes, beside.sound);
        const auto others = static_cast<std::int64_t>(beside.sound.size());
        std::vector<std::size_t> left = not_hopeless(early(root), root, shapes, others);
        if (left.empty() || others == 0) return;
        if (space_.recompute_sets()[beside.sound.front()] == 0) left = not_hopeless(near(root), root, left, others);
        if (left.empty()) return;
        const std::vector<std::size_t> sets = own_sets(root, open, chunks);
        dominated_ += static_cast<std::int64_t>((beside.sound.size() - sets.size()) * left.size()) * optimizers_;
        if (!sets.empty()) search_sets(root, left, sets);
    }

    int early(std::size_t root) {
        int& early = early_[like_[root]];
        if (early == unasked) early = bound_model_.early_layer_costs(plain_plan(root));
        return early;
    }
    // Where this has no price, the sets tell why.
    int near(std::size_t root) {
        try {
            return bound_model_.near_layer_costs(plain_plan(root));
        } catch (const Error& error) {
            if (error.fault() != Fault::bad_input) throw;
            return early(root);
        }
    }
    plan::Plan plain_plan(std::size_t root) const {
        plan::Plan plan = plan_at(typical_, root, 0);
        plan.recompute = 0;
        return plan;
    }

    // Shapes with which plans of the root could fit and win by a floor; others are counted with `sets` sets each.
    std::vector<std::size_t> not_hopeless(int floor, std::size_t root, const std::vector<std::size_t>& shapes,
                                          std::int64_t sets) {
        std::vector<std::size_t> left;
        if (hopeless(bound_model_.step_bound(floor))) {
            bound_ += static_cast<std::int64_t>(shapes.size()) * sets * optimizers_;
            return left;
        }
        for (const std::size_t s : shapes) {
            try {
                const LowerBound least = bound_model_.bound(floor, stages(s, root));
                if (too_large(least.memory_bytes)) {
                    memory_ += sets * optimizers_;
                    note(s, root, 0, least.memory_bytes);
                } else if (least_seconds(least.step_seconds) >
                           top_plans_.limit(parallel_config_of(candidate(s, root, 0)))) {
                    bound_ += sets * optimizers_;
                } else {
                    left.push_back(s);
                }
            } catch (const Error& error) {
                reject(error, sets * optimizers_);
            }
        }
        return left;
    }

    const RootSets& sets_beside(std::size_t root, bool chunks) const {
        return space_.sets_of_roots(family_, any_.parallel_config->pp, chunks)[root];
    }

    // Sets that no other root of `open` makes worse than another: graphs spare the host of every op some time, whatever
    // is recomputed, so that of two roots which differ in them the one that slows the layers less without any
    // recomputation does so with every set.
    std::vector<std::size_t> own_sets(std::size_t root, const std::vector<std::size_t>& open, bool chunks) {
        std::vector<std::size_t> sets = sets_beside(root, chunks).sound;
        for (const std::size_t other : open) {
            if (other == root || like_[other] != like_[root]) continue;
            const std::vector<double>&a = dominance_key(other), &b = dominance_key(root);
            if (!covers(a, b) || (other > root && covers(b, a))) continue;
            const std::vector<std::size_t>& better = sets_beside(other, chunks).sound;
            std::erase_if(
                sets, [&](std::size_t set) { return std::find(better.begin(), better.end(), set) != better.end(); });
        }
        return sets;
    }
    static bool covers(const std::vector<double>& a, const std::vector<double>& b) {
        return std::equal(a.begin(), a.end(), b.begin(), [](double x, double y) { return x <= y; });
    }
    const std::vector<double>& dominance_key(std::size_t root) {
        std::optional<std::vector<double>>& known = dominance_keys_[root];
        if (known) return *known;
        known.emplace();
        try {
            known = bound_model_.dominance_key(layers(root, 0, true));
        } catch (const Error& error) {
            if (error.fault() != Fault::bad_input) throw; // The fault comes up again where the set is bounded.
        }
        return *known;
    }

    int layers(std::size_t root, unsigned modules, bool coarse = false) {
        plan::Plan plan = plan_at(typical_, root, 0);
        plan.recompute = modules;
        return coarse ? bound_model_.coarse_layer_costs(plan) : bound_model_.layer_costs(plan);
    }
    int stages(std::size_t s, std::size_t root) {
        int& handle = stages_[2 * s + (roots_[root].fsdp ? 1 : 0)];
        if (handle == unasked) handle = bound_model_.stage_split(plan_at(s, root, 0));
        return handle;
    }

    // Searches without recomputation for every shape; where that is too large, with every set.
    void search_sets(std::size_t root, std::vector<std::size_t> shapes, const std::vector<std::size_t>& sets) {
        const auto first = sets.begin() + (space_.recompute_sets()[sets.front()] == 0 ? 1 : 0);
        const std::int64_t others = static_cast<std::int64_t>(sets.end() - first) * optimizers_;
        if (first != sets.begin()) {
            const std::vector<Verdict> plain = bound_set(root, shapes, sets.front());
            std::vector<std::size_t> large;
            for (std::size_t i = 0; i < shapes.size(); ++i) {
                if (plain[i] == Verdict::fits) dominated_ += others;
                if (plain[i] == Verdict::slow) bound_ += others;
                if (plain[i] == Verdict::large) large.push_back(shapes[i]);
            }
            shapes = std::move(large);
        }
        std::vector<std::size_t> rest(first, sets.end());
        const std::optional<std::size_t> largest = largest_of(space_, rest);
        if (largest) {
            take_large(root, *largest, shapes, others);
            std::erase(rest, *largest);
            // Mostly `full`: where it alone fits, the others need not be asked one by one.
            if (const std::optional<std::size_t> second = largest_of(space_, rest)) {
                const std::vector<std::size_t> tight =
                    take_large(root, *second, shapes, static_cast<std::int64_t>(rest.size()) * optimizers_);
                bound_sets(root, tight, {*largest});
            }
        }
        bound_sets(root, shapes, {first, sets.end()});
    }

    // Every set for every shape, but for those that recompute more than one that fits.
    void bound_sets(std::size_t root, const std::vector<std::size_t>& shapes, const std::vector<std::size_t>& sets) {
        std::vector<std::vector<unsigned>> fitting(shapes.size()); // modules recomputed by sets that fit
        for (const std::size_t set : sets) {
            const unsigned modules = covered(space_, set);
            const auto dominated = [modules](const std::vector<unsigned>& sets_that_fit) {
                return std::any_of(sets_that_fit.begin(), sets_that_fit.end(),
                                   [modules](unsigned fewer) { return (fewer & ~modules) == 0; });
            };
            std::vector<std::size_t> open, indices;
            for (std::size_t i = 0; i < shapes.size(); ++i) {
                if (dominated(fitting[i])) continue;
                open.push_back(shapes[i]);
                indices.push_back(i);
            }
            dominated_ += static_cast<std::int64_t>(shapes.size() - open.size()) * optimizers_;
            const std::vector<Verdict> verdicts = bound_set(root, open, set);
            for (std::size_t i = 0; i < open.size(); ++i)
                if (verdicts[i] != Verdict::large) fitting[indices[i]].push_back(modules);
        }
    }

    // large: too large, or not priced. slow: no plan of these layers and this cut wins, whatever fits; not always
    // counted as evaluated.
    enum class Verdict : std::uint8_t { fits, large, slow };
    // Bounds one set with each shape. FSDP's layers differ with every set: floors of theirs that are cheaper come
    // first.
    std::vector<Verdict> bound_set(std::size_t root, const std::vector<std::size_t>& shapes, std::size_t set) {
        std::vector<Verdict> verdicts(shapes.size(), Verdict::fits);
        for (const bool coarse : {true, false}) {
            const auto open = std::count(verdicts.begin(), verdicts.end(), Verdict::fits);
            if (open == 0 || (coarse && !shards(root))) continue;
            const auto all = [&](Verdict verdict) {
                std::replace(verdicts.begin(), verdicts.end(), Verdict::fits, verdict);
                return verdicts;
            };
            int handle = 0;
            try {
                handle = layers(root, space_.recompute_sets()[set], coarse);
                if (hopeless(bound_model_.step_bound(handle))) {
                    bound_ += open * optimizers_;
                    return all(Verdict::slow);
                }
            } catch (const Error& error) {
                reject(error, open * optimizers_);
                return all(Verdict::large);
            }
            for (std::size_t i = 0; i < shapes.size(); ++i)
                if (verdicts[i] == Verdict::fits) verdicts[i] = bound_plan(root, shapes[i], set, handle, coarse);
        }
        return verdicts;
    }
    bool shards(std::size_t root) const { return roots_[root].fsdp && any_.parallel_config->pp == 1; }

    // Takes out the shapes that are too large with this set and so with every set of fewer modules, and counts `each`
    // candidates for them.
    std::vector<std::size_t> take_large(std::size_t root, std::size_t set, std::vector<std::size_t>& shapes,
                                        std::int64_t each) {
        std::vector<std::size_t> taken;
        if (shapes.empty()) return taken;
        try {
            const int thrifty = layers(root, space_.recompute_sets()[set], true);
            std::erase_if(shapes, [&](std::size_t s) {
                const double bytes = bound_model_.bound(thrifty, stages(s, root)).memory_bytes;
                if (!too_large(bytes * (1.0 - bound_memory_margin))) return false;
                memory_ += each;
                note(s, root, set, bytes);
                taken.push_back(s);
                return true;
            });
        } catch (const Error& error) {
            if (error.fault() != Fault::bad_input) throw; // The fault is counted where the set is bounded.
        }
        return taken;
    }
    // Bounds the plan with the smallest optimizer states; the others are worse in either case.
    Verdict bound_plan(std::size_t root, std::size_t s, std::size_t set, int layers, bool coarse = false) {
        LowerBound bound;
        try {
            bound = bound_model_.bound(layers, stages(s, root));
        } catch (const Error& error) {
            reject(error, optimizers_);
            return Verdict::large;
        }
        Candidate found = candidate(s, root, set);
        found.seconds = bound.step_seconds;
        const bool slow = least_seconds(found.seconds) > top_plans_.limit(parallel_config_of(found));
        if (too_large(bound.memory_bytes)) {
            memory_ += optimizers_;
            note(s, root, set, bound.memory_bytes);
            return slow ? Verdict::slow : Verdict::large;
        }
        if (coarse) {
            bound_ += slow ? optimizers_ : 0;
            return slow ? Verdict::slow : Verdict::fits;
        }
        ++found_.evaluated;
        dominated_ += optimizers_ - 1;
        if (slow) return Verdict::slow;
        found_.candidates.push_back(found);
        return Verdict::fits;
    }

    // Exhaustive: every plan, to be priced.
    void keep_all(std::size_t root, const std::vector<std::size_t>& shapes, const std::vector<std::size_t>& sets) {
        for (const std::size_t s : shapes)
            for (const std::size_t set : sets)
                for (std::int64_t i = 0; i < optimizers_; ++i) {
                    Candidate found = candidate(s, root, set);
                    found.optimizer = static_cast<std::uint16_t>(i);
                    if (const plan::PlanFault fault =
                            i > 0 ? space_.fault_of(plan_of(space_, found), root) : plan::PlanFault{}) {
                        found_.rejected.add(fault, 1);
                        continue;
                    }
                    found_.candidates.push_back(found);
                    ++found_.evaluated;
                }
    }

    void reject(const Error& error, std::int64_t count) {
        if (error.fault() != Fault::bad_input) throw error;
        found_.rejected.add({"not priced", error.what()}, count);
    }
    void note(std::size_t s, std::size_t root, std::size_t set, double bytes) {
        if (!found_.smallest || bytes < found_.least_memory) found_.note(plan_at(s, root, set), bytes);
    }

    const SearchSpace& space_;
    const SearchNode& branch_;
    const LayerOptions& family_;
    const NodeShape& any_;
    const std::vector<plan::Plan>& roots_;
    BoundModel& bound_model_;
    const TopK& top_plans_;
    bool exhaustive_;
    std::int64_t optimizers_, choices_;
    std::int64_t memory_ = 0, bound_ = 0, dominated_ = 0;
    const std::vector<std::size_t>& like_; // roots that differ in CUDA graphs at most
    std::size_t typical_ = 0;              // a sound shape's index; no shape changes layers' costs
    std::vector<int> early_;               // handles by root, shared by those that are alike
    std::vector<std::optional<std::vector<double>>> dominance_keys_; // dominance keys by root
    std::vector<int> stages_;                                        // handles by shape: without FSDP, then with it
    Found found_;
};

} // namespace

Found search_node(const SearchSpace& space, const SearchNode& branch, BoundModel& bound_model, const TopK& top_plans,
                  bool exhaustive) {
    bound_model.forget();
    return BranchSearch(space, branch, bound_model, top_plans, exhaustive).run();
}

} // namespace moe::search
