// A stack: a software generation with what it can do and how efficiently. "moe-plan" is exactly what execute runs.
#pragma once

#include "planner/machine/coefficients.hpp"
#include "planner/machine/fwd.hpp"
#include "planner/machine/precision.hpp"
#include "planner/plan/choices.hpp"
#include "planner/plan/fwd.hpp"
#include "planner/stack/rules.hpp"
#include "planner/stack/workload.hpp"

#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace moe::stack {

// Fractions of a link's bandwidth by tier; between domains an exchange also uses the links inside.
struct LinkShares {
    double nvlink = 1.0, nic = 1.0;
    double start = 0.0; // seconds of a dispatch or combine before and behind its rows: metadata, barriers
    double row = 0.0;   // seconds of one multiprocessor for each row that it sends over NVLink, beside its bytes
};

// Efficiencies are fractions of the hardware's rate that large operations reach; times are seconds. Few and physical;
// each carries its source in the stack's JSON.
struct StackCosts {
    std::array<double, machine::precision_count> gemm{};         // share of peak_flops, large dense GEMM
    std::array<double, machine::precision_count> grouped_gemm{}; // share of peak_flops, many rows per expert
    double attention_forward = 0.6, attention_backward = 0.45;   // share of the BF16 peak, long sequences
    double memory = 0.8;                          // share of memory bandwidth, fused elementwise and norm kernels
    double permute = 0.5;                         // share of memory bandwidth, gathers of rows
    double scan = 0.16;                           // share of memory bandwidth, Mamba-2's scan; as fitted for Megatron
    double kernel_seconds = 2e-6;                 // device time of an empty kernel (tail and start)
    double launch_seconds = 5e-6;                 // host time to launch one op without CUDA graphs
    double graph_launch_seconds = 0.5e-6;         // host time per op inside a CUDA graph
    std::map<std::string, LinkShares> dispatcher; // shares by the dispatcher's name
    double exchange_sms = 32.0;                   // multiprocessors that a dispatcher sends rows over NVLink with
    double collective = 0.8;                      // NCCL ring collectives, fraction of link bandwidth
    double step_seconds = 0.0;                    // fixed host work per step
    double sync_seconds = 0.0;                    // host wait per MoE layer where a dispatcher reads counts on the host
    // Rates of latent attention over keys that an indexer picks, and the keys at which it reaches half of its rate.
    double attention_picked_forward = 0.65, attention_picked_backward = 0.28, attention_picked_half_length = 183.0;
    double attention_exponentials = 0.5;   // seconds of exponentials over those of products, BF16 forward, heads of 128
    double attention_half_length = 1200.0; // sequence length at which attention reaches half of its rate, tokens
    double overlap_sm_share = 0.0;         // share of the SMs that communication takes while EP overlap is on
    double fsdp_sm_share = 0.0;            // as overlap_sm_share, of FSDP, whose collectives run all the time
    // Kernels behind an op of the router, a gather of rows and a quantization, over those behind others.
    double routed_launches = 1.0; // host time of an op on routed rows, over that of other ops
    double router_launches = 1.0, permute_launches = 1.0, quantize_launches = 1.0;
    double recompute_launches = 1.0; // host time of a recomputed op over that of the same op in the forward
    double tile_seconds = 0.0;       // seconds of each wave of tiles of a product: filling the pipeline and writing out
    // Share of its rate that a product keeps where rows of an operand or its result begin at multiples of 4 or 8 bytes
    // only, of 2 alone, and of experts in either case.
    double unaligned = 1.0, unaligned_odd = 1.0, unaligned_experts = 1.0;
    double expert_launch_seconds = 0.0; // host time per local expert of a grouped product made of single ones
    // Bytes that move per element of the experts' last bias, which routing weights multiply, and of its gradients;
    // negative: what the ops say.
    double weighted_bias_bytes = -1.0, weighted_bias_grad_bytes = -1.0;
    double expert_seconds = 0.0;   // device time per local expert of the same, and of its rows' quantization
    double overlap_launches = 1.0; // host time of an op in merged slots over that of the same op alone
    double host_machine = 1.0, host_software = 1.0; // both multiply the launch times; applied when the stack is read
    double clock = 1.0;                // clock of the machine under full load, over the one that its peak FLOP/s assume
    double quantize_share = 1.0;       // share of a quantize op's bytes that are moved
    double fused_quantize_share = 1.0; // the same of routed rows where fused_experts holds; below 1 it is no own kernel
};

// Published figures that a stack stands for: a word of their source and its releases, newest last.
struct Publication {
    std::string source;
    std::vector<std::string> releases; // empty: every release of the source
    bool folding = true;               // false: a row that names no etp has tp there too (arXiv 2504.14960 section 3.2)
};

