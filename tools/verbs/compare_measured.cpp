// The verb compare for what other engines left: a plan's prediction beside their log or their profile.
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/plan.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/published/corrected_estimator.hpp"
#include "simulator/replay/simulate.hpp"
#include "tools/measured/chrome_trace.hpp"
#include "tools/measured/nsight.hpp"
#include "tools/print/console.hpp"
#include "tools/print/table.hpp"
#include "tools/report/job_warnings.hpp"
#include "tools/report/measured_documents.hpp"
#include "tools/verbs/request.hpp"
#include "tools/verbs/verbs.hpp"

#include <algorithm>
#include <cmath>

namespace moe::tools {

namespace {

constexpr std::size_t shown_names = 8;

struct Predicted {
    plan::Plan plan;
    stack::Stack stack;
    replay::Simulation simulation;
};

Predicted predict(const std::string& path, bool keep_rows) {
    Predicted predicted;
    predicted.plan = plan::load_plan(path);
    predicted.stack = stack_of_plan(predicted.plan, path);
    if (const plan::PlanFault fault = stack::check_stack(predicted.plan, predicted.stack))
        refuse("{}: {}", path, fault.message);
    predicted.simulation = replay::simulate(predicted.plan, predicted.stack, keep_rows);
    return predicted;
}

void add_seconds(Table& table, const char* name, double predicted, double measured) {
    table.add({name, seconds_text(predicted), seconds_text(measured), ratio_text(predicted, measured)});
}

Table log_table(const LogComparison& c) {
    Table table({"<", "predicted", "measured", "pred/meas"});
    const auto number = [](double value) { return fmt::format("{:.4g}", value); };
    add_seconds(table, "step", c.predicted_seconds, c.measured_seconds);
    table.add({"TFLOPS/GPU", number(c.predicted_tflops), number(c.measured_tflops),
               ratio_text(c.predicted_tflops, c.measured_tflops)});
    if (c.logged_tflops) table.add({"TFLOPS/GPU as logged", "", number(*c.logged_tflops), ""});
    for (const auto& [name, value] :
         {std::pair("memory GiB, allocated", c.allocated_gib), std::pair("memory GiB, reserved", c.reserved_gib)})
        if (value)
            table.add(
                {name, number(c.predicted_memory_gib), number(*value), ratio_text(c.predicted_memory_gib, *value)});
    return table;
}

void say_log(Console& console, const LogComparison& c) {
    console.note("{}: median of {} of {}", c.engine, counted(c.iterations), counted(c.logged, "logged iteration"));
    console.note("Left out: {} at the front (warm-up), {} as outliers{}{}", c.warm_up, c.outliers.size(),
                 c.other_batch > 0 ? fmt::format(", {} of another batch or sequence", c.other_batch) : "",
                 c.skipped > 0 ? fmt::format(", {} with skipped steps", c.skipped) : "");
    console.note("Spread: 80% of them between {} and {}", seconds_text(c.low), seconds_text(c.high));
    for (const std::string& warning : c.warnings) console.warn("{}", warning);
    if (c.time == LogTime::tokens || c.time == LogTime::samples)
        console.note("Step time follows from the {} that it logs and the plan's batch", to_string(c.time));
    if (c.time == LogTime::elapsed)
        console.note("Step times are differences of the times since the start that it logs");
    if (c.runs > 1) console.note("The log holds {}; this is the last whole one", counted(c.runs, "run"));
    if (c.cut) console.note("The log's last line has no end and was left out");
    if (c.first_loss && c.last_loss) console.note("Loss from {:.4f} to {:.4f}", *c.first_loss, *c.last_loss);
    for (std::size_t i = 0; i < std::min(shown_names, c.outliers.size()); ++i)
        console.note("  outlier: iteration {} took {}", c.outliers[i].iteration, seconds_text(c.outliers[i].seconds));
}

void compare_with_log(const CompareOptions& options) {
    const TrainingLog log = read_log_file(options.log);
    const Predicted predicted = predict(options.traces.front(), false);
    published::Corrector corrector(predicted.stack, !options.no_neighbours);
    const LogComparison c =
        compare_log(predicted.plan, corrector.apply(predicted.plan, predicted.simulation.estimate), log, options.log);
    if (options.json) return print(log_comparison_document(c));
    Console console(options);
    console.table(log_table(c));
    say_log(console, c);
}

DeviceProfile read_profile(const std::string& path) {
    std::string first;
    {
        FilePieces file(path, most_trace_bytes);
        first = file.next().substr(0, 16);
    }
    if (first.empty()) refuse("cannot read {}: it is empty", path);
    return is_sqlite(first) ? read_nsight_file(path) : read_chrome_trace_file(path);
}

// The rank that the profile is of, checked against the plan, and its representative in the timeline.
ProfileSubject subject_of(const CompareOptions& options, const DeviceProfile& profile, const Predicted& predicted,
                          int& representative) {
    const plan::Plan& plan = predicted.plan;
    ProfileSubject subject;
    if (profile.world_size && *profile.world_size != plan.gpus)
        refuse("{}: of a job of {}, the plan has {}: compare with a plan for {}", options.profile,
               counted(*profile.world_size, "rank"), counted(plan.gpus), counted(*profile.world_size));
    subject.rank_known = options.rank >= 0 || profile.rank;
    subject.rank =
        options.rank >= 0 ? static_cast<int>(std::min<std::int64_t>(options.rank, 1 << 30)) : profile.rank.value_or(0);
    if (subject.rank >= plan.gpus)
        refuse("{}: rank {}, the plan has ranks 0 to {}: say another one with --rank", options.profile, subject.rank,
               plan.gpus - 1);
    subject.pipeline_rank = plan::Mesh(plan).coordinate(plan::Domain::dense, plan::axis::pipeline, subject.rank);
    const program::Timeline& timeline = predicted.simulation.timeline;
    std::size_t at = timeline.ranks.size();
    for (std::size_t i = 0; i < timeline.ranks.size(); ++i)
        if (timeline.ranks[i] == subject.rank ||
            (at == timeline.ranks.size() && timeline.pipeline_rank[i] == subject.pipeline_rank))
            at = i;
    if (at == timeline.ranks.size())
        fail("no rank of pipeline rank {} among the {} that were played", subject.pipeline_rank, at);
    representative = timeline.ranks[at];
    subject.represents = timeline.represents[at];
    subject.predicted_tflops = predicted.simulation.estimate.tflops_per_gpu;
    return subject;
}

Table side_table(const ProfileComparison& c, const ProfileSubject& subject) {
    Table table({"<", "predicted", "measured", "pred/meas"});
    add_seconds(table, "step", c.predicted.step, c.measured.step);
    const double tflops = measured_tflops(c, subject);
    table.add({"TFLOPS/GPU", fmt::format("{:.4g}", subject.predicted_tflops), fmt::format("{:.4g}", tflops),
               ratio_text(subject.predicted_tflops, tflops)});
    add_seconds(table, "bare communication", c.predicted.exposed, c.measured.exposed);
    add_seconds(table, "nothing runs", c.predicted.idle, c.measured.idle);
    return table;
}

Table rows_table(const ProfileComparison& c) {
    Table table({"<kind", {"ops", 1}, {"kernels", 2}, "predicted", "measured", "pred/meas", {"of kernels", 3}});
    const auto share = [&](double seconds) {
        return c.kernel_seconds > 0.0 ? percent_text(seconds / c.kernel_seconds) : std::string("-");
    };
    for (const ProfileRow& row : c.rows)
        table.add({row.name, count_text(static_cast<double>(row.count)), count_text(row.kernels),
                   seconds_text(row.predicted + row.predicted_wait), seconds_text(row.measured),
                   ratio_text(row.predicted + row.predicted_wait, row.measured), share(row.measured)});
    table.add({"(unmatched)", "", "", "", seconds_text(c.unmatched_seconds), "", share(c.unmatched_seconds)});
    return table;
}

void say_profile(Console& console, const ProfileComparison& c, const ProfileSubject& subject,
                 const DeviceProfile& profile, const ProfiledSteps& steps) {
    console.note("\n{}{}: {}{} of {}, {}", profile.source, profile.gpu.empty() ? "" : " on " + profile.gpu,
                 counted(steps.steps.size(), "step"), steps.said ? " (as said)" : "", counted(c.devices, "device"),
                 counted(c.streams.size(), "stream"));
    console.note("Rank {}{}, pipeline rank {}, one of {}", subject.rank,
                 subject.rank_known ? "" : " (taken; see --rank)", subject.pipeline_rank,
                 counted(static_cast<std::size_t>(subject.represents), "equal rank"));
    console.note("Seconds of one step of one rank; communication with its waits for peers.");
    console.note("Names of kernels by the table {}; kinds that they do not tell apart:", subject.table);
    for (const ProfileRow& row : c.rows) {
        if (row.kinds.size() < 2 || row.count == 0) continue;
        std::string kinds = row.name + ":";
        for (const program::OpKind kind : row.kinds) kinds += fmt::format(" {}", program::to_string(kind));
        for (const std::string& line : wrapped(kinds, 76)) console.note("  {}", line);
    }
}

Table unmatched_table(const ProfileComparison& c) {
    Table table({"<unmatched kernel", {"calls", 1}, "measured", "of kernels"});
    for (std::size_t i = 0; i < std::min(shown_names, c.unmatched.size()); ++i)
        table.add({c.unmatched[i].name.substr(0, 60), count_text(c.unmatched[i].kernels),
                   seconds_text(c.unmatched[i].seconds), percent_text(c.unmatched[i].share)});
    return table;
}

void compare_with_profile(const CompareOptions& options) {
    const DeviceProfile profile = read_profile(options.profile);
    if (options.steps < 0 || options.steps > 1'000'000)
        refuse("--steps {}: must be from 1 to 1,000,000", options.steps);
    const ProfiledSteps steps = steps_of(profile, static_cast<int>(options.steps), options.profile);
    const Predicted predicted = predict(options.traces.front(), true);
    int representative = 0;
    ProfileSubject subject = subject_of(options, profile, predicted, representative);
    const KernelTable table =
        options.kernels.empty() ? kernel_table_of(predicted.plan.stack) : load_kernel_table(options.kernels);
    subject.table = table.name;
    const ProfileComparison c = compare_profile(predicted.simulation.timeline, representative, profile, steps, table);
    subject.warnings = profile_warnings(predicted.plan, profile, c, measured_tflops(c, subject));
    if (options.json) return print(profile_comparison_document(c, subject, profile, steps));
    Console console(options);
    console.table(side_table(c, subject));
    if (options.quiet) return;
    say_profile(console, c, subject, profile, steps);
    for (const std::string& warning : subject.warnings) console.warn("{}", warning);
    console.line("");
    console.table(rows_table(c));
    if (c.unmatched.empty()) return;
    console.line("");
    console.table(unmatched_table(c));
}

} // namespace

void compare_with_plan(const CompareOptions& options) {
    if (options.traces.size() != 1)
        refuse("--{}: needs one plan, {} files are named: moe-plan compare PLAN --{} FILE",
               options.log.empty() ? "profile" : "log", options.traces.size(), options.log.empty() ? "profile" : "log");
    if (!options.log.empty() && !options.profile.empty())
        refuse("--log {} --profile {}: leave one of them out", options.log, options.profile);
    if (!options.log.empty() && (!options.kernels.empty() || options.steps != 0 || options.rank != -1))
        refuse("--steps, --rank and --kernels are for --profile: leave them out with --log");
    if (!options.report.empty())
        refuse("--report is for traces and run directories: leave it out with --log or --profile");
    options.log.empty() ? compare_with_profile(options) : compare_with_log(options);
}

} // namespace moe::tools
