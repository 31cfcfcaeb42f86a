// Refinement: a few dozen plans around those of a search, each checked, played, and ranked with the others.
#include "planner/search/refined_search.hpp"

#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/base/parallel.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/plan/plan_fields.hpp"
#include "planner/search/explore.hpp"
#include "planner/search/offload_fit.hpp"
#include "planner/search/played_plans.hpp"
#include "planner/search/thrifty.hpp"
#include "planner/search/variants.hpp"
#include "planner/stack/stack.hpp"

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <utility>

namespace moe::search {
namespace {

using Clock = std::chrono::steady_clock;

// Memories to search with, over the real one, and how many plans of each: offload can spare most of the activations at
// the speed of the host's link.
constexpr double more_memory[] = {1.15, 1.4};
constexpr int plans_of_each = 8;
// Plans of the list that are tried with less recomputation, and with how many sets of modules.
constexpr std::size_t lighter_plans = 2, lighter_sets = 12;
constexpr std::size_t played_together = 8;
// Shares by which plays may differ from closed forms, or variants from each other; that delayed weight gradients gain
// at most where copies keep them waiting; and by which each further set of modules of a plan promises less.
constexpr double apart = 1.02, most_by_delay = 1.04, next_set = 1.002;
constexpr int most_rounds = 3; // rounds that change offloaded modules one by one; plans_of_rounds: plans in them
constexpr std::size_t plans_of_rounds = 3;
constexpr std::size_t most_climbed = 12; // plans whose variants are looked at
constexpr std::size_t most_vain = 8;     // groups that bring no faster plan, after which no other is tried
// Plans that are refined at least, so that the first one does not depend on how many are asked for.
constexpr int fewest_refined = 5;
// The share that a variant has to gain over the plan of its mapping: less is not worth another choice, and within what
// plays know.
constexpr double least_gain = 0.002;

class Refinement {
public:
    Refinement(const SearchRequest& request, const stack::Stack& stack, Estimator& estimator)
        : request_(request),
          shown_(request.top),
          stack_(stack),
          estimator_(estimator),
          workers_(thread_count(request.threads)),
          top_plans_(static_cast<std::size_t>(std::max(request.top, fewest_refined)), request.similar) {
        for (const auto& [field, value] : request.fixed) pinned_.insert(field);
        if (shown_ >= 1) request_.top = std::max(shown_, fewest_refined);
    }

    SearchResult run() {
        const Clock::time_point start = Clock::now();
        const SearchSpace space(request_, stack_);
        const double limit = limit_by_offload();
        const bool tight = limit < std::numeric_limits<double>::infinity();
        Exploration exploration = explore(request_, space, estimator_, workers_, limit);
        result_ = std::move(exploration.result);
        const std::vector<plan::Plan> found = plans_of(result_);
        const std::vector<plan::Plan> split = with_split_backwards(found);
        std::vector<plan::Plan> both = found;
        both.insert(both.end(), split.begin(), split.end());
        played_.of(both); // side by side
        play(found, false);
        play(split);
        if (top_plans_.plans().empty()) // The rest starts from a plan that fits, whatever it takes.
            if (const std::optional<plan::Plan> thrifty = fitting_plan(space, stack_, estimator_)) play({*thrifty});
        if (offloads()) {
            play_host_states(tight ? reach() : least());
            if (!top_plans_.plans().empty()) play_offloaded();
        }
        if (top_plans_.plans().empty()) {
            if (found.empty()) refuse_search(request_, stack_, estimator_, space, exploration.failure);
            refuse_host_memory();
        }
        play_variants();
        result_.plans = top_plans_.plans();
        while (result_.plans.size() > static_cast<std::size_t>(shown_)) result_.plans.pop_back();
        result_.seconds = std::chrono::duration<double>(Clock::now() - start).count();
        return std::move(result_);
    }

private:
    static std::vector<plan::Plan> plans_of(const SearchResult& result) {
        std::vector<plan::Plan> plans;
        for (const auto& [plan, estimate] : result.plans) plans.push_back(plan);
        return plans;
    }
    bool pinned(const char* field) const { return pinned_.contains(field); }
    bool offloads() const { return stack_.offloads && !pinned("offload"); }

    // Refuses plans that fit into the GPUs but not into the host. Closed forms do not count what is on the host, so
    // that a pinned set comes here.
    [[noreturn]] void refuse_host_memory() const {
        constexpr double gib = 1024.0 * 1024.0 * 1024.0;
        infeasible("no plan for {} fits: what they offload needs {:.1f} GiB of the host's memory for each, of {:.1f}: "
                   "unfix offload, or use more GPUs",
                   counted(request_.base.gpus, "GPU"), least_on_host_ / gib,
                   request_.base.hardware->host_memory_bytes / gib);
    }

