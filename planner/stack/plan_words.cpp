// One row for each word that is a number, a set or a name; the other plan fields are text.
#include "planner/stack/plan_words.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/plan/bf16_layers.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/plan_fields.hpp"
#include "planner/stack/layer_facts.hpp"
#include "planner/stack/model_words.hpp"

#include <algorithm>
#include <map>

namespace moe::stack {
namespace {

using machine::Precision;
using plan::Plan;

const char* name_of(const std::optional<Precision>& precision) {
    return precision ? machine::to_string(*precision) : "default";
}

const char* generation(const Plan& p) {
    const auto peak = [&p](Precision precision) { return p.hardware->peak_flops[static_cast<std::size_t>(precision)]; };
    return peak(Precision::mxfp8) > 0.0 || peak(Precision::nvfp4) > 0.0 ? "blackwell" : "hopper";
}

// A measured profile has the rules of the machine that it is like.
std::string machine_name(const Plan& p) {
    if (!p.hardware->like.empty()) return p.hardware->like;
    return p.hardware->name.substr(0, p.hardware->name.rfind("-measured"));
}

const char* exported_dispatcher(const Plan& p) {
    const bool asked = p.ep * p.etp > 1 || (p.capacity > 0.0 && plan::groups_by_expert(p.dispatcher));
    return plan::to_string(asked ? p.dispatcher : plan::Dispatcher::alltoall);
}

const char* bf16_layers_fit(const Plan& p) {
    return on_off(std::max(p.bf16_first, p.bf16_last) <= static_cast<int>(p.model->layers.size()) / p.pp);
}

const char* linear_heads_fit(const Plan& p) {
    const int parts = p.tp * p.cp;
    return on_off(first_kind(p, [parts](const model::LayerKind& k) {
                      return gated_delta(k) &&
                             (k.attention.key_heads % parts != 0 || k.attention.value_heads % parts != 0);
                  }) == nullptr);
}

const SetWord recompute_word{[](const Plan& p) { return p.recompute; }, plan::recompute::from_string,
                             plan::recompute::to_string};
const SetWord offload_word{[](const Plan& p) { return p.offload; }, plan::offload::from_string,
                           plan::offload::to_string};
const SetWord graph_word{
    [](const Plan& p) { return static_cast<unsigned>(p.cuda_graph); },
    [](const std::string& text) { return static_cast<unsigned>(plan::cuda_graph_from_string(text)); },
    [](unsigned set) { return plan::to_string(static_cast<plan::CudaGraph>(set)); }};

std::vector<PlanWord> plan_fields() {
    return {
        {"gpus", NumberWord{[](const Plan& p) { return double(p.gpus); }}},
        {"seq", NumberWord{[](const Plan& p) { return double(p.seq); }}},
        {"gbs", NumberWord{[](const Plan& p) { return double(p.gbs); }}},
        {"tp", NumberWord{[](const Plan& p) { return double(p.tp); }}},
        {"cp", NumberWord{[](const Plan& p) { return double(p.cp); }}},
        {"pp", NumberWord{[](const Plan& p) { return double(p.pp); }}},
        {"vpp", NumberWord{[](const Plan& p) { return double(p.vpp); }}},
        {"dp", NumberWord{[](const Plan& p) { return double(p.dp); }}},
        {"ep", NumberWord{[](const Plan& p) { return double(p.ep); }}},
        {"etp", NumberWord{[](const Plan& p) { return double(p.etp); }}},
        {"mbs", NumberWord{[](const Plan& p) { return double(p.mbs); }}},
        {"capacity", NumberWord{[](const Plan& p) { return p.capacity; }, true}},
        {"aux_loss", NumberWord{[](const Plan& p) { return p.router.aux_loss; }, true}},
        {"z_loss", NumberWord{[](const Plan& p) { return p.router.z_loss; }, true}},
        {"input_jitter", NumberWord{[](const Plan& p) { return p.router.input_jitter; }, true}},
        {"bias_update", NumberWord{[](const Plan& p) { return p.router.bias_update; }, true}},
        {"expert_capacity", NumberWord{[](const Plan& p) { return p.router.expert_capacity; }, true}},
        {"indexer_loss", NumberWord{[](const Plan& p) { return p.indexer.loss; }, true}},
        {"indexer_stage", NameWord{[](const Plan& p) { return plan::to_string(p.indexer.stage); }}},
        {"recompute", recompute_word},
        {"offload", offload_word},
        {"cuda_graph", graph_word},
        {"schedule", NameWord{[](const Plan& p) { return plan::to_string(p.schedule); }}},
        {"precision", NameWord{[](const Plan& p) { return machine::to_string(p.precision); }}},
        {"attention_precision", NameWord{[](const Plan& p) { return name_of(p.attention_precision); }}},
        {"expert_precision", NameWord{[](const Plan& p) { return name_of(p.expert_precision); }}},
        {"head_precision", NameWord{[](const Plan& p) { return name_of(p.head_precision); }}},
        {"fp8_scaling", NameWord{[](const Plan& p) { return plan::to_string(p.fp8_scaling); }}},
        {"fp8_wgrad", NameWord{[](const Plan& p) { return on_off(p.fp8_wgrad); }}},
        {"gradients", NameWord{[](const Plan& p) { return machine::to_string(p.gradients); }}},
        {"fsdp", NameWord{[](const Plan& p) { return on_off(p.fsdp); }}},
        {"fsdp_replicas", NumberWord{[](const Plan& p) { return double(p.fsdp_replicas); }}},
        {"dispatcher", NameWord{[](const Plan& p) { return plan::to_string(p.dispatcher); }}},
        {"cp_comm", NameWord{[](const Plan& p) { return plan::to_string(p.cp_comm); }}},
        {"paged_stash", NameWord{[](const Plan& p) { return on_off(p.paged_stash); }}},
        {"tp_overlap", NameWord{[](const Plan& p) { return on_off(p.tp_overlap); }}},
        {"ep_overlap", NameWord{[](const Plan& p) { return on_off(p.ep_overlap); }}},
        {"delay_wgrad", NameWord{[](const Plan& p) { return on_off(p.delay_wgrad); }}},
        {"deterministic", NameWord{[](const Plan& p) { return on_off(p.deterministic); }}},
        {"load_balancing", NameWord{[](const Plan& p) { return plan::to_string(p.router.load_balancing); }}},
        {"drop_policy", NameWord{[](const Plan& p) { return plan::to_string(p.router.drop_policy); }}},
        {"drop_scope", NameWord{[](const Plan& p) { return plan::to_string(p.router.drop_scope); }}},
        {"pad_to_capacity", NameWord{[](const Plan& p) { return on_off(p.router.pad_to_capacity); }}},
        {"rank_order", NameWord{[](const Plan& p) { return p.rank_order.c_str(); }}},
        {"layout", NameWord{[](const Plan& p) { return p.layout.empty() ? "none" : p.layout.c_str(); }}},
        {"bf16_layers", TextWord{plan::bf16_layers_to_string}},
        {"optimizer", TextWord{[](const Plan& p) { return plan::to_string(p.optimizer); }}},
        {"lora", TextWord{[](const Plan& p) { return plan::to_string(p.lora); }}},
    };
}

std::vector<PlanWord> facts() {
    return {
        {"hardware", TextWord{machine_name}},
        {"hardware.generation", NameWord{generation}},
        {"hardware.vendor", TextWord{[](const Plan& p) { return p.hardware->vendor; }}},
        {"hardware.compute_capability", NumberWord{[](const Plan& p) { return p.hardware->compute_capability; }, true}},
        {"hardware.nvlink_domain", NumberWord{[](const Plan& p) { return double(p.hardware->nvlink_domain); }}},
        {"micro_batches", NumberWord{[](const Plan& p) { return double(p.micro_batches()); }}},
        {"derived.etp_form", NameWord{[](const Plan& p) {
             if (p.etp == 1) return "one";
             return p.etp == p.tp ? "tp" : "other";
         }}},
        {"derived.expert_ranks", NumberWord{[](const Plan& p) { return double(p.ep) * p.etp; }}},
        {"derived.dispatcher", NameWord{exported_dispatcher}},
        {"derived.cp_inner", NumberWord{[](const Plan& p) { return double(plan::context_inner(p)); }}},
        {"derived.cp_outer", NumberWord{[](const Plan& p) { return double(p.cp) / plan::context_inner(p); }}},
        {"derived.cp_sizes", TextWord{[](const Plan& p) {
             return fmt::format("[{},{}]", plan::context_inner(p), p.cp / plan::context_inner(p));
         }}},
        {"derived.key_replicas", NumberWord{[](const Plan& p) { return double(plan::key_replicas(p)); }}},
        {"derived.bf16_layers_fit", NameWord{bf16_layers_fit}},
        {"derived.expert_precision_is_precision",
         NameWord{[](const Plan& p) { return on_off(p.experts() == p.precision); }}},
        {"derived.linear_heads_fit", NameWord{linear_heads_fit}},
    };
}

const std::map<std::string, PlanWord>& words() {
    static const std::map<std::string, PlanWord> all = [] {
        std::map<std::string, PlanWord> by_name;
        for (std::vector<PlanWord>& list : std::vector{plan_fields(), facts(), model_words()})
            for (PlanWord& word : list) by_name.emplace(word.name, std::move(word));
        for (const std::string& field : plan::field_names())
            by_name.try_emplace(
                field, PlanWord{field, TextWord{[field](const Plan& p) { return plan::field_text(p, field); }}});
        return by_name;
    }();
    return all;
}

struct AsText {
    const Plan& plan;
    std::string operator()(const NumberWord& word) const {
        const double number = word.read(plan);
        return number == 0.0 && word.none_is_zero ? "none" : fmt::format("{}", number);
    }
    std::string operator()(const SetWord& word) const { return word.text(word.read(plan)); }
    std::string operator()(const NameWord& word) const { return word.read(plan); }
    std::string operator()(const TextWord& word) const { return word.read(plan); }
};

} // namespace

const PlanWord* find_plan_word(const std::string& name) {
    const auto found = words().find(name);
    return found == words().end() ? nullptr : &found->second;
}

std::vector<std::string> plan_word_names() {
    std::vector<std::string> names;
    for (const auto& [name, word] : words()) names.push_back(name);
    return names;
}

std::string plan_word(const plan::Plan& plan, const std::string& name) {
    if (const PlanWord* word = find_plan_word(name)) return std::visit(AsText{plan}, word->reader);
    refuse("unknown plan field or fact '{}'{}", shown(name), did_you_mean(name, plan_word_names()));
}

} // namespace moe::stack
