// The effect of the router's training on the load of experts: losses, selection bias, dropped copies, a forced choice.
#include "planner/base/error.hpp"
#include "planner/lower/lower.hpp"
#include "tests/engine/train/samples.hpp"
#include "tests/support/draws.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

using namespace moe;

namespace {

std::vector<train::StepResult> train_steps(train::Trainer& trainer, int steps) {
    std::vector<train::StepResult> results;
    for (int s = 0; s < steps; ++s) results.push_back(trainer.step(made_up_tokens(61)));
    return results;
}

double imbalance(const train::StepResult& step) {
    double sum = 0.0;
    for (const train::RouterStep& router : step.routers) sum += router.max_over_mean();
    return sum / static_cast<double>(step.routers.size());
}

// Mean over the last steps of a short run that starts with routers which prefer some experts.
double trained_imbalance(const std::string& model, Fields fields) {
    fields.emplace_back("ep", "2");
    train::TrainOptions options;
    options.lr = 3e-3;
    train::Trainer trainer(small_plan(model, 2, fields), options);
    for (const auto& [name, shape] : trainer.parameters()) {
        if (name.find("mlp.gate.weight") == std::string::npos) continue;
        std::vector<float> weight = trainer.read_weight(name);
        for (std::size_t i = 0; i < weight.size(); ++i)
            weight[i] *= i / static_cast<std::size_t>(shape.cols) < 3 ? 12.0f : 1.0f;
        trainer.write_weight(name, weight);
    }
    const std::vector<train::StepResult> steps = train_steps(trainer, 40);
    double sum = 0.0;
    for (std::size_t s = 30; s < 40; ++s) sum += imbalance(steps[s]);
    return sum / 10.0;
}

} // namespace

// A statistic of many steps, whose every op parity_test.cpp runs.
TEST_CASE("balancing losses and the selection bias even out the load" * doctest::skip(sanitized())) {
    const double alone = trained_imbalance("qwen3", {});
    for (const char* kind : {"aux_loss", "seq_aux_loss", "global_aux_loss"}) {
        const double balanced = trained_imbalance("qwen3", {{"load_balancing", kind}, {"aux_loss", "0.1"}});
        INFO(kind, ": ", balanced, " against ", alone);
        CHECK(balanced - 1.0 < 0.8 * (alone - 1.0));
    }
    const double unbiased = trained_imbalance("deepseek3", {});
    const double biased = trained_imbalance("deepseek3", {{"bias_update", "0.02"}});
    INFO("selection bias: ", biased, " against ", unbiased);
    CHECK(biased - 1.0 < 0.8 * (unbiased - 1.0));
}

TEST_CASE("the selection bias moves once per step, against the load of the whole batch") {
    for (const char* precision : {"fp32", "bf16"}) {
        plan::Plan plan = small_plan("deepseek3", 4, {{"bias_update", "0.001"}, {"ep", "2"}, {"tp", "2"}});
        plan.precision = machine::precision_from_string(precision);
        train::TrainOptions options;
        train::Trainer trainer(plan, options);
        std::map<int, std::vector<double>> expected;
        for (const train::StepResult& step : train_steps(trainer, 3))
            for (const train::RouterStep& router : step.routers) {
                std::vector<double>& bias = expected[router.layer];
                bias.resize(router.tokens.size(), 0.0);
                const std::int64_t sum = std::accumulate(router.tokens.begin(), router.tokens.end(), std::int64_t{0});
                CHECK(sum == 8 * 32 * 2);
                for (std::size_t e = 0; e < bias.size(); ++e) {
                    const std::int64_t above = router.tokens[e] * static_cast<std::int64_t>(bias.size()) - sum;
                    bias[e] += above < 0 ? 0.001 : above > 0 ? -0.001 : 0.0;
                }
            }
        REQUIRE(expected.size() == 3); // the first layer is dense
        for (const auto& [layer, bias] : expected) {
            const std::vector<float> got =
                trainer.read_weight("model.layers." + std::to_string(layer) + ".mlp.gate.e_score_correction_bias");
            for (std::size_t e = 0; e < bias.size(); ++e) CHECK(std::abs(static_cast<double>(got[e]) - bias[e]) < 1e-6);
        }
    }
}

