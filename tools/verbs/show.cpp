// The verb show: lists profiles, and tells what a model, a machine, a stack or a plan was read as.
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "planner/base/profile.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/plan_fields.hpp"
#include "tools/print/console.hpp"
#include "tools/report/show_json.hpp"
#include "tools/verbs/request.hpp"
#include "tools/verbs/verbs.hpp"

#include <algorithm>

namespace moe::tools {

namespace {

std::string yes_no(bool yes) { return yes ? "yes" : "no"; }
std::string billions(std::int64_t parameters) { return fmt::format("{:.4g} B", static_cast<double>(parameters) / 1e9); }

// Facts beside their names, under a heading.
class ShownFacts {
public:
    ShownFacts(const std::string& heading, const std::string& value) : table_({"<" + heading, "<" + value}) {}
    void add(const std::string& name, const std::string& value) {
        if (!value.empty()) table_.add({name, value});
    }
    void print(Console& console) const { console.table(table_); }

private:
    Table table_;
};

template <class T>
std::string list_text(const std::vector<T>& values) {
    std::vector<std::string> words;
    for (const T& value : values) words.emplace_back(to_string(value));
    return words.empty() ? "none" : fmt::format("{}", fmt::join(words, ", "));
}

std::string or_none(const std::vector<std::string>& words) {
    return words.empty() ? "none" : fmt::format("{}", fmt::join(words, ", "));
}

// A list is its names with --quiet, one a line: what scripts and shells take.
template <class T>
bool names_alone(Console& console, const ShowOptions& options, const std::vector<T>& list) {
    if (options.quiet)
        for (const T& item : list) console.line(item.name);
    return options.quiet;
}

std::string trains(const model::Model& model) {
    const std::vector<std::string> why = why_not(model);
    return why.empty() ? "yes" : "no: " + why.front();
}

void show_models(const ShowOptions& options) {
    std::vector<model::Model> models;
    for (const std::string& name : profile_names("models")) models.push_back(families::load_model(name));
    if (options.json) return print(show_models_document(models));
    Console console(options);
    if (names_alone(console, options, models)) return;
    Table table({"<model", "parameters", "active", "layers", {"<architecture", 2}, {"<execute trains it", 1}});
    for (const model::Model& model : models) {
        const model::ParameterCount count = model::count_parameters(model);
        table.add({model.name, billions(count.total), billions(count.active), fmt::format("{}", model.layers.size()),
                   model.architecture, yes_no(why_not(model).empty())});
    }
    console.table(table);
    console.note("\nMore of one: moe-plan show model {}", models.empty() ? "NAME" : models.front().name);
}

std::string peak_text(const machine::Hardware& h, machine::Precision precision) {
    const double peak = h.peak_flops[static_cast<std::size_t>(precision)];
    return peak > 0.0 ? fmt::format("{:.4g}", peak / 1e12) : "-";
}

void show_hardware_list(const ShowOptions& options) {
    std::vector<machine::Hardware> machines;
    for (const std::string& name : profile_names("hardware")) machines.push_back(machine::load_hardware(name));
    if (options.json) return print(show_hardware_list_document(machines));
    Console console(options);
    if (names_alone(console, options, machines)) return;
    Table table({"<hardware", "BF16 TFLOPS", {"FP8", 2}, "GiB", {"TB/s", 3}, "NVLink domain", {"<default stack", 1}});
    for (const machine::Hardware& h : machines)
        table.add({h.name, peak_text(h, machine::Precision::bf16), peak_text(h, machine::Precision::fp8_blockwise),
                   gib_text(h.memory_bytes), fmt::format("{:.3g}", h.memory_bandwidth / 1e12),
                   fmt::format("{}", h.nvlink_domain), h.default_stack});
    console.table(table);
}

// The machine for which a stack is shown: the first profile whose default it is, else the H100 of the datasheet.
machine::Hardware machine_of(const std::string& stack) {
    for (const std::string& name : profile_names("hardware")) {
        machine::Hardware hardware = machine::load_hardware(name);
        if (hardware.default_stack == stack) return hardware;
    }
    return machine::load_hardware("h100");
}

void show_stacks(const ShowOptions& options) {
    std::vector<stack::Stack> stacks;
    const machine::Hardware machine = machine::load_hardware(options.hardware.empty() ? "h100" : options.hardware);
    for (const std::string& name : stack::stack_names()) stacks.push_back(stack::load_stack(name, machine));
    if (options.json) return print(show_stacks_document(stacks));
    Console console(options);
    if (names_alone(console, options, stacks)) return;
    Table table({"<stack", "<release", "<precisions on " + machine.name, "<execute runs it"});
    for (const stack::Stack& s : stacks) table.add({s.name, s.release, list_text(s.precisions), yes_no(s.executable)});
    console.table(table);
}

void show_model(const ShowOptions& options) {
    if (options.seq < 1 || options.seq > (std::int64_t{1} << 40))
        refuse("--seq {}: must be between 1 and {}", options.seq, std::int64_t{1} << 40);
    const model::Model model = families::load_model(options.name);
    if (options.json) return print(show_model_document(model, options.seq));
    Console console(options);
    const model::ParameterCount count = model::count_parameters(model);
    ShownFacts facts(model.name, model.architecture);
    facts.add("parameters", model.mtp.empty() ? billions(count.total)
                                              : fmt::format("{}, {} without MTP", billions(count.total),
                                                            billions(count.total_no_mtp)));
    facts.add("active per token", billions(count.active) + (model.mtp.empty() ? "" : " without MTP"));
    facts.add("FLOPs per token",
              fmt::format("{:.5g} G of training at {}", model::model_flops_per_token(model, options.seq) / 1e9,
                          counted(options.seq, "token")));
    facts.add("layers", fmt::format("{}{}", model.layers.size(),
                                    model.mtp.empty() ? "" : fmt::format(" and {} MTP", model.mtp.size())));
    facts.add("width", counted(model.hidden));
    facts.add("vocabulary", fmt::format("{}, padded to {}, {} embeddings", counted(model.vocab),
                                        counted(model.padded_vocab(1)), model.tied_embeddings ? "tied" : "separate"));
    facts.add("positions", rope_text(model));
    facts.add("norms", fmt::format("{}{}, epsilon {:g}",
                                   model.layer_norm_bias ? "LayerNorm with bias"
                                   : model.layer_norm    ? "LayerNorm"
                                                         : "RMSNorm",
                                   model.post_norms ? ", also behind attention and MLP" : "", model.norm_eps));
    if (model.residual_streams > 1) facts.add("residual streams", fmt::format("{}", model.residual_streams));
    facts.add("left out", model.left_out.empty() ? "nothing" : or_none(model.left_out));
    facts.add("not read", or_none(families::unread_fields(model)));
    facts.add("execute trains it", trains(model));
    facts.print(console);
    Table layers({"<layers", "count", "<attention", "<MLP or experts"});
    for (std::size_t i = 0; i < model.kinds.size(); ++i) {
        const int kind = static_cast<int>(i);
        const std::vector<int> of = layers_of(model, kind);
        const std::string attention = attention_text(model.kinds[i].attention), mlp = mlp_text(model.kinds[i]);
        if (!of.empty()) layers.add({layers_text(of), fmt::format("{}", of.size()), attention, mlp});
        if (const int mtp = mtp_layers_of(model, kind); mtp > 0)
            layers.add({"MTP", fmt::format("{}", mtp), attention, mlp});
    }
    console.line("");
    console.table(layers);
}

std::string link_text(const machine::Link& link) {
    if (!(link.bandwidth > 0.0)) return "";
    const std::string text = fmt::format("{:.4g} GB/s each way, {}", link.bandwidth / 1e9, seconds_text(link.latency));
    return link.message > 0.0 ? fmt::format("{}, {} for each message of an exchange", text, seconds_text(link.message))
                              : text;
}

void show_hardware(const ShowOptions& options) {
    const machine::Hardware h = machine::load_hardware(options.name);
    if (options.json) return print(show_hardware_document(h));
    Console console(options);
    ShownFacts facts(h.name, h.cpu ? counted(h.cores, "core") : "GPU, " + counted(h.sm_count, "multiprocessor"));
    for (int i = 0; i < machine::precision_count; ++i)
        if (const auto p = static_cast<machine::Precision>(i); h.peak_flops[static_cast<std::size_t>(i)] > 0.0)
            facts.add(fmt::format("peak {}", machine::to_string(p)), peak_text(h, p) + " TFLOPS");
    facts.add("memory", fmt::format("{} GiB, {:.4g} GB/s", gib_text(h.memory_bytes), h.memory_bandwidth / 1e9));
    facts.add("context", gib_text(h.context_bytes) + " GiB that tensors cannot have");
    if (!h.cpu) {
        facts.add("made by", h.vendor);
        facts.add("compute capability", fmt::format("{:.1f}", h.compute_capability));
        facts.add("node", counted(h.gpus_per_node, "GPU"));
    }
    facts.add("NVLink domain",
              h.nvlink_domain == h.nvlink_domain_used
                  ? counted(h.nvlink_domain, "GPU")
                  : fmt::format("{}, jobs use {}", counted(h.nvlink_domain, "GPU"), h.nvlink_domain_used));
    facts.add("NVLink", link_text(h.nvlink));
    facts.add("PCIe in a node", link_text(h.pcie));
    facts.add("network", link_text(h.nic));
    facts.add("host link", link_text(h.host));
    facts.add("host memory",
              h.host_memory_bytes > 0.0 ? gib_text(h.host_memory_bytes) + " GiB for a GPU" : "not known");
    facts.add("default stack", h.default_stack);
    std::size_t calls = 0;
    for (const auto& [family, list] : h.measured) calls += list.size();
    facts.add("measured", calls == 0
                              ? "nothing: rates are those of a datasheet"
                              : fmt::format("{} of {}", counted(calls, "call"), counted(h.measured.size(), "op kind")));
    facts.add("measured by", h.measured_by);
    if (console.verbose()) facts.add("source", h.source);
    facts.print(console);
}

// The releases whose rules and prices a stack has.
std::string engine_text(const stack::Engine& engine) {
    std::string text = engine.name.empty() ? "none that is known" : engine.name;
    const auto add = [&text](const char* name, const std::string& version) {
        if (!version.empty()) text += fmt::format("{}{}", name, version);
    };
    add(" ", engine.release);
    add(", Transformer Engine ", engine.transformer_engine);
    add(", Megatron-Bridge ", engine.bridge);
    return text;
}

void show_stack(const ShowOptions& options) {
    const machine::Hardware machine =
        options.hardware.empty() ? machine_of(options.name) : machine::load_hardware(options.hardware);
    const stack::Stack s = stack::load_stack(options.name, machine);
    if (options.json) return print(show_stack_document(s, machine));
    Console console(options);
    std::vector<std::string> sets, missing;
    for (const unsigned set : s.recompute_sets) sets.push_back(plan::recompute::to_string(set));
    const std::pair<const char*, bool> parts[] = {{"TP", s.tensor},
                                                  {"CP", s.context},
                                                  {"ETP", s.expert_tensor},
                                                  {"interleaved stages", s.interleaved},
                                                  {"EP overlap", s.ep_overlap},
                                                  {"offload", s.offloads},
                                                  {"narrow moments", s.bf16_moments},
                                                  {"Muon", s.muon},
                                                  {"paged stash", s.paged_stash}};
    for (const auto& [name, there] : parts)
        if (!there) missing.emplace_back(name);
    ShownFacts facts(s.name, s.release);
    facts.add("on", machine.name + (s.figures_of.empty() ? "" : ", with the figures of " + s.figures_of));
    facts.add("execute runs it", yes_no(s.executable));
    facts.add("precisions", list_text(s.precisions));
    facts.add("dispatchers",
              fmt::format("{} (usual: {})", list_text(s.dispatchers), plan::to_string(s.usual_dispatcher)));
    facts.add("CUDA graphs",
              fmt::format("{} (usual: {})", list_text(s.cuda_graphs), plan::to_string(s.usual_cuda_graph)));
    facts.add("EP overlap", fmt::format("{} (usual: {})", yes_no(s.ep_overlap), s.usual_ep_overlap ? "on" : "off"));
    facts.add("split schedules", list_text(s.split_schedules));
    facts.add("gradients in", machine::to_string(s.usual_gradients));
    facts.add("recompute tried", or_none(sets));
    facts.add("recompute known", plan::recompute::to_string(s.recompute_modules));
    std::vector<std::string> choices;
    for (const auto& [field, values] : s.recipe_choices)
        choices.push_back(fmt::format("{} {}", field, fmt::join(values, " or ")));
    facts.add("recipes have also", or_none(choices));
    facts.add("engine", engine_text(s.engine));
    facts.add("does not have", missing.empty() ? "nothing of the above" : or_none(missing));
    facts.add("features", s.features.empty() ? "" : or_none(s.features));
    if (console.verbose()) facts.add("source", s.source);
    facts.print(console);
}

void show_plan(const ShowOptions& options) {
    const plan::Plan plan = plan::load_plan(options.name);
    stack_of_plan(plan, options.name); // refused here, where the file's name is known
    if (options.json) return print(show_plan_document(plan));
    Console console(options);
    const PlanFacts found = facts_of(plan);
    ShownFacts facts(plan.model->name, fmt::format("on {} x {}", plan.gpus, plan.hardware->name));
    facts.add("stack", plan.stack + (found.fault.empty() ? "" : ", which refuses it: " + found.fault));
    facts.add("batch", fmt::format("{} of {}, {} per step", counted(plan.gbs, "sequence"), counted(plan.seq, "token"),
                                   counted(plan.gbs * plan.seq, "token")));
    facts.add("dense ranks", fmt::format("TP {} x CP {} x DP {} x PP {}", plan.tp, plan.cp, plan.dp, plan.pp));
    facts.add("expert ranks", fmt::format("ETP {} x EP {} x EDP {} x PP {}", plan.etp, plan.ep, plan.edp, plan.pp));
    facts.add("micro-batches",
              fmt::format("{} of {} for each rank", counted(plan.micro_batches()), counted(plan.mbs, "sequence")));
    facts.add("execute runs it", found.why_not.empty() ? "yes" : "no: " + found.why_not.front());
    facts.print(console);
    // Every field is in the plan; those that were chosen are what a reader looks for.
    Table fields({"<field", "<value"});
    for (const std::string& field : console.verbose() ? plan::field_names() : found.changed)
        fields.add({field, plan::field_text(plan, field)});
    console.line("");
    console.table(fields);
    if (!console.verbose()) console.note("\nThe other fields have their defaults; --verbose shows them");
}

// A topic, what shows it, and what its second word is; nothing: it takes none.
struct Topic {
    const char* name;
    void (*list)(const ShowOptions&);
    void (*one)(const ShowOptions&);
};
constexpr Topic topics[] = {{"models", show_models, nullptr}, {"hardware", show_hardware_list, show_hardware},
                            {"stacks", show_stacks, nullptr}, {"model", nullptr, show_model},
                            {"stack", nullptr, show_stack},   {"plan", nullptr, show_plan}};

} // namespace

void show_verb(const ShowOptions& options) {
    std::vector<std::string> known;
    for (const Topic& topic : topics) known.emplace_back(topic.name);
    const auto topic =
        std::find_if(std::begin(topics), std::end(topics), [&](const Topic& t) { return options.topic == t.name; });
    if (topic == std::end(topics))
        refuse("show {}: must be one of {}{}", shown(options.topic), fmt::join(known, ", "),
               did_you_mean(options.topic, known));
    if (options.name.empty() && topic->list == nullptr)
        refuse("show {}: say which: a name, or a file{}", options.topic,
               options.topic == "plan" ? "" : fmt::format("; moe-plan show {}s lists the names", options.topic));
    if (!options.name.empty() && topic->one == nullptr)
        refuse("show {} {}: lists all names; for one say show {} {}", options.topic, shown(options.name),
               options.topic.substr(0, options.topic.size() - 1), shown(options.name));
    options.name.empty() ? topic->list(options) : topic->one(options);
}

} // namespace moe::tools
