// Draws models and plans field by field; a case is the list of fields that were drawn, so that shrinking removes
// fields.
#include "tests/engine/train/random_cases.hpp"

#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/stack/stack.hpp"
#include "tests/support/dice.hpp"

#include <algorithm>
#include <array>
#include <numeric>

using namespace moe;

namespace {

std::string number(std::int64_t value) { return fmt::format("{}", value); }

// The fields of what is trained, which the one-rank plan has as well.
constexpr std::array trained_fields{"optimizer",  "precision",   "balance",      "load_balancing", "aux_loss",
                                    "z_loss",     "lora",        "documents",    "bias_update",    "input_jitter",
                                    "drop_scope", "drop_policy", "indexer_loss", "indexer_stage"};
constexpr const char* all_tokens = "64"; // an expert_capacity of which nothing is dropped

bool states(const RandomCase& c, const std::string& field) {
    return std::any_of(c.plan.begin(), c.plan.end(), [&field](const auto& stated) { return stated.first == field; });
}

void draw_balance(Dice& dice, RandomCase& c) {
    if (dice.one_in(3)) {
        c.plan.emplace_back("aux_loss", "0.1");
        c.plan.emplace_back("load_balancing", dice.of({"seq_aux_loss", "global_aux_loss"}));
    }
    if (dice.one_in(6)) c.plan.emplace_back("z_loss", "0.01");
    if (dice.one_in(8)) c.plan.emplace_back("balance", "forced");
    if (dice.aside().one_in(4)) c.plan.emplace_back("input_jitter", "0.1");
    if (Dice drops = dice.aside(); drops.next() % 5 == 1) { // of whole sequences, which every plan drops alike
        c.plan.emplace_back("expert_capacity", "1");
        c.plan.emplace_back("drop_scope", "full_sequence");
        c.plan.emplace_back("drop_policy", drops.of({"probs", "position"}));
    }
    if (c.model.rfind("deepseek3", 0) == 0 && dice.one_in(3)) c.plan.emplace_back("bias_update", "0.01");
}

bool is_dense(const std::string& model) {
    return model == "llama" || model == "nemotron" || model == "nemotronh" || model == "qwen3.5";
}

// A list as JSON with a word drawn for every layer.
std::string drawn_list(Dice& dice, int layers, std::initializer_list<const char*> words) {
    std::vector<std::string> list;
    for (int layer = 0; layer < layers; ++layer) list.emplace_back(dice.of(words));
    return fmt::format("[{}]", fmt::join(list, ", "));
}

const char* experts_field(const std::string& model) {
    if (model == "mixtral" || model == "gptoss" || model == "granite" || model == "granite4" || model == "llama4" ||
        model == "phimoe")
        return "num_local_experts";
    if (model == "step" || model == "ernie") return "moe_num_experts";
    const bool deepseek = model.rfind("deepseek", 0) == 0 || model == "mistral4" || model == "mimo" ||
                          model == "nemotron3" || model == "glm5";
    return deepseek ? "n_routed_experts" : "num_experts";
}

// Layers of one part each.
void draw_hybrid(Dice& dice, RandomCase& c, int layers) {
    std::string pattern;
    for (int layer = 0; layer < layers; ++layer)
        pattern += is_dense(c.model) ? dice.of({"M", "*", "-"}) : dice.of({"M", "*", "E"});
    if (!is_dense(c.model)) pattern.back() = 'E'; // Plans split experts.
    c.config.emplace_back("hybrid_override_pattern", "\"" + pattern + "\"");
    const int groups = dice.of({2, 4, 8});
    c.config.emplace_back("n_groups", number(groups));
    c.config.emplace_back("mamba_num_heads", number(groups * dice.of({1, 2, 3})));
    c.config.emplace_back("conv_kernel", dice.of({"1", "2", "4"}));
    if (dice.one_in(2)) c.config.emplace_back("time_step_limit", "[0.02, 0.4]");
    if (dice.one_in(2) && !is_dense(c.model)) c.config.emplace_back("moe_latent_size", "null");
}

// Mamba-2's groups and heads, of which the latter divide twice the hidden width.
void draw_granite(Dice& dice, RandomCase& c, int layers) {
    c.config.emplace_back("layer_types", drawn_list(dice, layers, {"\"mamba\"", "\"attention\""}));
    const int groups = dice.of({2, 4, 8});
    c.config.emplace_back("mamba_n_groups", number(groups));
    c.config.emplace_back("mamba_n_heads", number(groups * dice.of({1, 2, 4})));
    c.config.emplace_back("mamba_d_conv", dice.of({"1", "2", "4"}));
    if (dice.one_in(2)) c.config.emplace_back("time_step_limit", "[0.02, 0.4]");
}

// Kinds of layers, those with experts (the last one among them) and bounds.
void draw_step(Dice& dice, RandomCase& c, int layers) {
    c.config.emplace_back("layer_types", drawn_list(dice, layers, {"\"sliding_attention\"", "\"full_attention\""}));
    std::string sparse = number(layers - 1);
    for (int layer = 0; layer + 1 < layers; ++layer)
        if (dice.one_in(2)) sparse += ", " + number(layer);
    c.config.emplace_back("moe_layers_enum", "[" + sparse + "]");
    c.config.emplace_back("swiglu_limits", drawn_list(dice, layers, {"0.0", "0.02"}));
    c.config.emplace_back("swiglu_limits_shared", drawn_list(dice, layers, {"0.0", "0.02"}));
}

// An indexer that picks fewer keys than there are or all of them, of every layer or of some.
void draw_indexer(Dice& dice, RandomCase& c) {
    c.config.emplace_back("index_topk", dice.of({"1", "3", "6", "40"}));
    c.config.emplace_back("index_n_heads", dice.of({"5", "6"}));
    if (c.model == "glm5") c.config.emplace_back("index_topk_freq", dice.of({"1", "2", "3"}));
    if (dice.one_in(3)) c.plan.emplace_back("indexer_loss", dice.of({"none", "0.1"}));
    if (dice.one_in(3)) c.plan.emplace_back("indexer_stage", dice.of({"dense_loss", "warm_up"}));
}

void draw_model(Dice& dice, RandomCase& c) {
    c.model = dice.of({"qwen3",     "qwen2",    "deepseek3", "deepseek3-mtp", "deepseek2", "mixtral",    "gptoss",
                       "llama",     "olmoe",    "granite",   "afmoe",         "laguna",    "nemotron",   "mimo",
                       "mistral4",  "ernie",    "llama4",    "hunyuan",       "qwen3next", "qwen3.5",    "nemotronh",
                       "nemotron3", "granite4", "gemma4",    "step",          "phimoe",    "deepseek32", "glm5"});
    const int layers = dice.of({1, 2, 3, 4});
    c.config.emplace_back("num_hidden_layers", number(layers));
    const int heads = dice.of({4, 8, 16});
    const bool latent = c.model.rfind("deepseek", 0) == 0 || c.model == "mistral4" || c.model == "glm5";
    c.config.emplace_back("num_attention_heads", number(heads));
    c.config.emplace_back("num_key_value_heads", number(latent ? heads : heads / dice.of({1, 2, 4})));
    if (c.model == "mimo") c.config.emplace_back("swa_num_key_value_heads", number(heads / dice.of({1, 2, 4})));
    if (!latent) c.config.emplace_back("head_dim", c.model == "mimo" ? "8" : dice.of({"4", "6", "8"}));
    if (dice.one_in(3)) c.config.emplace_back("tie_word_embeddings", "true");
    if (dice.one_in(2)) c.config.emplace_back("vocab_size", dice.of({"17", "64", "83"}));
    if (dice.one_in(3)) c.plan.emplace_back("documents", "mask");
    Dice adapters = dice.aside();
    if (adapters.one_in(5))
        c.plan.emplace_back("lora", adapters.of({"4", "3:6:attention", "2:1:dense+experts", "8:8:attention+dense"}));
    if (c.model == "laguna" || c.model == "afmoe")
        c.config.emplace_back("layer_types", drawn_list(dice, layers, {"\"sliding_attention\"", "\"full_attention\""}));
    if (c.model == "qwen3next" || c.model == "qwen3.5") {
        c.config.emplace_back("layer_types", drawn_list(dice, layers, {"\"linear_attention\"", "\"full_attention\""}));
        const int keys = dice.of({2, 4, 8});
        c.config.emplace_back("linear_num_key_heads", number(keys));
        c.config.emplace_back("linear_num_value_heads", number(keys * dice.of({1, 2, 3})));
        c.config.emplace_back("linear_conv_kernel_dim", dice.of({"1", "2", "4"}));
    }
    if (c.model == "nemotronh" || c.model == "nemotron3") draw_hybrid(dice, c, layers);
    if (c.model == "granite4") draw_granite(dice, c, layers);
    if (c.model == "gemma4") {
        c.config.emplace_back("layer_types", drawn_list(dice, layers, {"\"sliding_attention\"", "\"full_attention\""}));
        c.config.emplace_back("num_global_key_value_heads", number(heads / dice.of({1, 2, 4})));
        if (dice.one_in(3)) c.config.emplace_back("attention_k_eq_v", "false");
    }
    if (c.model == "step") draw_step(dice, c, layers);
    if (c.model == "deepseek32" || c.model == "glm5") draw_indexer(dice, c);
    if (c.model == "laguna") c.config.emplace_back("gating", dice.of({"true", "\"per-element\""}));
    if (c.model == "mimo") {
        c.config.emplace_back("hybrid_layer_pattern", drawn_list(dice, layers, {"0", "1"}));
        c.config.emplace_back("moe_layer_freq", drawn_list(dice, layers, {"0", "1"}));
    }
    if (is_dense(c.model)) return;
    const int experts = dice.of({4, 8, 16});
    c.config.emplace_back(experts_field(c.model), number(experts));
    c.config.emplace_back(c.model == "hunyuan"  ? "moe_topk"
                          : c.model == "ernie"  ? "moe_k"
                          : c.model == "gemma4" ? "top_k_experts"
                          : c.model == "step"   ? "moe_top_k"
                                                : "num_experts_per_tok",
                          dice.of({"1", "2", "3"}));
    if (latent) c.config.emplace_back("first_k_dense_replace", number(dice.below(layers)));
    if (latent) c.config.emplace_back("n_shared_experts", dice.of({"1", "2"}));
    draw_balance(dice, c);
}

// Layers spread over the stages anyhow; the ends hold the embedding and the loss, MTP lies behind the last layer.
std::string draw_layout(Dice& dice, int layers, int mtp, int stages) {
    std::vector<int> cut;
    for (int i = 0; i + 1 < stages; ++i) cut.push_back(dice.below(layers + 1));
    std::sort(cut.begin(), cut.end());
    cut.push_back(layers);
    const int last = static_cast<int>(std::find(cut.begin(), cut.end(), layers) - cut.begin());
    const int predicts = last + dice.below(stages - last);
    std::string text = "E";
    int at = 0;
    for (int stage = 0; stage < stages; ++stage) {
        const int next = cut[static_cast<std::size_t>(stage)];
        text += std::string(static_cast<std::size_t>(next - at), 't');
        if (stage == predicts) text += std::string(static_cast<std::size_t>(mtp), 'm');
        text += stage + 1 < stages ? "|" : "L";
        at = next;
    }
    return text;
}

void draw_passes(Dice& dice, RandomCase& c) {
    const auto maybe = [&](int n, const char* field, const char* value) {
        if (dice.one_in(n)) c.plan.emplace_back(field, value);
    };
    if (dice.one_in(3)) {
        const unsigned all = plan::recompute::layernorm | plan::recompute::core_attn | plan::recompute::mla_up_proj |
                             plan::recompute::moe_act | plan::recompute::mlp | plan::recompute::shared_experts |
                             plan::recompute::moe;
        const unsigned set = dice.one_in(4) ? plan::recompute::full : static_cast<unsigned>(dice.next()) & all;
        c.plan.emplace_back("recompute", plan::recompute::to_string(set));
    }
    if (dice.one_in(6)) {
        const unsigned all = plan::offload::attn_norm | plan::offload::qkv_linear | plan::offload::core_attn |
                             plan::offload::attn_proj | plan::offload::mlp_norm | plan::offload::expert_fc1 |
                             plan::offload::moe_act | plan::offload::optimizer;
        unsigned set = static_cast<unsigned>(dice.next()) & all;
        if ((set & plan::offload::optimizer) != 0 && dice.aside().one_in(2)) set ^= plan::offload::states;
        c.plan.emplace_back("offload", plan::offload::to_string(set));
    }
    const std::string narrow = dice.aside().one_in(2) ? "adamw+fp8_exp_avg" : "adamw+bf16_moments";
    maybe(4, "optimizer", dice.of({narrow.c_str(), "muon"}));
    maybe(4, "dispatcher", dice.of({"allgather", "hybridep"}));
    if (c.plan.size() > 0 && c.plan.back().second == "hybridep" && dice.aside().one_in(2))
        c.plan.emplace_back("domain", dice.aside().of({"1", "2", "4"}));
    maybe(4, "capacity", dice.of({"1", "1.25"}));
    maybe(8, "memory_efficient_permutation", "off");
    if (dice.one_in(8) &&
        !states(c, "drop_scope")) { // of every token of a rank, so that none is dropped and the rest are zero rows
        c.plan.emplace_back("expert_capacity", all_tokens);
        c.plan.emplace_back("pad_to_capacity", "on");
    }
    maybe(8, "tp_overlap", "on");
    maybe(6, "ep_overlap", "on");
    maybe(6, "delay_wgrad", "on");
}

void draw_schedule(Dice& dice, RandomCase& c, int pp, int layers) {
    if (pp == 1) return;
    const std::string schedule = dice.of({"1f1b", "1f1b", "interleaved", "zero-bubble", "zb-v", "dualpipe-v"});
    const int vpp = schedule == "interleaved" ? dice.of({2, 3}) : schedule.find("-v") != std::string::npos ? 2 : 1;
    if (schedule != "1f1b") c.plan.emplace_back("schedule", schedule);
    if (vpp > 1) c.plan.emplace_back("vpp", number(vpp));
    if (pp * vpp > layers || dice.one_in(3)) {
        const int mtp = c.model == "deepseek3-mtp" ? 2 : c.model == "glm5" ? 1 : 0;
        c.plan.emplace_back("layout", draw_layout(dice, layers, mtp, pp * vpp));
    }
}

void draw_plan(Dice& dice, RandomCase& c, int ranks) {
    c.ranks = ranks > 0 ? ranks : 1 + dice.below(16);
    const int layers = std::stoi(c.config.front().second);
    const int pp = dice.one_in(2) ? 1 : std::min(dice.divisor(c.ranks), 4);
    if (c.ranks % pp != 0) return;
    const int stage = c.ranks / pp, tp = dice.divisor(stage), cp = dice.one_in(2) ? 1 : dice.divisor(stage / tp);
    const auto degree = [&](const char* field, int value) {
        if (value > 1) c.plan.emplace_back(field, number(value));
    };
    degree("pp", pp);
    degree("tp", tp);
    degree("cp", cp);
    const bool trades = cp > 1 && dice.one_in(2);
    if (cp >= 4 && dice.aside().one_in(2))
        c.plan.emplace_back("cp_comm", "alltoall+ring");
    else if (trades)
        c.plan.emplace_back("cp_comm", "alltoall");
    if (!is_dense(c.model)) {
        const int ep = dice.divisor(stage);
        degree("ep", ep);
        degree("etp", dice.one_in(2) ? 1 : dice.divisor(stage / ep));
    }
    degree("mbs", dice.of({1, 1, 2, 4}));
    draw_schedule(dice, c, pp, layers);
    if (dice.one_in(4)) {
        std::vector<std::string> order{"tp", "cp", "ep", "dp", "pp"};
        for (std::size_t i = order.size(); i > 1; --i)
            std::swap(order[i - 1], order[static_cast<std::size_t>(dice.below(static_cast<int>(i)))]);
        c.plan.emplace_back("rank_order", fmt::format("{}", fmt::join(order, "-")));
    }
    draw_passes(dice, c);
    if (dice.one_in(3)) {
        c.plan.emplace_back("fsdp", "on");
        const int copies = pp == 1 ? dice.divisor(stage / tp / cp) : 1;
        if (dice.one_in(2)) degree("fsdp_replicas", copies);
    }
    // Less than FP32 is for models without a choice alone: near ties of the router fall either way in it.
    if (is_dense(c.model) && dice.one_in(4)) {
        Dice less = dice.aside();
        c.plan.emplace_back("precision", less.of({"bf16", "bf16", "bf16", "mxfp8", "nvfp4", "fp8-tensor"}));
        if (less.one_in(2)) c.plan.emplace_back("gradients", "bf16");
    }
}

bool accepted(const RandomCase& c) {
    try {
        const plan::RouterTraining router = plan_of(c).router;
        // What a rank drops of its own tokens depends on the plan.
        return router.expert_capacity == 0.0 || router.drops_in_sequences() || router.pad_to_capacity;
    } catch (const Error&) {
        return false;
    }
}

// The case without field `i` of `fields`, then with its number halved, where it is one.
void smaller_fields(const RandomCase& c, Fields RandomCase::*fields, std::vector<RandomCase>& out) {
    for (std::size_t i = 0; i < (c.*fields).size(); ++i) {
        out.push_back(c);
        (out.back().*fields).erase((out.back().*fields).begin() + static_cast<std::ptrdiff_t>(i));
        const std::string& value = (c.*fields)[i].second;
        const auto plus = value.find('+');
        if (plus != std::string::npos) {
            for (const std::string& part : {value.substr(0, plus), value.substr(plus + 1)}) {
                out.push_back(c);
                (out.back().*fields)[i].second = part;
            }
        }
        if (value.find_first_not_of("0123456789") != std::string::npos || value.size() > 6) continue;
        for (const int less : {std::stoi(value) / 2, std::stoi(value) - 1}) {
            out.push_back(c);
            (out.back().*fields)[i].second = number(less);
        }
    }
}

} // namespace

