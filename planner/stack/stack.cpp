// Reads stacks from profiles/stacks and applies what they say of one machine.
#include "planner/stack/stack.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "planner/base/names.hpp"
#include "planner/base/schema.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/plan/plan_choices.hpp"
#include "planner/stack/anchored.hpp"
#include "planner/stack/requirements.hpp"
#include "planner/stack/stack_reader.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>

namespace moe::stack {
namespace {

using Json = nlohmann::json;
using Reader = StackReader;

// True where a cost holds a number of its own; coefficients carry their source themselves.
bool states_figure(const Json& cost) {
    if (cost.is_object() || cost.is_array()) return std::any_of(cost.begin(), cost.end(), states_figure);
    return cost.is_number();
}

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
    c.attention_gathered = costs.number("attention_gathered", c.attention_gathered, 0.01, 1.0);
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
    s.rules =
        at_place(place + ": engine", [&] { return std::make_shared<const std::vector<Rule>>(load_rules(s.engine)); });
    if (const Json* list = in.find("requirements"))
        s.requirements = std::make_shared<const std::vector<Rule>>(read_requirements(*list, place));
    in.finish();
    for (const unsigned set : s.recompute_sets)
        if ((set & ~s.recompute_modules) != 0)
            refuse("{}: recompute set \"{}\" names modules outside recompute_modules \"{}\"", place,
                   plan::recompute::to_string(set), plan::recompute::to_string(s.recompute_modules));
    return s;
}

std::string stacks_folder() { return profiles_folder() + "/stacks"; }

// Multiplies a cost, or every figure inside it, by a further factor.
void multiply(Json& cost, const Json& factor) {
    if (cost.is_object())
        for (auto& item : cost.items()) multiply(item.value(), factor);
    else
        cost = Json::array({cost, factor});
}

// Features behind the stack's name, and the costs of those that it lacks. A stack without the field "features" states
// its costs as they are.
void apply_features(Json& json, const std::vector<std::string>& changes, const std::string& place) {
    const std::string path = stacks_folder() + "/base/features.json";
    if (!json.contains("features")) {
        if (!changes.empty()) refuse("{}: names no features, so that \"{}\" cannot change one", place, changes.front());
        return;
    }
    const Json all = load_json<Json>(path);
    std::set<std::string> has;
    for (const Json& name : json["features"]) has.insert(name.is_string() ? name.get<std::string>() : "");
    for (const std::string& change : changes) {
        const bool drop = change.rfind("no-", 0) == 0;
        const std::string name = drop ? change.substr(3) : change;
        if (!all.contains(name)) refuse("{}: unknown feature \"{}\": see {}", place, name, path);
        if (drop)
            has.erase(name);
        else
            has.insert(name);
    }
    for (const auto& item : all.items()) {
        if (has.erase(item.key()) > 0) continue;
        for (const auto& cost : item.value().at("without").items()) {
            Json& stated = json["costs"][cost.key()]; // a cost that is 1 unless stated is not
            if (stated.is_null()) stated = 1.0;
            multiply(stated, cost.value());
            json["cost_sources"][cost.key()] = item.value().at("source");
        }
    }
    if (!has.empty()) refuse("{}: unknown feature \"{}\": see {}", place, *has.begin(), path);
}

// The differences on some machines, as a JSON merge patch.
struct Variant {
    std::vector<std::string> machines;
    Json set;
};

// "on": [{"hardware": [names], "set": {...}}], taken out of the stack.
std::vector<Variant> take_variants(Json& json, const std::string& place) {
    static const machine::Coefficients none; // lists of names hold no costs
    const auto on = json.find("on");
    if (on == json.end()) return {};
    const Json list = *on;
    json.erase(on);
    if (!list.is_array()) refuse("{}: \"on\" must be a list, found {}", place, list.type_name());
    std::vector<Variant> variants;
    for (const Json& item : list) {
        Reader in(item, place + ": on", none);
        Variant variant{in.list("hardware", [](std::string name) { return name; }), in.at("set")};
        in.finish();
        if (!variant.set.is_object())
            refuse("{}: on.set must be a JSON object, found {}", place, variant.set.type_name());
        variants.push_back(std::move(variant));
    }
    return variants;
}

void apply_variants(Json& json, const std::vector<Variant>& variants, const std::string& machine) {
    for (const Variant& variant : variants)
        if (std::find(variant.machines.begin(), variant.machines.end(), machine) != variant.machines.end())
            json.merge_patch(variant.set);
}

// `calibrate` names a GPU's profile after the datasheet's.
std::string own_name(const machine::Hardware& hardware) {
    return hardware.name.substr(0, hardware.name.rfind("-measured"));
}

// The machine, of those that a stack has figures for, whose figures this one gets, see load_stack().
std::string known_machine(const machine::Hardware& hardware, const std::vector<Variant>& variants) {
    std::set<std::string> known;
    for (const Variant& variant : variants) known.insert(variant.machines.begin(), variant.machines.end());
    if (known.empty() || hardware.name.empty()) return own_name(hardware); // no machine in particular
    if (!hardware.like.empty()) {
        if (known.contains(hardware.like)) return hardware.like;
        refuse("hardware {}: like = \"{}\": no machine that the stack has figures for{}; these are {}", hardware.name,
               shown(hardware.like), did_you_mean(hardware.like, {known.begin(), known.end()}), fmt::join(known, ", "));
    }
    if (hardware.cpu || known.contains(own_name(hardware))) return own_name(hardware);
    const auto computes = [&hardware](machine::Precision precision) {
        return hardware.peak_flops[static_cast<std::size_t>(precision)] > 0.0;
    };
    if (!computes(machine::Precision::mxfp8) && !computes(machine::Precision::nvfp4)) return "h100";
    return hardware.nvlink_domain > 8 ? "gb200-nvl72" : "b200";
}

constexpr int longest_chain = 8; // of bases; more is a cycle

// A stack's file with its bases below it: objects merge field by field, "on" lists follow each other. A cost that a
// file changes needs that file's own entry in cost_sources, since its base speaks of another figure.
Json read_with_bases(const std::string& name, int depth) {
    const std::string path = stacks_folder() + "/" + name + ".json";
    std::error_code unreadable; // such as a name that is too long
    const bool plain = name.find('/') == std::string::npos || (depth > 0 && name.rfind("base/", 0) == 0);
    if (!plain || !std::filesystem::is_regular_file(path, unreadable)) {
        const std::vector<std::string> known = stack_names();
        refuse("unknown stack '{}': known are {}", shown(name),
               known.empty() ? "none" : fmt::format("{}", fmt::join(known, ", ")));
    }
    Json json = load_json<Json>(path);
    if (!json.is_object() || !json.contains("base")) return json;
    if (!json["base"].is_string()) refuse("{}: \"base\" must be a string, found {}", path, json["base"].type_name());
    if (depth >= longest_chain) refuse("{}: more than {} bases follow each other: is it a cycle?", path, longest_chain);
    if (json.contains("costs") && json["costs"].is_object())
        for (const auto& item : json["costs"].items())
            if (states_figure(item.value()) &&
                (!json.contains("cost_sources") || !json["cost_sources"].contains(item.key())))
                refuse("{}: costs.{} has no entry in \"cost_sources\": say where the figure comes from", path,
                       item.key());
    Json whole = at_place(path + ": base", [&] { return read_with_bases(json["base"].get<std::string>(), depth + 1); });
    Json on = whole.contains("on") ? whole["on"] : Json::array();
    if (json.contains("on") && json["on"].is_array()) on.insert(on.end(), json["on"].begin(), json["on"].end());
    whole.erase("published"); // what the base stands for
    json.erase("base");
    whole.merge_patch(json);
    if (!on.empty() && whole["on"].is_array()) whole["on"] = on;
    return whole;
}

std::vector<std::string> words_of(const std::string& name) {
    std::vector<std::string> words;
    for (std::size_t at = 0; at <= name.size();) {
        const std::size_t comma = std::min(name.find(',', at), name.size());
        words.push_back(name.substr(at, comma - at));
        at = comma + 1;
    }
    return words;
}

// The file among the words, which then are those of its base; `name` becomes the one that says both.
std::optional<AnchoredStack> take_anchored(std::vector<std::string>& words, std::string& name) {
    const auto file = std::find_if(words.begin(), words.end(), names_file);
    if (file == words.end()) return std::nullopt;
    const std::string path = std::filesystem::absolute(*file).lexically_normal().string();
    if (path.find(',') != std::string::npos) refuse("stack {}: its path must hold no comma", path);
    AnchoredStack anchored = load_anchored(path);
    words.erase(file);
    if (!words.empty() && words != words_of(anchored.base))
        refuse("stack {}: the file is based on {}: name it alone", name, anchored.base);
    words = words_of(anchored.base);
    name = anchored.base + "," + path;
    return anchored;
}

machine::Coefficients with_values(machine::Coefficients coefficients, const AnchoredStack& anchored,
                                  const std::string& name) {
    for (const auto& [coefficient, value] : anchored.coefficients) {
        const auto found = coefficients.find(coefficient);
        if (found == coefficients.end())
            refuse("stack {}: profiles/coefficients.json has no \"{}\"", name, coefficient);
        found->second.value = value;
    }
    return coefficients;
}

} // namespace

