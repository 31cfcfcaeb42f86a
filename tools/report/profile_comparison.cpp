// Sums kernels by rule and ops by kind, and joins kinds into a row where a kernel's name leaves open which it is.
#include "tools/report/profile_comparison.hpp"

#include "tools/report/exposed_comm.hpp"

#include <algorithm>
#include <map>
#include <set>

namespace moe::tools {

namespace {

using program::OpKind;

struct Sum {
    double kernels = 0.0, seconds = 0.0;
    void add(double amount) {
        kernels += 1.0;
        seconds += amount;
    }
    Sum per(double steps) const { return {kernels / steps, seconds / steps}; }
};

SpanSort sort_of(OpKind kind) {
    if (kind == OpKind::copy_to_host || kind == OpKind::copy_from_host) return SpanSort::copy;
    return program::is_communication(kind) ? SpanSort::communication : SpanSort::work;
}

struct PredictedKind {
    std::int64_t count = 0;
    double busy = 0.0, wait = 0.0;
};
using PredictedKinds = std::map<OpKind, PredictedKind>;

PredictedKinds predicted_kinds(const program::Timeline& timeline, int rank) {
    PredictedKinds kinds;
    for (const program::TimelineRow& row : timeline.rows) {
        if (row.rank != rank) continue;
        PredictedKind& kind = kinds[row.kind];
        ++kind.count;
        kind.busy += row.busy;
        if (program::is_communication(row.kind)) kind.wait += std::max(0.0, row.end - row.start - row.busy);
    }
    return kinds;
}

SideTotals predicted_totals(const program::Timeline& timeline, int rank) {
    std::vector<BusySpan> spans;
    for (const program::TimelineRow& row : timeline.rows)
        if (row.rank == rank) spans.push_back({row.start, row.end, sort_of(row.kind)});
    const SpanTotals totals = totals_of(spans);
    return {timeline.step_seconds, totals.exposed, std::max(0.0, timeline.step_seconds - totals.busy)};
}

struct Matched {
    std::vector<std::optional<std::size_t>> rule; // by name
    std::vector<Sum> by_rule, by_name;
};

Matched match(const DeviceProfile& profile, const ProfiledSteps& steps, const KernelTable& table) {
    Matched matched;
    for (const EventName& name : profile.names) matched.rule.push_back(table.rule_of(name));
    matched.by_rule.resize(table.rules.size());
    matched.by_name.resize(profile.names.size());
    for (const DeviceEvent& event : steps.events) {
        const auto name = static_cast<std::size_t>(event.name);
        matched.by_name[name].add(event.end - event.start);
        if (matched.rule[name]) matched.by_rule[*matched.rule[name]].add(event.end - event.start);
    }
    return matched;
}

SpanSort sort_of(const DeviceEvent& event, const Matched& matched, const KernelTable& table) {
    const auto& rule = matched.rule[static_cast<std::size_t>(event.name)];
    return rule ? sort_of(table.rules[*rule].kinds.front()) : SpanSort::work;
}

// Events are ordered by device. Sums over devices and steps become means.
SideTotals measured_totals(const ProfiledSteps& steps, const Matched& matched, const KernelTable& table,
                           double device_steps) {
    SpanTotals sum;
    std::vector<BusySpan> spans;
    for (std::size_t i = 0; i < steps.events.size(); ++i) {
        const DeviceEvent& event = steps.events[i];
        spans.push_back({event.start, event.end, sort_of(event, matched, table)});
        if (i + 1 < steps.events.size() && steps.events[i + 1].device == event.device) continue;
        const SpanTotals totals = totals_of(spans);
        sum.exposed += totals.exposed;
        sum.busy += totals.busy;
        spans.clear();
    }
    return {steps.seconds, sum.exposed / device_steps, std::max(0.0, steps.seconds - sum.busy / device_steps)};
}

std::vector<StreamUse> streams_of(const DeviceProfile& profile, const ProfiledSteps& steps, const Matched& matched,
                                  const KernelTable& table) {
    std::map<std::pair<std::int32_t, std::int32_t>, std::pair<Sum, double>> sums;
    for (const DeviceEvent& event : steps.events) {
        auto& [all, communication] = sums[{event.device, event.stream}];
        all.add(event.end - event.start);
        if (sort_of(event, matched, table) == SpanSort::communication) communication += event.end - event.start;
    }
    const auto count = static_cast<double>(steps.steps.size());
    std::vector<StreamUse> uses;
    for (const auto& [key, sum] : sums)
        uses.push_back({profile.devices[static_cast<std::size_t>(key.first)], key.second, sum.first.kernels / count,
                        sum.first.seconds / count, sum.second / count});
    std::stable_sort(uses.begin(), uses.end(),
                     [](const StreamUse& a, const StreamUse& b) { return a.seconds > b.seconds; });
    return uses;
}

// The kinds that a matched rule stands for in this comparison: of its own those that the plan has. A rule for the rest
// gives way to rules that matched as well.
std::vector<std::vector<OpKind>> kinds_of_rules(const KernelTable& table, const Matched& matched,
                                                const PredictedKinds& predicted) {
    std::vector<std::vector<OpKind>> kinds(table.rules.size());
    std::set<OpKind> taken;
    for (const bool rest : {false, true})
        for (std::size_t i = 0; i < table.rules.size(); ++i) {
            if (table.rules[i].rest != rest || matched.by_rule[i].kernels == 0.0) continue;
            for (const OpKind kind : table.rules[i].kinds)
                if (predicted.contains(kind) && !(rest && taken.contains(kind))) kinds[i].push_back(kind);
            if (!rest) taken.insert(kinds[i].begin(), kinds[i].end());
        }
    return kinds;
}

// Sets of kinds that no matched rule tells apart, by union of each rule's kinds.
class Joined {
public:
    void join(OpKind a, OpKind b) { parents_[root(a)] = root(b); }
    OpKind root(OpKind kind) {
        const auto at = parents_.try_emplace(kind, kind).first;
        return at->second == kind ? kind : root(at->second);
    }

private:
    std::map<OpKind, OpKind> parents_;
};

void add_predicted(ProfileRow& row, OpKind kind, const PredictedKind& predicted) {
    row.kinds.push_back(kind);
    row.communication = program::is_communication(kind);
    row.count += predicted.count;
    row.predicted += predicted.busy;
    row.predicted_wait += predicted.wait;
}

std::string name_of(const ProfileRow& row, const std::string& together) {
    return row.kinds.size() == 1 ? program::to_string(row.kinds.front()) : together;
}

std::vector<ProfileRow> rows_of(const KernelTable& table, const Matched& matched, const PredictedKinds& predicted,
                                double device_steps) {
    const std::vector<std::vector<OpKind>> kinds = kinds_of_rules(table, matched, predicted);
    Joined joined;
    for (const auto& of_rule : kinds)
        for (const OpKind kind : of_rule) joined.join(of_rule.front(), kind);
    std::map<OpKind, ProfileRow> rows;
    std::map<OpKind, std::pair<std::size_t, double>> widest; // kinds and seconds of the rule that names the row
    for (const auto& [kind, sum] : predicted) add_predicted(rows[joined.root(kind)], kind, sum);
    std::vector<ProfileRow> result;
    for (std::size_t i = 0; i < table.rules.size(); ++i) {
        const Sum sum = matched.by_rule[i].per(device_steps);
        if (sum.kernels == 0.0) continue;
        if (kinds[i].empty()) { // the plan has no such op
            ProfileRow row;
            row.kinds = table.rules[i].kinds;
            row.communication = program::is_communication(row.kinds.front());
            row.kernels = sum.kernels;
            row.measured = sum.seconds;
            row.name = name_of(row, table.rules[i].label);
            result.push_back(std::move(row));
            continue;
        }
        const OpKind root = joined.root(kinds[i].front());
        ProfileRow& row = rows[root];
        row.kernels += sum.kernels;
        row.measured += sum.seconds;
        if (const std::pair width(kinds[i].size(), sum.seconds); row.name.empty() || width > widest[root]) {
            row.name = table.rules[i].label;
            widest[root] = width;
        }
    }
    for (auto& [root, row] : rows) {
        row.name = name_of(row, row.name);
        result.push_back(std::move(row));
    }
    std::stable_sort(result.begin(), result.end(), [](const ProfileRow& a, const ProfileRow& b) {
        return std::pair(a.measured, a.predicted) > std::pair(b.measured, b.predicted);
    });
    return result;
}

std::vector<UnmatchedKernel> unmatched_of(const DeviceProfile& profile, const Matched& matched, double all,
                                          double device_steps) {
    std::vector<UnmatchedKernel> unmatched;
    for (std::size_t i = 0; i < profile.names.size(); ++i) {
        const Sum sum = matched.by_name[i].per(device_steps);
        if (matched.rule[i] || sum.kernels == 0.0) continue;
        unmatched.push_back({profile.names[i].kernel, sum.kernels, sum.seconds, all > 0.0 ? sum.seconds / all : 0.0});
    }
    std::stable_sort(unmatched.begin(), unmatched.end(),
                     [](const UnmatchedKernel& a, const UnmatchedKernel& b) { return a.seconds > b.seconds; });
    return unmatched;
}

} // namespace

ProfileComparison compare_profile(const program::Timeline& predicted, int representative, const DeviceProfile& profile,
                                  const ProfiledSteps& steps, const KernelTable& table) {
    ProfileComparison result;
    std::set<std::int32_t> devices;
    for (const DeviceEvent& event : steps.events) devices.insert(event.device);
    result.devices = devices.size();
    const double device_steps = static_cast<double>(devices.size() * steps.steps.size());
    const Matched matched = match(profile, steps, table);
    for (const Sum& sum : matched.by_name) result.kernel_seconds += sum.seconds / device_steps;
    result.predicted = predicted_totals(predicted, representative);
    result.measured = measured_totals(steps, matched, table, device_steps);
    result.rows = rows_of(table, matched, predicted_kinds(predicted, representative), device_steps);
    result.streams = streams_of(profile, steps, matched, table);
    result.unmatched = unmatched_of(profile, matched, result.kernel_seconds, device_steps);
    for (const UnmatchedKernel& kernel : result.unmatched) result.unmatched_seconds += kernel.seconds;
    return result;
}

} // namespace moe::tools
