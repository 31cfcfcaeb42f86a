// What a ranking says of its plans besides their figures: how sure the order is, and which of them train otherwise.
#pragma once

#include "planner/search/search.hpp"
#include "simulator/goodput/cheapest.hpp"
#include "simulator/pricing/replication.hpp"
#include "simulator/published/corrected_estimator.hpp"
#include "simulator/published/nearest.hpp"
#include "simulator/replay/document_steps.hpp"

#include <optional>
#include <string>
#include <vector>

namespace moe::tools {

struct PlanNote {
    published::IntervalResult interval;
    std::optional<published::Correction> correction; // that is in the plan's estimate
    // The plan cannot be told apart from the first one: their predicted rates differ by less than the ratio of two such
    // plans may be off, see published::ratio_margin(). The first plan is equal to itself.
    bool equal_to_first = false;
    std::optional<double> certainty; // probability that the first plan is the faster one; none for the first itself
    std::vector<std::string> trains_differently; // what makes losses depend on the plan, see differences_of_training()
    std::vector<published::NearRun> nearest;
    std::optional<replay::DocumentSteps> documents; // where the plan masks documents of known lengths
    std::optional<goodput::Outlook> outlook;        // where money, time or several numbers of GPUs are asked for
};

// The terms of a ranking by GPU-hours, and what each number of GPUs gave.
struct Money {
    goodput::Terms terms;
    std::vector<goodput::Count> counts;
};

struct Ranking {
    std::vector<PlanNote> plans;
    std::size_t simplest = 0;            // index of the plan with fewest choices among those equal to the first
    std::optional<double> widest_margin; // of the plans marked equal: largest log ratio that tells nothing
    std::optional<Money> money;
    std::optional<pricing::Replication> replication; // of the first plan's hot experts
};

// `executable`: plans of the engine's own stack, of which no published pairs speak. `nearest`: runs of each plan.
// `corrector`: that has corrected the result's estimates. `outlooks`: of the plans, or none; with them, plans are
// compared by the rate that is left after failures.
Ranking rank_notes(const search::SearchResult& result, bool executable, std::size_t nearest,
                   published::Corrector& corrector, const std::vector<goodput::Outlook>& outlooks = {});

// Settings by which a plan trains another model than one rank would: tokens dropped over a capacity, a balancing loss
// over micro-batches, products of the head or of attention in another precision than the linear layers' usual one.
std::vector<std::string> differences_of_training(const plan::Plan& plan);

} // namespace moe::tools
