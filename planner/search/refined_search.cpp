// Refinement: a few dozen plans around those of a search, each checked, played, and ranked with the others.
#include "planner/search/refined_search.hpp"

#include "planner/base/error.hpp"
#include "planner/base/parallel.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/plan/plan_fields.hpp"
#include "planner/search/offload_fit.hpp"
#include "planner/search/search_space.hpp"
#include "planner/search/top_k.hpp"
#include "planner/stack/stack.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

namespace moe::search {
namespace {

using Clock = std::chrono::steady_clock;

// Memories to search with, over the real one, and how many mappings of each: offload can spare most of the activations
// at the speed of the host's link.
constexpr double more_memory[] = {1.15, 1.4};
constexpr int mappings_of_each = 4;
// Plans of the list that are tried with less recomputation, and with how many sets of modules.
constexpr std::size_t lighter_plans = 2, lighter_sets = 12;
constexpr std::size_t played_together = 8;
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
          threads_(thread_count(request.threads)),
          podium_(static_cast<std::size_t>(std::max(request.top, fewest_refined)), request.similar) {
        if (shown_ >= 1) request_.top = std::max(shown_, fewest_refined);
    }

    SearchResult run() {
        const Clock::time_point start = Clock::now();
        std::exception_ptr nothing_fits;
        try {
            result_ = search(request_, stack_, estimator_);
        } catch (const Error& error) {
            if (error.fault() != Fault::no_plan || !offloads()) throw;
            nothing_fits = std::current_exception();
        }
        std::vector<plan::Plan> found;
        for (const auto& [plan, estimate] : result_.plans) found.push_back(plan);
        play(found, false);
        play(with_split_backwards(found));
        if (offloads()) play_offloaded();
        if (podium_.plans().empty()) {
            if (nothing_fits) std::rethrow_exception(nothing_fits);
            refuse_host_memory();
        }
        play(with_delayed_wgrad());
        result_.plans = podium_.plans();
        while (result_.plans.size() > static_cast<std::size_t>(shown_)) result_.plans.pop_back();
        result_.seconds = std::chrono::duration<double>(Clock::now() - start).count();
        return std::move(result_);
    }

private:
    bool pinned(const char* field) const {
        return std::any_of(request_.fixed.begin(), request_.fixed.end(),
                           [field](const auto& pin) { return pin.first == field; });
    }
    bool offloads() const { return stack_.offloads && !pinned("offload"); }

    // Refuses plans that fit into the GPUs but not into the host. Closed forms do not count what is on the host, so
    // that a pinned set comes here.
    [[noreturn]] void refuse_host_memory() const {
        constexpr double gib = 1024.0 * 1024.0 * 1024.0;
        infeasible(
            "no plan for {} GPUs fits: what they offload needs {:.1f} GiB of the host's memory for each, of {:.1f}: "
            "unfix offload, or use more GPUs",
            request_.base.gpus, least_on_host_ / gib, request_.base.hardware->host_memory_bytes / gib);
    }

    // Plans that do not fit, and those that cannot be priced, are left out. fresh: none of them was counted before.
    void play(const std::vector<plan::Plan>& plans, bool fresh = true) {
        std::vector<std::optional<Estimate>> played(plans.size());
        in_parallel(plans.size(), threads_, [&](std::size_t, std::size_t i) {
            try {
                if (estimator_.memory_bytes(plans[i]) <= plans[i].hardware->memory_bytes)
                    played[i] = estimator_.play(plans[i]);
            } catch (const Error& error) {
                if (error.fault() != Fault::bad_input) throw;
            }
        });
        for (std::size_t i = 0; i < plans.size(); ++i) {
            if (!played[i]) continue;
            if (!played[i]->fits) {
                least_on_host_ = std::min(least_on_host_, played[i]->host_bytes);
                continue;
            }
            result_.evaluated += fresh ? 1 : 0;
            result_.priced += fresh ? 1 : 0;
            const double limit = podium_.limit(parallel_config_of(plans[i]));
            if (played[i]->step_seconds < (1.0 - least_gain) * limit) podium_.add({plans[i], *played[i]});
        }
        if (!request_.progress) return;
        std::int64_t pruned = 0;
        for (const auto& [reason, count] : result_.pruned) pruned += count;
        request_.progress(result_.evaluated, pruned);
    }

    // Fills what stages wait for each other, and keeps more.
    std::vector<plan::Plan> with_split_backwards(const std::vector<plan::Plan>& plans) const {
        std::vector<plan::Plan> result;
        for (const char* field : {"schedule", "layout", "vpp"})
            if (pinned(field)) return result;
        for (const plan::Plan& found : plans)
            for (const plan::ScheduleKind kind : stack_.split_schedules) {
                if (found.pp == 1) continue;
                plan::Plan plan = found;
                plan.schedule = kind;
                plan.vpp = plan::in_a_v(kind) ? 2 : 1;
                // Schedules other than DualPipeV have no whole backwards for a forward to run beside.
                if (kind != plan::ScheduleKind::dualpipe_v && !pinned("ep_overlap")) plan.ep_overlap = false;
                for (plan::Plan& cut : stack::sound_cuts(plan, stack_)) result.push_back(std::move(cut));
            }
        return result;
    }

