// plan.json: the choices first, then the model and the hardware in full, so that the file needs nothing else.
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "planner/base/json_object.hpp"
#include "planner/base/schema.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/document_lengths.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/bf16_layers.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/plan_limits.hpp"

#include <nlohmann/json.hpp>

#include <limits>

namespace moe::plan {
namespace {

constexpr int schema_version = 1;

using Json = nlohmann::ordered_json;

std::vector<std::string> split_list(const std::string& joined) {
    std::vector<std::string> names;
    if (joined.empty() || joined == "none") return names;
    for (std::size_t at = 0; at <= joined.size();) {
        const std::size_t plus = std::min(joined.find('+', at), joined.size());
        names.push_back(joined.substr(at, plus - at));
        at = plus + 1;
    }
    return names;
}

std::string join_list(const JsonObject& json, const std::string& key) {
    return json.has(key) ? fmt::format("{}", fmt::join(json.strings(key), "+")) : std::string{};
}

int degree(const JsonObject& mesh, const std::string& key) {
    return static_cast<int>(mesh.integer(key, 1, limits::max_gpus));
}

void read_mesh(const JsonObject& mesh, Plan& plan) {
    mesh.only({"gpus", "tp", "cp", "dp", "pp", "vpp", "ep", "etp", "edp", "rank_order"});
    plan.gpus = degree(mesh, "gpus");
    plan.tp = degree(mesh, "tp");
    plan.cp = degree(mesh, "cp");
    plan.dp = degree(mesh, "dp");
    plan.pp = degree(mesh, "pp");
    plan.vpp = degree(mesh, "vpp");
    plan.ep = degree(mesh, "ep");
    plan.etp = degree(mesh, "etp");
    plan.edp = degree(mesh, "edp");
    plan.rank_order = mesh.string_or("rank_order", plan.rank_order);
}

// A choice by its name; from_string() does not know the file that the name stands in.
template <class Choice>
Choice named(const JsonObject& json, const std::string& name, Choice (*from_string)(const std::string&)) {
    try {
        return from_string(name);
    } catch (const Error& error) {
        refuse("{}: {}", json.place(), error.what());
    }
}

// A module's own precision; absent where it follows the rule of the plan.
std::optional<machine::Precision> optional_precision(const JsonObject& json, const std::string& key) {
    if (!json.has(key)) return std::nullopt;
    return named(json, json.string(key), machine::precision_from_string);
}

constexpr double any_amount = std::numeric_limits<double>::max();

void read_router(const JsonObject& json, RouterTraining& router) {
    json.only({"load_balancing", "aux_loss", "z_loss", "input_jitter", "bias_update", "forced", "expert_capacity",
               "drop_policy", "drop_scope", "pad_to_capacity"});
    router.load_balancing =
        named(json, json.string_or("load_balancing", to_string(router.load_balancing)), load_balancing_from_string);
    router.aux_loss = json.number_or("aux_loss", 0.0, 0.0, any_amount);
    router.z_loss = json.number_or("z_loss", 0.0, 0.0, any_amount);
    router.input_jitter = json.number_or("input_jitter", 0.0, 0.0, any_amount);
    router.bias_update = json.number_or("bias_update", 0.0, 0.0, any_amount);
    router.forced = json.boolean_or("forced", false);
    router.expert_capacity = json.number_or("expert_capacity", 0.0, 0.0, any_amount);
    router.drop_policy =
        named(json, json.string_or("drop_policy", to_string(router.drop_policy)), drop_policy_from_string);
    router.drop_scope = named(json, json.string_or("drop_scope", to_string(router.drop_scope)), drop_scope_from_string);
    router.pad_to_capacity = json.boolean_or("pad_to_capacity", false);
}

Json router_json(const RouterTraining& router) {
    return {{"load_balancing", to_string(router.load_balancing)},
            {"aux_loss", router.aux_loss},
            {"z_loss", router.z_loss},
            {"input_jitter", router.input_jitter},
            {"bias_update", router.bias_update},
            {"forced", router.forced},
            {"expert_capacity", router.expert_capacity},
            {"drop_policy", to_string(router.drop_policy)},
            {"drop_scope", to_string(router.drop_scope)},
            {"pad_to_capacity", router.pad_to_capacity}};
}

void read_indexer(const JsonObject& json, IndexerTraining& indexer) {
    json.only({"loss", "stage"});
    indexer.loss = json.number_or("loss", indexer.loss, 0.0, any_amount);
    indexer.stage = named(json, json.string_or("stage", to_string(indexer.stage)), indexer_stage_from_string);
}

void read_bf16_layers(const JsonObject& json, Plan& plan) {
    if (!json.has("bf16_layers")) return;
    const auto layers = static_cast<std::int64_t>(plan.model->layers.size());
    const std::vector<std::int64_t> ends = json.integers("bf16_layers", 0, layers);
    if (ends.size() != 2 || ends[0] + ends[1] > layers)
        json.refuse_value("bf16_layers",
                          fmt::format("must be two numbers, of layers at the start and at the end of {}", layers));
    keep_in_bf16(plan, static_cast<int>(ends[0]), static_cast<int>(ends[1]));
}

void read_choices(const JsonObject& json, Plan& plan) {
    plan.mbs = json.integer("mbs", 1, limits::max_gbs);
    plan.schedule = named(json, json.string("schedule"), schedule_from_string);
    plan.layout = json.string_or("layout", "");
    plan.precision = named(json, json.string("precision"), machine::precision_from_string);
    plan.attention_precision = optional_precision(json, "attention_precision");
    plan.expert_precision = optional_precision(json, "expert_precision");
    plan.head_precision = optional_precision(json, "head_precision");
    plan.fp8_scaling = named(json, json.string_or("fp8_scaling", to_string(plan.fp8_scaling)), fp8_scaling_from_string);
    plan.fp8_wgrad = json.boolean_or("fp8_wgrad", false);
    plan.gradients =
        named(json, json.string_or("gradients", machine::to_string(plan.gradients)), machine::precision_from_string);
    plan.recompute = named(json, join_list(json, "recompute"), recompute::from_string);
    plan.offload = named(json, join_list(json, "offload"), offload::from_string);
    plan.optimizer = named(json, json.string_or("optimizer", to_string(plan.optimizer)), optimizer_from_string);
    plan.lora = named(json, json.string_or("lora", "none"), lora_from_string);
    plan.fsdp = json.boolean_or("fsdp", false);
    if (json.has("fsdp_replicas"))
        plan.fsdp_replicas = static_cast<int>(json.integer("fsdp_replicas", 1, limits::max_gpus));
    plan.dispatcher = named(json, json.string_or("dispatcher", to_string(plan.dispatcher)), dispatcher_from_string);
    plan.cp_comm = named(json, json.string_or("cp_comm", to_string(plan.cp_comm)), context_comm_from_string);
    plan.capacity = json.number_or("capacity", 0.0, 0.0, any_amount);
    plan.paged_stash = json.boolean_or("paged_stash", false);
    plan.memory_efficient_permutation = json.boolean_or("memory_efficient_permutation", true);
    plan.tp_overlap = json.boolean_or("tp_overlap", false);
    plan.ep_overlap = json.boolean_or("ep_overlap", false);
    plan.delay_wgrad = json.boolean_or("delay_wgrad", false);
    plan.deterministic = json.boolean_or("deterministic", false);
    plan.documents = named(json, json.string_or("documents", to_string(plan.documents)), documents_from_string);
    plan.cuda_graph = named(json, json.string_or("cuda_graph", to_string(plan.cuda_graph)), cuda_graph_from_string);
}

Json choices(const Plan& plan) {
    Json json;
    json["schema"] = schema::plan;
    json["schema_version"] = schema_version; // Plans carried it before they had a schema.
    json["stack"] = plan.stack;
    json["workload"] = {{"seq", plan.seq}, {"gbs", plan.gbs}, {"routing", plan.routing}};
    json["mesh"] = {
        {"gpus", plan.gpus}, {"tp", plan.tp}, {"cp", plan.cp},   {"dp", plan.dp},   {"pp", plan.pp},
        {"vpp", plan.vpp},   {"ep", plan.ep}, {"etp", plan.etp}, {"edp", plan.edp}, {"rank_order", plan.rank_order}};
    if (!plan.lengths.empty()) json["workload"]["lengths"] = plan.lengths;
    if (plan.router != RouterTraining{}) json["router"] = router_json(plan.router);
    if (plan.indexer != IndexerTraining{})
        json["indexer"] = {{"loss", plan.indexer.loss}, {"stage", to_string(plan.indexer.stage)}};
    json["mbs"] = plan.mbs;
    json["schedule"] = to_string(plan.schedule);
    json["layout"] = plan.layout;
    json["precision"] = machine::to_string(plan.precision);
    if (plan.attention_precision) json["attention_precision"] = machine::to_string(*plan.attention_precision);
    if (plan.expert_precision) json["expert_precision"] = machine::to_string(*plan.expert_precision);
    if (plan.head_precision) json["head_precision"] = machine::to_string(*plan.head_precision);
    if (plan.bf16_first + plan.bf16_last > 0) json["bf16_layers"] = {plan.bf16_first, plan.bf16_last};
    json["fp8_scaling"] = to_string(plan.fp8_scaling);
    if (plan.fp8_wgrad) json["fp8_wgrad"] = true;
    json["gradients"] = machine::to_string(plan.gradients);
    json["recompute"] = split_list(recompute::to_string(plan.recompute));
    json["offload"] = split_list(offload::to_string(plan.offload));
    json["optimizer"] = to_string(plan.optimizer);
    if (plan.lora.on()) json["lora"] = to_string(plan.lora);
    json["fsdp"] = plan.fsdp;
    if (plan.fsdp_replicas > 1) json["fsdp_replicas"] = plan.fsdp_replicas;
    json["dispatcher"] = to_string(plan.dispatcher);
    json["cp_comm"] = to_string(plan.cp_comm);
    json["capacity"] = plan.capacity;
    json["paged_stash"] = plan.paged_stash;
    json["memory_efficient_permutation"] = plan.memory_efficient_permutation;
    json["tp_overlap"] = plan.tp_overlap;
    json["ep_overlap"] = plan.ep_overlap;
    json["delay_wgrad"] = plan.delay_wgrad;
    json["cuda_graph"] = to_string(plan.cuda_graph);
    json["deterministic"] = plan.deterministic;
    json["documents"] = to_string(plan.documents);
    return json;
}

} // namespace

std::string plan_to_json(const Plan& plan) {
    Json json = choices(plan);
    json["model"] = parse_json<Json>(plan.model->config_json, "model");
    json["hardware"] = parse_json<Json>(machine::to_json(*plan.hardware), "hardware");
    return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

Plan plan_from_json(const std::string& text, const std::string& place) {
    const JsonObject json = JsonObject::parse(text, place);
    if (!json.has("schema_version")) refuse("{}: field \"schema_version\" is missing: this is no plan", place);
    if (const std::int64_t version = json.integer("schema_version", 0, std::numeric_limits<int>::max());
        version != schema_version)
        refuse("{}: schema_version = {}, but this program reads version {}: search again", place, version,
               schema_version);
    check_schema(json, schema::plan);
    json.only({"schema",
               "schema_version",
               "stack",
               "workload",
               "mesh",
               "router",
               "indexer",
               "mbs",
               "schedule",
               "layout",
               "precision",
               "attention_precision",
               "expert_precision",
               "head_precision",
               "bf16_layers",
               "fp8_scaling",
               "fp8_wgrad",
               "gradients",
               "recompute",
               "offload",
               "optimizer",
               "lora",
               "fsdp",
               "fsdp_replicas",
               "dispatcher",
               "cp_comm",
               "capacity",
               "paged_stash",
               "memory_efficient_permutation",
               "tp_overlap",
               "ep_overlap",
               "delay_wgrad",
               "cuda_graph",
               "deterministic",
               "documents",
               "model",
               "hardware"});
    Plan plan;
    plan.stack = json.string("stack");
    const JsonObject workload = json.object("workload");
    workload.only({"seq", "gbs", "routing", "lengths"});
    plan.seq = workload.integer("seq", 1, limits::max_seq);
    plan.gbs = workload.integer("gbs", 1, limits::max_gbs);
    plan.routing = workload.string_or("routing", plan.routing);
    plan.lengths = workload.string_or("lengths", plan.lengths);
    named(workload, plan.lengths, model::document_lengths_from_string);
    read_mesh(json.object("mesh"), plan);
    if (json.has("router")) read_router(json.object("router"), plan.router);
    if (json.has("indexer")) read_indexer(json.object("indexer"), plan.indexer);
    read_choices(json, plan);
    plan.model =
        std::make_shared<const model::Model>(families::model_from_json(json.object("model").dump(), place + ": model"));
    read_bf16_layers(json, plan);
    plan.hardware = std::make_shared<const machine::Hardware>(
        machine::hardware_from_json(json.object("hardware").dump(), place + ": hardware"));
    if (const PlanFault found = check_plan(plan)) refuse("{}: {}", place, found.message);
    return plan;
}

Plan load_plan(const std::string& path) { return plan_from_json(read_file(path), path); }

} // namespace moe::plan
