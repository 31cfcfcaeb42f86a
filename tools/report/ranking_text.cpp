// Lays out a ranking's table and says what its marks mean.
#include "tools/report/ranking_text.hpp"

#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/plan_fields.hpp"
#include "tools/report/correction.hpp"
#include "tools/report/money_report.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>

namespace moe::tools {
namespace {

// Choices that have a column only where they differ, by field, with heading and rank.
struct Extra {
    const char* field;
    const char* heading;
    int rank;
};
constexpr Extra extras[] = {
    {"offload", "<offload", 0},        {"cuda_graph", "<graph", 2}, {"ep_overlap", "<EP overlap", 2},
    {"dispatcher", "<dispatcher", 2},  {"fsdp", "<FSDP", 2},        {"capacity", "capacity", 3},
    {"delay_wgrad", "<delay wgrad", 4}};

bool counts_differ(const search::SearchResult& result) {
    return std::any_of(result.plans.begin(), result.plans.end(),
                       [&result](const auto& entry) { return entry.first.gpus != result.plans.front().first.gpus; });
}

bool differ(const search::SearchResult& result, const char* field) {
    std::set<std::string> values;
    for (const auto& [plan, estimate] : result.plans) values.insert(plan::field_text(plan, field));
    // A set of modules says something even where all plans have it.
    return values.size() > 1 || (std::string(field) == "offload" && *values.begin() != "none");
}

std::string number(std::int64_t value) { return fmt::format("{}", value); }

std::string marked(std::size_t i, const PlanNote& note) {
    return fmt::format("{}{}{}", i + 1, i > 0 && note.equal_to_first ? "=" : "",
                       note.trains_differently.empty() ? "" : "*");
}

} // namespace

Table ranking_table(const search::SearchResult& result, const Ranking& ranking) {
    const bool counts = counts_differ(result);
    std::vector<Column> columns{"<"};
    if (counts) columns.emplace_back("GPUs");
    columns.insert(columns.end(), {"TFLOPS/GPU", {"tokens/s/GPU", 9}, {"step", 4}});
    if (ranking.money)
        for (const std::string& heading : money_headings(ranking.money->terms)) columns.emplace_back(heading);
    columns.insert(columns.end(), {"GiB",
                                   "TP",
                                   {"CP", 3},
                                   {"DP", 6},
                                   "PP",
                                   {"VPP", 1},
                                   "EP",
                                   {"ETP", 8},
                                   {"MBS", 1},
                                   {"<precision", 7},
                                   {"<schedule", 9},
                                   "<recompute"});
    std::vector<const char*> fields;
    for (const Extra& extra : extras)
        if (differ(result, extra.field)) {
            columns.emplace_back(extra.heading, extra.rank);
            fields.push_back(extra.field);
        }
    Table table(columns);
    for (std::size_t i = 0; i < result.plans.size(); ++i) {
        const auto& [plan, estimate] = result.plans[i];
        std::vector<std::string> row{marked(i, ranking.plans[i])};
        const auto add = [&row](std::vector<std::string> cells) {
            row.insert(row.end(), std::make_move_iterator(cells.begin()), std::make_move_iterator(cells.end()));
        };
        if (counts) add({number(plan.gpus)});
        add({fmt::format("{:.4g}", estimate.tflops_per_gpu), count_text(estimate.tokens_per_second_per_gpu),
             seconds_text(estimate.step_seconds)});
        if (ranking.money) add(money_cells(*ranking.plans[i].outlook, ranking.money->terms));
        add({gib_text(estimate.memory_bytes), number(plan.tp), number(plan.cp), number(plan.dp), number(plan.pp),
             number(plan.vpp), number(plan.ep), number(plan.etp), number(plan.mbs), machine::to_string(plan.precision),
             plan::to_string(plan.schedule), plan::recompute::to_string(plan.recompute)});
        for (const char* field : fields) row.push_back(plan::field_text(plan, field));
        table.add(std::move(row));
    }
    return table;
}

std::string document_steps_text(const replay::DocumentSteps& d) {
    return fmt::format("Documents of {:.4g} tokens on average leave {} of a sample's pairs; over {} drawn steps: mean "
                       "{}, p50 {}, p99 {}",
                       d.mean_length, percent_text(d.pairs), d.steps, seconds_text(d.step_seconds.mean),
                       seconds_text(d.step_seconds.p50), seconds_text(d.step_seconds.p99));
}

std::vector<std::string> ranking_lines(const search::SearchResult& result, const Ranking& ranking) {
    std::vector<std::string> lines;
    if (!ranking.plans.empty() && ranking.plans.front().correction)
        lines.push_back(correction_text(&*ranking.plans.front().correction));
    if (!ranking.plans.empty() && ranking.plans.front().documents)
        lines.push_back("Plan 1: " + document_steps_text(*ranking.plans.front().documents));
    const auto equal = std::count_if(ranking.plans.begin(), ranking.plans.end(),
                                     [](const PlanNote& note) { return note.equal_to_first; });
    if (equal > 1 && ranking.widest_margin)
        lines.push_back(fmt::format(
            "= cannot be told from plan 1: published pairs of such plans are off by up to {:.0f}% "
            "({:.0f}% of them); the simplest of these plans is {}",
            100.0 * std::expm1(*ranking.widest_margin), 100.0 * published::interval_coverage, ranking.simplest + 1));
    std::set<std::string> told;
    for (std::size_t i = 0; i < result.plans.size(); ++i)
        for (const std::string& what : ranking.plans[i].trains_differently)
            if (told.insert(what).second) lines.push_back(fmt::format("* plan {} trains differently: {}", i + 1, what));
    return lines;
}

Table nearest_table(const Ranking& ranking) {
    Table table({"<nearest published run", "measured", "predicted", "<differs from plan 1 in"});
    if (ranking.plans.empty()) return table;
    for (const published::NearRun& run : ranking.plans.front().nearest)
        table.add({run.run_id, fmt::format("{:.4g}", run.measured), fmt::format("{:.4g}", run.predicted),
                   run.differs_in.empty() ? "nothing" : fmt::format("{}", fmt::join(run.differs_in, " "))});
    return table;
}

} // namespace moe::tools
