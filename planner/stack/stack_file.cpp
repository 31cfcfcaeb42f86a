// Reads what a stack offers and what it costs, field by field.
#include "planner/stack/stack_file.hpp"

#include "planner/base/error.hpp"
#include "planner/base/json.hpp"
#include "planner/base/names.hpp"
#include "planner/base/schema.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/plan/plan_choices.hpp"
#include "planner/stack/requirements.hpp"
#include "planner/stack/stack_reader.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <set>

namespace moe::stack {
namespace {

using Json = nlohmann::json;
using Reader = StackReader;

constexpr double longest = 10.0; // seconds; no single cost of a stack is near it

std::array<double, machine::precision_count> by_precision(Reader& costs, const std::string& key) {
    Reader object(costs.at(key), costs.place() + "." + key, costs.coefficients());
    std::array<double, machine::precision_count> result{};
    for (int i = 0; i < machine::precision_count; ++i)
        result[static_cast<std::size_t>(i)] =
            object.number(machine::to_string(static_cast<machine::Precision>(i)), 0.0, 0.0, 1.0);
    object.finish();
    return result;
}

// "dispatcher": {name: share of both tiers' bandwidth, or {"nvlink": share, "nic": share}}.
void read_dispatchers(Reader& costs, StackCosts& c) {
    const Json& dispatchers = costs.at("dispatcher");
    const std::string place = costs.place() + ".dispatcher";
    if (!dispatchers.is_object()) refuse("{}: must be a JSON object, found {}", place, dispatchers.type_name());
    for (const auto& item : dispatchers.items()) {
        LinkShares& shares =
            c.dispatcher[plan::to_string(at_place(place, [&] { return plan::dispatcher_from_string(item.key()); }))];
        if (item.value().is_object()) {
            Reader one(item.value(), place + "." + item.key(), costs.coefficients());
            shares.nvlink = one.checked(one.at("nvlink"), "nvlink", 0.01, 1.5);
            shares.nic = one.checked(one.at("nic"), "nic", 0.01, 1.5);
            shares.start = one.number("start", 0.0, 0.0, 1.0);
            shares.row = one.number("row", 0.0, 0.0, 1e-3);
            one.finish();
        } else {
            shares.nvlink = shares.nic = costs.checked(item.value(), "dispatcher." + item.key(), 0.01, 1.5);
        }
    }
}

StackCosts read_costs(const Json& json, const Json& sources, const std::string& place,
                      const machine::Coefficients& coefficients) {
    Reader costs(json, place + ": costs", coefficients);
    StackCosts c;
    c.gemm = by_precision(costs, "gemm");
    c.grouped_gemm = by_precision(costs, "grouped_gemm");
    c.attention_forward = costs.number("attention_forward", c.attention_forward, 0.01, 1.5);
    c.attention_backward = costs.number("attention_backward", c.attention_backward, 0.01, 1.5);
    c.attention_picked_forward = costs.number("attention_picked_forward", c.attention_picked_forward, 0.01, 1.5);
    c.attention_picked_backward = costs.number("attention_picked_backward", c.attention_picked_backward, 0.01, 1.5);
    c.attention_picked_half_length =
        costs.number("attention_picked_half_length", c.attention_picked_half_length, 0.0, 1e6);
    c.attention_half_length = costs.number("attention_half_length", c.attention_half_length, 0.0, 1e6);
    c.memory = costs.number("memory", c.memory, 0.01, 1.0);
    c.permute = costs.number("permute", c.permute, 0.01, 1.0);
    c.scan = costs.number("scan", c.scan, 0.01, 1.0);
    c.kernel_seconds = costs.number("kernel_seconds", c.kernel_seconds, 0.0, longest);
    c.launch_seconds = costs.number("launch_seconds", c.launch_seconds, 0.0, longest);
    c.graph_launch_seconds = costs.number("graph_launch_seconds", c.graph_launch_seconds, 0.0, longest);
    c.collective = costs.number("collective", c.collective, 0.01, 1.0);
    c.step_seconds = costs.number("step_seconds", c.step_seconds, 0.0, longest);
    c.sync_seconds = costs.number("sync_seconds", c.sync_seconds, 0.0, longest);
    c.overlap_sm_share = costs.number("overlap_sm_share", c.overlap_sm_share, 0.0, 0.9);
    c.routed_launches = costs.number("routed_launches", c.routed_launches, 0.1, 100.0);
    c.router_launches = costs.number("router_launches", c.router_launches, 1.0, 100.0);
    c.quantize_launches = costs.number("quantize_launches", c.quantize_launches, 1.0, 100.0);
    c.recompute_launches = costs.number("recompute_launches", c.recompute_launches, 1.0, 100.0);
    c.permute_launches = costs.number("permute_launches", c.permute_launches, 1.0, 100.0);
    c.fsdp_sm_share = costs.number("fsdp_sm_share", c.fsdp_sm_share, 0.0, 0.9);
    c.tile_seconds = costs.number("tile_seconds", c.tile_seconds, 0.0, 1e-3);
    c.unaligned = costs.number("unaligned", c.unaligned, 0.01, 1.0);
    c.unaligned_odd = costs.number("unaligned_odd", c.unaligned_odd, 0.01, 1.0);
    c.unaligned_experts = costs.number("unaligned_experts", c.unaligned_experts, 0.01, 1.0);
    c.expert_launch_seconds = costs.number("expert_launch_seconds", c.expert_launch_seconds, 0.0, longest);
    c.weighted_bias_bytes = costs.number("weighted_bias_bytes", c.weighted_bias_bytes, 0.0, 1000.0);
    c.weighted_bias_grad_bytes = costs.number("weighted_bias_grad_bytes", c.weighted_bias_grad_bytes, 0.0, 1000.0);
    c.attention_exponentials = costs.number("attention_exponentials", c.attention_exponentials, 0.0, 4.0);
    c.expert_seconds = costs.number("expert_seconds", c.expert_seconds, 0.0, longest);
    c.overlap_launches = costs.number("overlap_launches", c.overlap_launches, 0.1, 100.0);
    c.quantize_share = costs.number("quantize_share", c.quantize_share, 0.0, 2.0);
    c.fused_quantize_share = costs.number("fused_quantize_share", c.fused_quantize_share, 0.0, 2.0);
    c.clock = costs.number("clock", c.clock, 0.1, 2.0);
    c.host_machine = costs.number("host_machine", c.host_machine, 0.1, 10.0);
    c.host_software = costs.number("host_software", c.host_software, 0.1, 10.0);
    c.launch_seconds *= c.host_machine * c.host_software;
    c.expert_launch_seconds *= c.host_machine * c.host_software;
    c.exchange_sms = costs.number("exchange_sms", c.exchange_sms, 1.0, 1000.0);
    read_dispatchers(costs, c);
    costs.finish();
    // A figure without its evidence cannot be checked by anybody: every cost names where it comes from.
    for (const auto& item : json.items())
        if (states_figure(item.value()) &&
            (!sources.is_object() || !sources.contains(item.key()) || !sources[item.key()].is_string()))
            refuse("{}: costs.{} has no entry in \"cost_sources\": say where the figure comes from", place, item.key());
    return c;
}

std::vector<Publication> read_published(const Json* list, const std::string& place, const machine::Coefficients& none) {
    std::vector<Publication> result;
    if (list == nullptr) return result;
    if (!list->is_array()) refuse("{}: \"published\" must be a list, found {}", place, list->type_name());
    for (const Json& item : *list) {
        Reader in(item, place + ": published", none);
        Publication publication;
        publication.source = in.text("source");
        publication.releases = in.list("releases", [](std::string release) { return release; });
        publication.folding = in.flag("folding", true);
        in.finish();
        result.push_back(std::move(publication));
    }
    return result;
}

Engine read_engine(const Json& json, const std::string& place) {
    static const machine::Coefficients none; // names and versions hold no costs
    Reader in(json, place + ": engine", none);
    const auto version = [&in](const char* key) { return in.find(key) != nullptr ? in.text(key) : std::string(); };
    Engine engine{in.text("name"), version("release"), version("transformer_engine"), version("bridge")};
    if (!engine.release.empty()) in.text("source");
    in.find("source");
    in.finish();
    return engine;
}

// "recipe_choices": {field of a plan: [values as --fix takes them]}.
std::map<std::string, std::vector<std::string>> read_choices(const Json* json, const std::string& place) {
    static const machine::Coefficients none; // choices hold no costs
    std::map<std::string, std::vector<std::string>> result;
    if (json == nullptr) return result;
    Reader in(*json, place + ": recipe_choices", none);
    for (const auto& item : json->items())
        result[item.key()] = in.list(item.key(), [&item](std::string value) {
            plan::Plan plan;
            plan::set_field(plan, item.key(), value);
            return value;
        });
    return result;
}

} // namespace

Stack read_stack(const Json& json, const std::string& place, const machine::Coefficients& coefficients) {
    Reader in(json, place, coefficients);
    Stack s;
    if (in.find("schema") != nullptr && in.text("schema") != schema::stack)
        refuse("{}: schema = \"{}\": must be \"{}\"", place, shown(in.text("schema")), schema::stack);
    s.name = in.text("name");
    s.release = in.text("release");
    s.source = in.text("source");
    s.executable = in.flag("executable", false);
    s.tensor = in.flag("tensor", true);
    s.context = in.flag("context", true);
    s.expert_tensor = in.flag("expert_tensor", true);
    s.interleaved = in.flag("interleaved", true);
    s.ep_overlap = in.flag("ep_overlap", false);
    s.usual_ep_overlap = in.flag("usual_ep_overlap", false);
    s.bf16_moments = in.flag("bf16_moments", false);
    s.muon = in.flag("muon", false);
    s.paged_stash = in.flag("paged_stash", false);
    s.recipe_choices = read_choices(in.find("recipe_choices"), place);
    if (in.find("fused_experts") != nullptr) s.fused_experts = in.list("fused_experts", machine::precision_from_string);
    s.fused_experts_need_stash = in.flag("fused_experts_need_stash", false);
    s.memory_headroom = in.number("memory_headroom", 0.0, 0.0, 0.9);
    s.usual_capacity = in.number("usual_capacity", 0.0, 1.0, 100.0);
    if (in.find("usual_gradients") != nullptr)
        s.usual_gradients = in.word("usual_gradients", machine::precision_from_string);
    s.precisions = in.list("precisions", machine::precision_from_string);
    s.dispatchers = in.list("dispatchers", plan::dispatcher_from_string);
    s.host_synced = in.list("host_synced", plan::dispatcher_from_string);
    s.cuda_graphs = in.list("cuda_graphs", plan::cuda_graph_from_string);
    if (in.find("split_schedules") != nullptr)
        s.split_schedules = in.list("split_schedules", plan::schedule_from_string);
    s.offloads = in.flag("offloads", false);
    s.recompute_sets = in.list("recompute_sets", plan::recompute::from_string);
    s.recompute_modules = in.word("recompute_modules", plan::recompute::from_string);
    s.usual_dispatcher = in.word("usual_dispatcher", plan::dispatcher_from_string);
    s.usual_cuda_graph = in.word("usual_cuda_graph", plan::cuda_graph_from_string);
    if (in.find("features") != nullptr) s.features = in.list("features", [](std::string name) { return name; });
    s.costs = read_costs(in.at("costs"), in.at("cost_sources"), place, coefficients);
    s.published = read_published(in.find("published"), place, coefficients);
    if (const Json* engine = in.find("engine")) s.engine = read_engine(*engine, place);
    s.rules = at_place(place + ": engine", [&] { return std::make_shared<const RuleList>(load_rules(s.engine)); });
    if (const Json* list = in.find("requirements"))
        s.requirements = std::make_shared<const std::vector<Rule>>(read_requirements(*list, place));
    in.finish();
    for (const unsigned set : s.recompute_sets)
        if ((set & ~s.recompute_modules) != 0)
            refuse("{}: recompute set \"{}\" names modules outside recompute_modules \"{}\"", place,
                   plan::recompute::to_string(set), plan::recompute::to_string(s.recompute_modules));
    return s;
}

} // namespace moe::stack
