// The verb import: a launch file of another engine becomes a plan, with what was not understood and what was found.
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan_fields.hpp"
#include "tools/import/import_plan.hpp"
#include "tools/print/console.hpp"
#include "tools/print/table.hpp"
#include "tools/report/documents.hpp"
#include "tools/verbs/verbs.hpp"

namespace moe::tools {

namespace {

std::string place_of(const NotUnderstood& unknown) {
    return unknown.line == 0 ? unknown.file : fmt::format("{}:{}", unknown.file, unknown.line);
}

// Degrees, and the choices that are not at their default.
std::string written_text(const plan::Plan& plan) {
    std::string text = fmt::format("gbs {}, seq {}", plan.gbs, plan.seq);
    for (const std::string& field : plan::field_names())
        if (const std::string word = plan::field_text(plan, field); word != plan::field_text(plan::Plan{}, field))
            text += fmt::format(", {} {}", field, word);
    return text;
}

void print_import(Console& console, const ImportVerbOptions& options, const Import& import) {
    const plan::Plan& plan = import.plan;
    console.say("{} in the words of {} {}: {} on {} x {}, stack {}", options.files.front(), import.format,
                import.release, plan.model->name, plan.gpus, plan.hardware->name, plan.stack);
    console.say("{}", written_text(plan));
    console.say("{}, {} without effect on time and memory, {} not understood", counted(import.settings, "setting"),
                counted(import.harmless), counted(import.unknown.size()));
    for (const Severity severity : {Severity::error, Severity::warning, Severity::hint})
        for (const Finding& finding : import.findings)
            if (finding.severity == severity) console.say("{}: {}", to_string(severity), finding.message);
    if (import.unknown.empty()) return;
    Table table({"<not understood", "<value", "<where", "<why"});
    for (const NotUnderstood& unknown : import.unknown)
        table.add({unknown.setting.empty() ? unknown.value : unknown.setting,
                   unknown.setting.empty() ? "" : unknown.value, place_of(unknown), unknown.why});
    console.line("");
    console.table(table);
}

} // namespace

void import_verb(const ImportVerbOptions& options) {
    ImportRequest request;
    request.files = options.files;
    request.from = options.from;
    request.model = options.model;
    request.hardware = options.hardware;
    request.stack = options.stack;
    request.gpus = options.gpus;
    request.seq = options.seq;
    request.alone = options.alone;
    Import import = import_plan(request);
    add_prices(import);
    if (!options.out.empty()) {
        for (const std::string& file : options.files) refuse_overwriting("--out", options.out, file);
        write_file(options.out, plan::plan_to_json(import.plan));
    }
    if (options.json) return print(import_document(import, options.out));
    Console console(options);
    print_import(console, options, import);
    if (!options.out.empty()) console.note("The plan is in {}", options.out);
}

} // namespace moe::tools
