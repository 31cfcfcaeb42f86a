// The verb replay: simulates a plan event by event, and writes its timeline and report.
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/document_lengths.hpp"
#include "planner/model/model.hpp"
#include "simulator/cost/network.hpp"
#include "simulator/pricing/skewed_estimator.hpp"
#include "simulator/published/corrected_estimator.hpp"
#include "simulator/replay/document_steps.hpp"
#include "tools/print/console.hpp"
#include "tools/print/table.hpp"
#include "tools/report/correction.hpp"
#include "tools/report/documents.hpp"
#include "tools/report/explanation.hpp"
#include "tools/report/html.hpp"
#include "tools/report/ranking_text.hpp"
#include "tools/report/report_data.hpp"
#include "tools/report/trace_file.hpp"
#include "tools/verbs/request.hpp"
#include "tools/verbs/verbs.hpp"

#include <algorithm>
#include <optional>
#include <utility>

namespace moe::tools {

namespace {

void print_breakdown(Console& console, const search::Estimate& estimate) {
    Table table({"<", "time", "of step"});
    for (const auto& [name, value] : parts_of(estimate.breakdown))
        if (value != 0.0) table.add({name, seconds_text(value), percent_text(value / estimate.step_seconds)});
    console.table(table, 2);
}

// The plan with the fields of --set, and the expert data parallelism that follows from them.
plan::Plan changed(plan::Plan plan, const ReplayOptions& options) {
    if (options.set.empty()) return plan;
    for (const std::string& change : options.set) {
        const std::size_t at = change.find('=');
        if (at == std::string::npos || at == 0) refuse("--set {}: must be FIELD=VALUE", change);
        const std::string field = change.substr(0, at);
        for (const std::string& earlier : options.set)
            if (&earlier < &change && earlier.starts_with(field + "="))
                refuse("--set {} --set {}: a field has one value: leave one of them out", earlier, change);
        plan::set_field(plan, field, change.substr(at + 1));
    }
    if (const int model_ranks = plan.etp * plan.ep * plan.pp; model_ranks > 0 && plan.gpus % model_ranks == 0)
        plan.edp = plan.gpus / model_ranks;
    if (const plan::PlanFault fault = plan::check_plan(plan)) refuse("{}: {}", options.plan, fault.message);
    return plan;
}

// A report is a page, or where the file's name ends in .json the document that the page shows.
void write_report(const Explanation& explanation, const ReplayOptions& options) {
    const bool data = options.report.ends_with(".json");
    write_file(options.report,
               data ? report_document(explanation, options.command) : html_report(explanation, options.command));
}

} // namespace

void replay_verb(const ReplayOptions& options) {
    check_spare_experts(options.spare_experts);
    refuse_overwriting("--trace", options.trace, options.plan);
    refuse_overwriting("--report", options.report, options.plan);
    refuse_overwriting("--report", options.report, options.trace);
    plan::Plan plan = changed(plan::load_plan(options.plan), options);
    if (!options.lengths.empty()) {
        if (!plan.masks_documents())
            refuse("{}: documents = ignore, and --lengths {} is of documents that are masked: search again with it",
                   options.plan, options.lengths);
        plan.lengths = model::to_string(model::read_document_lengths(options.lengths));
    }
    const stack::Stack stack = stack_of_plan(plan, options.plan);
    if (const plan::PlanFault fault = stack::check_stack(plan, stack)) refuse("{}: {}", options.plan, fault.message);
    published::Corrector corrector(stack, !options.no_neighbours);
    replay::Simulation simulation = replay::simulate(plan, stack, !options.trace.empty() || !options.report.empty());
    if (!options.trace.empty())
        write_timeline(simulation.timeline, {simulation.timed, simulation.planned, simulation.memory}, options.trace);
    pricing::Skew skew;
    if (!options.report.empty()) {
        Explanation explanation =
            explain_plan(plan, stack, std::move(simulation), corrector, static_cast<int>(options.spare_experts));
        write_report(explanation, options);
        simulation = std::move(explanation.simulation);
        skew = explanation.skew;
    } else {
        skew =
            corrector.apply(plan, pricing::skew_of(plan, stack, simulation, static_cast<int>(options.spare_experts)));
        simulation.estimate = corrector.apply(plan, simulation.estimate);
    }
    const published::Correction* const correction = corrector.of(plan);
    const search::Estimate& e = simulation.estimate;
    const std::optional<replay::DocumentSteps> documents =
        replay::document_steps(plan, simulation.core_seconds, e.step_seconds);
    const published::IntervalResult interval = published::interval_of(plan, e, stack.executable, correction);
    if (options.json)
        return print(replay_document(simulation, skew, documents, interval, correction, options.trace, options.report));
    Console console(options);
    if (const std::string line = cost::unpriced(plan); !line.empty()) console.warn("warning: {}", line);
    console.say("{} on {} x {}: {:.4g} TFLOPS/GPU, {} tokens/s/GPU, step {}, {:.2f} GiB of {:.2f}{}", plan.model->name,
                plan.gpus, plan.hardware->name, e.tflops_per_gpu, count_text(e.tokens_per_second_per_gpu),
                seconds_text(e.step_seconds), gib(e.memory_bytes), gib(plan.hardware->memory_bytes),
                e.fits ? "" : " (does not fit)");
    if (e.host_bytes > 0.0) console.say("{:.2f} GiB of the host's memory for what a GPU offloads", gib(e.host_bytes));
    console.say("{}", interval_text(interval));
    if (documents) console.say("{}", document_steps_text(*documents));
    if (correction != nullptr)
        console.say("{}", options.quiet ? correction_line(correction) : correction_text(correction));
    if (options.quiet) return;
    print_breakdown(console, e);
    if (routing::skewed(plan)) console.say("\n{}\n", skew_text(plan, skew));
    console.note("{} played on {} in place of {}", counted(simulation.ops, "op"),
                 counted(simulation.timeline.ranks.size(), "rank"), counted(simulation.ranks));
    if (!options.trace.empty()) console.note("Timeline in {} (open it in ui.perfetto.dev)", options.trace);
    if (!options.report.empty()) console.note("Report in {}", options.report);
}

} // namespace moe::tools
