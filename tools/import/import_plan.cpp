// Files to settings, settings to a model and to fields; then the plan is written again and held against the files.
#include "tools/import/import_plan.hpp"

#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "planner/base/profile.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan_fields.hpp"
#include "planner/plan/schedule.hpp"
#include "planner/search/whatif.hpp"
#include "simulator/pricing/skewed_estimator.hpp"
#include "tools/engines/engine_release.hpp"
#include "tools/import/bridge_settings.hpp"
#include "tools/import/model_of_facts.hpp"
#include "tools/import/named_model.hpp"
#include "tools/import/readers/bash_test.hpp"
#include "tools/import/readers/readers.hpp"
#include "tools/import/reading.hpp"
#include "tools/import/renamed_settings.hpp"
#include "tools/import/stage_settings.hpp"

#include <algorithm>
#include <cctype>
#include <set>

namespace moe::tools {
namespace {

std::string text_of(const std::vector<std::string>& values) {
    if (values.empty()) return "on";
    return shown(as_written(fmt::format("{}", fmt::join(values, " "))));
}

int gpus_of(const ImportRequest& request, const SettingsFile& file) {
    if (request.gpus) {
        if (*request.gpus < 1 || *request.gpus > 10'000'000)
            refuse("--gpus {}: must be between 1 and 10000000", *request.gpus);
        return static_cast<int>(*request.gpus);
    }
    const std::int64_t all = std::int64_t{file.nodes} * file.processes;
    if (all > 0 && all <= 10'000'000) return static_cast<int>(all);
    if (file.tasks > 0) return file.tasks;
    refuse("{}: does not say how many processes it starts: give --gpus", request.files.front());
}

// The engine's own name of the model, where the file has it.
void name_recipe(SettingsFile& file, const ReaderTable& reader) {
    std::vector<std::string> words;
    for (const std::string& name : reader.recipe)
        if (const Setting* setting = file.find(name); setting != nullptr && setting->values.size() == 1)
            words.push_back(setting->values[0]);
    if (!words.empty() && words.size() == reader.recipe.size()) file.recipe = fmt::format("{}", fmt::join(words, "/"));
}

// Whether a value is an argument of the script: ${7}.
bool is_argument(const Setting& setting) {
    const std::string text = setting.text();
    const std::size_t brace = setting.unknown() ? text.find("${") : std::string::npos;
    return brace != std::string::npos && brace + 2 < text.size() &&
           std::isdigit(static_cast<unsigned char>(text[brace + 2])) != 0;
}

// Throws where only who starts the script knows the value of one of the settings, or where none of them is there and
// other values are the script's arguments.
void refuse_unclear(const SettingsFile& file, const std::vector<std::string>& names) {
    const auto argument = std::find_if(file.settings.begin(), file.settings.end(), is_argument);
    const bool asks = argument != file.settings.end();
    const Setting* unclear = asks ? &*argument : nullptr;
    for (const std::string& name : names) {
        const Setting* setting = file.find(name);
        if (setting == nullptr) continue;
        unclear = setting->unknown() ? setting : nullptr;
        if (unclear != nullptr) break;
    }
    if (unclear == nullptr) return;
    refuse("{}: {} {} is not in the file: give {}", unclear->place(), unclear->name, shown(unclear->text()),
           asks ? "a file with the command that starts the script with its arguments"
                : "the script that sets it before it, or what is missing by --model and --seq");
}

// Throws where the file has a value for a field, and that is no number: to say that it has none would be wrong.
void refuse_no_number(const SettingsFile& file, const Reading& reading, const std::string& field) {
    const Setting* setting = file.find(reading.said_by(field));
    if (setting == nullptr || setting->unknown()) return;
    refuse("{}: {} {}: must be a whole number of 1 or more, within 64 bits", setting->place(), setting->name,
           shown(setting->text()));
}

void set_model(const ImportRequest& request, const Reading& reading, const ReaderTable& reader, Import& import,
               const EngineTable& table, SettingsFile& file) {
    Facts facts = reading.facts();
    complete_facts(facts, reading.unclear("model.moe_layers"));
    const std::string& place = request.files.front();
    std::string name = request.model;
    if (name.empty() && !file.recipe.empty()) name = model_of_recipe(table, file.recipe);
    std::string published;
    if (name.empty() && !reading.says_sizes()) {
        NamedModel named = named_model(file, reader, request.alone);
        name = std::move(named.model);
        published = std::move(named.published);
        if (!name.empty()) import.findings.push_back({Severity::hint, "model", std::move(named.why)});
    }
    if (name.empty() && file.recipe.empty()) file.recipe = published;
    if (name.empty() && !file.recipe.empty() && !reading.says_sizes())
        refuse("{}: no profile is known of the model {}: give its config.json by --model", place, shown(file.recipe));
    if (name.empty() && facts.count("model.layers") == 0)
        refuse_unclear(file, {"--num-layers", "--hidden-size", "--num-attention-heads"});
    std::string why;
    const Facts likely = likely_vocabulary(file, reader, why);
    model::Model model = name.empty()
                             ? model_of_facts(facts, likely, named_model(file, reader, true).model, reader, place)
                             : families::load_model(name);
    if (!published.empty() && !name.empty()) model = with_mtp_of(facts, model, place);
    if (name.empty() && facts.count("model.vocab") == 0 && !likely.empty())
        import.findings.push_back({model.name == "imported" ? Severity::warning : Severity::hint, "model.vocab", why});
    if (name.empty() && facts.count("model.vocab") == 0 && likely.empty())
        import.findings.push_back({Severity::warning, "model.vocab",
                                   fmt::format("no size of the vocabulary is set: {} is taken, that of {}, which has "
                                               "all other sizes: --model gives another",
                                               model.vocab, model.name)});
    import.plan.model = std::make_shared<const model::Model>(model);
    if (!name.empty() && !reading.says_sizes()) return; // The file leaves the model to others.
    for (const FactDifference& differ : differing_facts(facts, model, reader))
        import.findings.push_back({Severity::warning, differ.fact,
                                   fmt::format("{}: {} in the file, {} in the model {}", differ.fact,
                                               shown(differ.file), shown(differ.model), model.name)});
}

// Finds what the file says and the plan would not, and the other way round.
class Review {
public:
    Review(const Reading& reading, const ReaderTable& reader, const SettingsFile& file, Import& import,
           std::vector<std::string> used)
        : reading_(reading),
          reader_(reader),
          file_(file),
          import_(import),
          used_(used.begin(), used.end()),
          written_(reading.written(import.plan)) {}

