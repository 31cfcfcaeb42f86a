// One estimator that is asked for many plans answers as a fresh one for each: nothing that it remembers is taken for
// something else.
#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan_fields.hpp"
#include "simulator/pricing/skewed_estimator.hpp"
#include "tests/simulator/pricing/random_plans.hpp"
#include "tests/support/draws.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>

namespace {

using Values = std::vector<const char*>;

// Values of every field by which plans of any model are varied. Those that a plan cannot have are left out there.
const std::map<std::string, Values>& field_values() {
    static const std::map<std::string, Values> values{
        {"tp", {"1", "2", "4"}},
        {"cp", {"1", "2", "4"}},
        {"pp", {"1", "2", "4"}},
        {"vpp", {"1", "2"}},
        {"dp", {"1", "2", "4", "8"}},
        {"ep", {"1", "2", "4", "8"}},
        {"etp", {"1", "2"}},
        {"mbs", {"1", "2", "3", "4"}},
        {"layout", {"none"}}, // and the one that balances stages, see below
        {"schedule", {"1f1b", "interleaved", "zero-bubble", "zb-v", "dualpipe-v"}},
        {"rank_order", {"tp-cp-ep-dp-pp", "ep-dp-tp-cp-pp", "dp-ep-tp-cp-pp", "cp-tp-ep-dp-pp"}},
        {"precision", {"bf16", "fp8-tensor", "fp8-blockwise", "mxfp8"}},
        {"attention_precision", {"default", "fp8-tensor"}},
        {"expert_precision", {"default", "bf16", "mxfp8", "fp8-blockwise"}},
        {"head_precision", {"default", "mxfp8", "fp8-blockwise", "fp8-tensor"}},
        {"bf16_layers", {"none", "1+1", "0+2"}},
        {"fp8_scaling", {"current", "delayed"}},
        {"fp8_wgrad", {"off", "on"}},
        {"gradients", {"fp32", "bf16"}},
        {"recompute", {"none", "layernorm", "moe_act", "layernorm+moe_act", "core_attn", "moe", "full", "mla_up_proj"}},
        {"offload",
         {"none", "optimizer", "optimizer_step", "expert_fc1+moe_act", "attn_norm+core_attn", "core_attn+optimizer"}},
        {"optimizer", {"adamw", "adamw+bf16_moments", "adamw+fp8_exp_avg", "muon"}},
        {"lora", {"none", "16", "8", "16:8:attention", "16:32:experts"}},
        {"fsdp", {"off", "on"}},
        {"fsdp_replicas", {"1", "2"}},
        {"dispatcher", {"alltoall", "allgather", "deepep", "hybridep"}},
        {"cp_comm", {"ring", "alltoall"}},
        {"capacity", {"none", "1.25", "1.5", "2"}},
        {"paged_stash", {"off", "on"}},
        {"memory_efficient_permutation", {"off", "on"}},
        {"tp_overlap", {"off", "on"}},
        {"ep_overlap", {"off", "on"}},
        {"delay_wgrad", {"off", "on"}},
        {"cuda_graph", {"none", "partial", "full", "attn", "attn+moe_router"}},
        {"deterministic", {"off", "on"}},
        {"documents", {"ignore", "mask"}},
        {"lengths", {"none", "100:10+3000:4", "512:1"}},
        {"routing", {"balanced", "load:1.2", "load:1.2:0.3", "load:1.4", "dirichlet:2", "zipf:0.5"}},
        {"balance", {"natural", "forced"}},
        {"load_balancing", {"aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"}},
        {"aux_loss", {"none", "0.01", "0.001"}},
        {"z_loss", {"none", "0.001"}},
        {"input_jitter", {"none", "0.01"}},
        {"indexer_loss", {"1", "none", "0.1"}},
        {"indexer_stage", {"sparse", "dense_loss", "warm_up"}},
        {"bias_update", {"none", "0.001"}},
        {"expert_capacity", {"none", "1", "1.2"}},
        {"drop_policy", {"probs", "position"}},
        {"drop_scope", {"sub_sequence", "full_sequence"}},
        {"pad_to_capacity", {"off", "on"}},
    };
    return values;
}

class Random {
public:
    explicit Random(std::uint64_t seed) : state_(seed * 2 + 1) {}
    std::size_t below(std::size_t count) {
        state_ = state_ * 6364136223846793005U + 1442695040888963407U;
        return static_cast<std::size_t>(state_ >> 33) % count;
    }
    template <class T>
    void shuffle(std::vector<T>& list) {
        for (std::size_t i = list.size(); i > 1; --i) std::swap(list[i - 1], list[below(i)]);
    }

private:
    std::uint64_t state_;
};

// Follows from the other fields.
void complete(moe::plan::Plan& plan) {
    plan.gpus = plan.tp * plan.cp * plan.dp * plan.pp;
    plan.edp = std::max(1, plan.gpus / plan.pp / (plan.ep * plan.etp));
    if (plan.vpp == 1 && plan.schedule == moe::plan::ScheduleKind::interleaved)
        plan.schedule = moe::plan::ScheduleKind::one_f_one_b;
    if (moe::plan::in_a_v(plan.schedule)) plan.vpp = 2;
    if (plan.vpp > 1 && plan.schedule == moe::plan::ScheduleKind::one_f_one_b)
        plan.schedule = moe::plan::ScheduleKind::interleaved;
}

// Everything that an estimator says about a plan, as numbers; what it refuses, as text.
struct Answers {
    std::vector<double> numbers;
    std::string refusal;
    bool operator==(const Answers&) const = default;
};

template <class Ask>
Answers asked(Ask ask) {
    Answers answers;
    try {
        ask(answers.numbers);
    } catch (const moe::Error& error) {
        answers.refusal = error.what();
    }
    return answers;
}

using Question = Answers (*)(moe::search::Estimator&, moe::search::BoundModel&, const moe::plan::Plan&);
struct Named {
    std::string name;
    Question ask;
};

void add(std::vector<double>& list, const moe::search::LowerBound& bound) {
    list.insert(list.end(), {bound.step_seconds, bound.memory_bytes});
}

// Each is asked by itself, in any order.
const Named questions[] = {
    {"estimate",
     [](moe::search::Estimator& estimator, moe::search::BoundModel&, const moe::plan::Plan& plan) {
         return asked([&](std::vector<double>& list) {
             const moe::search::Estimate e = estimator.estimate(plan);
             const moe::search::Breakdown& b = e.breakdown;
             list = {e.step_seconds, e.tflops_per_gpu, e.memory_bytes, b.compute, b.tensor,    b.context,  b.expert,
                     b.pipeline,     b.bubble,         b.data,         b.host,    b.optimizer, b.recompute};
         });
     }},
    {"memory_bytes",
     [](moe::search::Estimator& estimator, moe::search::BoundModel&, const moe::plan::Plan& plan) {
         return asked([&](std::vector<double>& list) { list = {estimator.memory_bytes(plan)}; });
     }},
    {"bound",
     [](moe::search::Estimator&, moe::search::BoundModel& bound_model, const moe::plan::Plan& plan) {
         return asked([&](std::vector<double>& list) {
             const int layers = bound_model.layer_costs(plan), stages = bound_model.stage_split(plan);
             add(list, bound_model.bound(layers, stages));
             list.push_back(bound_model.step_bound(layers));
             const std::vector<double> keys = bound_model.dominance_key(layers);
             list.insert(list.end(), keys.begin(), keys.end());
         });
     }},
    {"early bound",
     [](moe::search::Estimator&, moe::search::BoundModel& bound_model, const moe::plan::Plan& plan) {
         return asked([&](std::vector<double>& list) {
             list.push_back(bound_model.early_step_bound(plan));
             const int layers = bound_model.early_layer_costs(plan), stages = bound_model.stage_split(plan);
             add(list, bound_model.bound(layers, stages));
         });
     }},
    {"near bound",
     [](moe::search::Estimator&, moe::search::BoundModel& bound_model, const moe::plan::Plan& plan) {
         return asked([&](std::vector<double>& list) {
             const int layers = bound_model.near_layer_costs(plan), stages = bound_model.stage_split(plan);
             add(list, bound_model.bound(layers, stages));
         });
     }},
    {"coarse bound",
     [](moe::search::Estimator&, moe::search::BoundModel& bound_model, const moe::plan::Plan& plan) {
         return asked([&](std::vector<double>& list) {
             const int layers = bound_model.coarse_layer_costs(plan), stages = bound_model.stage_split(plan);
             add(list, bound_model.bound(layers, stages));
         });
     }},
    {"merged_seconds",
     [](moe::search::Estimator&, moe::search::BoundModel& bound_model, const moe::plan::Plan& plan) {
         return asked([&](std::vector<double>& list) { list = {bound_model.merged_step_bound(plan)}; });
     }},
    {"least and kept bytes",
     [](moe::search::Estimator&, moe::search::BoundModel& bound_model, const moe::plan::Plan& plan) {
         return asked([&](std::vector<double>& list) {
             list = {bound_model.least_bytes(plan), bound_model.kept_bytes(plan)};
         });
     }},
};

struct Variation {
    moe::plan::Plan plan;
    std::string change; // "field=value"
};

// Plans around one: each field alone takes each of its values, and another field one of its own with it. `varied` gets
// the fields that some plan differs in.
std::vector<Variation> variations(const moe::plan::Plan& base, const moe::stack::Stack& stack, Random& random,
                                  std::set<std::string>& varied) {
    std::vector<Variation> plans{{base, "none"}};
    const auto keep = [&](moe::plan::Plan plan, const std::string& field, const std::string& value) {
        complete(plan);
        if (moe::plan::check_plan(plan) || moe::stack::check_stack(plan, stack)) return;
        if (field_values().count(field) == 1 &&
            moe::plan::field_text(plan, field) != moe::plan::field_text(base, field))
            varied.insert(field);
        plans.push_back({std::move(plan), field + "=" + value});
    };
    const auto change = [&](moe::plan::Plan plan, const std::string& field, const char* value) {
        try {
            moe::plan::set_field(plan, field, value);
            if (field == "pad_to_capacity" || field == "drop_policy" || field == "drop_scope")
                plan.router.expert_capacity = 1.5;
            if (field == "load_balancing") plan.router.aux_loss = std::string(value) == "sinkhorn" ? 0.0 : 0.01;
            if (field == "paged_stash") {
                plan.capacity = 1.5, plan.offload = 0;
                plan.dispatcher = moe::plan::Dispatcher::hybridep;
            }
            if (field == "lora" || field == "fsdp_replicas") {
                plan.precision = moe::machine::Precision::bf16;
                plan.attention_precision = plan.expert_precision = plan.head_precision = std::nullopt;
                plan.optimizer.muon = false;
            }
            if (field == "fsdp_replicas") {
                plan.fsdp = true;
                plan.lora = {};
                plan.ep_overlap = false;
            }
            keep(plan, field, value);
        } catch (const moe::Error&) { // layers of another model
        }
    };
    for (const auto& [field, values] : field_values())
        for (const char* value : values) change(base, field, value);
    // Two fields change at a time as well, because some plans may share what differs from what others share.
    const std::vector<Variation> once = plans;
    for (const Variation& other : once) {
        const auto field = std::next(field_values().begin(), static_cast<long>(random.below(field_values().size())));
        change(other.plan, field->first, field->second[random.below(field->second.size())]);
    }
    for (const moe::plan::Plan& plan : moe::stack::sound_cuts(base, stack)) keep(plan, "layout", plan.layout);
    for (const std::int64_t times : {2, 3}) {
        moe::plan::Plan plan = base;
        plan.gbs *= times;
        keep(plan, "gbs", fmt::format("{}", plan.gbs));
        plan = base;
        plan.seq *= times;
        keep(plan, "seq", fmt::format("{}", plan.seq));
    }
    return plans;
}

struct Machine {
    std::shared_ptr<const moe::machine::Hardware> hardware;
    moe::stack::Stack stack;
    std::vector<Variation> plans;
};

// Plans by machine and stack: what they share is asked of one estimator.
using Machines = std::map<std::string, Machine>;

// Adds the variations of a base that `wanted` takes.
template <class Wanted>
void add_base(Machines& machines, const RandomPlan& base, Random& random, std::set<std::string>& varied,
              const Wanted& wanted) {
    Machine& machine = machines[base.plan.hardware->name + " " + base.stack.name];
    machine.hardware = base.plan.hardware;
    machine.stack = base.stack;
    for (Variation& variation : variations(base.plan, base.stack, random, varied))
        if (wanted(variation)) machine.plans.push_back(std::move(variation));
}

// A base is drawn for each field that no plan varies yet, since few stacks allow it.
void vary_every_field(Machines& machines, std::uint64_t seed, Random& random, std::set<std::string>& varied) {
    for (const std::string& field : moe::plan::field_names())
        for (int tries = 0; tries < 200 && !varied.contains(field); ++tries) {
            const RandomPlan base = random_plans(++seed, 1).front();
            const auto varies_field = [&field](const Variation& v) { return v.change.starts_with(field + "="); };
            add_base(machines, base, random, varied, varies_field);
        }
}

} // namespace

