// The verb search: explores the plan space of a request, prints the best plans and writes the first.
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/document_lengths.hpp"
#include "planner/model/model.hpp"
#include "simulator/cost/network.hpp"
#include "simulator/goodput/cheapest.hpp"
#include "simulator/pricing/skewed_estimator.hpp"
#include "tools/print/console.hpp"
#include "tools/print/table.hpp"
#include "tools/report/documents.hpp"
#include "tools/report/explanation.hpp"
#include "tools/report/money_report.hpp"
#include "tools/report/ranking_text.hpp"
#include "tools/verbs/money.hpp"
#include "tools/verbs/request.hpp"
#include "tools/verbs/verbs.hpp"

#include <algorithm>
#include <optional>

namespace moe::tools {

namespace {

constexpr std::size_t nearest_runs = 3; // that are shown for a plan

// The numbers of GPUs that are asked for; none where the deadline decides.
std::vector<int> counts_of(const SearchOptions& options, Request& request, const goodput::Terms& terms,
                           search::Estimator& estimator) {
    if (options.gpus == SearchOptions::fewest_gpus && terms.deadline_hours) return {};
    settle_gpus(options, request, estimator);
    std::vector<int> counts{request.search.base.gpus};
    for (const std::int64_t gpus : options.more_gpus) counts.push_back(static_cast<int>(gpus));
    return counts;
}

void print_money(Console& console, const search::SearchResult& result, const Ranking& ranking) {
    const Money& money = *ranking.money;
    if (money.counts.size() > 1) {
        console.note("");
        console.table(counts_table(money));
        for (const std::string& line : counts_lines(money)) console.note("{}", line);
    }
    console.note("");
    const auto& [plan, estimate] = result.plans.front();
    for (const std::string& line : assumption_lines(money, ranking.plans.front(), plan, estimate.tflops_per_gpu))
        console.note("{}", line);
}

void print_plans(Console& console, const search::SearchResult& result, const Ranking& ranking) {
    console.table(ranking_table(result, ranking));
    for (const std::string& line : ranking_lines(result, ranking)) console.note("{}", line);
    if (ranking.replication) {
        console.note("");
        for (const std::string& line : replication_lines(*ranking.replication)) console.note("{}", line);
    }
    if (ranking.money) print_money(console, result, ranking);
    if (ranking.plans.front().nearest.empty()) return;
    console.note("");
    console.table(nearest_table(ranking));
}

// Steps over the lengths of documents, of the plans that are shown.
void add_document_steps(const search::SearchResult& result, const stack::Stack& stack, Ranking& ranking) {
    replay::RowRoom rows;
    for (std::size_t i = 0; i < result.plans.size(); ++i) {
        const auto& [plan, estimate] = result.plans[i];
        if (plan.masked_lengths().bins.empty()) continue;
        ranking.plans[i].documents =
            replay::document_steps(plan, replay::timed(plan, stack, rows).core_seconds, estimate.step_seconds);
    }
}

// What plans leave free, and of which memory.
std::string headroom_text(const Request& request) {
    if (request.headroom == 0.0) return "";
    return fmt::format(", {} of {:.1f} GiB left free", percent_text(request.headroom),
                       gib(request.hardware->memory_bytes));
}

void print_counts(Console& console, const search::SearchResult& result) {
    std::vector<std::pair<std::string, std::int64_t>> reasons(result.pruned.begin(), result.pruned.end());
    std::stable_sort(reasons.begin(), reasons.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
    std::int64_t pruned = 0;
    for (const auto& [reason, count] : reasons) pruned += count;
    console.note("\n{} evaluated and {} excluded in {}", counted(result.evaluated, "plan"), counted(pruned),
                 seconds_text(result.seconds));
    if (!console.verbose() || reasons.empty()) return;
    Table table({"<excluded because", "plans"});
    for (const auto& [reason, count] : reasons) table.add({reason, count_text(static_cast<double>(count))});
    console.table(table, 2);
}

} // namespace

void search_verb(const SearchOptions& options) {
    refuse_overwriting("--out", options.out, options.model);
    refuse_overwriting("--out", options.out, options.hardware);
    const goodput::Terms terms = terms_of(options.money);
    Request request = request_of(options);
    const model::Model& model = *request.search.base.model;
    const machine::Hardware& hardware = *request.hardware;

    Console console(options);
    request.search.progress = [&console](std::int64_t evaluated, std::int64_t pruned) {
        console.progress(fmt::format("{} evaluated, {} excluded", counted(evaluated, "plan"), counted(pruned)));
    };
    pricing::SkewedEstimator physics(request.search.base.hardware, request.stack, request.point);
    published::Corrector corrector(request.stack, !options.no_neighbours);
    published::CorrectedEstimator estimator(physics, corrector);
    const std::vector<int> counts = counts_of(options, request, terms, estimator);
    goodput::Offers offers = counts.empty()
                                 ? goodput::cheapest_by_deadline(request.search, request.stack, estimator,
                                                                 SearchOptions::most_for_fewest, terms)
                                 : goodput::cheapest(request.search, request.stack, estimator, counts, terms);
    search::SearchResult& result = offers.found;
    const std::optional<pricing::Replication> replication =
        pricing::replication_of(result.plans.front().first, request.stack, static_cast<int>(options.spare_experts),
                                [&estimator](const plan::Plan& loaded) { return estimator.play(loaded); });
    for (auto& ranked : result.plans) ranked.first.hardware = request.hardware;
    if (!options.out.empty()) write_file(options.out, plan::plan_to_json(result.plans.front().first));
    warn_left_out(console, model);
    if (const std::string line = cost::unpriced(result.plans.front().first); !line.empty())
        console.warn("warning: {}", line);

    const bool money = terms.given() || offers.counts.size() > 1;
    if (!money) offers.outlooks.clear();
    Ranking ranking = rank_notes(result, request.stack.executable, nearest_runs, corrector, offers.outlooks);
    add_document_steps(result, request.stack, ranking);
    if (money) ranking.money = Money{terms, offers.counts};
    ranking.replication = replication;
    if (options.json) return print(search_document(result, result.plans.front().first.gpus, ranking));
    const std::string& machine = request.stack.figures_of;
    std::vector<int> gpus;
    for (const goodput::Count& count : offers.counts) gpus.push_back(count.gpus);
    console.say("{} on {} x {}, stack {}{}, batch {} x {} tokens{}\n", model.name, fmt::join(gpus, "|"), hardware.name,
                request.stack.name, machine.empty() ? "" : " with its figures of " + machine, options.gbs, options.seq,
                headroom_text(request));
    print_plans(console, result, ranking);
    print_counts(console, result);
    if (options.out.empty())
        console.note("Keep the best plan with --out plan.json");
    else
        console.note("Plan 1 is in {0}; next: moe-plan replay {0} --trace trace.json", options.out);
}

} // namespace moe::tools