struct Stack {
    std::string name;                      // "moe-plan", "bridge-26.08", ...
    std::string release;                   // release as the source names it
    Engine engine;                         // whose rules its plans keep
    std::shared_ptr<const RuleList> rules; // those in force; may be null
    // What it needs of a machine; may be null. Precisions and dispatchers for which this one lacks something are left
    // out below.
    std::shared_ptr<const std::vector<Rule>> requirements;
    std::vector<machine::Precision> precisions;
    std::vector<plan::Dispatcher> dispatchers;
    std::vector<plan::CudaGraph> cuda_graphs;
    std::vector<plan::ScheduleKind> split_schedules; // schedules with backwards in two slots: tried on the plans found
    std::vector<unsigned> recompute_sets;            // the sets that search tries
    std::vector<plan::Dispatcher> host_synced;       // dispatchers that read routed counts on the host
    // Precisions in which a grouped product, its activation and its quantizations are single kernels for all experts,
    // and whether only plans with a paged stash turn them on.
    std::vector<machine::Precision> fused_experts;
    bool fused_experts_need_stash = false;
    bool executable = false; // execute can run what it offers
    bool tensor = true, context = true, expert_tensor = true, interleaved = true;
    bool ep_overlap = false;
    bool offloads = false; // may offload activations and states: tried on the plans found
    bool bf16_moments = false;
    bool muon = false;        // offers optimizer muon
    bool paged_stash = false; // see Plan
    // Further values of plan fields, by --fix name, that its recipes name: tried on the plans that search finds.
    std::map<std::string, std::vector<std::string>> recipe_choices;
    unsigned recompute_modules = 0; // all modules that a plan may name (a superset of the sets that search tries)
    machine::Precision usual_gradients = machine::Precision::fp32; // in which its recipes sum and reduce gradients
    // usual choices of the generation, taken by search unless fixed
    plan::Dispatcher usual_dispatcher = plan::Dispatcher::alltoall;
    plan::CudaGraph usual_cuda_graph = plan::CudaGraph::none;
    bool usual_ep_overlap = false;
    double usual_capacity = 0.0;  // Plan::capacity of graphs that hold a whole step with experts; 0 = it has none
    double memory_headroom = 0.0; // share of a GPU's memory that search leaves free unless asked otherwise
    std::string figures_of;       // the machine whose figures these are where the hardware is another one, else ""
    // Named capabilities whose absence costs something: profiles/stacks/base/features.json. Empty: costs are as stated.
    std::vector<std::string> features;
    StackCosts costs;
    std::string source;
    std::vector<Publication> published;
    std::vector<MeasuredRun> anchors; // the user's own runs, from a file of `calibrate --anchor`: anchored.hpp
};

// Loads a stack by name from profiles/stacks, where a file may state only what differs from its "base"; an empty name
// gives the hardware's default stack. Features can be added and dropped behind the name: "bridge-26.04,fused_grouped"
// or "bridge-26.04,no-fused_router". Figures that a stack states for some machines go by the profile's `like`, else by
// its name; a GPU of a name that the stack does not know has the figures of gb200-nvl72 or b200 (domains of up to 8) if
// it computes in MXFP8 or NVFP4, else those of h100. What the stack states for the profile's own name comes on top. A
// name that ends with ".json" is a file of anchored.hpp; the stack is then named after its base with the file's path
// behind it, "bridge-26.08,/home/me/cluster.json", which can be loaded like any other name. Throws Error (bad_input),
// also where the software does not run on the machine.
Stack load_stack(const std::string& name, const machine::Hardware& hardware);
// Loads a stack with other coefficients than those in profiles/coefficients.json.
Stack load_stack(const std::string& name, const machine::Hardware& hardware, const machine::Coefficients& coefficients);

// Names in profiles/stacks, sorted.
std::vector<std::string> stack_names();

// Tells whether the stack offers what the plan asks for, the rules of its engine aside: like check_plan(), empty when
// it does.
plan::PlanFault check_offers(const plan::Plan& plan, const Stack& stack);
// The rules of the stack's engine that the plan breaks, in their file's order.
std::vector<const Rule*> broken_rules(const plan::Plan& plan, const Stack& stack);
// Tells whether the stack's software would run the plan: check_offers(), then the first broken rule, counted as
// "ENGINE: RULE". Its message ends with the rule's source.
plan::PlanFault check_stack(const plan::Plan& plan, const Stack& stack);
// The same of plans that can break no other rules.
plan::PlanFault check_stack(const plan::Plan& plan, const Stack& stack, const OpenRules& rules);
// True where neither check_plan() nor check_stack() has anything against it.
bool sound(const plan::Plan& plan, const Stack& stack);
// True where one kernel works on the rows of all local experts, see Stack::fused_experts.
bool fuses_experts(const plan::Plan& plan, const Stack& stack);
// The sound ones of two cuts of the plan: its stages cut evenly, and by balanced_stages().
std::vector<plan::Plan> sound_cuts(plan::Plan plan, const Stack& stack);

} // namespace moe::stack
