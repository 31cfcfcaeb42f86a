// Search: families of plans in rounds over the machine's cores, the best plans of all kept, nothing uncounted.
#include "planner/search/search.hpp"

#include "planner/base/error.hpp"
#include "planner/base/parallel.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/search/explore.hpp"
#include "planner/search/search_branch.hpp"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <limits>
#include <mutex>
#include <optional>
#include <set>

namespace moe::search {
namespace {

using Clock = std::chrono::steady_clock;

// Calls the request's progress function at most ten times a second, whichever thread finished a family.
class Progress {
public:
    Progress(const SearchRequest& request, std::int64_t rejected) : call_(request.progress), rejected_(rejected) {}

    void add(const Found& result) {
        if (!call_) return;
        const std::lock_guard lock(mutex_);
        evaluated_ += result.evaluated;
        rejected_ += result.rejected.total();
        const Clock::time_point now = Clock::now();
        if (now - last_ < std::chrono::milliseconds(100)) return;
        last_ = now;
        call_(evaluated_, rejected_);
    }

private:
    const std::function<void(std::int64_t, std::int64_t)>& call_;
    std::mutex mutex_;
    Clock::time_point last_ = Clock::now();
    std::int64_t evaluated_ = 0;
    std::int64_t rejected_;
};

// Prices candidates, several at a time, and keeps the top plans and the counts of those that turn out not to fit.
class Pricer {
public:
    Pricer(const SearchSpace& space, Estimator& estimator, const std::vector<std::unique_ptr<BoundModel>>& bound_models,
           Workers& workers, SearchResult& result, SearchFailure& failure)
        : space_(space),
          estimator_(estimator),
          bound_models_(bound_models),
          workers_(workers),
          result_(result),
          failure_(failure) {}

    // The results do not depend on the number of threads: the top plans change when all are priced.
    void price(const std::vector<Candidate>& candidates, TopK& top_plans) {
        std::vector<Priced> priced(candidates.size());
        workers_.run(candidates.size(), [&](std::size_t worker, std::size_t i) {
            const Candidate& c = candidates[i];
            priced[i] = price(plan_of(space_, c), [&](const plan::Plan& plan) {
                return c.seconds > 0.0 && least_seconds(bound_models_[worker]->merged_step_bound(plan)) >
                                              top_plans.limit(parallel_config_of(c));
            });
        });
        take(priced, top_plans);
    }

private:
    struct Priced {
        plan::Plan plan;
        std::optional<Estimate> estimate;
        plan::PlanFault fault{"memory", "memory"};
        double bytes = 0.0;  // bytes of a plan that does not fit
        bool beaten = false; // whether its mapping or the list already has something faster
    };

    template <class Beaten>
    Priced price(plan::Plan plan, const Beaten& beaten) {
        Priced p;
        p.plan = std::move(plan);
        try {
            p.beaten = beaten(p.plan);
            if (p.beaten) return p;
            p.bytes = estimator_.memory_bytes(p.plan);
            if (p.bytes > p.plan.hardware->memory_bytes) return p;
            p.estimate = estimator_.estimate(p.plan);
            if (p.estimate->fits) return p;
            constexpr double gib = 1024.0 * 1024.0 * 1024.0;
            p.fault = {"offload > host memory",
                       fmt::format("offload {} takes {:.1f} GiB of the host's {:.1f} for a GPU",
                                   plan::offload::to_string(p.plan.offload), p.estimate->host_bytes / gib,
                                   p.plan.hardware->host_memory_bytes / gib)};
            p.bytes = 0.0;
        } catch (const Error& error) {
            if (error.fault() != Fault::bad_input) throw;
            p.fault = {"not priced", error.what()};
            p.bytes = 0.0;
        }
        return p;
    }

    void take(std::vector<Priced>& priced, TopK& top_plans) {
        for (Priced& p : priced) {
            if (p.beaten) continue;
            result_.priced += p.estimate ? 1 : 0;
            if (p.estimate && p.estimate->fits) {
                top_plans.add({std::move(p.plan), *p.estimate});
                continue;
            }
            --result_.evaluated;
            failure_.rejected.add(p.fault, 1);
            if (p.bytes > 0.0) failure_.note(p.plan, p.bytes);
        }
    }

