// The verb replay: simulates a plan event by event, and writes its timeline and report.
#include "planner/error.hpp"
#include "planner/files.hpp"
#include "simulator/simulate.hpp"
#include "tools/console.hpp"
#include "tools/documents.hpp"
#include "tools/report/html.hpp"
#include "tools/table.hpp"
#include "tools/verbs.hpp"

#include <algorithm>
#include <utility>

namespace moe::tools {

namespace {

void print_breakdown(Console& console, const Estimate& estimate) {
    const Breakdown& b = estimate.breakdown;
    Table table({"<", "time", "of step"});
    for (const auto& [name, value] : std::vector<std::pair<const char*, double>>{{"compute", b.compute},
                                                                                 {"recompute", b.recompute},
                                                                                 {"TP communication", b.tensor},
                                                                                 {"CP communication", b.context},
                                                                                 {"EP communication", b.expert},
                                                                                 {"PP communication", b.pipeline},
                                                                                 {"bubble", b.bubble},
                                                                                 {"DP communication", b.data},
                                                                                 {"optimizer", b.optimizer},
                                                                                 {"host", b.host}})
        if (value > 0.0) table.add({name, seconds_text(value), percent_text(value / estimate.step_seconds)});
    console.line(table.text(2));
}

void write_report(const std::string& path, const Plan& plan, const Simulation& simulation) {
    const auto fullest = std::max_element(simulation.memory_bytes.begin(), simulation.memory_bytes.end());
    const auto stage = fullest - simulation.memory_bytes.begin();
    write_file(path, html_report(plan, simulation.estimate, simulation.timeline,
                                 simulation.memory[static_cast<std::size_t>(stage)], static_cast<int>(stage)));
}

} // namespace

void replay_verb(const ReplayOptions& options) {
    const Plan plan = load_plan(options.plan);
    const Stack stack = load_stack(plan.stack, *plan.hardware);
    if (const PlanFault fault = check_stack(plan, stack)) refuse("{}: {}", options.plan, fault.message);
    const bool keep_rows = !options.trace.empty() || !options.report.empty();
    const Simulation simulation = simulate(plan, stack, keep_rows);
    if (!options.trace.empty()) write_trace(simulation.timeline, options.trace);
    if (!options.report.empty()) write_report(options.report, plan, simulation);

    const Estimate& e = simulation.estimate;
    if (options.json) return print(replay_document(simulation, options.trace, options.report));
    Console console(false);
    console.say("{} on {} x {}: {:.4g} TFLOPS/GPU, {} tokens/s/GPU, step {}, {:.2f} GiB of {:.2f}{}", plan.model->name,
                plan.gpus, plan.hardware->name, e.tflops_per_gpu, count_text(e.tokens_per_second_per_gpu),
                seconds_text(e.step_seconds), gib(e.memory_bytes), gib(plan.hardware->memory_bytes),
                e.fits ? "" : " (does not fit)");
    print_breakdown(console, e);
    console.say("{} ops played on {} ranks that stand for {}", count_text(static_cast<double>(simulation.ops)),
                simulation.timeline.ranks.size(), simulation.ranks);
    if (!options.trace.empty()) console.say("Timeline in {} (open it in ui.perfetto.dev)", options.trace);
    if (!options.report.empty()) console.say("Report in {}", options.report);
}

} // namespace moe::tools
