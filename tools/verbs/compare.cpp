// The verb compare: predicted and measured timelines of one plan, side by side.
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "tools/print/console.hpp"
#include "tools/print/table.hpp"
#include "tools/report/comparison.hpp"
#include "tools/report/documents.hpp"
#include "tools/report/run_file.hpp"
#include "tools/report/run_report.hpp"
#include "tools/report/trace_file.hpp"
#include "tools/verbs/verbs.hpp"

#include <filesystem>
#include <optional>

namespace moe::tools {

namespace {

// A run directory stands for what execute --run-dir left in it; two traces have no run.
struct Files {
    std::string predicted, measured;
    std::string run, routing; // empty = none
};
Files files_of(const std::vector<std::string>& given) {
    if (given.size() == 2) return {given[0], given[1], "", ""};
    std::error_code error;
    if (!std::filesystem::exists(given[0], error)) refuse("cannot read {}: No such file or directory", given[0]);
    if (!std::filesystem::is_directory(given[0], error))
        refuse("{}: not a run directory; give one, or two traces: PREDICTED MEASURED", given[0]);
    const std::filesystem::path folder(given[0]);
    return {(folder / "predicted.json").string(), (folder / "measured.json").string(), (folder / "run.json").string(),
            (folder / "routing.csv").string()};
}

void write_report(const program::Timeline& predicted, const program::Timeline& measured, const Files& files,
                  const CompareOptions& options) {
    for (const std::string* read : {&files.predicted, &files.measured, &files.run, &files.routing})
        refuse_overwriting("--report", options.report, *read);
    std::optional<RunRecord> run;
    if (!files.run.empty()) run = read_run(files.run);
    RunReport report{predicted, &measured, run ? &*run : nullptr, {}, options.command};
    if (!files.routing.empty()) report.routed = read_routed(files.routing);
    write_run_report(report, options.report);
}

Table kinds_table(const Comparison& c) {
    Table table({"<kind", {"count", 1}, "predicted", "measured", "pred/meas", {"of step", 2}});
    double predicted = 0.0, measured = 0.0;
    for (const ComparedKind& kind : c.kinds) {
        table.add({program::to_string(kind.kind), count_text(static_cast<double>(kind.count)),
                   seconds_text(kind.predicted), seconds_text(kind.measured), ratio_text(kind.predicted, kind.measured),
                   percent_text(kind.measured / c.measured_seconds)});
        predicted += kind.predicted;
        measured += kind.measured;
    }
    // The rest of the step is waiting: for peers, for a core, for the host, and the pipeline's bubble.
    const double predicted_wait = c.predicted_seconds - predicted, measured_wait = c.measured_seconds - measured;
    table.add({"(waiting)", "", seconds_text(predicted_wait), seconds_text(measured_wait),
               ratio_text(predicted_wait, measured_wait), percent_text(measured_wait / c.measured_seconds)});
    return table;
}

Table widest_table(const Comparison& c) {
    Table table({"<furthest apart", "rank", {"slot", 3}, {"op", 2}, "layer", {"<phase", 1}, "predicted", "measured"});
    for (const ComparedOp& op : c.widest)
        table.add({program::to_string(op.measured.kind), fmt::format("{}", op.measured.rank),
                   fmt::format("{}", op.measured.slot), fmt::format("{}", op.measured.op),
                   op.measured.layer < 0 ? "-" : fmt::format("{}", op.measured.layer),
                   program::to_string(op.measured.phase), seconds_text(op.predicted.busy),
                   seconds_text(op.measured.busy)});
    return table;
}

} // namespace

void compare_verb(const CompareOptions& options) {
    if (!options.log.empty() || !options.profile.empty()) return compare_with_plan(options);
    for (const auto& [given, name] :
         {std::pair(!options.kernels.empty(), "--kernels"), std::pair(options.steps != 0, "--steps"),
          std::pair(options.rank != -1, "--rank")})
        if (given) refuse("{} is for --profile FILE: name the profile as well, or leave it out", name);
    const Files files = files_of(options.traces);
    const program::Timeline predicted = read_timeline(files.predicted);
    const program::Timeline measured = read_timeline(files.measured);
    const Comparison c = compare(predicted, measured);
    if (!(c.measured_seconds > 0.0))
        refuse("{}: step_seconds = {}: a measured trace holds at least one step", files.measured, c.measured_seconds);
    if (!options.report.empty()) write_report(predicted, measured, files, options);
    if (options.json) return print(comparison_document(c));

    Table summary({"<", "predicted", "measured", "pred/meas"});
    summary.add({"step", seconds_text(c.predicted_seconds), seconds_text(c.measured_seconds),
                 ratio_text(c.predicted_seconds, c.measured_seconds)});
    summary.add({"TFLOPS/GPU", fmt::format("{:.4g}", c.predicted_tflops), fmt::format("{:.4g}", c.measured_tflops),
                 ratio_text(c.predicted_tflops, c.measured_tflops)});
    summary.add({"memory GiB", fmt::format("{:.4g}", c.predicted_memory_gib),
                 fmt::format("{:.4g}", c.measured_memory_gib),
                 ratio_text(c.predicted_memory_gib, c.measured_memory_gib)});
    if (c.predicted_exposed > 0.0 || c.measured_exposed > 0.0)
        summary.add({"bare communication", seconds_text(c.predicted_exposed), seconds_text(c.measured_exposed),
                     ratio_text(c.predicted_exposed, c.measured_exposed)});
    Console console(options);
    console.table(summary);
    if (!options.report.empty()) console.note("Report in {}", options.report);
    if (options.quiet) return;
    console.say("\nBusy seconds of a step by op kind, mean of ranks ({} lined up):", counted(c.matched, "op"));
    console.table(kinds_table(c));
    if (c.widest.empty()) return;
    console.line("");
    console.table(widest_table(c));
}

} // namespace moe::tools
