// One search for each published plan; the plan itself stands where nothing is faster.
#include "simulator/published/improve.hpp"

#include "planner/base/error.hpp"
#include "planner/search/search.hpp"
#include "simulator/pricing/fast_estimator.hpp"

#include <numeric>
#include <optional>

namespace moe::published {
namespace {

// Nothing where no plan of the space fits.
std::optional<search::SearchResult> search_from(const plan::Plan& plan, const stack::Stack& stack) {
    search::SearchRequest request;
    request.base = plan;
    request.precisions = {plan.precision};
    request.top = 1;
    pricing::FastEstimator estimator(plan.hardware, stack);
    try {
        return search::search(request, stack, estimator);
    } catch (const Error& error) {
        if (error.fault() == Fault::failure) throw;
        return std::nullopt;
    }
}

Improvement improve(const Prediction& row, const stack::Stack& stack) {
    Improvement result{row.run_id, row.estimate.tflops_per_gpu, row.plan, row.estimate, {}, 0, 0.0};
    const std::optional<search::SearchResult> found = search_from(row.plan, stack);
    if (!found) return result;
    result.seconds = found->seconds;
    result.candidates = found->evaluated;
    for (const auto& [reason, count] : found->pruned) result.candidates += count;
    const auto& [plan, estimate] = found->plans.front();
    // Plans that do not fit by our count have run all the same; a plan that fits is no slower for being safe.
    if (estimate.step_seconds >= row.estimate.step_seconds) return result;
    result.best = plan;
    result.estimate = estimate;
    result.changes = plan::differences(row.plan, plan);
    return result;
}

} // namespace

std::vector<Improvement> improve(const std::vector<Prediction>& predictions, const machine::Coefficients& coefficients,
                                 const std::function<void(std::size_t)>& progress) {
    std::vector<Improvement> result;
    for (const Prediction& row : predictions) {
        if (!row.skipped.empty()) continue;
        result.push_back(improve(row, stack::load_stack(row.plan.stack, *row.plan.hardware, coefficients)));
        if (progress) progress(result.size());
    }
    return result;
}

} // namespace moe::published
