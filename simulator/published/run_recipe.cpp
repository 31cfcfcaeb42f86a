// Reads recipe words by their meaning: sources spell one setting in several ways.
#include "simulator/published/run_recipe.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/bf16_layers.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/schedule.hpp"
#include "planner/stack/stack.hpp"

#include <algorithm>
#include <cctype>
#include <cstdlib>

namespace moe::published {
namespace {

std::string lower(std::string text) {
    std::transform(text.begin(), text.end(), text.begin(),
                   [](char c) { return static_cast<char>(std::tolower(static_cast<unsigned char>(c))); });
    return text;
}

bool begins(const std::string& text, const char* word) { return text.rfind(word, 0) == 0; }
bool holds(const std::string& text, const char* word) { return text.find(word) != std::string::npos; }

// Takes a word out of "a+b+c"; false where it is not there.
bool take_word(std::string& text, const std::string& word) {
    const std::string joined = "+" + text + "+";
    const std::size_t at = joined.find("+" + word + "+");
    if (at == std::string::npos) return false;
    const std::string rest = joined.substr(0, at) + joined.substr(at + word.size() + 1);
    text = rest.size() > 1 ? rest.substr(1, rest.size() - 2) : "";
    return true;
}

unsigned recompute_set(std::string text, const model::Model& model, std::vector<std::string>& warnings) {
    // Megatron-LM, megatron/core/transformer/transformer_config.py: mhc, what hyper-connections (DeepSeek-V4) write.
    if (take_word(text, "mhc"))
        warnings.push_back("recompute mhc is not priced: what hyper-connections keep is not counted in memory either");
    if (!begins(text, "selective")) return applicable_recompute(plan::recompute::from_string(text), model);
    return plan::recompute::operators; // torchtitan's, see choices.hpp
}

// "expert_fc1+moe_act", "optimizer states+expert_fc1"; other sources' words as a warning.
unsigned offload_set(const std::string& text, const model::Model& model, std::vector<std::string>& warnings) {
    if (text.empty() || begins(text, "none")) return 0;
    unsigned set = 0;
    if (holds(text, "optimizer states")) set |= plan::offload::optimizer;
    for (unsigned module = 1; module < plan::offload::optimizer; module <<= 1)
        if (holds(text, plan::offload::to_string(module).c_str())) set |= module;
    const bool routed = std::any_of(model.kinds.begin(), model.kinds.end(),
                                    [](const model::LayerKind& kind) { return kind.moe.has_value(); });
    if (!routed) set &= ~(plan::offload::expert_fc1 | plan::offload::moe_act);
    if (set == 0) warnings.push_back("offload of " + text + " is not priced: its copies count as hidden");
    return set;
}

plan::Dispatcher dispatcher_of(const std::string& text) {
    std::string word = lower(text);
    word.resize(std::min({word.size(), word.find('('), word.find("-like")}));
    std::erase_if(word, [](char c) { return c == ' ' || c == '_'; }); // "NCCL EP", "nccl_ep"
    return plan::dispatcher_from_string(word);
}

// Megatron's words; a ring is what it and the others do unless they are asked for something else (Megatron-LM,
// megatron/core/extensions/transformer_engine.py: cp_comm_type None is p2p).
plan::ContextComm context_comm_of(const std::string& text, std::vector<std::string>& warnings) {
    const std::string word = lower(text);
    if (word.empty() || word == "p2p") return plan::ContextComm::ring;
    if (word == "a2a") return plan::ContextComm::alltoall;
    if (word == "a2a+p2p") return plan::ContextComm::hierarchical;
    if (word == "allgather" || word == "all_gather") {
        warnings.push_back("cp_comm " + text + " is priced as a ring: gathered keys and values are no choice of plans");
        return plan::ContextComm::ring;
    }
    refuse("cp_comm '{}': must be p2p, a2a, allgather or a2a+p2p", shown(text));
}

plan::CudaGraph cuda_graph_of(const std::string& text) {
    const std::string words = lower(text);
    if (begins(words, "none")) return plan::CudaGraph::none;
    if (holds(words, "full_iteration")) return plan::CudaGraph::full;
    if (holds(words, "per layer") || holds(words, "transformer_engine:all")) return plan::CudaGraph::partial;
    plan::CudaGraph graph = plan::CudaGraph::none;
    // Mamba layers are in the scope of attention here.
    if (holds(words, "attn") || holds(words, "mamba")) graph = graph | plan::CudaGraph::attn;
    if (holds(words, "mlp")) graph = graph | plan::CudaGraph::mlp;
    // Megatron's scope of the router holds the shared experts, where they do not run beside the dispatch.
    if (holds(words, "moe_router")) graph = graph | plan::CudaGraph::moe_router | plan::CudaGraph::shared_experts;
    if (holds(words, "moe_preprocess")) graph = graph | plan::CudaGraph::moe_preprocess;
    if (graph != plan::CudaGraph::none) return graph;
    refuse("cuda_graph '{}': name none, full_iteration or modules of a layer", shown(text));
}

bool bf16_moments(const std::string& optimizer) {
    const std::string words = lower(optimizer);
    return holds(words, "exp_avg=bf") || holds(words, "precision_aware(bf16");
}

// "main_grads=bfloat16", "main_grads=fp32"; otherwise the usual choice of the generation.
machine::Precision gradients_of(const std::string& optimizer, const stack::Stack& stack) {
    const std::string words = lower(optimizer);
    if (holds(words, "main_grads=bf")) return machine::Precision::bf16;
    return holds(words, "main_grads=f") ? machine::Precision::fp32 : stack.usual_gradients;
}

// "FP8" alone is Transformer Engine's default recipe of its time, which scales by history.
plan::Fp8Scaling scaling_of(const std::string& precision) {
    const std::string word = lower(precision);
    return word == "fp8" || begins(word, "fp8-delayed") ? plan::Fp8Scaling::delayed : plan::Fp8Scaling::current;
}

// Modules whose precision is not that of the linear layers.
void module_precisions(const Run& run, plan::Plan& plan) {
    plan.fp8_scaling = scaling_of(run.precision);
    if (holds(run.other_settings, "fp8_attention")) plan.attention_precision = machine::Precision::fp8_tensor;
    if (holds(run.other_settings, "fp8_lm_head") && !plan.model->tied_embeddings) plan.head_precision = plan.precision;
    // "first/last layers bf16 (0/14)"
    const std::string words = "layers bf16 (";
    const std::size_t at = run.other_settings.find(words);
    int first = 0, last = 0;
    if (at != std::string::npos &&
        std::sscanf(run.other_settings.c_str() + at + words.size(), "%d/%d)", &first, &last) == 2)
        plan::keep_in_bf16(plan, first, last);
}

// "expert_rank_capacity=1.5", "moe_expert_rank_capacity_factor=1.2": buffers of a sync-free dispatch. 0 = as many rows
// as there are, which the host knows.
double capacity_of(const Run& run) {
    const std::size_t word = run.other_settings.find("expert_rank_capacity");
    if (word == std::string::npos) return 0.0;
    const std::size_t equals = run.other_settings.find('=', word);
    if (equals == std::string::npos) return 0.0;
    const double factor = std::strtod(run.other_settings.c_str() + equals + 1, nullptr);
    return factor >= 1.0 && factor <= 1e6 ? factor : 0.0;
}

// "token-drop, capacity 1.0": an expert takes a factor of the balanced load, and its input is filled up to that.
void drop_tokens(const Run& run, plan::Plan& plan) {
    if (!holds(run.moe_balance, "capacity 1")) return;
    plan.router.expert_capacity = 1.0;
    plan.router.pad_to_capacity = plan.dispatcher == plan::Dispatcher::alltoall;
}

// The stack's usual choices hold for plans that can use them: what excludes them is left off.
void usual_graphs(const stack::Stack& stack, plan::Plan& plan) {
    plan.cuda_graph = stack.usual_cuda_graph;
    if (stack::check_stack(plan, stack)) plan.cuda_graph = plan::CudaGraph::none;
}

void usual_overlap(const stack::Stack& stack, plan::Plan& plan) {
    plan.ep_overlap = stack.usual_ep_overlap && plan.ep > 1;
    if (plan.ep_overlap && stack::check_stack(plan, stack)) plan.ep_overlap = false;
}

} // namespace

machine::Precision recipe_precision(const std::string& text) {
    const std::string word = lower(text);
    if (word == "fp8" || begins(word, "fp8-delayed") || begins(word, "fp8-tensor"))
        return machine::Precision::fp8_tensor;
    // A scale for each row costs kernels what one for each block does: pytorch/ao, docs/source/workflows/training.md,
    // gains 10 % over BF16 with it where one for the tensor gains 25 % (H100), and 4 instead of 25 % on B200.
    if (begins(word, "fp8-rowwise")) return machine::Precision::fp8_blockwise;
    return machine::precision_from_string(word);
}

unsigned applicable_recompute(unsigned set, const model::Model& model) {
    bool routed = false, dense = false, latent = false;
    for (const model::LayerKind& kind : model.kinds) {
        routed = routed || kind.moe;
        dense = dense || kind.dense();
        const model::AttentionKind attention = kind.attention.kind;
        latent = latent || attention == model::AttentionKind::mla || attention == model::AttentionKind::compressed;
    }
    if (!routed) set &= ~(plan::recompute::moe | plan::recompute::moe_act | plan::recompute::shared_experts);
    if (!latent) set &= ~plan::recompute::mla_up_proj;
    return (set & plan::recompute::full) != 0 ? plan::recompute::full : set;
}

void apply_recipe(const Run& run, const stack::Stack& stack, plan::Plan& plan, std::vector<std::string>& warnings) {
    if (!run.recompute_modules.empty()) plan.recompute = recompute_set(run.recompute_modules, *plan.model, warnings);
    plan.offload = offload_set(run.offload_modules, *plan.model, warnings);
    if (bf16_moments(run.optimizer) && stack.bf16_moments) plan.optimizer.moments = plan::Moments::bf16;
    plan.gradients = gradients_of(run.optimizer, stack);
    if (holds(run.moe_balance, "natural"))
        warnings.push_back("natural routing of unknown distribution: priced as balanced");
    plan.capacity = capacity_of(run);
    module_precisions(run, plan);
    // torchtitan's name of the same is asyncTP.
    plan.tp_overlap =
        plan.tp > 1 && (holds(run.other_settings, "tp_comm_overlap") || holds(run.other_settings, "asyncTP"));
    plan.paged_stash = plan.capacity > 0.0 && stack.paged_stash && holds(run.other_settings, "paged_stash") &&
                       (plan.offload & (plan::offload::expert_fc1 | plan::offload::moe_act)) == 0; // one or the other
    if (plan.cp > 1) plan.cp_comm = context_comm_of(run.cp_comm, warnings);
    plan.dispatcher = run.dispatcher.empty() ? stack.usual_dispatcher : dispatcher_of(run.dispatcher);
    if (!run.cuda_graph.empty()) plan.cuda_graph = cuda_graph_of(run.cuda_graph);
    drop_tokens(run, plan);
    if (run.ep_overlap) plan.ep_overlap = *run.ep_overlap && plan.ep > 1;
    if (run.cuda_graph.empty()) usual_graphs(stack, plan);
    if (!run.ep_overlap) usual_overlap(stack, plan);
    plan.delay_wgrad = holds(run.other_settings, "delay_wgrad") && (plan.ep_overlap || plan.pp > 1);
}

std::string recipe_layout(const Run& run, const plan::Plan& plan, std::vector<std::string>& warnings) {
    std::string layout = run.pipeline_layout;
    if (layout == "DualPipe")
        refuse("pipeline layout DualPipe: a rank holds two copies of its weights, which no plan says: priced is "
               "DualPipeV");
    if (layout.find_first_not_of("EtmL|()*0123456789, ") != std::string::npos) {
        warnings.push_back("pipeline layout " + layout + " is no layout string: priced as " +
                           plan::to_string(plan.schedule));
        layout.clear();
    }
    if (!layout.empty()) {
        if (plan.model->mtp.empty()) layout.erase(std::remove(layout.begin(), layout.end(), 'm'), layout.end());
        return layout;
    }
    const auto layers = static_cast<std::int64_t>(plan.model->layers.size());
    const std::int64_t count = std::int64_t{plan.pp} * plan.vpp; // not checked yet: any two degrees
    if (layers % count == 0 || (layers + 2) % count != 0) return {};
    const int units = static_cast<int>((layers + 2) / count);
    std::vector<plan::Stage> cut(static_cast<std::size_t>(count));
    int next = 0;
    for (plan::Stage& stage : cut) {
        stage.embedding = &stage == &cut.front();
        stage.loss = &stage == &cut.back();
        stage.first_layer = next;
        stage.layers = units - (stage.embedding ? 1 : 0) - (stage.loss ? 1 : 0);
        next += stage.layers;
    }
    cut.back().mtp = static_cast<int>(plan.model->mtp.size());
    return plan::layout_to_string(cut);
}

} // namespace moe::published