    const SearchSpace& space_;
    Estimator& estimator_;
    const std::vector<std::unique_ptr<BoundModel>>& bound_models_; // bound models, one for each worker
    Workers& workers_;
    SearchResult& result_;
    SearchFailure& failure_;
};

constexpr std::size_t priced_together = 16;

// Prices the candidates of lowest bounds, and drops those that are above their mapping's limit on the way: they give
// later rounds something to beat. At first one of each mapping.
void price_best(std::vector<Candidate>& candidates, Pricer& pricer, TopK& top_plans) {
    const bool few = top_plans.plans().size() < top_plans.most();
    std::sort(candidates.begin(), candidates.end(), sooner);
    std::set<ParallelConfigKey> seen;
    std::vector<Candidate> batch;
    auto kept = candidates.begin(), next = kept;
    for (; next != candidates.end() && batch.size() < priced_together; ++next) {
        const ParallelConfigKey mapping = parallel_config_of(*next);
        if (few && !seen.insert(top_plans.place_of(mapping)).second)
            *kept++ = *next;
        else if (least_seconds(next->seconds) <= top_plans.limit(mapping))
            batch.push_back(*next);
    }
    candidates.erase(kept, next);
    pricer.price(batch, top_plans);
}

// Prices candidates from the soonest on, until no bound is below the limit of its mapping.
void price_in_order(std::vector<Candidate> candidates, Pricer& pricer, TopK& top_plans) {
    std::sort(candidates.begin(), candidates.end(), sooner);
    std::vector<Candidate> batch;
    for (std::size_t i = 0; i < candidates.size(); ++i) {
        const double least = least_seconds(candidates[i].seconds);
        if (least > top_plans.worst()) break;
        if (least <= top_plans.limit(parallel_config_of(candidates[i]))) batch.push_back(candidates[i]);
        if (batch.size() < priced_together && i + 1 < candidates.size()) continue;
        pricer.price(batch, top_plans);
        batch.clear();
    }
    pricer.price(batch, top_plans);
}

// True for branches that are often near the best: they come first, so that there is something to beat.
bool usual(const SearchNode& branch) {
    return branch.layer_options->cp == 1 && branch.layer_options->etp == 1 && branch.layer_options->tp <= 8 &&
           branch.mbs <= 2;
}

// All branches, the usual ones first, then the lowest floor first.
template <class Merge>
std::vector<SearchNode> survey_all(const SearchSpace& space,
                                   const std::vector<std::unique_ptr<BoundModel>>& bound_models, Workers& workers,
                                   const SearchRequest& request, const Merge& merge) {
    const std::vector<LayerOptions>& families = space.layer_options();
    std::vector<Found> found(families.size());
    std::vector<std::vector<SearchNode>> parts(families.size());
    workers.run(families.size(), [&](std::size_t worker, std::size_t i) {
        parts[i] = survey(space, families[i], *bound_models[worker], request.exhaustive, found[i]);
    });
    merge(found);
    std::vector<SearchNode> branches;
    for (std::vector<SearchNode>& part : parts) std::move(part.begin(), part.end(), std::back_inserter(branches));
    std::stable_sort(branches.begin(), branches.end(), [](const SearchNode& a, const SearchNode& b) {
        return std::pair(!usual(a), a.floor) < std::pair(!usual(b), b.floor);
    });
    return branches;
}

// The branches of a round in the order in which to begin them: those that have most to bound come first, so that no
// thread is left alone with one of them at the end.
std::vector<std::size_t> largest_first(const SearchNode* branches, std::size_t count, const TopK& top_plans) {
    std::vector<std::pair<std::size_t, std::size_t>> sizes; // open roots, and number
    for (std::size_t i = 0; i < count; ++i) {
        const auto open = std::count_if(branches[i].roots.begin(), branches[i].roots.end(), [&](const auto& root) {
            return least_seconds(root.floor) <= top_plans.worst();
        });
        sizes.emplace_back(static_cast<std::size_t>(open), i);
    }
    std::stable_sort(sizes.begin(), sizes.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    std::vector<std::size_t> order;
    for (const auto& size : sizes) order.push_back(size.second);
    return order;
}

} // namespace

Exploration explore(const SearchRequest& request, const SearchSpace& space, Estimator& estimator, Workers& workers,
                    double slowest, bool by_micro_batch) {
    const Clock::time_point start = Clock::now();
    if (request.top < 1) refuse("top {}: must be 1 or more", request.top);
    Exploration exploration;
    SearchResult& result = exploration.result;
    SearchFailure& failure = exploration.failure;
    failure.rejected = space.rejected();
    TopK top_plans(static_cast<std::size_t>(request.top), request.similar, slowest, by_micro_batch);
    Progress progress(request, failure.rejected.total());
    std::vector<std::unique_ptr<BoundModel>> bound_models(workers.size());
    for (std::unique_ptr<BoundModel>& bound_model : bound_models) bound_model = estimator.bound_model();

    Pricer pricer(space, estimator, bound_models, workers, result, failure);
    std::vector<Candidate> candidates;

    const auto merge = [&](const std::vector<Found>& parts) {
        for (const Found& part : parts) {
            result.evaluated += part.evaluated;
            failure.rejected.merge(part.rejected);
            if (part.smallest) failure.note(*part.smallest, part.least_memory);
        }
    };
    const std::vector<SearchNode> branches = survey_all(space, bound_models, workers, request, merge);

    // Branches of a round see the plans found in earlier rounds only, so that neither the plans nor the counts depend
    // on the number of threads. The most promising come first; rounds grow as there is more to go by.
    constexpr std::size_t first_round = 4, largest_round = 64;
    std::size_t done = 0;
    for (std::size_t round = first_round; done < branches.size(); round = std::min(2 * round, largest_round)) {
        if (!usual(branches[done]) && least_seconds(branches[done].floor) > top_plans.worst()) break;
        std::vector<Found> found(std::min(round, branches.size() - done));
        const std::vector<std::size_t> order = largest_first(&branches[done], found.size(), top_plans);
        workers.run(found.size(), [&](std::size_t worker, std::size_t n) {
            const std::size_t i = order[n];
            found[i] = search_node(space, branches[done + i], *bound_models[worker], top_plans, request.exhaustive);
            progress.add(found[i]);
        });
        done += found.size();
        merge(found);
        for (const Found& part : found)
            candidates.insert(candidates.end(), part.candidates.begin(), part.candidates.end());
        if (!request.exhaustive) price_best(candidates, pricer, top_plans);
    }
    std::int64_t bound = 0;
    for (; done < branches.size(); ++done) bound += candidates_of(space, branches[done], branches[done].roots.size());
    failure.rejected.add({"bound", "bound"}, bound);
    price_in_order(std::move(candidates), pricer, top_plans);
    workers.run(bound_models.size(), [&](std::size_t, std::size_t i) { bound_models[i].reset(); });
    for (const auto& [counter, reason] : failure.rejected.reasons) result.pruned[counter] = reason.count;
    result.plans = top_plans.plans();
    result.seconds = std::chrono::duration<double>(Clock::now() - start).count();
    return exploration;
}

SearchResult explore_like(const plan::Plan& known, const SearchRequest& request, const stack::Stack& stack,
                          Estimator& estimator, Workers& workers, double slowest) {
    const SearchSpace space(request, stack, &known);
    return explore(request, space, estimator, workers, slowest, true).result;
}

SearchResult search(const SearchRequest& request, const stack::Stack& stack, Estimator& estimator) {
    const SearchSpace space(request, stack);
    Workers workers(thread_count(request.threads));
    Exploration exploration = explore(request, space, estimator, workers);
    if (exploration.result.plans.empty()) refuse_search(request, stack, estimator, space, exploration.failure);
    return std::move(exploration.result);
}

} // namespace moe::search