    // Plans that do not fit, and those that cannot be priced, are left out. fresh: none of them was counted before.
    void play(const std::vector<plan::Plan>& plans, bool fresh = true) {
        const std::vector<std::optional<Estimate>> played = played_.of(plans);
        for (std::size_t i = 0; i < plans.size(); ++i) {
            if (!played[i]) continue;
            if (!played[i]->fits) {
                least_on_host_ = std::min(least_on_host_, played[i]->host_bytes);
                continue;
            }
            result_.evaluated += fresh ? 1 : 0;
            result_.priced += fresh ? 1 : 0;
            nearest_.add({plans[i], *played[i]});
            const double limit = top_plans_.limit(parallel_config_of(plans[i]));
            if (played[i]->step_seconds < (1.0 - least_gain) * limit) top_plans_.add({plans[i], *played[i]});
        }
        if (!request_.progress) return;
        std::int64_t pruned = 0;
        for (const auto& [reason, count] : result_.pruned) pruned += count;
        request_.progress(result_.evaluated, pruned);
    }

    std::vector<plan::Plan> with_split_backwards(const std::vector<plan::Plan>& plans) const {
        std::vector<plan::Plan> result;
        for (const plan::Plan& found : plans)
            for (plan::Plan& plan : split_backwards(found, stack_, pinned_)) result.push_back(std::move(plan));
        return result;
    }

    // Choices that are not explored: those that bounds promise most of, and delayed weight gradients, of which bounds
    // know little, on all plans near the best.
    void play_variants() {
        std::vector<Ranked> near = top_plans_.plans(); // Each that is listed is climbed from.
        for (const Ranked& ranked : near_best())
            if (std::none_of(near.begin(), near.end(), [&](const Ranked& n) { return same_plan(n, ranked); }))
                near.push_back(ranked);
        std::vector<std::optional<plan::Plan>> climbed(std::min(near.size(), most_climbed));
        std::vector<std::unique_ptr<BoundModel>> bounds(workers_.size());
        for (std::unique_ptr<BoundModel>& one : bounds) one = estimator_.bound_model();
        workers_.run(climbed.size(), [&](std::size_t worker, std::size_t i) {
            climbed[i] = best_variant(near[i].first, stack_, pinned_, estimator_, *bounds[worker], least_gain);
        });
        std::vector<plan::Plan> batch;
        for (const std::optional<plan::Plan>& plan : climbed)
            if (plan) batch.push_back(*plan);
        play(batch);
        play(with_delayed_wgrad());
    }

    // The listed plans and the others within what variants gain, fastest first.
    std::vector<Ranked> near_best() const {
        std::vector<Ranked> all = top_plans_.plans();
        for (const Ranked& ranked : nearest_.plans())
            if (ranked.second.step_seconds < apart * least()) all.push_back(ranked);
        std::sort(all.begin(), all.end(), better);
        all.erase(std::unique(all.begin(), all.end(), same_plan), all.end());
        return all;
    }

    std::vector<plan::Plan> with_delayed_wgrad() const {
        std::vector<plan::Plan> result;
        if (pinned("delay_wgrad")) return result;
        for (const auto& [found, estimate] : near_best()) {
            plan::Plan plan = found;
            plan.delay_wgrad = !plan.delay_wgrad;
            if (stack::sound(plan, stack_)) result.push_back(std::move(plan));
        }
        return result;
    }

    // The fastest plan with the stack's usual choices and few kinds of parallelism, found at once.
    std::optional<Ranked> usual_plan(const char* offload) {
        SearchRequest asked = request_;
        asked.progress = {};
        asked.top = 1;
        asked.fixed.emplace_back("offload", offload);
        for (const auto& [field, value] : {std::pair{"cp", std::string("1")},
                                           {"etp", "1"},
                                           {"ep_overlap", "off"},
                                           {"tp_overlap", "off"},
                                           {"dispatcher", plan::to_string(stack_.usual_dispatcher)}})
            if (!pinned(field)) asked.fixed.emplace_back(field, value);
        const SearchSpace space(asked, stack_);
        const SearchResult result = explore(asked, space, estimator_, workers_).result;
        return result.plans.empty() ? std::nullopt : std::optional(result.plans.front());
    }

