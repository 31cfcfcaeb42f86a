// Search: families of plans in rounds over the machine's cores, the best plans of all kept, nothing uncounted.
#include "planner/search.hpp"

#include "planner/error.hpp"
#include "planner/search_family.hpp"
#include "planner/search_refusal.hpp"
#include "planner/search_space.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <thread>

namespace moe {
namespace {

using Clock = std::chrono::steady_clock;

// Calls the request's progress function at most ten times a second, whichever thread finished a family.
class Progress {
public:
    Progress(const SearchRequest& request, std::int64_t rejected) : call_(request.progress), rejected_(rejected) {}

    void add(const FamilyResult& result) {
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

// Runs work(0) ... work(count-1) on `threads` threads and passes on the first exception by index.
template <class Work>
void in_parallel(std::size_t count, std::size_t threads, const Work& work) {
    std::atomic<std::size_t> next{0};
    std::vector<std::exception_ptr> errors(count);
    const auto loop = [&] {
        for (std::size_t i = next++; i < count; i = next++) {
            try {
                work(i);
            } catch (...) {
                errors[i] = std::current_exception();
            }
        }
    };
    std::vector<std::thread> helpers;
    for (std::size_t i = 1; i < std::min(threads, count); ++i) helpers.emplace_back(loop);
    loop();
    for (std::thread& helper : helpers) helper.join();
    for (const std::exception_ptr& error : errors)
        if (error) std::rethrow_exception(error);
}

std::size_t thread_count(const SearchRequest& request) {
    if (request.threads > 0) return static_cast<std::size_t>(request.threads);
    return std::max(1U, std::thread::hardware_concurrency());
}

} // namespace

SearchResult search(const SearchRequest& request, const Stack& stack, Estimator& estimator) {
    const Clock::time_point start = Clock::now();
    if (request.top < 1) refuse("top {}: must be 1 or more", request.top);
    const SearchSpace space(request, stack);
    const std::vector<Family>& families = space.families();
    SearchResult result;
    SearchFailure failure;
    failure.rejected = space.rejected();
    Podium podium(static_cast<std::size_t>(request.top));
    Progress progress(request, failure.rejected.total());

    // Families of a round see the plans found in earlier rounds only, so that neither the plans nor the counts depend
    // on the number of threads.
    constexpr std::size_t round = 8;
    for (std::size_t first = 0; first < families.size(); first += round) {
        std::vector<FamilyResult> results(std::min(round, families.size() - first));
        in_parallel(results.size(), thread_count(request), [&](std::size_t i) {
            results[i] = search_family(space, families[first + i], estimator, podium, request.exhaustive);
            progress.add(results[i]);
        });
        for (FamilyResult& part : results) {
            result.evaluated += part.evaluated;
            failure.rejected.merge(part.rejected);
            for (Ranked& ranked : part.found) podium.add(std::move(ranked));
            if (!part.smallest || (failure.smallest && part.least_memory >= failure.least_memory)) continue;
            failure.least_memory = part.least_memory;
            failure.smallest = std::move(part.smallest);
        }
    }
    if (podium.plans().empty()) refuse_search(request, stack, estimator, space, failure);
    for (const auto& [counter, reason] : failure.rejected.reasons) result.pruned[counter] = reason.count;
    result.plans = podium.plans();
    result.seconds = std::chrono::duration<double>(Clock::now() - start).count();
    return result;
}

} // namespace moe