    std::vector<plan::Plan> with_delayed_wgrad() const {
        std::vector<plan::Plan> result;
        if (pinned("delay_wgrad")) return result;
        for (const auto& [found, estimate] : podium_.plans()) {
            plan::Plan plan = found;
            plan.delay_wgrad = !plan.delay_wgrad;
            if (stack::sound(plan, stack_)) result.push_back(std::move(plan));
        }
        return result;
    }

    // The best plans of GPUs with more memory. Choices of communication and precision are those of the best plan so
    // far, which more memory does not change.
    std::vector<Ranked> of_larger_memories() {
        SearchRequest larger = request_;
        larger.progress = {};
        larger.top = mappings_of_each;
        if (!podium_.plans().empty()) {
            const plan::Plan& best = podium_.plans().front().first;
            larger.precisions = {best.precision};
            for (const char* field :
                 {"etp", "dispatcher", "cuda_graph", "ep_overlap", "tp_overlap", "cp_comm", "fsdp", "optimizer"})
                if (!pinned(field)) larger.fixed.emplace_back(field, plan::field_text(best, field));
        }
        std::vector<Ranked> plans;
        for (const double times : more_memory) {
            auto hardware = std::make_shared<machine::Hardware>(*request_.base.hardware);
            hardware->memory_bytes *= times;
            larger.base.hardware = std::move(hardware);
            try {
                for (Ranked& ranked : search(larger, stack_, estimator_).plans) {
                    ranked.first.hardware = request_.base.hardware;
                    plans.push_back(std::move(ranked));
                }
            } catch (const Error& error) {
                if (error.fault() == Fault::failure) throw;
            }
        }
        return plans;
    }

    // Plans of the list with the sets of recomputed modules that would be fastest if they fitted.
    std::vector<Ranked> recomputing_less() {
        std::vector<Ranked> result;
        if (pinned("recompute")) return result;
        const std::vector<unsigned> sets = SearchSpace::every_set(request_.base.model, stack_);
        for (std::size_t i = 0; i < std::min(lighter_plans, podium_.plans().size()); ++i) {
            const Ranked& found = podium_.plans()[i];
            if (found.first.recompute == 0) continue;
            std::vector<Ranked> faster(sets.size());
            in_parallel(faster.size(), threads_, [&](std::size_t, std::size_t set) {
                plan::Plan plan = found.first;
                plan.recompute = sets[set];
                try {
                    if (stack::sound(plan, stack_)) faster[set] = {plan, estimator_.estimate(plan)};
                } catch (const Error& error) { // not priced: the estimate stays one that fits, and is of no use below
                    if (error.fault() != Fault::bad_input) throw;
                }
            });
            const auto no_use = [&found](const Ranked& r) {
                return r.second.fits || r.second.step_seconds >= found.second.step_seconds;
            };
            faster.erase(std::remove_if(faster.begin(), faster.end(), no_use), faster.end());
            std::sort(faster.begin(), faster.end(), better);
            faster.resize(std::min(faster.size(), lighter_sets));
            result.insert(result.end(), faster.begin(), faster.end());
        }
        return result;
    }

    // Plans that are too large come into memory by offload, and take no less than without, nor than its copies do. The
    // most promising are played first, until none promises a place.
    void play_offloaded() {
        std::vector<Ranked> plans = of_larger_memories();
        for (Ranked& ranked : recomputing_less()) plans.push_back(std::move(ranked));
        std::vector<std::vector<Ranked>> ways(plans.size());
        in_parallel(plans.size(), threads_, [&](std::size_t, std::size_t i) {
            auto& [plan, estimate] = plans[i];
            for (OffloadFit& fit : offloaded_to_fit(plan, stack_, estimator_)) {
                ways[i].push_back({std::move(fit.plan), estimate});
                double& least = ways[i].back().second.step_seconds;
                least = std::max(least, fit.link_seconds);
            }
        });
        std::vector<Ranked> all;
        for (const std::vector<Ranked>& some : ways) all.insert(all.end(), some.begin(), some.end());
        std::sort(all.begin(), all.end(), better);
        all.erase(
            std::unique(all.begin(), all.end(),
                        [](const Ranked& a, const Ranked& b) { return plan::differences(a.first, b.first).empty(); }),
            all.end());
        std::vector<plan::Plan> batch;
        for (std::size_t i = 0; i < all.size(); ++i) {
            const auto& [plan, estimate] = all[i];
            if (estimate.step_seconds >= podium_.worst()) break;
            if (estimate.step_seconds < podium_.limit(parallel_config_of(plan))) batch.push_back(plan);
            if (batch.size() < played_together && i + 1 < all.size()) continue;
            play(batch);
            batch.clear();
        }
        play(batch);
    }

    SearchRequest request_;
    int shown_;
    const stack::Stack& stack_;
    Estimator& estimator_;
    std::size_t threads_;
    TopK podium_;
    SearchResult result_;
    double least_on_host_ = std::numeric_limits<double>::infinity(); // bytes, of the plans that did not fit when played
};

} // namespace

SearchResult refined_search(const SearchRequest& request, const stack::Stack& stack, Estimator& estimator) {
    // Estimates on CPUs are plays already, and threads of one process share the cores that wait and the memory.
    if (request.base.hardware->cpu) return search(request, stack, estimator);
    return Refinement(request, stack, estimator).run();
}

} // namespace moe::search
