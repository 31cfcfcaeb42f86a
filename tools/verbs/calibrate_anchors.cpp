// The verb calibrate for runs of one's own: a stack whose coefficients have seen them.
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/pricing/skewed_estimator.hpp"
#include "simulator/published/validate.hpp"
#include "tools/calibrate/anchors.hpp"
#include "tools/measured/log_reader.hpp"
#include "tools/print/console.hpp"
#include "tools/print/table.hpp"
#include "tools/report/anchor_document.hpp"
#include "tools/report/log_comparison.hpp"
#include "tools/verbs/verbs.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>

namespace moe::tools {

namespace {

constexpr std::size_t most_runs = 64;     // more are a fit of their own
constexpr std::size_t shown_moved = 10;   // coefficients
constexpr const char* between = ".json:"; // a plan and its log

// What a stack's rows of a CSV file name.
stack::Publication publication_of(const std::string& name) {
    const stack::Stack stack = stack::load_stack(name, machine::Hardware{});
    if (stack.published.empty())
        refuse("--stack {}: anchors are for stacks that published runs were fitted with", name);
    return stack.published.front();
}

// Rows with a plan of the stack. What the file's `source` and `release` say does not count.
void add_rows(const std::string& path, const std::string& stack, std::vector<MeasuredPlan>& runs, Console& console) {
    const stack::Publication publication = publication_of(stack);
    std::vector<published::Run> rows = published::load_runs(path);
    for (published::Run& row : rows) {
        row.source = publication.source;
        row.release = publication.releases.empty() ? "" : publication.releases.back();
    }
    for (const published::Prediction& p : published::predict_runs(rows, machine::load_coefficients(), {})) {
        if (!p.skipped.empty()) {
            console.warn("{}: left out: {}", p.run_id, p.skipped);
            continue;
        }
        // The row may count FLOPs by another rule than the plan.
        MeasuredPlan run{p.run_id, p.plan, p.published * p.estimate.tflops_per_gpu / p.predicted};
        run.plan.stack = stack;
        runs.push_back(std::move(run));
    }
}

MeasuredPlan logged(const std::string& text, const std::string& stack_name, Console& console) {
    const std::size_t at = text.find(between) + std::string(between).size() - 1;
    const std::string path = text.substr(0, at), log_path = text.substr(at + 1);
    MeasuredPlan run{std::filesystem::path(log_path).stem().string(), plan::load_plan(path), 0.0};
    run.plan.stack = stack_name;
    const stack::Stack stack = stack::load_stack(stack_name, *run.plan.hardware);
    if (const plan::PlanFault fault = stack::check_stack(run.plan, stack)) refuse("{}: {}", path, fault.message);
    const TrainingLog log = read_log_file(log_path);
    pricing::SkewedEstimator estimator(run.plan.hardware, stack);
    const LogComparison comparison = compare_log(run.plan, estimator.estimate(run.plan), log, log_path);
    for (const std::string& warning : comparison.warnings) console.warn("{}: {}", log_path, warning);
    run.tflops_per_gpu = comparison.measured_tflops;
    return run;
}

std::vector<MeasuredPlan> runs_of(const CalibrateOptions& options, Console& console) {
    std::vector<MeasuredPlan> runs;
    for (const std::string& text : options.anchors) {
        if (text.find(between) != std::string::npos)
            runs.push_back(logged(text, options.stack, console));
        else if (text.ends_with(".csv"))
            add_rows(text, options.stack, runs, console);
        else
            refuse("--anchor {}: must be a CSV file of runs, or PLAN.json:LOG", text);
    }
    if (runs.empty()) refuse("--anchor: none of the runs can be predicted");
    if (runs.size() > most_runs)
        refuse("--anchor: {} runs, at most {} are taken: name those that matter", runs.size(), most_runs);
    for (std::size_t i = 0; i < runs.size(); ++i)
        for (std::size_t j = 0; j < i; ++j)
            if (runs[i].run_id == runs[j].run_id)
                refuse("--anchor: two runs are called {}: rename one of them", runs[i].run_id);
    return runs;
}

Table runs_table(const Anchoring& anchoring) {
    Table table({"<run", "measured", "before", "after", {"<interval before", 1}, {"<interval after", 1}});
    const auto number = [](double tflops) { return fmt::format("{:.4g}", tflops); };
    const auto ends = [&](const published::Interval& i) { return fmt::format("{:.4g} to {:.4g}", i.low, i.high); };
    for (const Anchoring::Run& run : anchoring.runs)
        table.add({run.run_id, number(run.measured), number(run.before), number(run.after), ends(run.interval_before),
                   ends(run.interval_after)});
    return table;
}

Table moved_table(const Anchoring& anchoring) {
    Table table({"<coefficient", "before", "after", {"error before", 1}, {"error after", 1}, {"<unit", 2}});
    for (std::size_t i = 0; i < std::min(shown_moved, anchoring.coefficients.size()); ++i) {
        const Anchoring::Moved& m = anchoring.coefficients[i];
        table.add({m.name, fmt::format("{:.4g}", m.before), fmt::format("{:.4g}", m.after),
                   percent_text(m.error_before), percent_text(m.error_after), m.unit});
    }
    return table;
}

} // namespace

void calibrate_anchors(const CalibrateOptions& options) {
    if (options.anchors.empty()) refuse("--stack {}: is for --anchor: name runs, or leave it out", options.stack);
    if (options.stack.empty()) refuse("--anchor: name the stack that was run with --stack");
    if (!options.runs.empty() || !options.merge.empty() || !options.from.empty() || options.gpus != 0)
        refuse("--anchor: measures nothing: leave {} out", !options.runs.empty()    ? "--runs"
                                                           : !options.merge.empty() ? "--merge"
                                                           : !options.from.empty()  ? "--from"
                                                                                    : "--gpus");
    if (!options.out.ends_with(".json")) refuse("--out {}: a stack's file must end with .json", options.out);
    Console console(options);
    const std::vector<MeasuredPlan> runs = runs_of(options, console);
    const Anchoring anchoring =
        anchor(options.stack, runs, "moe-plan calibrate --anchor with " + counted(runs.size(), "run"));
    write_file(options.out, stack::to_json(anchoring.stack));
    if (options.json) return print(anchor_document(anchoring, options.out));
    console.say("{}: stack {} with {} moved by {}", options.out, options.stack,
                counted(anchoring.stack.coefficients.size(), "coefficient"), counted(runs.size(), "run"));
    if (options.quiet) return;
    console.say("\nTFLOPS/GPU, corrected by runs nearby:");
    console.table(runs_table(anchoring));
    console.line("");
    console.table(moved_table(anchoring));
    console.note("Next: moe-plan search --stack {} ...", options.out);
}

} // namespace moe::tools
