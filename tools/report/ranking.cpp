// Notes on ranked plans: intervals, ties with the first plan, what trains differently, and the nearest published runs.
#include "tools/report/ranking.hpp"

#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/plan_fields.hpp"
#include "planner/plan/stack_traits.hpp"
#include "simulator/published/ratios.hpp"

#include <algorithm>
#include <cmath>

namespace moe::tools {
namespace {

// Degrees above 1 and choices that are not a plan's plainest ones: what somebody has to set and to understand.
int complexity(const plan::Plan& plan) {
    plan::Plan plain;
    plain.model = plan.model;
    plain.hardware = plan.hardware;
    plain.stack = plan.stack;
    plain.precision = plan.precision;
    plain.gradients = plan.gradients;
    plain.gpus = plan.gpus, plain.gbs = plan.gbs, plain.seq = plan.seq;
    plain.dispatcher = plan.dispatcher;
    plain.documents = plan.documents, plain.lengths = plan.lengths;
    return published::differing_choices(plain, plan);
}

} // namespace

std::vector<std::string> differences_of_training(const plan::Plan& plan) {
    std::vector<std::string> what;
    // Megatron-Core 0.19.2, transformer_config.py: with hybridep, tokens beyond moe_expert_rank_capacity_factor are
    // dropped; with ncclep they end the run (skills of Megatron-Bridge, perf-moe-dispatcher-selection). The engine's
    // own stack runs the step again.
    if (plan.capacity > 0.0 && !plan::stack_traits(plan).retries_overflow)
        what.push_back(fmt::format("capacity {}: {}", plan::field_text(plan, "capacity"),
                                   plan.dispatcher == plan::Dispatcher::ncclep ? "a rank with more rows ends the run"
                                                                               : "a rank drops rows beyond it"));
    if (plan.router.expert_capacity > 0.0)
        what.push_back(fmt::format(
            "expert_capacity {}: an expert drops tokens beyond it{}", plan::field_text(plan, "expert_capacity"),
            plan.router.drops_in_sequences() ? ", of each whole sequence"
                                             : ", of a rank's own: which ones depends on mbs, tp and cp"));
    if (plan.router.load_balancing == plan::LoadBalancing::sinkhorn)
        what.emplace_back(
            "load_balancing sinkhorn: balanced over a rank's tokens, the choice depends on mbs, tp and cp");
    if (plan.router.aux_loss > 0.0 && plan.router.load_balancing == plan::LoadBalancing::micro_batch)
        what.emplace_back("load_balancing aux_loss: taken over a micro-batch, it depends on mbs and tp");
    for (const char* field : {"head_precision", "attention_precision"})
        if (plan::field_text(plan, field) != "default")
            what.push_back(fmt::format("{} {}: rounds what is BF16 by default", field, plan::field_text(plan, field)));
    return what;
}

Ranking rank_notes(const search::SearchResult& result, bool executable, std::size_t nearest,
                   published::Corrector& corrector, const std::vector<goodput::Outlook>& outlooks) {
    Ranking ranking;
    if (result.plans.empty()) return ranking;
    const auto& [first, best] = result.plans.front();
    const std::vector<published::RatioError> errors = published::load_ratio_errors(executable);
    std::optional<published::PublishedRuns> runs;
    if (!executable) runs.emplace();
    const auto lasting = [&outlooks](std::size_t i) { return outlooks.empty() ? 1.0 : outlooks[i].goodput; };
    for (const auto& [plan, estimate] : result.plans) {
        const std::size_t place = ranking.plans.size();
        PlanNote note;
        if (!outlooks.empty()) note.outlook = outlooks[place];
        const published::Correction* const correction = corrector.of(plan);
        if (correction != nullptr) note.correction = *correction;
        note.interval = published::interval_of(plan, estimate, executable, correction);
        const double log_ratio =
            std::log(best.tflops_per_gpu * lasting(0) / (estimate.tflops_per_gpu * lasting(place)));
        const std::optional<double> margin = published::ratio_margin(errors, first, plan);
        note.equal_to_first = ranking.plans.empty() || (margin && log_ratio <= *margin);
        if (!ranking.plans.empty()) note.certainty = published::certainty(errors, first, plan, log_ratio);
        if (note.equal_to_first && margin) ranking.widest_margin = std::max(ranking.widest_margin.value_or(0), *margin);
        note.trains_differently = differences_of_training(plan);
        if (runs) note.nearest = runs->nearest(plan, nearest);
        ranking.plans.push_back(std::move(note));
    }
    for (std::size_t i = 0; i < ranking.plans.size(); ++i)
        if (ranking.plans[i].equal_to_first &&
            complexity(result.plans[i].first) < complexity(result.plans[ranking.simplest].first))
            ranking.simplest = i;
    return ranking;
}

} // namespace moe::tools
