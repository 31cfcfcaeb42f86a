// Lays out hours, dollars and goodput.
#include "tools/report/money_report.hpp"

#include "planner/base/counted.hpp"
#include "planner/plan/plan.hpp"
#include "tools/report/stamp.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace moe::tools {
namespace {

using Json = nlohmann::ordered_json;

// "1,234" and "12.3": three digits at least.
std::string amount(double value) { return value < 100.0 ? fmt::format("{:.3g}", value) : count_text(value); }

std::string hours_text(double hours) { return amount(hours) + " h"; }
std::string minutes_text(double seconds) { return fmt::format("{:.3g} min", seconds / 60.0); }

std::string checkpoint_line(const goodput::Outlook& o, const goodput::Terms& terms) {
    const bool usual = terms.storage_bandwidth == goodput::usual_storage_bandwidth;
    return fmt::format("Checkpoints: every {} steps of plan 1 ({} of training, {}); {:.3g} GB a GPU in {:.3g} s at "
                       "{:.3g} GB/s a GPU{}",
                       count_text(static_cast<double>(o.interval_steps)), minutes_text(o.interval_seconds),
                       terms.interval_seconds ? "as asked for" : "Daly 2006", o.checkpoint_bytes / 1e9, o.write_seconds,
                       terms.storage_bandwidth / 1e9, usual ? " (Llama 3: 2 TB/s for 16,384)" : "");
}

std::string deadline_line(const goodput::Terms& terms, const PlanNote& first, double tflops_per_gpu) {
    const double hours = first.outlook->hours;
    std::string text =
        fmt::format("Deadline: {}; plan 1 ends after {}", hours_text(*terms.deadline_hours), hours_text(hours));
    if (const auto& i = first.interval.interval)
        text += fmt::format(", {:.0f}% interval {} to {}", 100.0 * published::interval_coverage,
                            amount(hours * tflops_per_gpu / i->high), amount(hours * tflops_per_gpu / i->low));
    return text;
}

} // namespace

std::vector<std::string> money_headings(const goodput::Terms& terms) {
    std::vector<std::string> headings;
    if (terms.mtbf_hours) headings.emplace_back("goodput");
    headings.insert(headings.end(), {"hours", terms.price ? "dollars" : "GPU-hours"});
    return headings;
}

std::vector<std::string> money_cells(const goodput::Outlook& o, const goodput::Terms& terms) {
    std::vector<std::string> cells;
    if (terms.mtbf_hours) cells.push_back(percent_text(o.goodput));
    cells.insert(cells.end(), {amount(o.hours), amount(o.dollars.value_or(o.gpu_hours))});
    return cells;
}

Table counts_table(const Money& money) {
    std::vector<Column> columns{"GPUs", "TFLOPS/GPU"};
    for (const std::string& heading : money_headings(money.terms)) columns.emplace_back(heading);
    if (money.terms.deadline_hours) columns.emplace_back("<deadline");
    Table table(columns);
    for (const goodput::Count& count : money.counts) {
        if (!count.best) continue;
        std::vector<std::string> row{count_text(count.gpus), fmt::format("{:.4g}", count.estimate.tflops_per_gpu)};
        for (std::string& cell : money_cells(*count.best, money.terms)) row.push_back(std::move(cell));
        if (money.terms.deadline_hours)
            row.emplace_back(count.best->hours <= *money.terms.deadline_hours ? "met" : "missed");
        table.add(std::move(row));
    }
    return table;
}

std::vector<std::string> counts_lines(const Money& money) {
    std::vector<std::string> lines;
    for (const goodput::Count& count : money.counts)
        if (!count.best) lines.push_back(fmt::format("{}: {}", counted(count.gpus, "GPU"), count.no_plan));
    return lines;
}

std::vector<std::string> assumption_lines(const Money& money, const PlanNote& first, const plan::Plan& plan,
                                          double tflops_per_gpu) {
    const goodput::Terms& terms = money.terms;
    const goodput::Outlook& o = *first.outlook;
    std::vector<std::string> lines;
    lines.push_back(
        fmt::format("Tokens: {}{}", goodput::tokens_text(terms.budget()), terms.tokens ? "" : " (no --tokens)"));
    if (terms.price)
        lines.push_back(fmt::format("Price: {:.4g} dollars a GPU-hour, {} a trillion tokens with plan 1", *terms.price,
                                    amount(*o.dollars_per_trillion)));
    if (!terms.mtbf_hours) {
        lines.emplace_back("Failures and checkpoints: left out (no --mtbf)");
    } else {
        lines.push_back(fmt::format("Failures: at random, every {} of a GPU, so every {} of {}",
                                    hours_text(*terms.mtbf_hours), hours_text(o.job_mtbf_hours),
                                    counted(plan.gpus, "GPU")));
        lines.push_back(checkpoint_line(o, terms));
        const bool usual = terms.restart_seconds == goodput::usual_restart_seconds;
        lines.push_back(fmt::format("Restart: {} behind each failure{}", minutes_text(terms.restart_seconds),
                                    usual ? " (MegaScale: found and diagnosed in less than that)" : ""));
    }
    if (terms.deadline_hours) lines.push_back(deadline_line(terms, first, tflops_per_gpu));
    return lines;
}

Json outlook_json(const goodput::Outlook& o, const goodput::Terms& terms) {
    Json json = {{"goodput", o.goodput},
                 {"hours", o.hours},
                 {"gpu_hours", o.gpu_hours},
                 {"dollars", or_null(o.dollars)},
                 {"dollars_per_trillion_tokens", or_null(o.dollars_per_trillion)},
                 {"checkpoint", nullptr}};
    if (terms.mtbf_hours)
        json["checkpoint"] = {{"gpu_bytes", o.checkpoint_bytes},
                              {"write_seconds", o.write_seconds},
                              {"interval_steps", o.interval_steps},
                              {"interval_seconds", o.interval_seconds},
                              {"job_mtbf_hours", o.job_mtbf_hours}};
    return json;
}

Json money_json(const Money& money) {
    const goodput::Terms& terms = money.terms;
    Json assumptions = {{"tokens", terms.budget()},
                        {"price", or_null(terms.price)},
                        {"deadline_hours", or_null(terms.deadline_hours)},
                        {"mtbf_hours", or_null(terms.mtbf_hours)},
                        {"checkpoint_interval", nullptr},
                        {"storage_bytes_per_second", nullptr},
                        {"restart_seconds", nullptr}};
    if (terms.mtbf_hours) {
        assumptions["checkpoint_interval"] = terms.interval_seconds ? "given" : "daly";
        assumptions["storage_bytes_per_second"] = terms.storage_bandwidth;
        assumptions["restart_seconds"] = terms.restart_seconds;
    }
    Json counts = Json::array();
    for (const goodput::Count& count : money.counts) {
        Json entry = {{"gpus", count.gpus}, {"no_plan", count.best ? Json(nullptr) : Json(count.no_plan)}};
        entry["hours"] = count.best ? Json(count.best->hours) : Json(nullptr);
        entry["gpu_hours"] = count.best ? Json(count.best->gpu_hours) : Json(nullptr);
        entry["dollars"] = count.best ? or_null(count.best->dollars) : Json(nullptr);
        counts.push_back(std::move(entry));
    }
    return {{"assumptions", std::move(assumptions)}, {"counts", std::move(counts)}};
}

} // namespace moe::tools