    // Where memory binds so much that plans are faster with their optimizer states on the host, the many that keep them
    // on the GPU are not worth the time: step seconds above which none of those is looked at.
    double limit_by_offload() {
        constexpr double faster = 0.97, near = 1.03;
        constexpr double none = std::numeric_limits<double>::infinity();
        if (!offloads()) return none;
        const std::optional<Ranked> kept = usual_plan("none");
        if (kept && kept->first.recompute == 0) return none;
        const std::optional<Ranked> offloaded = usual_plan("optimizer");
        if (!offloaded) return none;
        const double seconds = offloaded->second.step_seconds;
        if (kept && faster * kept->second.step_seconds < seconds) return none;
        play({offloaded->first});
        return top_plans_.plans().empty() ? none : near * least();
    }

    // Optimizer states on the host have a closed form, so that plans which have them there are searched as others are.
    void play_host_states(double seconds) {
        SearchRequest asked = request_;
        asked.progress = {};
        asked.fixed.emplace_back("offload", "optimizer");
        const SearchSpace space(asked, stack_);
        play(plans_of(explore(asked, space, estimator_, workers_, seconds).result));
    }

    // Plans that more memory has room for and that would be faster than any so far. Choices of communication are those
    // of the best plan, which more memory does not change; where they have no meaning for a plan, it is as it is.
    std::vector<Ranked> of_larger_memories() {
        const plan::Plan& best = top_plans_.plans().front().first;
        SearchRequest larger = request_;
        larger.progress = {};
        larger.top = plans_of_each;
        larger.precisions = {best.precision};
        for (const char* field : {"etp", "optimizer"})
            if (!pinned(field)) larger.fixed.emplace_back(field, plan::field_text(best, field));
        std::vector<Ranked> plans;
        add_of_larger_memories(best, larger, plans);
        if ((best.offload & plan::offload::optimizer) == 0) return plans;
        larger.fixed.emplace_back("offload", "optimizer");
        add_of_larger_memories(best, larger, plans);
        return plans;
    }

    void add_of_larger_memories(const plan::Plan& best, SearchRequest larger, std::vector<Ranked>& plans) {
        for (const double times : more_memory) {
            auto hardware = std::make_shared<machine::Hardware>(*request_.base.hardware);
            hardware->memory_bytes *= times;
            larger.base.hardware = std::move(hardware);
            for (Ranked& ranked : explore_like(best, larger, stack_, estimator_, workers_, apart * least()).plans) {
                ranked.first.hardware = request_.base.hardware;
                plans.push_back(std::move(ranked));
            }
        }
    }

    // Plans of the list with the sets of recomputed modules that would be fastest, by their bounds, if they fitted.
    std::vector<Ranked> recomputing_less() const {
        std::vector<Ranked> result;
        if (pinned("recompute")) return result;
        const std::vector<unsigned> sets = SearchSpace::every_set(request_.base.model, stack_);
        const std::unique_ptr<BoundModel> bounds = estimator_.bound_model();
        for (std::size_t i = 0; i < std::min(lighter_plans, top_plans_.plans().size()); ++i) {
            const auto& [found, estimate] = top_plans_.plans()[i];
            if (found.recompute == 0) continue;
            std::vector<Ranked> faster;
            for (const unsigned set : sets) {
                plan::Plan plan = found;
                plan.recompute = set;
                plan.offload = 0;
                if (!stack::sound(plan, stack_)) continue;
                try {
                    const LowerBound bound = bounds->bound(bounds->layer_costs(plan), bounds->stage_split(plan));
                    if (bound.step_seconds >= estimate.step_seconds) continue;
                    faster.emplace_back(std::move(plan), Estimate{});
                    faster.back().second.step_seconds = bound.step_seconds;
                } catch (const Error& error) { // Without a price the plan is of no use.
                    if (error.fault() != Fault::bad_input) throw;
                }
            }
            std::sort(faster.begin(), faster.end(), better);
            faster.resize(std::min(faster.size(), lighter_sets));
            result.insert(result.end(), faster.begin(), faster.end());
        }
        return result;
    }

    static bool same_plan(const Ranked& a, const Ranked& b) { return plan::differences(a.first, b.first).empty(); }
    // Step seconds that a plan must promise to stay below.
    double reach() const {
        constexpr double farthest = 1.05; // share of the best's seconds; beyond it no mapping is worth the time
        if (top_plans_.plans().empty()) return top_plans_.worst();
        return std::min(top_plans_.worst(), farthest * top_plans_.plans().front().second.step_seconds);
    }

    double least() const {
        return top_plans_.plans().empty() ? top_plans_.worst() : top_plans_.plans().front().second.step_seconds;
    }

