// Names of a plan's choices, and setting of single fields by the names of --fix.
#include "planner/plan.hpp"

#include "planner/error.hpp"
#include "planner/names.hpp"
#include "planner/plan_limits.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <functional>
#include <utility>
#include <vector>

namespace moe {
namespace {

constexpr std::array<const char*, 4> schedule_names{"1f1b", "interleaved", "zero-bubble", "dualpipe"};
constexpr std::array<const char*, 4> dispatcher_names{"alltoall", "allgather", "deepep", "hybridep"};
constexpr std::array<const char*, 2> context_comm_names{"ring", "alltoall"};
constexpr std::array<const char*, 2> scaling_names{"current", "delayed"};
constexpr std::array<const char*, 6> graph_names{"attn",           "mlp", "moe_router", "moe_preprocess",
                                                 "shared_experts", "full"};
constexpr std::array<const char*, 8> recompute_names{"layernorm", "core_attn",      "mla_up_proj", "moe_act",
                                                     "mlp",       "shared_experts", "moe",         "full"};
constexpr std::array<const char*, 8> offload_names{"attn_norm", "qkv_linear", "core_attn", "attn_proj",
                                                   "mlp_norm",  "expert_fc1", "moe_act",   "optimizer"};

// Position of `text` in the names of a choice; refuses others with the known ones.
template <std::size_t size>
std::size_t position(const std::array<const char*, size>& names, const char* what, const std::string& text) {
    const std::vector<std::string> known(names.begin(), names.end());
    const auto found = std::find(known.begin(), known.end(), text);
    if (found == known.end())
        refuse("{} '{}' is unknown{}; known are {}", what, shown(text), did_you_mean(text, known),
               fmt::join(known, ", "));
    return static_cast<std::size_t>(found - known.begin());
}

// Names of the bits of a set, joined by '+'.
template <std::size_t size>
std::string set_to_string(const std::array<const char*, size>& names, unsigned set) {
    std::string text;
    for (std::size_t i = 0; i < size; ++i) {
        if ((set >> i & 1U) == 0) continue;
        if (!text.empty()) text += '+';
        text += names[i];
    }
    return text.empty() ? "none" : text;
}

template <std::size_t size>
unsigned set_from_string(const std::array<const char*, size>& names, const char* what, const std::string& text) {
    if (text == "none" || text.empty()) return 0;
    unsigned set = 0;
    for (std::size_t at = 0; at <= text.size();) {
        const std::size_t plus = std::min(text.find('+', at), text.size());
        set |= 1U << position(names, what, text.substr(at, plus - at));
        at = plus + 1;
    }
    return set;
}

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

std::optional<Precision> precision_or_default(const std::string& text) {
    if (text == "default") return std::nullopt;
    return precision_from_string(text);
}

double capacity_factor(const std::string& text) {
    if (text == "none") return 0.0;
    double number = 0.0;
    const char* end = text.data() + text.size();
    const auto [last, error] = std::from_chars(text.data(), end, number);
    if (error != std::errc{} || last != end || !std::isfinite(number) || number < 0.0)
        refuse("capacity={}: must be a factor over the balanced load, or none for the worst case", shown(text));
    return number;
}

using Setter = std::function<void(Plan&, const std::string&)>;

// The fields of --fix: those of the contract in its order, finer choices beside what they refine.
const std::vector<std::pair<std::string, Setter>>& setters() {
    static const std::vector<std::pair<std::string, Setter>> list{
        {"tp", [](Plan& plan, const std::string& v) { plan.tp = degree("tp", v); }},
        {"cp", [](Plan& plan, const std::string& v) { plan.cp = degree("cp", v); }},
        {"pp", [](Plan& plan, const std::string& v) { plan.pp = degree("pp", v); }},
        {"vpp", [](Plan& plan, const std::string& v) { plan.vpp = degree("vpp", v); }},
        {"dp", [](Plan& plan, const std::string& v) { plan.dp = degree("dp", v); }},
        {"ep", [](Plan& plan, const std::string& v) { plan.ep = degree("ep", v); }},
        {"etp", [](Plan& plan, const std::string& v) { plan.etp = degree("etp", v); }},
        {"mbs", [](Plan& plan, const std::string& v) { plan.mbs = whole("mbs", v, limits::max_gbs); }},
        {"layout", [](Plan& plan, const std::string& v) { plan.layout = v == "none" ? std::string{} : v; }},
        {"schedule", [](Plan& plan, const std::string& v) { plan.schedule = schedule_from_string(v); }},
        {"rank_order", [](Plan& plan, const std::string& v) { plan.rank_order = v; }},
        {"precision", [](Plan& plan, const std::string& v) { plan.precision = precision_from_string(v); }},
        {"attention_precision",
         [](Plan& plan, const std::string& v) { plan.attention_precision = precision_or_default(v); }},
        {"expert_precision", [](Plan& plan, const std::string& v) { plan.expert_precision = precision_or_default(v); }},
        {"head_precision", [](Plan& plan, const std::string& v) { plan.head_precision = precision_or_default(v); }},
        {"fp8_scaling", [](Plan& plan, const std::string& v) { plan.fp8_scaling = fp8_scaling_from_string(v); }},
        {"gradients", [](Plan& plan, const std::string& v) { plan.gradients = precision_from_string(v); }},
        {"recompute", [](Plan& plan, const std::string& v) { plan.recompute = recompute::from_string(v); }},
        {"offload", [](Plan& plan, const std::string& v) { plan.offload = offload::from_string(v); }},
        {"optimizer", [](Plan& plan, const std::string& v) { plan.optimizer = optimizer_from_string(v); }},
        {"fsdp", [](Plan& plan, const std::string& v) { plan.fsdp = on_or_off("fsdp", v); }},
        {"dispatcher", [](Plan& plan, const std::string& v) { plan.dispatcher = dispatcher_from_string(v); }},
        {"cp_comm", [](Plan& plan, const std::string& v) { plan.cp_comm = context_comm_from_string(v); }},
        {"capacity", [](Plan& plan, const std::string& v) { plan.capacity = capacity_factor(v); }},
        {"tp_overlap", [](Plan& plan, const std::string& v) { plan.tp_overlap = on_or_off("tp_overlap", v); }},
        {"ep_overlap", [](Plan& plan, const std::string& v) { plan.ep_overlap = on_or_off("ep_overlap", v); }},
        {"delay_wgrad", [](Plan& plan, const std::string& v) { plan.delay_wgrad = on_or_off("delay_wgrad", v); }},
        {"cuda_graph", [](Plan& plan, const std::string& v) { plan.cuda_graph = cuda_graph_from_string(v); }},
        {"routing", [](Plan& plan, const std::string& v) { plan.routing = v; }},
    };
    return list;
}

} // namespace

const char* to_string(ScheduleKind kind) { return schedule_names[static_cast<std::size_t>(kind)]; }
const char* to_string(Dispatcher dispatcher) { return dispatcher_names[static_cast<std::size_t>(dispatcher)]; }
const char* to_string(ContextComm comm) { return context_comm_names[static_cast<std::size_t>(comm)]; }
const char* to_string(Fp8Scaling scaling) { return scaling_names[static_cast<std::size_t>(scaling)]; }
std::string to_string(CudaGraph graph) {
    return graph == CudaGraph::partial ? "partial" : set_to_string(graph_names, static_cast<unsigned>(graph));
}

ScheduleKind schedule_from_string(const std::string& text) {
    return static_cast<ScheduleKind>(position(schedule_names, "schedule", text));
}
Dispatcher dispatcher_from_string(const std::string& text) {
    return static_cast<Dispatcher>(position(dispatcher_names, "dispatcher", text));
}
ContextComm context_comm_from_string(const std::string& text) {
    return static_cast<ContextComm>(position(context_comm_names, "cp_comm", text));
}
Fp8Scaling fp8_scaling_from_string(const std::string& text) {
    return static_cast<Fp8Scaling>(position(scaling_names, "fp8_scaling", text));
}
CudaGraph cuda_graph_from_string(const std::string& text) {
    if (text == "partial") return CudaGraph::partial;
    return static_cast<CudaGraph>(set_from_string(graph_names, "cuda_graph scope", text));
}

std::string to_string(const OptimizerChoice& choice) { return choice.bf16_moments ? "adamw+bf16_moments" : "adamw"; }

OptimizerChoice optimizer_from_string(const std::string& text) {
    constexpr std::array names{"adamw", "adamw+bf16_moments"};
    return {position(names, "optimizer", text) == 1};
}

namespace recompute {

std::string to_string(unsigned set) { return set_to_string(recompute_names, set); }
unsigned from_string(const std::string& text) { return set_from_string(recompute_names, "recompute module", text); }

} // namespace recompute

namespace offload {

std::string to_string(unsigned set) { return set_to_string(offload_names, set); }
unsigned from_string(const std::string& text) { return set_from_string(offload_names, "offload module", text); }

} // namespace offload

void set_field(Plan& plan, const std::string& field, const std::string& value) {
    std::vector<std::string> known;
    for (const auto& [name, set] : setters()) {
        if (name == field) return set(plan, value);
        known.push_back(name);
    }
    refuse("unknown plan field '{}'{}; known are {}", shown(field), did_you_mean(field, known), fmt::join(known, ", "));
}

} // namespace moe
