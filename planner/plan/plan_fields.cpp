// The fields of a plan by name: setting one from text, and reading it as the text that sets it.
#include "planner/plan/plan_fields.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/document_lengths.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/bf16_layers.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/plan_limits.hpp"

#include <charconv>
#include <cmath>
#include <optional>

namespace moe::plan {
namespace {

std::int64_t whole(const std::string& field, const std::string& text, std::int64_t high) {
    std::int64_t number = 0;
    const char* end = text.data() + text.size();
    const auto [last, error] = std::from_chars(text.data(), end, number);
    if (error != std::errc{} || last != end || number < 1 || number > high)
        refuse("{}={}: must be a whole number from 1 to {}", field, shown(text), high);
    return number;
}

int degree(const std::string& field, const std::string& text) {
    return static_cast<int>(whole(field, text, limits::max_gpus));
}

bool on_or_off(const std::string& field, const std::string& text) {
    if (text == "on" || text == "true") return true;
    if (text == "off" || text == "false" || text == "none") return false;
    refuse("{}={}: must be on or off", field, shown(text));
}

std::optional<machine::Precision> precision_or_default(const std::string& text) {
    if (text == "default") return std::nullopt;
    return machine::precision_from_string(text);
}

// 0 or more; "none" is 0.
double amount(const std::string& field, const std::string& text, const char* what) {
    if (text == "none") return 0.0;
    double number = 0.0;
    const char* end = text.data() + text.size();
    const auto [last, error] = std::from_chars(text.data(), end, number);
    if (error != std::errc{} || last != end || !std::isfinite(number) || number < 0.0)
        refuse("{}={}: must be {}", field, shown(text), what);
    return number;
}

double capacity_factor(const std::string& text) {
    return amount("capacity", text, "a factor over the balanced load, or none for the worst case");
}

bool forced_balance(const std::string& text) {
    if (text != "natural" && text != "forced") refuse("balance={}: must be natural or forced", shown(text));
    return text == "forced";
}

std::string word(bool on) { return on ? "on" : "off"; }
std::string word(double amount) { return amount == 0.0 ? std::string("none") : fmt::format("{}", amount); }
std::string word(const std::optional<machine::Precision>& precision) {
    return precision ? machine::to_string(*precision) : "default";
}

struct Field {
    const char* name;
    void (*set)(Plan&, const std::string&);
    std::string (*get)(const Plan&);
};

// The fields of --fix: those of the contract in its order, finer choices beside what they refine.
const std::vector<Field>& fields() {
    static const std::vector<Field> list{
        {"tp", [](Plan& plan, const std::string& v) { plan.tp = degree("tp", v); },
         [](const Plan& plan) -> std::string { return fmt::format("{}", plan.tp); }},
        {"cp", [](Plan& plan, const std::string& v) { plan.cp = degree("cp", v); },
         [](const Plan& plan) -> std::string { return fmt::format("{}", plan.cp); }},
        {"pp", [](Plan& plan, const std::string& v) { plan.pp = degree("pp", v); },
         [](const Plan& plan) -> std::string { return fmt::format("{}", plan.pp); }},
        {"vpp", [](Plan& plan, const std::string& v) { plan.vpp = degree("vpp", v); },
         [](const Plan& plan) -> std::string { return fmt::format("{}", plan.vpp); }},
        {"dp", [](Plan& plan, const std::string& v) { plan.dp = degree("dp", v); },
         [](const Plan& plan) -> std::string { return fmt::format("{}", plan.dp); }},
        {"ep", [](Plan& plan, const std::string& v) { plan.ep = degree("ep", v); },
         [](const Plan& plan) -> std::string { return fmt::format("{}", plan.ep); }},
        {"etp", [](Plan& plan, const std::string& v) { plan.etp = degree("etp", v); },
         [](const Plan& plan) -> std::string { return fmt::format("{}", plan.etp); }},
        {"mbs", [](Plan& plan, const std::string& v) { plan.mbs = whole("mbs", v, limits::max_gbs); },
         [](const Plan& plan) -> std::string { return fmt::format("{}", plan.mbs); }},
        {"layout", [](Plan& plan, const std::string& v) { plan.layout = v == "none" ? std::string{} : v; },
         [](const Plan& plan) -> std::string { return plan.layout.empty() ? std::string("none") : plan.layout; }},
        {"schedule", [](Plan& plan, const std::string& v) { plan.schedule = schedule_from_string(v); },
         [](const Plan& plan) -> std::string { return to_string(plan.schedule); }},
        {"rank_order", [](Plan& plan, const std::string& v) { plan.rank_order = v; },
         [](const Plan& plan) -> std::string { return plan.rank_order; }},
        {"precision", [](Plan& plan, const std::string& v) { plan.precision = machine::precision_from_string(v); },
         [](const Plan& plan) -> std::string { return machine::to_string(plan.precision); }},
        {"attention_precision",
         [](Plan& plan, const std::string& v) { plan.attention_precision = precision_or_default(v); },
         [](const Plan& plan) -> std::string { return word(plan.attention_precision); }},
        {"expert_precision", [](Plan& plan, const std::string& v) { plan.expert_precision = precision_or_default(v); },
         [](const Plan& plan) -> std::string { return word(plan.expert_precision); }},
        {"head_precision", [](Plan& plan, const std::string& v) { plan.head_precision = precision_or_default(v); },
         [](const Plan& plan) -> std::string { return word(plan.head_precision); }},
        {"bf16_layers", bf16_layers_from_string, bf16_layers_to_string},
        {"fp8_scaling", [](Plan& plan, const std::string& v) { plan.fp8_scaling = fp8_scaling_from_string(v); },
         [](const Plan& plan) -> std::string { return to_string(plan.fp8_scaling); }},
        {"fp8_wgrad", [](Plan& plan, const std::string& v) { plan.fp8_wgrad = on_or_off("fp8_wgrad", v); },
         [](const Plan& plan) -> std::string { return word(plan.fp8_wgrad); }},
        {"gradients", [](Plan& plan, const std::string& v) { plan.gradients = machine::precision_from_string(v); },
         [](const Plan& plan) -> std::string { return machine::to_string(plan.gradients); }},
        {"recompute", [](Plan& plan, const std::string& v) { plan.recompute = recompute::from_string(v); },
         [](const Plan& plan) -> std::string { return recompute::to_string(plan.recompute); }},
        {"offload", [](Plan& plan, const std::string& v) { plan.offload = offload::from_string(v); },
         [](const Plan& plan) -> std::string { return offload::to_string(plan.offload); }},
        {"optimizer", [](Plan& plan, const std::string& v) { plan.optimizer = optimizer_from_string(v); },
         [](const Plan& plan) -> std::string { return to_string(plan.optimizer); }},
        {"lora", [](Plan& plan, const std::string& v) { plan.lora = lora_from_string(v); },
         [](const Plan& plan) -> std::string { return to_string(plan.lora); }},
        {"fsdp", [](Plan& plan, const std::string& v) { plan.fsdp = on_or_off("fsdp", v); },
         [](const Plan& plan) -> std::string { return word(plan.fsdp); }},
        {"fsdp_replicas", [](Plan& plan, const std::string& v) { plan.fsdp_replicas = degree("fsdp_replicas", v); },
         [](const Plan& plan) -> std::string { return fmt::format("{}", plan.fsdp_replicas); }},
        {"dispatcher", [](Plan& plan, const std::string& v) { plan.dispatcher = dispatcher_from_string(v); },
         [](const Plan& plan) -> std::string { return to_string(plan.dispatcher); }},
        {"cp_comm", [](Plan& plan, const std::string& v) { plan.cp_comm = context_comm_from_string(v); },
         [](const Plan& plan) -> std::string { return to_string(plan.cp_comm); }},
        {"capacity", [](Plan& plan, const std::string& v) { plan.capacity = capacity_factor(v); },
         [](const Plan& plan) -> std::string { return word(plan.capacity); }},
        {"paged_stash", [](Plan& plan, const std::string& v) { plan.paged_stash = on_or_off("paged_stash", v); },
         [](const Plan& plan) -> std::string { return word(plan.paged_stash); }},
        {"memory_efficient_permutation",
         [](Plan& plan, const std::string& v) {
             plan.memory_efficient_permutation = on_or_off("memory_efficient_permutation", v);
         },
         [](const Plan& plan) -> std::string { return word(plan.memory_efficient_permutation); }},
        {"tp_overlap", [](Plan& plan, const std::string& v) { plan.tp_overlap = on_or_off("tp_overlap", v); },
         [](const Plan& plan) -> std::string { return word(plan.tp_overlap); }},
        {"ep_overlap", [](Plan& plan, const std::string& v) { plan.ep_overlap = on_or_off("ep_overlap", v); },
         [](const Plan& plan) -> std::string { return word(plan.ep_overlap); }},
        {"delay_wgrad", [](Plan& plan, const std::string& v) { plan.delay_wgrad = on_or_off("delay_wgrad", v); },
         [](const Plan& plan) -> std::string { return word(plan.delay_wgrad); }},
        {"cuda_graph", [](Plan& plan, const std::string& v) { plan.cuda_graph = cuda_graph_from_string(v); },
         [](const Plan& plan) -> std::string { return to_string(plan.cuda_graph); }},
        {"deterministic", [](Plan& plan, const std::string& v) { plan.deterministic = on_or_off("deterministic", v); },
         [](const Plan& plan) -> std::string { return word(plan.deterministic); }},
        {"documents", [](Plan& plan, const std::string& v) { plan.documents = documents_from_string(v); },
         [](const Plan& plan) -> std::string { return to_string(plan.documents); }},
        {"lengths",
         [](Plan& plan, const std::string& v) {
             const model::DocumentLengths lengths = model::document_lengths_from_string(v);
             plan.lengths = lengths.bins.empty() ? std::string{} : model::to_string(lengths);
         },
         [](const Plan& plan) -> std::string { return plan.lengths.empty() ? std::string("none") : plan.lengths; }},
        {"routing", [](Plan& plan, const std::string& v) { plan.routing = v; },
         [](const Plan& plan) -> std::string { return plan.routing; }},
        {"balance", [](Plan& plan, const std::string& v) { plan.router.forced = forced_balance(v); },
         [](const Plan& plan) -> std::string { return plan.router.forced ? "forced" : "natural"; }},
        {"load_balancing",
         [](Plan& plan, const std::string& v) { plan.router.load_balancing = load_balancing_from_string(v); },
         [](const Plan& plan) -> std::string { return to_string(plan.router.load_balancing); }},
        {"aux_loss",
         [](Plan& plan, const std::string& v) {
             plan.router.aux_loss = amount("aux_loss", v, "a coefficient or none");
         },
         [](const Plan& plan) -> std::string { return word(plan.router.aux_loss); }},
        {"z_loss",
         [](Plan& plan, const std::string& v) { plan.router.z_loss = amount("z_loss", v, "a coefficient or none"); },
         [](const Plan& plan) -> std::string { return word(plan.router.z_loss); }},
        {"input_jitter",
         [](Plan& plan, const std::string& v) {
             plan.router.input_jitter = amount("input_jitter", v, "a share below 1 or none");
         },
         [](const Plan& plan) -> std::string { return word(plan.router.input_jitter); }},
        {"bias_update",
         [](Plan& plan, const std::string& v) {
             plan.router.bias_update = amount("bias_update", v, "a step of the selection bias or none");
         },
         [](const Plan& plan) -> std::string { return word(plan.router.bias_update); }},
        {"expert_capacity",
         [](Plan& plan, const std::string& v) {
             plan.router.expert_capacity = amount("expert_capacity", v, "a factor over the balanced load or none");
         },
         [](const Plan& plan) -> std::string { return word(plan.router.expert_capacity); }},
        {"drop_policy", [](Plan& plan, const std::string& v) { plan.router.drop_policy = drop_policy_from_string(v); },
         [](const Plan& plan) -> std::string { return to_string(plan.router.drop_policy); }},
        {"drop_scope", [](Plan& plan, const std::string& v) { plan.router.drop_scope = drop_scope_from_string(v); },
         [](const Plan& plan) -> std::string { return to_string(plan.router.drop_scope); }},
        {"indexer_loss",
         [](Plan& plan, const std::string& v) {
             plan.indexer.loss = amount("indexer_loss", v, "a coefficient or none");
         },
         [](const Plan& plan) -> std::string { return word(plan.indexer.loss); }},
        {"indexer_stage", [](Plan& plan, const std::string& v) { plan.indexer.stage = indexer_stage_from_string(v); },
         [](const Plan& plan) -> std::string { return to_string(plan.indexer.stage); }},
        {"pad_to_capacity",
         [](Plan& plan, const std::string& v) { plan.router.pad_to_capacity = on_or_off("pad_to_capacity", v); },
         [](const Plan& plan) -> std::string { return plan.router.pad_to_capacity ? "on" : "off"; }},
    };
    return list;
}

const Field& field_named(const std::string& name) {
    for (const Field& field : fields())
        if (name == field.name) return field;
    const std::vector<std::string> known = field_names();
    refuse("unknown plan field '{}'{}; known are {}", shown(name), did_you_mean(name, known), fmt::join(known, ", "));
}

} // namespace

std::vector<std::string> field_names() {
    std::vector<std::string> names;
    for (const Field& field : fields()) names.emplace_back(field.name);
    return names;
}

void set_field(Plan& plan, const std::string& field, const std::string& value) { field_named(field).set(plan, value); }

std::string field_text(const Plan& plan, const std::string& field) { return field_named(field).get(plan); }

std::vector<FieldChange> differences(const Plan& from, const Plan& to) {
    std::vector<FieldChange> changes;
    const auto add = [&changes](const std::string& field, const std::string& a, const std::string& b) {
        if (a != b) changes.push_back({field, a, b});
    };
    const auto number = [](auto value) { return fmt::format("{}", value); };
    add("model", from.model->name, to.model->name);
    add("hardware", from.hardware->name, to.hardware->name);
    add("stack", from.stack, to.stack);
    add("gpus", number(from.gpus), number(to.gpus));
    add("gbs", number(from.gbs), number(to.gbs));
    add("seq", number(from.seq), number(to.seq));
    for (const Field& field : fields()) {
        add(field.name, field.get(from), field.get(to));
        if (std::string(field.name) == "etp") add("edp", number(from.edp), number(to.edp));
    }
    return changes;
}

} // namespace moe::plan