TEST_CASE("the micro-batch loss follows its formula, the global one starts a step later") {
    // One micro-batch of everything: with aux_loss 1 a balanced layer adds 1, any other more.
    plan::Plan plan = small_plan("qwen3", 1, {{"mbs", "8"}, {"load_balancing", "aux_loss"}, {"aux_loss", "1"}});
    train::TrainOptions options;
    options.lr = 0.0;
    const train::SampleSource same = [source = made_up_tokens(61)](std::int64_t sample,
                                                                   std::span<std::int32_t> tokens) {
        source(sample % 8, tokens);
    };
    train::Trainer whole(plan, options);
    const train::StepResult first = whole.step(same);
    REQUIRE(first.routers.size() == 4);
    for (const train::RouterStep& router : first.routers) {
        CHECK(router.aux_loss > 0.99);
        CHECK(router.aux_loss < router.max_over_mean());
        CHECK(router.z_loss == 0.0);
    }
    plan::set_field(plan, "load_balancing", "global_aux_loss");
    plan::set_field(plan, "mbs", "2");
    train::Trainer parts(plan, options);
    CHECK(parts.step(same).aux_loss() == 0.0);
    const train::StepResult second = parts.step(same);
    for (std::size_t i = 0; i < 4; ++i)
        CHECK(second.routers[i].aux_loss == nearly(first.routers[i].aux_loss).epsilon(1e-5));
}

TEST_CASE("no expert takes more than its capacity, and a generous one drops nothing") {
    const auto run = [](const Fields& fields) {
        train::Trainer trainer(small_plan("qwen3", 4, fields), train::TrainOptions{});
        return train_steps(trainer, 2);
    };
    const Fields base{{"ep", "4"}, {"tp", "2"}};
    const std::vector<train::StepResult> dropless = run(base);
    for (const char* policy : {"probs", "position"}) {
        Fields generous = base, tight = base;
        generous.insert(generous.end(), {{"expert_capacity", "8"}, {"drop_policy", policy}});
        tight.insert(tight.end(), {{"expert_capacity", "1"}, {"drop_policy", policy}});
        const std::vector<train::StepResult> free = run(generous), dropped = run(tight);
        for (std::size_t s = 0; s < 2; ++s) CHECK(free[s].loss == dropless[s].loss);
        CHECK(dropped[0].loss != dropless[0].loss);
        CHECK(std::isfinite(dropped[1].grad_norm));
        // 16 tokens of a rank's micro-batch choose 2 of 8 experts: 4 each, 16 times over ranks and micro-batches.
        for (const train::RouterStep& router : dropped[1].routers) {
            CHECK(*std::max_element(router.tokens.begin(), router.tokens.end()) <= 4 * 16);
            CHECK(std::accumulate(router.tokens.begin(), router.tokens.end(), std::int64_t{0}) < 8 * 32 * 2);
        }
    }
}

