// Works out explanations and what differs between two of them.
#include "tools/report/explanation.hpp"

#include "simulator/pricing/skewed_estimator.hpp"
#include "simulator/published/ratios.hpp"
#include "tools/print/table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

namespace moe::tools {

namespace {

void sort_widest(std::vector<Difference>& list) {
    std::stable_sort(list.begin(), list.end(), [](const Difference& a, const Difference& b) {
        return std::abs(a.there - a.here) > std::abs(b.there - b.here);
    });
}

// Joins two lists by name: names of either one stand in the result.
template <class List, class Name, class Value>
std::vector<Difference> joined(const List& here, const List& there, Name name, Value value) {
    std::vector<Difference> result;
    const auto entry = [&](const std::string& wanted) -> Difference& {
        for (Difference& d : result)
            if (d.name == wanted) return d;
        result.push_back({wanted, 0.0, 0.0});
        return result.back();
    };
    for (const auto& item : here) entry(name(item)).here = value(item);
    for (const auto& item : there) entry(name(item)).there = value(item);
    return result;
}

} // namespace

Explanation explain_plan(const plan::Plan& plan, const stack::Stack& stack, replay::Simulation simulation,
                         published::Corrector& corrector, int slots) {
    Explanation e;
    e.plan = plan;
    e.simulation = std::move(simulation);
    e.walls = replay::walls(plan, stack, e.simulation);
    e.skew = corrector.apply(plan, pricing::skew_of(plan, stack, e.simulation, slots));
    e.simulation.estimate = corrector.apply(plan, e.simulation.estimate);
    const published::Correction* const correction = corrector.of(plan);
    if (correction != nullptr) e.correction = *correction;
    e.interval = published::interval_of(plan, e.simulation.estimate, stack.executable, correction);
    pricing::SkewedEstimator physics(plan.hardware, stack);
    published::CorrectedEstimator estimator(physics, corrector);
    e.base = estimator.play(plan);
    e.deltas = search::what_ifs(plan, stack, estimator);
    const std::vector<published::RatioError> errors = published::load_ratio_errors(stack.executable);
    for (const search::WhatIf& w : e.deltas)
        e.certainties.push_back(w.impossible.empty() ? published::certainty(errors, plan, w.plan, std::log1p(w.gain))
                                                     : std::nullopt);
    e.front = search::memory_front(plan, stack, estimator);
    return e;
}

std::vector<std::pair<const char*, double>> parts_of(const search::Breakdown& b) {
    return {{"compute", b.compute},         {"recompute", b.recompute},
            {"TP communication", b.tensor}, {"CP communication", b.context},
            {"EP communication", b.expert}, {"PP communication", b.pipeline},
            {"bubble", b.bubble},           {"DP communication", b.data},
            {"optimizer", b.optimizer},     {"host", b.host},
            {"neighbours", b.neighbours}};
}

std::string interval_text(const published::IntervalResult& result) {
    if (!result.interval) return fmt::format("No interval: {}", result.reason);
    const published::Interval& i = *result.interval;
    std::vector<const char*> new_ones;
    if (i.new_family) new_ones.push_back("this model family");
    if (i.new_system) new_ones.push_back("this system");
    if (i.new_stack) new_ones.push_back("this stack");
    if (i.new_release && !i.new_stack && !i.new_system) new_ones.push_back("this stack on this system");
    const std::string unseen = new_ones.empty() ? "" : fmt::format(", {} not among them", fmt::join(new_ones, " and "));
    return fmt::format("{:.0f}% interval {:.4g} to {:.4g} TFLOPS/GPU (cross-validated on {} measured runs{})",
                       100.0 * published::interval_coverage, i.low, i.high, i.rows, unseen);
}

std::string skew_text(const plan::Plan& plan, const pricing::Skew& skew) {
    Table table({"<", "load", "step", "TFLOPS/GPU", "GiB"});
    for (const auto& [name, value] : {std::pair{"mean", &routing::Quantiles::mean},
                                      {"p50", &routing::Quantiles::p50},
                                      {"p99", &routing::Quantiles::p99}})
        table.add({name, fmt::format("{:.2f}", skew.loads.time.*value), seconds_text(skew.step_seconds.*value),
                   fmt::format("{:.4g}", skew.tflops_per_gpu.*value), gib_text(skew.memory_bytes.*value)});
    std::string text = fmt::format("Routing {}, over steps (load: of the hottest ranks over the mean rank):\n{}",
                                   plan.routing, table.text(2));
    if (plan.capacity > 0.0)
        text += fmt::format("\n  {} of the steps exceed the capacity {} and are run again",
                            percent_text(skew.loads.overflow), plan.capacity);
    if (skew.replication)
        for (const std::string& line : replication_lines(*skew.replication)) text += "\n  " + line;
    return text;
}

std::vector<std::string> replication_lines(const pricing::Replication& r) {
    return {
        fmt::format("What if hot experts had copies, {} spare slots a rank ({} GiB; UltraEP, arXiv 2606.04101): load "
                    "{:.2f}, step {}, {:.4g} TFLOPS/GPU, {} of balanced",
                    r.slots, gib_text(r.slot_bytes), r.loads.time.mean, seconds_text(r.estimate.step_seconds),
                    r.estimate.tflops_per_gpu, percent_text(r.share_of_balanced)),
        fmt::format(
            "{:.1f} copies a layer and micro-batch, {:.1f} from one rank: planned in {}, weights sent in {} each "
            "way, gradients reduced in {} of which {} exposed; {} of the step",
            r.copies, r.most_sent, seconds_text(r.plan_seconds), seconds_text(r.weight_seconds),
            seconds_text(r.gradient_seconds), seconds_text(r.exposed_seconds), seconds_text(r.added_seconds))};
}

std::vector<std::pair<std::string, double>> losses(const Explanation& e) {
    std::vector<std::pair<std::string, double>> result;
    for (const replay::ComputeWall& wall : e.walls.compute)
        if (wall.busy - wall.repeated > wall.ideal)
            result.emplace_back(wall.name + " below peak", wall.busy - wall.repeated - wall.ideal);
    if (e.walls.unaligned > 0) result.emplace_back("rows that are not whole 16 bytes", e.walls.unaligned_seconds);
    for (const auto& [name, seconds] : parts_of(e.simulation.estimate.breakdown))
        if (std::string(name) != "compute" && std::string(name) != "optimizer" && seconds > 0.0)
            result.emplace_back(name, seconds);
    std::stable_sort(result.begin(), result.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
    return result;
}

Versus compare_plans(const Explanation& here, const Explanation& there) {
    Versus v;
    v.fields = plan::differences(here.plan, there.plan);
    v.there = there.simulation.estimate;
    const auto first = [](const auto& item) { return std::string(item.first); };
    const auto second = [](const auto& item) { return item.second; };
    v.parts = joined(parts_of(here.simulation.estimate.breakdown), parts_of(there.simulation.estimate.breakdown), first,
                     second);
    v.kinds = joined(
        totals_by_kind(here.simulation.timeline), totals_by_kind(there.simulation.timeline),
        [](const KindTotal& total) { return std::string(program::to_string(total.kind)); },
        [](const KindTotal& total) { return total.seconds; });
    v.memory = joined(here.walls.memory, there.walls.memory, first, second);
    sort_widest(v.kinds);
    return v;
}

} // namespace moe::tools
