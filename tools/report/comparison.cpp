// Lines up the rows of two timelines by (rank, slot, op) and sums them by op kind.
#include "tools/report/comparison.hpp"

#include "planner/base/error.hpp"
#include "tools/report/exposed_comm.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

namespace moe::tools {

namespace {

constexpr std::size_t widest_kept = 8;

using OpId = std::tuple<std::int32_t, std::int32_t, std::int32_t>;
OpId id_of(const program::TimelineRow& row) { return {row.rank, row.slot, row.op}; }

std::map<std::int32_t, int> represented(const program::Timeline& timeline) {
    std::map<std::int32_t, int> ranks;
    for (std::size_t i = 0; i < timeline.ranks.size(); ++i) ranks[timeline.ranks[i]] = timeline.represents[i];
    return ranks;
}

// Fills matched and widest. Both timelines number ops alike, so a differing kind under one id means differing Programs.
void line_up(const program::Timeline& predicted, const program::Timeline& measured, Comparison& result) {
    std::map<OpId, const program::TimelineRow*> by_id;
    for (const program::TimelineRow& row : predicted.rows) by_id[id_of(row)] = &row;
    for (const program::TimelineRow& row : measured.rows) {
        const auto found = by_id.find(id_of(row));
        if (found == by_id.end()) continue;
        if (found->second->kind != row.kind)
            refuse("the traces are of different programs: rank {} slot {} op {} is {} in the predicted and {} in the "
                   "measured one; make both with the same version of moe-plan",
                   row.rank, row.slot, row.op, program::to_string(found->second->kind), program::to_string(row.kind));
        ++result.matched;
        result.widest.push_back({*found->second, row});
    }
    const auto apart = [](const ComparedOp& op) { return std::abs(op.predicted.busy - op.measured.busy); };
    const auto wider = [&](const ComparedOp& a, const ComparedOp& b) { return apart(a) > apart(b); };
    const std::size_t kept = std::min(widest_kept, result.widest.size());
    std::partial_sort(result.widest.begin(), result.widest.begin() + static_cast<std::ptrdiff_t>(kept),
                      result.widest.end(), wider);
    result.widest.resize(kept);
}

} // namespace

std::vector<KindTotal> totals_by_kind(const program::Timeline& timeline) {
    const std::map<std::int32_t, int> ranks = represented(timeline);
    double all_ranks = 0.0;
    for (const auto& [rank, count] : ranks) all_ranks += count;
    std::map<program::OpKind, KindTotal> totals;
    for (const program::TimelineRow& row : timeline.rows) {
        const auto rank = ranks.find(row.rank);
        if (rank == ranks.end()) refuse("the trace has rows of rank {}, which its list of ranks lacks", row.rank);
        KindTotal& total = totals[row.kind];
        total.kind = row.kind;
        total.count += rank->second;
        total.seconds += row.busy * rank->second / all_ranks;
    }
    std::vector<KindTotal> sorted;
    for (const auto& [kind, total] : totals) sorted.push_back(total);
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const KindTotal& a, const KindTotal& b) { return a.seconds > b.seconds; });
    return sorted;
}

Comparison compare(const program::Timeline& predicted, const program::Timeline& measured) {
    if (!predicted.predicted) refuse("the first trace is a measured one: give the predicted trace first");
    if (measured.predicted) refuse("the second trace is a predicted one: give the measured trace of execute second");
    if (predicted.plan_json != measured.plan_json)
        refuse("the traces are of different plans: replay and execute the same plan file");

    Comparison result;
    result.predicted_tflops = predicted.tflops_per_gpu;
    result.measured_tflops = measured.tflops_per_gpu;
    result.predicted_seconds = predicted.step_seconds;
    result.measured_seconds = measured.step_seconds;
    result.predicted_memory_gib = predicted.memory_gib;
    result.measured_memory_gib = measured.memory_gib;
    result.predicted_exposed = exposed_communication(predicted);
    result.measured_exposed = exposed_communication(measured);
    line_up(predicted, measured, result);

    std::map<program::OpKind, ComparedKind> kinds;
    for (const KindTotal& total : totals_by_kind(predicted))
        kinds[total.kind] = {total.kind, total.count, total.seconds, 0.0};
    for (const KindTotal& total : totals_by_kind(measured)) {
        const auto [at, only_measured] = kinds.try_emplace(total.kind, ComparedKind{total.kind, total.count, 0.0, 0.0});
        if (!only_measured && at->second.count != total.count)
            refuse("the traces are of different programs: {} ops of kind {} predicted, {} measured; make both with the "
                   "same version of moe-plan",
                   at->second.count, program::to_string(total.kind), total.count);
        at->second.measured = total.seconds;
    }
    for (const auto& [kind, compared] : kinds) result.kinds.push_back(compared);
    std::stable_sort(result.kinds.begin(), result.kinds.end(),
                     [](const ComparedKind& a, const ComparedKind& b) { return a.measured > b.measured; });
    return result;
}

} // namespace moe::tools
