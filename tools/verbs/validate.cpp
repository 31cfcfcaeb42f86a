// The verb validate: predicts published runs and shows how far the predictions are off, and where.
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "simulator/published/improve.hpp"
#include "tools/print/console.hpp"
#include "tools/print/table.hpp"
#include "tools/report/documents.hpp"
#include "tools/verbs/verbs.hpp"

#include <algorithm>
#include <cmath>
#include <map>

namespace moe::tools {

namespace {

std::vector<std::string> cells_of(const std::string& name, const published::ValidationSummary& s) {
    const auto number = [](double value) { return fmt::format("{:.3f}", value); };
    return {name,
            fmt::format("{}", s.predicted),
            percent_text(s.mape),
            percent_text(s.bias),
            percent_text(s.within_10_percent),
            s.pairs > 0 ? number(s.kendall_tau) : "-",
            s.intervals > 0 ? percent_text(s.coverage) : "-",
            s.intervals > 0 ? percent_text(s.width) : "-"};
}

void print_groups(Console& console, const std::vector<published::Prediction>& predictions) {
    Table table({"<", "rows", "MAPE", "bias", {"within 10%", 1}, {"Kendall tau", 2}, "inside", "width"});
    table.add(cells_of("all", published::summarize(predictions)));
    for (const auto& [group, field] : published::validation_groups)
        for (const auto& [value, summary] : published::summarize_by(predictions, field))
            if (summary.predicted > 0)
                table.add(cells_of(fmt::format("{} {}", group, value.empty() ? "(blank)" : value), summary));
    console.table(table);
}

// Of the runs that coefficients and neighbours were fitted to, by fits without them.
void print_left_out(Console& console, const std::vector<published::LeftOutCoverage>& coverage) {
    std::vector<Column> columns{"<left out with the run"};
    for (const published::LeftOutCoverage& way : coverage) columns.emplace_back(way.left_out);
    Table table(columns);
    const auto cell = [](const published::Coverage& c) {
        return fmt::format("{:.0f}%, {:.0f}%", 100.0 * c.inside, 100.0 * c.width);
    };
    std::vector<std::string> all{"all systems"};
    for (const published::LeftOutCoverage& way : coverage) all.push_back(cell(way.all));
    table.add(all);
    for (const auto& [system, first] : coverage.front().systems) {
        std::vector<std::string> cells{system};
        for (const published::LeftOutCoverage& way : coverage) cells.push_back(cell(way.systems.at(system)));
        table.add(cells);
    }
    console.line("");
    console.table(table);
    console.note("inside, width: of the {:.0f}% intervals of fitted runs, where fit and neighbours have not seen them",
                 100.0 * published::interval_coverage);
}

void print_skipped(Console& console, const std::vector<published::Prediction>& predictions) {
    std::map<std::string, int> reasons;
    for (const published::Prediction& p : predictions)
        if (!p.skipped.empty()) ++reasons[p.skipped];
    if (reasons.empty()) return;
    Table table({"<skipped because", "rows"});
    for (const auto& [reason, count] : reasons) table.add({reason, fmt::format("{}", count)});
    console.line("");
    console.table(table);
}

void print_worst(Console& console, const std::vector<published::Prediction>& predictions, std::size_t count) {
    std::vector<const published::Prediction*> rows;
    for (const published::Prediction& p : predictions)
        if (p.skipped.empty()) rows.push_back(&p);
    std::stable_sort(rows.begin(), rows.end(), [](const published::Prediction* a, const published::Prediction* b) {
        return std::abs(std::log1p(a->error)) > std::abs(std::log1p(b->error));
    });
    rows.resize(std::min(rows.size(), count));
    if (rows.empty()) return;
    Table table({"<widest misses", "published", "predicted", "error", "<largest parts of the step"});
    for (const published::Prediction* p : rows) {
        const search::Breakdown& b = p->estimate.breakdown;
        std::vector<std::pair<double, const char*>> parts{
            {b.compute, "compute"},     {b.tensor, "TP"},     {b.context, "CP"}, {b.expert, "EP"},
            {b.pipeline, "PP"},         {b.bubble, "bubble"}, {b.data, "DP"},    {b.optimizer, "optimizer"},
            {b.recompute, "recompute"}, {b.host, "host"}};
        std::sort(parts.rbegin(), parts.rend());
        std::string text;
        for (std::size_t i = 0; i < 3; ++i)
            text += fmt::format("{}{} {}", i > 0 ? ", " : "", parts[i].second,
                                percent_text(parts[i].first / p->estimate.step_seconds));
        table.add({p->run_id, fmt::format("{:.0f}", p->published), fmt::format("{:.0f}", p->predicted),
                   percent_text(p->error), text});
    }
    console.line("");
    console.table(table);
}

void print_improvements(Console& console, const std::vector<published::Improvement>& improvements) {
    Table table({"<run", "published plan", "best found", "gain", "<what it changes"});
    for (const published::Improvement& i : improvements) {
        std::string changes;
        for (const plan::FieldChange& c : i.changes)
            changes += fmt::format("{}{} {} -> {}", changes.empty() ? "" : ", ", c.field, c.from, c.to);
        const double gain = i.estimate.tflops_per_gpu / i.published_tflops - 1.0;
        table.add({i.run_id, fmt::format("{:.0f}", i.published_tflops),
                   fmt::format("{:.0f}", i.estimate.tflops_per_gpu), percent_text(gain),
                   changes.empty() ? "nothing" : changes});
    }
    console.say("\nPredicted TFLOPS/GPU of each published plan and of the best plan for the same GPUs and batch");
    console.table(table);
}

} // namespace

void validate_verb(const ValidateOptions& options) {
    if (options.worst < 0 || options.worst > 1'000'000)
        refuse("--worst {}: must be between 0 and 1000000", options.worst);
    std::vector<published::Run> runs =
        published::load_runs(options.runs.empty() ? profiles_folder() + "/runs" : options.runs);
    if (!options.row.empty()) {
        std::erase_if(runs,
                      [&](const published::Run& run) { return run.run_id.find(options.row) == std::string::npos; });
        if (runs.empty()) refuse("--row {}: no run's id contains that", options.row);
    }
    Console console(options);
    std::vector<published::Prediction> predictions =
        published::predict_runs(runs, machine::load_coefficients(), [&](std::size_t done) {
            console.progress(fmt::format("{} of {} runs predicted", done, runs.size()));
        });
    std::vector<published::Improvement> improvements;
    if (options.improve)
        improvements = published::improve(predictions, machine::load_coefficients(), [&](std::size_t done) {
            console.progress(fmt::format("{} of {} plans searched for better ones", done, predictions.size()));
        });
    published::correct_runs(predictions, machine::load_coefficients(), !options.no_neighbours);
    const std::vector<published::LeftOutCoverage> coverage =
        options.no_neighbours ? std::vector<published::LeftOutCoverage>{} : published::left_out_coverage();
    if (options.json)
        return print(validation_document(predictions, options.improve ? &improvements : nullptr, coverage));
    const published::ValidationSummary all = published::summarize(predictions);
    console.say("{}: {} predicted, {} skipped{}", counted(all.rows, "run"), all.predicted, all.skipped,
                options.quiet ? "" : "\n");
    if (options.quiet) return;
    print_groups(console, predictions);
    console.note("inside: share of rows within their {:.0f}% interval; width: mean of its high / low - 1",
                 100.0 * published::interval_coverage);
    if (!options.no_neighbours)
        console.note("Each row is corrected by runs nearby, itself left out; --no-neighbours corrects nothing");
    if (!coverage.empty()) print_left_out(console, coverage);
    print_skipped(console, predictions);
    print_worst(console, predictions, static_cast<std::size_t>(options.worst));
    if (options.improve) print_improvements(console, improvements);
}

} // namespace moe::tools