    // Plans that are too large come into memory by offload, and take no less than without, nor than its copies do. The
    // most promising are tried first, for any place in the list; the others as long as they promise the first one.
    void play_offloaded() {
        std::vector<Ranked> plans = of_larger_memories();
        for (Ranked& ranked : recomputing_less()) plans.push_back(std::move(ranked));
        std::sort(plans.begin(), plans.end(), better);
        plans.erase(std::unique(plans.begin(), plans.end(), same_plan), plans.end());
        std::vector<std::vector<Ranked>> ways(plans.size());
        workers_.run(plans.size(), [&](std::size_t, std::size_t i) {
            const Ranked& ranked = plans[i];
            double sets = 1.0; // sets: a further one promises less by this factor
            for (OffloadFit& fit : offloaded_to_fit(ranked.first, stack_, estimator_)) {
                const auto add = [&](const plan::Plan& way, double gain) {
                    ways[i].push_back({way, ranked.second});
                    double& least = ways[i].back().second.step_seconds;
                    least = std::max(least / gain, fit.link_seconds) * sets;
                };
                if (const std::optional<plan::Plan> delayed = with_wgrad_delayed(fit.plan))
                    add(*delayed, most_by_delay);
                add(fit.plan, 1.0);
                sets *= next_set;
            }
        });
        std::vector<Ranked> all;
        for (const std::vector<Ranked>& some : ways) all.insert(all.end(), some.begin(), some.end());
        std::sort(all.begin(), all.end(), better);
        all.erase(std::unique(all.begin(), all.end(), same_plan), all.end());
        play_promising(all);
        for (int round = 0; round < most_rounds; ++round) {
            const double before = least();
            play(with_other_offload());
            if (least() >= before) break;
        }
    }

    // The list's first plans that offload, with one module more or less on the host: the set that moves fewest bytes
    // need not be the fastest.
    std::vector<plan::Plan> with_other_offload() const {
        std::vector<plan::Plan> result;
        std::size_t left = plans_of_rounds;
        for (const auto& [found, estimate] : top_plans_.plans()) {
            if (found.offload == 0 || estimate.step_seconds > most_by_delay * least()) continue;
            if (left-- == 0) break;
            for (unsigned module = 1; module <= plan::offload::optimizer; module *= 2) {
                plan::Plan plan = found;
                plan.offload ^= module;
                if (stack::sound(plan, stack_)) result.push_back(std::move(plan));
            }
        }
        return result;
    }

    // Copies to the host keep merged slots waiting, which delayed weight gradients may fill.
    std::optional<plan::Plan> with_wgrad_delayed(plan::Plan plan) const {
        if (!plan.ep_overlap || plan.delay_wgrad || pinned("delay_wgrad")) return std::nullopt;
        plan.delay_wgrad = true;
        return stack::sound(plan, stack_) ? std::optional(plan) : std::nullopt;
    }

    // The first ones for any place in the list; the others as long as they promise the first place.
    void play_promising(const std::vector<Ranked>& plans) {
        std::vector<plan::Plan> batch;
        std::size_t vain = 0;
        double seconds = reach();
        for (std::size_t i = 0; i < plans.size() && vain < most_vain; ++i) {
            const auto& [plan, bound] = plans[i];
            if (bound.step_seconds >= seconds) break;
            if (bound.step_seconds < top_plans_.limit(parallel_config_of(plan))) batch.push_back(plan);
            if (batch.size() < played_together && i + 1 < plans.size()) continue;
            vain += play_for_less(batch) ? 0 : 1;
            seconds = vain == 0 ? reach() : least();
        }
        play(batch);
    }
    // Tells whether a plan of the batch is faster than all before.
    bool play_for_less(std::vector<plan::Plan>& batch) {
        const double before = least();
        play(batch);
        batch.clear();
        return least() < before;
    }

    SearchRequest request_;
    int shown_;
    const stack::Stack& stack_;
    Estimator& estimator_;
    Workers workers_;
    std::set<std::string> pinned_;
    TopK top_plans_;
    PlayedPlans played_{estimator_, workers_};
    TopK nearest_{12, true}; // best plans of all that were played, whatever their mappings
    SearchResult result_;
    double least_on_host_ = std::numeric_limits<double>::infinity(); // fewest bytes of played plans that did not fit
};

} // namespace

SearchResult refined_search(const SearchRequest& request, const stack::Stack& stack, Estimator& estimator) {
    // Estimates on CPUs are plays already, and threads of one process share the cores that wait and the memory.
    if (request.base.hardware->cpu) return search(request, stack, estimator);
    return Refinement(request, stack, estimator).run();
}

} // namespace moe::search
