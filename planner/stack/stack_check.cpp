// The check of a plan against a stack: what the stack offers, and the rules of its engine.
#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan_choices.hpp"
#include "planner/plan/schedule.hpp"
#include "planner/stack/requirements.hpp"
#include "planner/stack/stack.hpp"

#include <algorithm>

namespace moe::stack {

namespace {

template <class T>
bool offers(const std::vector<T>& list, T value) {
    return std::find(list.begin(), list.end(), value) != list.end();
}

template <class T>
std::string names(const std::vector<T>& list) {
    std::vector<std::string> words;
    for (const T value : list) words.emplace_back(to_string(value));
    return fmt::format("{}", fmt::join(words, ", "));
}

// The scopes of a set are offered one by one; no graph at all only where the stack says so.
bool offers_graph(const Stack& s, plan::CudaGraph wanted) {
    if (wanted == plan::CudaGraph::none) return offers(s.cuda_graphs, wanted);
    plan::CudaGraph all = plan::CudaGraph::none;
    for (const plan::CudaGraph graph : s.cuda_graphs) all = all | graph;
    return plan::holds(all, wanted);
}

plan::PlanFault check_mesh(const plan::Plan& p, const Stack& s) {
    if (p.tp > 1 && !s.tensor)
        return {"stack: tp", fmt::format("tp {}: stack {} has no tensor parallelism", p.tp, s.name)};
    if (p.cp > 1 && !s.context)
        return {"stack: cp", fmt::format("cp {}: stack {} has no context parallelism: set cp 1", p.cp, s.name)};
    if (p.etp > 1 && !s.expert_tensor)
        return {"stack: etp",
                fmt::format("etp {}: stack {} does not split experts over ranks: set etp 1", p.etp, s.name)};
    if (p.vpp > 1 && !s.interleaved)
        return {"stack: vpp", fmt::format("vpp {}: stack {} has no interleaved schedule: set vpp 1", p.vpp, s.name)};
    return {};
}

// What a stack offers elsewhere and this machine lacks something for is refused with the reason.
std::string refused(const plan::Plan& p, const Stack& s, const std::string& otherwise) {
    const std::string reason = lacking(p, s);
    return reason.empty() ? otherwise : fmt::format("stack {} on {}: {}", s.name, p.hardware->name, reason);
}

plan::PlanFault check_features(const plan::Plan& p, const Stack& s) {
    if (!offers(s.precisions, p.precision))
        return {"stack: precision",
                fmt::format("precision {}: {}", machine::to_string(p.precision),
                            refused(p, s, fmt::format("stack {} offers {}", s.name, names(s.precisions))))};
    for (const std::optional<machine::Precision>& module :
         {p.attention_precision, p.expert_precision, p.head_precision})
        if (module && !offers(s.precisions, *module))
            return {"stack: module precision", fmt::format("precision {} of a module: stack {} offers {}",
                                                           machine::to_string(*module), s.name, names(s.precisions))};
    if (p.ep * p.etp > 1 && !offers(s.dispatchers, p.dispatcher))
        return {"stack: dispatcher", fmt::format("dispatcher {}: {}", plan::to_string(p.dispatcher),
                                                 refused(p, s,
                                                         fmt::format("stack {} offers {} on {}", s.name,
                                                                     names(s.dispatchers), p.hardware->name)))};
    if (p.fp8_wgrad && !p.blocks_by_rows())
        return {"stack: fp8_wgrad",
                fmt::format("fp8_wgrad on: wgrad of stack {} has the precision of its recipe: set it off", s.name)};
    if (!offers_graph(s, p.cuda_graph))
        return {"stack: cuda_graph",
                fmt::format("cuda_graph {}: stack {} offers {} on {}", plan::to_string(p.cuda_graph), s.name,
                            names(s.cuda_graphs), p.hardware->name)};
    if ((p.recompute & ~s.recompute_modules) != 0)
        return {"stack: recompute", fmt::format("recompute {}: stack {} recomputes only {}",
                                                plan::recompute::to_string(p.recompute & ~s.recompute_modules), s.name,
                                                plan::recompute::to_string(s.recompute_modules))};
    if (p.paged_stash && !s.paged_stash)
        return {"stack: paged_stash", fmt::format("paged_stash on: stack {} has none: set it off", s.name)};
    if (p.optimizer.narrow() && !s.bf16_moments)
        return {"stack: optimizer",
                fmt::format("optimizer {}: stack {} keeps FP32 moments only", plan::to_string(p.optimizer), s.name)};
    if (p.steps_on_host() && !s.executable)
        return {"stack: offload",
                fmt::format("offload optimizer_step: stack {} has offload optimizer, which stands for its own step on "
                            "the host: leave optimizer_step out",
                            s.name)};
    if (p.optimizer.muon && !s.muon)
        return {"stack: optimizer", fmt::format("optimizer muon: stack {} has AdamW only: set it adamw", s.name)};
    if (p.lora.on() && !s.executable)
        return {"stack: lora", fmt::format("lora {}: stack {} is priced without adapters: use the stack moe-plan",
                                           plan::to_string(p.lora), s.name)};
    if (p.ep_overlap && !s.ep_overlap)
        return {"stack: ep_overlap",
                fmt::format("ep_overlap on: stack {} has none on {}: set it off", s.name, p.hardware->name)};
    return {};
}

plan::PlanFault fault_of_rule(const Rule* broken, const Stack& stack) {
    if (broken == nullptr) return {};
    return {stack.engine.name + ": " + broken->name, fmt::format("{} ({})", broken->message, broken->source)};
}

} // namespace

plan::PlanFault check_offers(const plan::Plan& plan, const Stack& stack) {
    if (stack.executable && !plan.model->not_executable.empty())
        return {"stack: model", fmt::format("model {}: stack {} offers only what execute runs: {}", plan.model->name,
                                            stack.name, plan.model->not_executable)};
    if (stack.executable)
        if (const plan::PlanFault fault = plan::check_executable(plan))
            return {"stack: " + fault.counter, fmt::format("stack {}: {}", stack.name, fault.message)};
    if (plan::PlanFault fault = check_mesh(plan, stack)) return fault;
    return check_features(plan, stack);
}

std::vector<const Rule*> broken_rules(const plan::Plan& plan, const Stack& stack) {
    return stack.rules == nullptr ? std::vector<const Rule*>{} : stack.rules->broken_by(plan);
}

plan::PlanFault check_stack(const plan::Plan& plan, const Stack& stack) {
    if (plan::PlanFault fault = check_offers(plan, stack)) return fault;
    return fault_of_rule(stack.rules == nullptr ? nullptr : stack.rules->first_broken(plan), stack);
}

plan::PlanFault check_stack(const plan::Plan& plan, const Stack& stack, const OpenRules& rules) {
    if (plan::PlanFault fault = check_offers(plan, stack)) return fault;
    return fault_of_rule(rules.first_broken(plan), stack);
}

bool fuses_experts(const plan::Plan& plan, const Stack& stack) {
    const std::vector<machine::Precision>& in = stack.fused_experts;
    return std::find(in.begin(), in.end(), plan.experts()) != in.end() &&
           (plan.paged_stash || !stack.fused_experts_need_stash);
}

bool sound(const plan::Plan& plan, const Stack& stack) { return !plan::check_plan(plan) && !check_stack(plan, stack); }

std::vector<plan::Plan> sound_cuts(plan::Plan plan, const Stack& stack) {
    std::vector<plan::Plan> result;
    plan.layout.clear();
    if (sound(plan, stack)) result.push_back(plan);
    try {
        plan.layout = plan::layout_to_string(plan::balanced_stages(*plan.model, plan.seq, plan.pp * plan.vpp));
    } catch (const Error&) {
        return result; // fewer units than stages
    }
    if (sound(plan, stack)) result.push_back(plan);
    return result;
}

} // namespace moe::stack