std::string RandomCase::text() const {
    std::string out = model;
    for (const auto& [field, value] : config) out += fmt::format(" {}={}", field, value);
    out += fmt::format(" | ranks {} gbs {}", ranks, gbs);
    for (const auto& [field, value] : plan) out += fmt::format(" {}={}", field, value);
    return out;
}

plan::Plan plan_of(const RandomCase& c) {
    static const stack::Stack stack = stack::load_stack("moe-plan", machine::load_hardware("cpu-local"));
    plan::Plan plan = small_plan(small_model(c.model, c.config), c.ranks, c.plan, {16, c.gbs});
    if (const plan::PlanFault fault = stack::check_stack(plan, stack)) refuse("{}", fault.message);
    return plan;
}

RandomCase one_rank_of(const RandomCase& c) {
    RandomCase one{c.model, c.config, {}, 1, c.gbs};
    for (const auto& [field, value] : c.plan)
        if (std::find(trained_fields.begin(), trained_fields.end(), field) != trained_fields.end() ||
            (field == "expert_capacity" && value != all_tokens))
            one.plan.emplace_back(field, value);
    return one;
}

std::vector<RandomCase> random_cases(std::uint64_t seed, std::size_t count, std::size_t per_model, int ranks) {
    Dice dice(seed);
    std::vector<RandomCase> cases;
    RandomCase model;
    constexpr int most_refused = 2000; // one behind another
    int refused = 0;
    while (cases.size() < count) {
        if (cases.size() % per_model == 0) {
            model = {};
            draw_model(dice, model);
            model.gbs = dice.of({4, 6, 8, 12, 16});
        }
        RandomCase next = model;
        draw_plan(dice, next, ranks);
        if (accepted(next)) {
            cases.push_back(std::move(next));
            refused = 0;
        } else if (++refused == most_refused) {
            plan_of(next); // says why
        }
    }
    return cases;
}

RandomCase shrunk(RandomCase c, const std::function<bool(const RandomCase&)>& fails) {
    for (bool progress = true; progress;) {
        progress = false;
        std::vector<RandomCase> candidates;
        for (int ranks = 1; ranks < c.ranks; ++ranks) {
            candidates.push_back(c);
            candidates.back().ranks = ranks;
        }
        smaller_fields(c, &RandomCase::plan, candidates);
        smaller_fields(c, &RandomCase::config, candidates);
        for (std::int64_t gbs = 1; gbs < c.gbs; ++gbs) {
            candidates.push_back(c);
            candidates.back().gbs = gbs;
        }
        for (const RandomCase& candidate : candidates) {
            if (!accepted(candidate) || !fails(candidate)) continue;
            c = candidate;
            progress = true;
            break;
        }
    }
    return c;
}
