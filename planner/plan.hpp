// A plan: every choice for a run. plan.json is this, versioned, with its model and hardware inside.
#pragma once

#include "planner/hardware.hpp"
#include "planner/model.hpp"

#include <cstdint>
#include <memory>
#include <string>

namespace moe {

enum class ScheduleKind : std::uint8_t { one_f_one_b, interleaved };
enum class Dispatcher : std::uint8_t { alltoall, allgather, deepep, hybridep };
enum class CudaGraph : std::uint8_t { none, partial, full };

// Modules that can be recomputed in the backward pass, by Megatron's names; a plan holds a set of them.
namespace recompute {
inline constexpr unsigned layernorm = 1, core_attn = 2, mla_up_proj = 4, moe_act = 8, mlp = 16, shared_experts = 32,
                          moe = 64, full = 128;
std::string to_string(unsigned set);           // "layernorm+moe_act", "none"
unsigned from_string(const std::string& text); // throws Error (bad_input) naming the known modules
} // namespace recompute

struct OptimizerChoice {
    bool bf16_moments = false; // exp_avg and exp_avg_sq stored as BF16 instead of FP32
    bool operator==(const OptimizerChoice&) const = default;
};

struct Plan {
    std::shared_ptr<const Model> model;
    std::shared_ptr<const Hardware> hardware;
    std::string stack; // software generation; "moe-plan" is what execute runs

    // workload
    std::int64_t seq = 0; // tokens per sequence
    std::int64_t gbs = 0; // sequences per step

    // mesh: gpus = tp*cp*dp*pp = etp*ep*edp*pp
    int gpus = 1;
    int tp = 1, cp = 1, dp = 1, pp = 1, vpp = 1;
    int ep = 1, etp = 1, edp = 1;
    std::string rank_order = "tp-cp-ep-dp-pp"; // left varies fastest

    std::int64_t mbs = 1; // sequences per micro-batch
    ScheduleKind schedule = ScheduleKind::one_f_one_b;
    std::string layout; // "" = stages cut as evenly as possible; else Megatron's layout string

    Precision precision = Precision::bf16;
    unsigned recompute = 0; // set of recompute:: modules
    std::string offload;    // module names joined by '+', "" = none
    OptimizerChoice optimizer;
    bool fsdp = false;
    Dispatcher dispatcher = Dispatcher::alltoall;
    double capacity = 0.0; // factor over the balanced load; 0 = worst case, never overflows
    bool ep_overlap = false;
    CudaGraph cuda_graph = CudaGraph::none;

    int micro_batches() const { return static_cast<int>(gbs / (mbs * dp)); }
    int stage_ranks() const { return tp * cp * dp; } // ranks of one pipeline stage
    // Tokens of one micro-batch on one rank: inside the TP region (sequence gathered over TP) and outside of it.
    std::int64_t tokens_gathered() const { return mbs * seq / cp; }
    std::int64_t tokens_local() const { return mbs * seq / (static_cast<std::int64_t>(cp) * tp); }
};

const char* to_string(ScheduleKind kind);
const char* to_string(Dispatcher dispatcher);
const char* to_string(CudaGraph graph);
ScheduleKind schedule_from_string(const std::string& text);
Dispatcher dispatcher_from_string(const std::string& text);
CudaGraph cuda_graph_from_string(const std::string& text);
// "adamw" (FP32 moments) or "adamw+bf16_moments".
std::string to_string(const OptimizerChoice& choice);
OptimizerChoice optimizer_from_string(const std::string& text);

// The reason why a plan is impossible, empty when it is sound: divisibility of every axis, both factorings equal to
// gpus, layers against stages, experts against EP, heads against TP, batch against DP*MBS, and so on. `counter` is a
// short key under which search counts the rejection ("experts % ep", ...); `message` names the numbers.
struct PlanFault {
    std::string counter, message;
    explicit operator bool() const { return !counter.empty(); }
};
PlanFault check_plan(const Plan& plan);

// plan.json. from_json throws Error (bad_input) for anything that is not a sound plan, naming the field.
std::string plan_to_json(const Plan& plan);
Plan plan_from_json(const std::string& text, const std::string& place);
Plan load_plan(const std::string& path);
// Pins or sets one field by the names of the CLI's --fix (tp, cp, ..., cuda_graph). Throws Error (bad_input).
void set_field(Plan& plan, const std::string& field, const std::string& value);

} // namespace moe