TEST_CASE("every field of a plan has values by which the shared estimator is tried") {
    for (const std::string& field : moe::plan::field_names()) {
        CAPTURE(field);
        CHECK(field_values().count(field) == 1);
    }
}

TEST_CASE("an estimator that has seen a plan without expert_capacity knows what one with it saves") {
    moe::plan::Plan plan;
    plan.model = std::make_shared<const moe::model::Model>(moe::families::load_model("Qwen3-30B-A3B"));
    plan.hardware = std::make_shared<const moe::machine::Hardware>(moe::machine::load_hardware("h200"));
    plan.stack = "moe-plan";
    plan.gpus = plan.dp = plan.ep = 8;
    plan.seq = 4096;
    plan.gbs = 64;
    moe::plan::Plan capped = plan;
    capped.router.expert_capacity = 1.0;
    const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
    moe::pricing::FastEstimator shared(plan.hardware, stack), fresh(plan.hardware, stack);
    const double uncapped = shared.memory_bytes(plan);
    CHECK(shared.memory_bytes(capped) == fresh.memory_bytes(capped));
    CHECK(shared.memory_bytes(capped) < 0.7 * uncapped);
}

TEST_CASE("a shared estimator answers as a fresh one, to the bit, whatever it was asked before") {
    const std::uint64_t seed = seed_of_run();
    MESSAGE("seed ", seed, " (MOE_PLAN_SEED)");
    Machines machines;
    Random random(seed);
    std::set<std::string> varied;
    for (const RandomPlan& base : random_plans(seed + 101, draws(12)))
        add_base(machines, base, random, varied, [](const Variation&) { return true; });
    const bool all_fields = draws(8) == 8;
    if (all_fields) vary_every_field(machines, seed + 1000, random, varied);
    std::size_t asked_plans = 0;
    for (auto& entry : machines) {
        const std::string& name = entry.first;
        Machine& machine = entry.second;
        random.shuffle(machine.plans);
        if (sanitized()) machine.plans = thinned(std::move(machine.plans)); // hundreds of one base, by the same ways
        moe::pricing::SkewedEstimator shared(machine.hardware, machine.stack, moe::routing::SkewPoint::mean);
        const std::unique_ptr<moe::search::BoundModel> bound_model = shared.bound_model();
        for (const Variation& variation : machine.plans) {
            const moe::plan::Plan& plan = variation.plan;
            const std::string& change = variation.change;
            ++asked_plans;
            CAPTURE(seed);
            CAPTURE(name);
            std::string text = moe::plan::plan_to_json(plan);
            text.resize(text.find("\"model\":"));
            std::erase_if(text, [](char c) { return c == ' ' || c == '\n' || c == '"'; });
            CAPTURE(plan.model->name);
            CAPTURE(change);
            CAPTURE(text);
            moe::pricing::SkewedEstimator fresh(machine.hardware, machine.stack, moe::routing::SkewPoint::mean);
            const std::unique_ptr<moe::search::BoundModel> own = fresh.bound_model();
            if (random.below(40) == 0) bound_model->forget();
            std::vector<Named> order(std::begin(questions), std::end(questions));
            random.shuffle(order);
            for (const Named& question : order) {
                CAPTURE(question.name);
                const Answers expected = question.ask(fresh, *own, plan),
                              got = question.ask(shared, *bound_model, plan);
                CHECK(got.refusal == expected.refusal);
                CHECK(got.numbers == expected.numbers);
            }
        }
    }
    MESSAGE(asked_plans, " plans of ", machines.size(), " machines and stacks");
    if (all_fields)
        for (const std::string& field : moe::plan::field_names()) {
            CAPTURE(field);
            CHECK(varied.count(field) == 1);
        }
}