    void run() {
        for (const Setting& setting : file_.settings) review(setting);
        for (const auto& [name, said] : written_) missing(name, said);
        for (const Unread& unread : file_.unread)
            import_.unknown.push_back({"", unread.text, unread.file, unread.line, unread.why});
        for (const auto& [field, release] : reading_.dialects())
            import_.findings.push_back(
                {Severity::hint, field,
                 fmt::format("{}: said in words of release {}; {} has others", field, release, reading_.release())});
    }

private:
    void find(Severity severity, const std::string& field, const std::string& message) {
        import_.findings.push_back({severity, field, message});
    }
    void unknown(const Setting& setting, const std::string& why) {
        import_.unknown.push_back({setting.name, shown(setting.text()), setting.file, setting.line, why});
    }

    void review(const Setting& setting) {
        ++import_.settings;
        if (used_.count(setting.name) > 0) return;
        if (reader_.is_harmless(setting.name)) {
            ++import_.harmless;
            return;
        }
        const std::vector<std::string>* given = reading_.given(setting.name);
        if (given == nullptr) return; // The setting is asked for only beside another.
        if (std::any_of(given->begin(), given->end(), has_unknown))
            return unknown(setting, "its value is not in the file");
        if (reading_.without_effect(setting.name, import_.plan)) return;
        const std::vector<std::string>& values = *given;
        const auto written = written_.find(setting.name);
        const auto usual = reading_.default_of(setting.name, import_.plan);
        if (written != written_.end()) {
            if (!same_values(values, written->second.values, reader_)) disagree(setting, written->second);
            return;
        }
        if (usual && same_values(values, *usual, reader_)) return;
        if (same_values(values, {"null"}, reader_) || same_values(values, {"false"}, reader_)) return;
        if (setting.dumped) { // Nobody has set it for this run, as far as the list tells.
            ++import_.harmless;
            return;
        }
        if (!reading_.known(setting.name))
            return unknown(setting, "no field of a plan and no fact of a model is said by it");
        find(Severity::warning, setting.name,
             fmt::format("{}: {} {}: the plan that was read has no use for it", setting.place(), setting.name,
                         text_of(setting.values)));
    }

