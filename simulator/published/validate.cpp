// One fast estimator per machine and stack; open micro-batch sizes and recomputation are chosen as a planner would.
#include "simulator/published/validate.hpp"

#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "simulator/pricing/fast_estimator.hpp"
#include "simulator/published/run_recipe.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>

namespace moe::published {
namespace {

// True where the stack would run the plan as far as it would run the row: what is chosen for a row breaks no further
// rule.
bool sound_as(const PlannedRun& planned, const plan::Plan& plan, const stack::Stack& stack) {
    if (plan::check_plan(plan) || stack::check_offers(plan, stack)) return false;
    const std::vector<const stack::Rule*> before = stack::broken_rules(planned.plan, stack);
    const std::vector<const stack::Rule*> now = stack::broken_rules(plan, stack);
    return std::includes(before.begin(), before.end(), now.begin(), now.end());
}

class Estimators {
public:
    pricing::FastEstimator& of(const plan::Plan& plan, const stack::Stack& stack) {
        auto& slot = map_[{plan.hardware->name, stack.name}];
        if (!slot) slot = std::make_unique<pricing::FastEstimator>(plan.hardware, stack);
        return *slot;
    }

private:
    std::map<std::pair<std::string, std::string>, std::unique_ptr<pricing::FastEstimator>> map_;
};

// The lightest of the stack's recompute sets with which the plan fits; the row's own where it names one. Sets that
// repeat whole products come last, though they did run where nothing else fits: published recipes that use them say so,
// and dense rows that were priced with them came out 10 to 15 % too slow beside rows of the same mapping without. Rows
// of models with experts take them before they would not fit; a stack that only knows whole layers uses them.
bool fit(const PlannedRun& planned, plan::Plan& plan, const stack::Stack& stack, pricing::FastEstimator& estimator) {
    const auto fits = [&] { return estimator.memory_bytes(plan) <= plan.hardware->memory_bytes; };
    if (fits()) return true;
    if (!planned.open_recompute) return false;
    const unsigned before = plan.recompute;
    const bool whole_layers = std::all_of(stack.recompute_sets.begin(), stack.recompute_sets.end(),
                                          [](unsigned set) { return set == 0 || set == plan::recompute::full; });
    constexpr unsigned products =
        plan::recompute::full | plan::recompute::moe | plan::recompute::mlp | plan::recompute::shared_experts;
    const auto light = [&](unsigned set) { return (set & products) == 0 || whole_layers; };
    const auto among = [&](const auto& chosen) {
        return std::any_of(stack.recompute_sets.begin(), stack.recompute_sets.end(), [&](unsigned set) {
            if (!chosen(set)) return false;
            plan.recompute = applicable_recompute(set, *plan.model);
            return sound_as(planned, plan, stack) && fits();
        });
    };
    if (among(light)) return true;
    if (planned.kind == "MoE") {
        const auto some = [&](unsigned set) { return !light(set) && set != plan::recompute::full; };
        if (among(some)) return true;
        const unsigned kept = plan.offload;
        if (planned.open_offload && stack.offloads) {
            plan.offload |= plan::offload::optimizer;
            if (among(light) || among(some)) return true;
            plan.offload = kept;
        }
        if (among([&](unsigned set) { return !light(set) && set == plan::recompute::full; })) return true;
    }
    plan.recompute = before;
    return false;
}

// The numbers of chunks per rank that an open row may have: those that cut the layers evenly.
std::vector<int> open_chunks(const PlannedRun& planned, const plan::Plan& plan) {
    std::vector<int> chunks{plan.vpp};
    const int per_rank = static_cast<int>(plan.model->layers.size()) / plan.pp;
    if (!planned.open_vpp || static_cast<int>(plan.model->layers.size()) % plan.pp != 0) return chunks;
    for (int vpp = 2; vpp <= per_rank; ++vpp)
        if (per_rank % vpp == 0) chunks.push_back(vpp);
    return chunks;
}

// Fills what the row leaves open: the fastest micro-batch size that fits, and chunks per rank. Larger sizes need more
// memory, so that the first that does not fit even with recomputation ends the list.
search::Estimate choose(const PlannedRun& planned, plan::Plan& plan, const stack::Stack& stack,
                        pricing::FastEstimator& estimator) {
    if (!planned.open_mbs) {
        fit(planned, plan, stack, estimator);
        return estimator.estimate(plan);
    }
    constexpr std::array<std::int64_t, 10> sizes{1, 2, 3, 4, 6, 8, 12, 16, 24, 32};
    plan::Plan best = plan;
    search::Estimate fastest;
    for (const int vpp : open_chunks(planned, plan)) {
        for (const std::int64_t size : sizes) {
            plan::Plan candidate = plan;
            candidate.mbs = size;
            candidate.vpp = vpp;
            candidate.schedule = vpp > 1 ? plan::ScheduleKind::interleaved : plan::ScheduleKind::one_f_one_b;
            if (!sound_as(planned, candidate, stack)) continue;
            if (!fit(planned, candidate, stack, estimator)) break;
            const search::Estimate estimate = estimator.estimate(candidate);
            if (fastest.step_seconds > 0.0 && estimate.step_seconds >= fastest.step_seconds) continue;
            fastest = estimate;
            best = candidate;
        }
    }
    plan = best;
    return fastest.step_seconds > 0.0 ? fastest : estimator.estimate(plan);
}

void predict(const PlannedRun& planned, RunPlanner& planner, Estimators& estimators, Prediction& prediction) {
    prediction.plan = planned.plan;
    const stack::Stack& stack = planner.stack(planned.plan);
    prediction.workload = workload_of(planned.plan, stack);
    prediction.estimate = choose(planned, prediction.plan, stack, estimators.of(planned.plan, stack));
    const search::Estimate& estimate = prediction.estimate;
    if (!std::isfinite(estimate.step_seconds) || !(estimate.step_seconds > 0.0))
        fail("{}: the predicted step takes {} s", prediction.run_id, estimate.step_seconds);
    prediction.predicted = estimate.tokens_per_second_per_gpu * planned.flops_per_token / 1e12;
    prediction.error = prediction.predicted / prediction.published - 1.0;
    constexpr double gib = 1024.0 * 1024.0 * 1024.0;
    if (!estimate.fits)
        prediction.warnings.push_back(fmt::format("predicted not to fit: {:.1f} GiB of {:.1f}",
                                                  estimate.memory_bytes / gib,
                                                  planned.plan.hardware->memory_bytes / gib));
}

// Adds up concordant minus discordant pairs; equal predictions count as neither.
void rank_pairs(const std::vector<const Prediction*>& rows, ValidationSummary& summary) {
    double score = 0.0;
    for (std::size_t i = 0; i < rows.size(); ++i)
        for (std::size_t j = i + 1; j < rows.size(); ++j) {
            const Prediction &a = *rows[i], &b = *rows[j];
            if (a.model != b.model) continue;
            const double published = a.published - b.published, predicted = a.predicted - b.predicted;
            if (std::abs(published) <= 0.03 * std::min(a.published, b.published)) continue;
            ++summary.pairs;
            if (published * predicted != 0.0) score += published * predicted > 0.0 ? 1.0 : -1.0;
        }
    if (summary.pairs > 0) summary.kendall_tau = score / summary.pairs;
}

ValidationSummary summary_of(const std::vector<const Prediction*>& predictions) {
    ValidationSummary s;
    std::vector<const Prediction*> predicted;
    int within = 0;
    for (const Prediction* p : predictions) {
        ++s.rows;
        if (!p->skipped.empty()) {
            ++s.skipped;
            continue;
        }
        predicted.push_back(p);
        s.mape += std::abs(p->error);
        s.bias += p->error;
        if (std::abs(p->error) <= 0.1) ++within;
        if (!p->interval) continue;
        ++s.intervals;
        s.width += p->interval->high / p->interval->low - 1.0;
        if (p->interval->low <= p->published && p->published <= p->interval->high) s.coverage += 1.0;
    }
    s.predicted = static_cast<int>(predicted.size());
    if (s.intervals > 0) {
        s.coverage /= s.intervals;
        s.width /= s.intervals;
    }
    if (s.predicted == 0) return s;
    s.mape /= s.predicted;
    s.bias /= s.predicted;
    s.within_10_percent = static_cast<double>(within) / s.predicted;
    rank_pairs(predicted, s);
    return s;
}

} // namespace

std::vector<Prediction> predict_runs(const std::vector<Run>& runs, const machine::Coefficients& coefficients,
                                     const std::function<void(std::size_t)>& progress) {
    RunPlanner planner(coefficients);
    Estimators estimators;
    std::vector<Prediction> result;
    for (const Run& run : runs) {
        if (progress) progress(result.size());
        const PlannedRun planned = planner.plan(run);
        Prediction p;
        p.run_id = run.run_id;
        p.skipped = planned.skipped;
        p.published = run.tflops_std ? *run.tflops_std : run.tflops_per_gpu.value_or(0.0);
        p.model = run.model;
        p.family = planned.family;
        p.kind = planned.family.empty() ? "" : planned.kind;
        p.system = run.system;
        p.precision = run.precision;
        p.stack = planned.plan.stack;
        p.tier = run.tier;
        p.tier_and_kind = p.kind.empty() ? "" : p.tier + " " + p.kind;
        p.system_and_stack = p.system + " " + p.stack;
        p.warnings = planned.warnings;
        try {
            if (p.skipped.empty()) predict(planned, planner, estimators, p);
        } catch (const Error& error) {
            if (error.fault() != Fault::bad_input) throw;
            p.skipped = error.what(); // a combination that has no price
        }
        result.push_back(std::move(p));
    }
    return result;
}

ValidationSummary summarize(const std::vector<Prediction>& predictions) {
    std::vector<const Prediction*> all;
    for (const Prediction& p : predictions) all.push_back(&p);
    return summary_of(all);
}

std::vector<std::pair<std::string, ValidationSummary>> summarize_by(const std::vector<Prediction>& predictions,
                                                                    const std::string Prediction::*group) {
    std::map<std::string, std::vector<const Prediction*>> groups;
    for (const Prediction& p : predictions) groups[p.*group].push_back(&p);
    std::vector<std::pair<std::string, ValidationSummary>> result;
    for (const auto& [name, members] : groups) result.emplace_back(name, summary_of(members));
    return result;
}

} // namespace moe::published
