// Searches number by number and ranks what was found by GPU-hours.
#include "simulator/goodput/cheapest.hpp"

#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan_limits.hpp"
#include "planner/search/refined_search.hpp"
#include "planner/search/thrifty.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

namespace moe::goodput {
namespace {

constexpr double least_goodput = 1e-3; // a job below it does not end

struct Offer {
    plan::Plan plan;
    search::Estimate estimate;
    Outlook outlook;
};

bool in_time(const Outlook& o, const Terms& terms) { return !terms.deadline_hours || o.hours <= *terms.deadline_hours; }

// Rounded up, or down, to three digits: an option that is followed has to hold.
double rounded(double value, double (*to)(double)) {
    const double unit = std::pow(10.0, std::floor(std::log10(value)) - 2.0);
    return to(value / unit) * unit;
}

std::string hours_text(double hours) {
    return hours < 100.0 ? fmt::format("{:.3g}", hours) : fmt::format("{:.0f}", hours);
}

class Explorer {
public:
    Explorer(const search::SearchRequest& request, const stack::Stack& stack, search::Estimator& estimator,
             const Terms& terms)
        : request_(request), stack_(stack), estimator_(estimator), terms_(terms) {}

    // The best outlook with so many GPUs; empty where there is none. `alone`: an Error of the search is this one's.
    std::optional<Outlook> explore(int gpus, bool alone = false) {
        search::SearchRequest request = request_;
        request.base.gpus = gpus;
        Count count;
        count.gpus = gpus;
        try {
            add(search::refined_search(request, stack_, estimator_), count);
        } catch (const Error& error) {
            if (alone || error.fault() != Fault::no_plan) throw;
            count.no_plan = error.what();
        }
        counts_.push_back(std::move(count));
        return counts_.back().best;
    }

    // The plan that ends first.
    const Offer* nearest() const {
        const auto first = std::min_element(offers_.begin(), offers_.end(), [](const Offer& a, const Offer& b) {
            return a.outlook.hours < b.outlook.hours;
        });
        return first == offers_.end() ? nullptr : &*first;
    }

    // `more`: up to so many GPUs are tried for a remedy.
    Offers finish(std::int64_t more) {
        refuse_none();
        if (!in_time(nearest()->outlook, terms_)) refuse_deadline(more);
        std::erase_if(offers_, [this](const Offer& offer) { return !in_time(offer.outlook, terms_); });
        std::stable_sort(offers_.begin(), offers_.end(),
                         [](const Offer& a, const Offer& b) { return a.outlook.gpu_hours < b.outlook.gpu_hours; });
        offers_.resize(std::min(offers_.size(), static_cast<std::size_t>(request_.top)));
        Offers result;
        result.found = std::move(sums_);
        for (Offer& offer : offers_) {
            result.found.plans.emplace_back(std::move(offer.plan), offer.estimate);
            result.outlooks.push_back(offer.outlook);
        }
        std::sort(counts_.begin(), counts_.end(), [](const Count& a, const Count& b) { return a.gpus < b.gpus; });
        result.counts = std::move(counts_);
        return result;
    }

private:
    void add(const search::SearchResult& found, Count& count) {
        for (const auto& [plan, estimate] : found.plans) {
            const Outlook o = outlook(plan, estimate, terms_);
            if (o.goodput < least_goodput) {
                count.no_plan = fmt::format(
                    "a job of {} GPUs fails every {:.3g} s, writes a checkpoint in {:.3g} s and restarts in {:.3g} s",
                    count.gpus, o.job_mtbf_hours * 3600.0, o.write_seconds, terms_.restart_seconds);
                continue;
            }
            if (!count.best || o.gpu_hours < count.best->gpu_hours) count.best = o, count.estimate = estimate;
            offers_.push_back({plan, estimate, o});
        }
        if (count.best) count.no_plan.clear();
        sums_.evaluated += found.evaluated;
        sums_.priced += found.priced;
        sums_.seconds += found.seconds;
        for (const auto& [reason, number] : found.pruned) sums_.pruned[reason] += number;
    }

    void refuse_none() const {
        if (!offers_.empty()) return;
        const std::string& reason = counts_.back().no_plan;
        if (terms_.mtbf_hours && reason.starts_with("a job of"))
            infeasible(
                "--mtbf {}: {}: nothing gets trained: take fewer GPUs, a faster --storage-bandwidth or a shorter "
                "--restart",
                *terms_.mtbf_hours, reason);
        infeasible("no plan with any of these numbers of GPUs; with {}: {}", counts_.back().gpus, reason);
    }