    void disagree(const Setting& setting, const Reading::Said& said) {
        if (said.field.rfind("model.", 0) == 0) return; // The field is told as a fact, where it matters.
        find(reader_.is_weak(setting.name) ? Severity::hint : Severity::warning,
             said.field.empty() ? setting.name : said.field,
             fmt::format("{}: {} is {}, the plan that was read says {}", setting.place(), setting.name,
                         text_of(setting.values), text_of(said.values)));
    }

    void missing(const std::string& name, const Reading::Said& said) {
        if (!used_.empty() && (said.field == "layout" || said.field == "vpp")) return; // Numbers of layers say it.
        if (name[0] == '$' || reading_.given(name) != nullptr || used_.count(name) > 0) return;
        if (reading_.without_effect(name, import_.plan) || said.field.rfind("model.", 0) == 0) return;
        const auto usual = reading_.default_of(name, import_.plan);
        if (usual && same_values(said.values, *usual, reader_)) return;
        if (!usual && (same_values(said.values, {"null"}, reader_) || same_values(said.values, {"false"}, reader_)))
            return;
        find(said.field.empty() || reader_.is_weak(name) ? Severity::hint : Severity::warning,
             said.field.empty() ? name : said.field,
             fmt::format("{} {} is not set, and prices of the stack assume it", name, text_of(said.values)));
    }

    const Reading& reading_;
    const ReaderTable& reader_;
    const SettingsFile& file_;
    Import& import_;
    std::set<std::string> used_;
    std::map<std::string, Reading::Said> written_;
};

// Engines that are told every stage are told even ones too, which a plan has without a layout.
void forget_even_layout(plan::Plan& plan) {
    plan::Plan even = plan;
    even.layout.clear();
    const int stages = plan.pp * plan.vpp;
    if (plan.layout.empty() || static_cast<int>(plan.model->layers.size()) % stages != 0) return;
    even.layout = plan::layout_to_string(plan::stages(even));
    if (plan.layout == even.layout) plan.layout.clear();
}

// Fields that every run of the program has. What a plan cannot have beside the others is told.
void set_program_fields(Import& import, const Program& program) {
    for (const ProgramField& one : program.fields) {
        if (!one.when.holds(import.plan)) continue;
        plan::Plan tried = import.plan;
        plan::set_field(tried, one.field, one.value);
        const plan::PlanFault fault = plan::check_plan(tried);
        if (!fault)
            import.plan = std::move(tried);
        else if (!plan::check_plan(import.plan))
            import.findings.push_back({Severity::warning, one.field,
                                       fmt::format("{} {}, which the program has, is none of a plan here: {}",
                                                   one.field, one.value, fault.message)});
    }
}

// Choices that other engines' runs have, a plan has not beside others, and time and memory do not tell apart.
void leave_out_what_plans_lack(Import& import) {
    for (const char* field : {"bias_update", "load_balancing"}) {
        const plan::PlanFault fault = plan::check_plan(import.plan);
        if (!fault || fault.counter != field) continue;
        plan::set_field(import.plan, field, std::string(field) == "bias_update" ? "none" : "aux_loss");
        import.findings.push_back({Severity::warning, field, "left out, without effect on time: " + fault.message});
    }
}

void check(const ImportRequest& request, Import& import) {
    leave_out_what_plans_lack(import);
    if (const plan::PlanFault fault = plan::check_plan(import.plan))
        refuse("{}: {}{}", fmt::join(request.files, ", "), fault.message,
               request.gpus
                   ? ""
                   : fmt::format("; the file starts {}: give --gpus for others", counted(import.plan.gpus, "GPU")));
    for (const stack::Rule* rule : stack::broken_rules(import.plan, import.stack))
        import.findings.push_back({Severity::error, rule->name.substr(0, rule->name.find(':')),
                                   fmt::format("{} ({})", rule->message, rule->source)});
    if (const plan::PlanFault fault = stack::check_offers(import.plan, import.stack))
        import.findings.push_back({Severity::warning, fault.counter, fault.message});
}

} // namespace

const char* to_string(Severity severity) {
    switch (severity) {
    case Severity::error:
        return "error";
    case Severity::warning:
        return "warning";
    case Severity::hint:
        return "hint";
    }
    return "hint";
}

Import import_plan(const ImportRequest& request) {
    if (request.files.empty()) refuse("import: no file is given");
    if (!request.from.empty()) load_reader_table(request.from); // load_reader_table() says which there are.
    SettingsFile file = read_settings(request.files, request.from, request.alone);
    ReaderTable reader = load_reader_table(file.format);
    const EngineTable table = load_engine_table(reader.engine);
    Import import;
    import.format = file.format;
    rename_settings(file, reader, import.findings);
    plan::Plan& plan = import.plan;
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware(request.hardware));
    import.stack = stack::load_stack(request.stack, *plan.hardware);
    plan.stack = import.stack.name;
    import.release = table.release; // release of the words; else of the engine that the stack stands for
    if (import.release.empty())
        import.release = engine_stack(plan, reader.engine, reader.part == "bridge").engine.release;
    plan.gpus = gpus_of(request, file);
    if (reader.part == "bridge") expand_bridge(file, table);
    name_recipe(file, reader);
    Reading reading(table, reader, file, import.release);
    set_model(request, reading, reader, import, table, file);
    plan.layout.clear();
    reading.set_fields(plan);
    if (const auto program = reader.programs.find(file.program); program != reader.programs.end())
        set_program_fields(import, program->second);
    if (plan.gbs == 0) refuse_no_number(file, reading, "gbs");
    if (plan.seq == 0 && !request.seq) refuse_no_number(file, reading, "seq");
    if (plan.gbs == 0) {
        plan.gbs = plan.mbs * plan.dp;
        import.findings.push_back(
            {Severity::hint, "gbs",
             fmt::format("no global batch is set: {}, one micro-batch of each rank", counted(plan.gbs, "sequence"))});
    }
    if (request.seq && (*request.seq < 1 || *request.seq > std::int64_t{1} << 40))
        refuse("--seq {}: must be between 1 and 2^40", *request.seq);
    if (request.seq) plan.seq = *request.seq;
    if (plan.seq == 0) refuse_unclear(file, {"--seq-length"});
    if (plan.seq == 0) refuse("{}: says no length of sequences: give --seq", fmt::join(request.files, ", "));
    const std::vector<std::string> used = set_stages(plan, reading, reader);
    if (!used.empty()) reading.set_fields(plan, {"layout", "vpp"});
    if (reader.part == "config") forget_even_layout(plan);
    check(request, import);
    Review(reading, reader, file, import, used).run();
    return import;
}