TEST_CASE("whole sequences drop the same tokens under every plan") {
    struct Case {
        std::string model;
        int ranks;
        Fields fields;
    };
    const std::vector<Case> cases{
        {"qwen3", 2, {{"tp", "2"}}},
        {"qwen3", 2, {{"cp", "2"}, {"mbs", "2"}}},
        {"qwen3", 4, {{"tp", "2"}, {"cp", "2"}, {"ep", "4"}, {"mbs", "2"}}},
        {"qwen3", 4, {{"tp", "2"}, {"cp", "2"}, {"ep", "2"}, {"etp", "2"}, {"recompute", "moe"}}},
        {"qwen3", 8, {{"tp", "2"}, {"ep", "4"}, {"pp", "2"}, {"dispatcher", "allgather"}}},
        {"qwen3", 8, {{"tp", "2"}, {"cp", "2"}, {"ep", "8"}, {"dispatcher", "hybridep"}, {"mbs", "2"}}},
        {"deepseek3", 4, {{"cp", "2"}, {"ep", "4"}, {"ep_overlap", "on"}, {"delay_wgrad", "on"}}},
        {"deepseek2", 4, {{"cp", "2"}, {"ep", "2"}, {"mbs", "4"}, {"cp_comm", "alltoall"}}},
    };
    for (const Case& c : thinned(cases)) {
        for (const std::string policy : {"probs", "position"}) {
            const Fields dropping{{"expert_capacity", "1"}, {"drop_policy", policy}, {"drop_scope", "full_sequence"}};
            Fields cut = c.fields;
            cut.insert(cut.end(), dropping.begin(), dropping.end());
            CAPTURE(c.model);
            CAPTURE(policy);
            CAPTURE(c.ranks);
            train::Trainer one(small_plan(c.model, 1, dropping), train::TrainOptions{}),
                many(small_plan(c.model, c.ranks, cut), train::TrainOptions{});
            const train::StepResult want = train_steps(one, 1).back(), got = train_steps(many, 1).back();
            CHECK(got.loss == nearly(want.loss).epsilon(1e-5));
            REQUIRE(got.routers.size() == want.routers.size());
            for (std::size_t r = 0; r < got.routers.size(); ++r) {
                CHECK(got.routers[r].tokens == want.routers[r].tokens);
                const auto kept = std::accumulate(got.routers[r].tokens.begin(), got.routers[r].tokens.end(), 0L);
                CHECK(kept < 8 * 32 * 2); // some are dropped
            }
            for (const auto& [name, shape] : many.parameters()) {
                CAPTURE(name);
                CHECK(relative_distance(many.read_gradient(name), one.read_gradient(name)) <= 1e-4);
            }
        }
    }
}

// 32 tokens of a sequence choose 2 of 8 experts: 8 each, which one rank of the sequence may have all of.
TEST_CASE("buffers hold what whole sequences leave, and no more") {
    const auto rows = [](const Fields& fields, int ranks) {
        Fields all{{"expert_capacity", "1"}};
        all.insert(all.end(), fields.begin(), fields.end());
        const program::Program program = lower::lower(small_plan("qwen3", ranks, all), 0);
        std::int64_t most = 0;
        for (const program::Template& ops : program.templates)
            for (const program::Op& op : ops.ops)
                if (op.kind == program::OpKind::grouped_gemm && op.phase == program::Phase::forward)
                    most = std::max(most, program.tensors[static_cast<std::size_t>(op.in[0])].rows);
        return most;
    };
    const Fields both{{"tp", "2"}, {"ep", "4"}}, folded{{"tp", "4"}, {"ep", "4"}};
    const auto whole = [](Fields fields) {
        fields.emplace_back("drop_scope", "full_sequence");
        return fields;
    };
    CHECK(rows(both, 4) == 2 * 4 * 4);          // 2 experts, 4 ranks of 16 tokens that send 4 to each
    CHECK(rows(whole(both), 4) == 2 * 2 * 8);   // 2 sequences that send 8
    CHECK(rows(whole(folded), 4) == 2 * 1 * 8); // all ranks share one
    CHECK(rows(whole({{"ep", "4"}, {"mbs", "2"}}), 4) == 2 * 4 * 16);
}