    // The first of some multiples of the largest number of GPUs searched that does it, and its hours; left out are
    // those that would have to be faster per GPU than the nearest plan.
    std::optional<std::pair<int, double>> enough_gpus(const Offer& nearest, std::int64_t most) {
        const auto largest = std::max_element(counts_.begin(), counts_.end(),
                                              [](const Count& a, const Count& b) { return a.gpus < b.gpus; });
        const std::int64_t from = largest->gpus;
        int tries = 3;
        for (const double times : {1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0}) {
            const auto gpus = static_cast<std::int64_t>(times * static_cast<double>(from));
            if (gpus > most || tries == 0) break;
            if (nearest.outlook.gpu_hours / static_cast<double>(gpus) > *terms_.deadline_hours) continue;
            --tries;
            const std::optional<Outlook> best = explore(static_cast<int>(gpus));
            if (best && in_time(*best, terms_)) return std::pair(static_cast<int>(gpus), best->hours);
        }
        return std::nullopt;
    }

    [[noreturn]] void refuse_deadline(std::int64_t most) {
        const Offer near = *nearest();
        std::string ways;
        if (const auto more = enough_gpus(near, most))
            ways = fmt::format("use {} ({} hours), or ", counted(more->first, "GPU"), hours_text(more->second));
        const plan::Plan& p = near.plan;
        infeasible("--deadline {}: no plan trains {} tokens by then; the nearest takes {} hours ({}, tp {} cp {} dp "
                   "{} pp {} ep {}): {}--deadline {}, or --tokens {}",
                   *terms_.deadline_hours, tokens_text(terms_.budget()), hours_text(near.outlook.hours),
                   counted(p.gpus, "GPU"), p.tp, p.cp, p.dp, p.pp, p.ep, ways,
                   hours_text(rounded(near.outlook.hours, std::ceil)),
                   tokens_text(rounded(terms_.budget() * *terms_.deadline_hours / near.outlook.hours, std::floor)));
    }

    const search::SearchRequest& request_;
    const stack::Stack& stack_;
    search::Estimator& estimator_;
    const Terms& terms_;
    std::vector<Offer> offers_;
    std::vector<Count> counts_;
    search::SearchResult sums_; // without plans
};

// GPUs below which the tokens cannot be trained by the deadline, whatever the plan.
double gpus_at_peak(const search::SearchRequest& request, const Terms& terms) {
    const plan::Plan& base = request.base;
    const double peak = *std::max_element(base.hardware->peak_flops.begin(), base.hardware->peak_flops.end());
    return terms.budget() * model::model_flops_per_token(*base.model, base.seq) /
           (peak * *terms.deadline_hours * 3600.0);
}

} // namespace

Offers cheapest(const search::SearchRequest& request, const stack::Stack& stack, search::Estimator& estimator,
                const std::vector<int>& gpus, const Terms& terms) {
    constexpr std::int64_t times = 16; // as many GPUs at most for a remedy
    Explorer explorer(request, stack, estimator, terms);
    for (const int number : gpus) explorer.explore(number, gpus.size() == 1);
    return explorer.finish(
        std::min<std::int64_t>(times * *std::max_element(gpus.begin(), gpus.end()), plan::limits::max_gpus));
}

Offers cheapest_by_deadline(const search::SearchRequest& request, const stack::Stack& stack,
                            search::Estimator& estimator, int most, const Terms& terms) {
    const auto fewest = search::fewest_gpus(request, stack, estimator, 1, most);
    if (!fewest) infeasible("--gpus auto: no plan for up to {}", counted(most, "GPU"));
    Explorer explorer(request, stack, estimator, terms);
    const double least = gpus_at_peak(request, terms);
    double best = std::numeric_limits<double>::infinity(); // GPU-hours
    std::optional<double> met;                             // GPU-hours of the last count that does it
    std::vector<int> ladder;
    for (int gpus = fewest->first; gpus <= most; gpus *= 2) ladder.push_back(gpus);
    for (const int gpus : ladder) {
        if (gpus < least || (std::isfinite(best) && best > 1.25 * gpus * *terms.deadline_hours)) continue;
        const std::optional<Outlook> found = explorer.explore(gpus);
        if (!found) continue;
        best = std::min(best, found->gpu_hours);
        if (!in_time(*found, terms)) continue;
        const double now = found->gpu_hours;
        if (met && now >= *met) break;
        if (!met && gpus % 4 == 0 && gpus > fewest->first) explorer.explore(gpus / 4 * 3);
        met = now;
    }
    // None that could do it has a plan: the most GPUs that have one come nearest.
    for (auto gpus = ladder.rbegin(); gpus != ladder.rend() && explorer.nearest() == nullptr; ++gpus)
        if (*gpus < least) explorer.explore(*gpus);
    return explorer.finish(most);
}

} // namespace moe::goodput