void add_prices(Import& import) {
    pricing::SkewedEstimator estimator(import.plan.hardware, import.stack);
    const search::Estimate estimate = estimator.play(import.plan);
    const double limit = import.plan.hardware->memory_bytes, gib = 0x1p30;
    if (!estimate.fits)
        import.findings.push_back({Severity::error, "memory",
                                   fmt::format("does not fit: {:.1f} GiB of {:.1f} GiB are predicted",
                                               estimate.memory_bytes / gib, limit / gib)});
    else if (!import.stack.executable && estimate.memory_bytes > 0.9 * limit)
        import.findings.push_back({Severity::warning, "memory",
                                   fmt::format("may not fit: {:.1f} GiB of {:.1f} GiB are predicted, and memory of "
                                               "published stacks is met within about a tenth",
                                               estimate.memory_bytes / gib, limit / gib)});
    int told = 0;
    for (const search::WhatIf& change : search::what_ifs(import.plan, import.stack, estimator)) {
        if (!change.impossible.empty() || !change.estimate.fits || change.gain < 0.01 || told == 3) continue;
        std::string along;
        for (const plan::FieldChange& other : change.along)
            along += fmt::format(", with {} {} -> {}", other.field, other.from, other.to);
        import.findings.push_back({Severity::hint, change.change.field,
                                   fmt::format("{} {} -> {} is predicted {:.1f} % faster, {:.1f} GiB{}",
                                               change.change.field, change.change.from, change.change.to,
                                               change.gain * 100.0, change.estimate.memory_bytes / gib, along)});
        ++told;
    }
}

} // namespace moe::tools