TEST_CASE("experts that are filled up to their capacity with zero rows learn what they learn without them") {
    const std::vector<std::pair<std::string, Fields>> cases{
        {"qwen3", {{"ep", "4"}, {"tp", "2"}}},
        {"qwen3", {{"ep", "2"}, {"etp", "2"}, {"tp", "2"}, {"recompute", "moe"}}},
        {"qwen3", {{"pp", "2"}, {"memory_efficient_permutation", "off"}}},
        {"deepseek3", {{"ep", "2"}, {"pp", "2"}, {"delay_wgrad", "on"}, {"bias_update", "0.01"}}},
        {"gptoss", {{"ep", "4"}, {"aux_loss", "0.01"}}}, // biases give rows without a token values on their way
    };
    for (const auto& [model, fields] : thinned(cases)) {
        for (const std::string policy : {"probs", "position"}) {
            for (const std::string capacity : {"0.5", "1", "1.5"}) {
                Fields plain = fields;
                plain.insert(plain.end(), {{"expert_capacity", capacity}, {"drop_policy", policy}});
                Fields filled = plain;
                filled.emplace_back("pad_to_capacity", "on");
                CAPTURE(model);
                CAPTURE(policy);
                CAPTURE(capacity);
                train::Trainer without(small_plan(model, 4, plain), train::TrainOptions{});
                train::Trainer with(small_plan(model, 4, filled), train::TrainOptions{});
                for (int step = 0; step < 2; ++step) {
                    const train::StepResult want = train_steps(without, 1).back(), got = train_steps(with, 1).back();
                    CHECK(got.loss == nearly(want.loss).epsilon(1e-5));
                    REQUIRE(got.routers.size() == want.routers.size());
                    for (std::size_t r = 0; r < got.routers.size(); ++r)
                        CHECK(got.routers[r].tokens == want.routers[r].tokens); // real copies only
                    // Behind the first update AdamW has made more of what rounding left between the two.
                    for (const auto& [name, shape] : with.parameters()) {
                        CAPTURE(name);
                        CHECK(relative_distance(with.read_gradient(name), without.read_gradient(name)) <=
                              (step == 0 ? 1e-5 : 1e-3));
                    }
                }
            }
        }
    }
}

TEST_CASE("rows of filled-up experts are planned and priced whatever the routing") {
    // 16 tokens of a rank's micro-batch choose 2 of 8 experts: 4 each, of which a factor of 1.5 makes 6 rows.
    const program::Program program = lower::lower(
        small_plan(
            "qwen3", 4,
            {{"ep", "4"}, {"tp", "2"}, {"expert_capacity", "1.5"}, {"pad_to_capacity", "on"}, {"routing", "zipf:1"}}),
        0);
    const auto tensor = [&](program::TensorId id) { return program.tensors[static_cast<std::size_t>(id)]; };
    int products = 0;
    for (const program::Template& ops : program.templates)
        for (const program::Op& op : ops.ops) {
            if (op.kind != program::OpKind::grouped_gemm || op.phase != program::Phase::forward) continue;
            ++products;
            CHECK(tensor(op.in[0]).rows == 6 * 8);
            CHECK(op.flops == 2.0 * 6 * 8 * static_cast<double>(tensor(op.in[0]).cols * tensor(op.out[0]).cols));
        }
    CHECK(products == 2 * 4);
}

TEST_CASE("a forced choice loads every expert alike") {
    train::Trainer trainer(small_plan("deepseek3", 4, {{"ep", "4"}, {"balance", "forced"}}), train::TrainOptions{});
    const train::StepResult step = train_steps(trainer, 2).back();
    REQUIRE(step.routers.size() == 3);
    for (const train::RouterStep& router : step.routers) CHECK(router.max_over_mean() == 1.0);
}

TEST_CASE("Sinkhorn's choice evens out the load, and an evaluation is free of it") {
    const double alone = trained_imbalance("qwen2", {}),
                 balanced = trained_imbalance("qwen2", {{"load_balancing", "sinkhorn"}});
    INFO(balanced, " against ", alone);
    CHECK(balanced - 1.0 < 0.5 * (alone - 1.0));
    train::TrainOptions options;
    options.evaluates = true;
    train::Trainer with(small_plan("qwen2", 1, {{"load_balancing", "sinkhorn"}}), options),
        without(small_plan("qwen2", 1), options);
    CHECK(with.evaluate(made_up_tokens(61), 8).loss == without.evaluate(made_up_tokens(61), 8).loss);
    CHECK(with.step(made_up_tokens(61)).loss != without.step(made_up_tokens(61)).loss);
}