std::vector<std::string> stack_names() {
    std::vector<std::string> names;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(stacks_folder(), ignored))
        if (entry.path().extension() == ".json") names.push_back(entry.path().stem().string());
    std::sort(names.begin(), names.end());
    return names;
}

Stack load_stack(const std::string& name, const machine::Hardware& hardware) {
    return load_stack(name, hardware, machine::load_coefficients());
}

Stack load_stack(const std::string& name, const machine::Hardware& hardware,
                 const machine::Coefficients& coefficients) {
    std::string wanted = name.empty() ? hardware.default_stack : name;
    if (wanted.empty()) refuse("hardware {}: has no default_stack: name one with --stack", hardware.name);
    std::vector<std::string> words = words_of(wanted); // the stack, its changed features, an anchored stack's file
    const std::optional<AnchoredStack> anchored = take_anchored(words, wanted);
    const machine::Coefficients values = anchored ? with_values(coefficients, *anchored, wanted) : coefficients;
    const std::string path = stacks_folder() + "/" + words.front() + ".json";
    Json json = read_with_bases(words.front(), 0);
    const std::vector<Variant> variants = take_variants(json, path);
    if (json.contains("requirements")) refuse_machine(wanted, read_requirements(json["requirements"], path), hardware);
    const std::string machine = known_machine(hardware, variants), own = own_name(hardware);
    apply_variants(json, variants, machine);
    if (own != machine) apply_variants(json, variants, own);
    apply_features(json, {words.begin() + 1, words.end()}, path);
    Stack stack = read_stack(json, path, values);
    if (anchored) stack.anchors = anchored->runs;
    if (stack.name != words.front()) refuse("{}: name = \"{}\": rename the file or the stack", path, shown(stack.name));
    stack.name = wanted;
    leave_out_lacking(stack, hardware);
    if (machine != own) stack.figures_of = machine;
    return stack;
}

} // namespace moe::stack