// A sequence has 32 tokens; a recomputed router balances the same ones again.
TEST_CASE("Sinkhorn's choice is over the tokens of a rank's micro-batch") {
    const auto program = [](const Fields& fields, int ranks) {
        Fields all{{"load_balancing", "sinkhorn"}};
        all.insert(all.end(), fields.begin(), fields.end());
        return lower::lower(small_plan("qwen2", ranks, all), 0);
    };
    const auto tokens = [](const program::Program& of, program::Phase phase) {
        std::vector<std::int64_t> list;
        for (const program::Template& ops : of.templates)
            for (const program::Op& op : ops.ops)
                if (op.kind == program::OpKind::sinkhorn && op.phase == phase) {
                    const auto& attr = std::get<program::RouterAttr>(op.attr);
                    CHECK(op.bytes == 4.0 * static_cast<double>(attr.tokens) * (10 * attr.experts + attr.top_k));
                    list.push_back(attr.tokens);
                }
        return list;
    };
    const auto forward = program::Phase::forward;
    CHECK(tokens(program({}, 1), forward) == std::vector<std::int64_t>(4, 32));
    CHECK(tokens(program({{"mbs", "2"}}, 1), forward) == std::vector<std::int64_t>(4, 64));
    CHECK(tokens(program({{"tp", "2"}, {"cp", "2"}}, 4), forward) == std::vector<std::int64_t>(4, 8));
    CHECK(tokens(program({}, 1), program::Phase::recompute).empty());
    CHECK(tokens(program({{"recompute", "moe"}}, 1), program::Phase::recompute).size() >= 4);
}

TEST_CASE("what a model's routers cannot follow is refused by its field") {
    const auto refused = [](const std::string& model, const std::string& field, const std::string& value) {
        try {
            small_plan(model, 1, {{field, value}});
        } catch (const Error& error) {
            return std::string(error.what());
        }
        return std::string();
    };
    CHECK(refused("llama", "aux_loss", "0.01").find("aux_loss = 0.01: ") != std::string::npos);
    CHECK(refused("llama", "balance", "forced").find("no experts") != std::string::npos);
    CHECK(refused("qwen3", "bias_update", "0.001").find("no selection bias") != std::string::npos);
    CHECK(refused("qwen3", "load_balancing", "expert").find("seq_aux_loss") != std::string::npos);
    CHECK(refused("qwen3", "pad_to_capacity", "on").find("set expert_capacity") != std::string::npos);
    CHECK(refused("qwen3", "drop_scope", "sequence").find("full_sequence") != std::string::npos);
    CHECK_THROWS_WITH_AS(
        small_plan("qwen3", 1, {{"expert_capacity", "1"}, {"drop_scope", "full_sequence"}, {"pad_to_capacity", "on"}}),
        doctest::Contains("set drop_scope sub_sequence"), Error);
    CHECK(refused("qwen3", "z_loss", "-1").find("z_loss") != std::string::npos);
    CHECK(refused("qwen3", "input_jitter", "1").find("input_jitter = 1: must be below 1") != std::string::npos);
    CHECK(refused("llama", "input_jitter", "0.01").find("no experts") != std::string::npos);
    for (const char* model : {"qwen3", "mixtral", "deepseek3", "deepseek2", "gptoss", "llama"}) // normalized, of groups
        CHECK(refused(model, "load_balancing", "sinkhorn").find("load_balancing = sinkhorn") != std::string::npos);
    CHECK(refused("qwen2", "load_balancing", "sinkhorn").empty());
}
