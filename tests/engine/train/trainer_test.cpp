// Training itself: the loss falls, schedules and options hold, what cannot run is refused, timelines line up with the
// Program.
#include "engine/backends/cpu/table.hpp"
#include "engine/comm/check.hpp"
#include "engine/run/executable.hpp"
#include "planner/base/error.hpp"
#include "planner/lower/lower.hpp"
#include "planner/model/model.hpp"
#include "tests/engine/train/samples.hpp"
#include "tests/support/draws.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

using namespace moe;

namespace {

std::vector<program::Program> lowered(const plan::Plan& plan) {
    std::vector<program::Program> programs;
    for (int stage = 0; stage < plan.pp; ++stage) programs.push_back(lower::lower(plan, stage));
    return programs;
}

program::Op& first_op(program::Program& program, plan::SlotKind slot, program::OpKind kind) {
    for (program::Template& ops : program.templates)
        if (ops.kind == slot)
            for (program::Op& op : ops.ops)
                if (op.kind == kind) return op;
    throw std::logic_error("no such op");
}

} // namespace

// Many steps learn here; parity_test.cpp runs every op of them.
TEST_CASE("eight ranks learn the rule behind made-up tokens, in FP32 and in BF16" * doctest::skip(sanitized())) {
    for (const machine::Precision precision : {machine::Precision::fp32, machine::Precision::bf16}) {
        plan::Plan plan = small_plan("qwen3", 8, {{"tp", "2"}, {"ep", "4"}, {"pp", "2"}});
        plan.precision = precision;
        train::TrainOptions options;
        options.steps = 60;
        options.lr = 1e-2;
        options.warmup = 5;
        options.schedule = train::LearningRate::cosine;
        train::Trainer trainer(plan, options);
        int calls = 0;
        const std::vector<train::StepResult> results = train::train(
            trainer, options, made_up_tokens(61), [&](const train::StepResult& r) { CHECK(r.step == ++calls); });
        REQUIRE(results.size() == 60);
        CHECK(results.front().loss == nearly(std::log(61.0)).epsilon(0.05));
        // Guessing by frequency reaches ln 61 = 4.11; knowing the successor three times in four about 1.6.
        CHECK(results.back().loss < 2.6);
        CHECK(results.back().tokens == 8 * 32);
    }
}

TEST_CASE("BF16 storage follows FP32 to its precision") {
    plan::Plan plan = small_plan("deepseek3", 4, {{"tp", "2"}, {"ep", "2"}, {"pp", "2"}});
    train::Trainer exact(plan, {});
    plan.precision = machine::Precision::bf16;
    train::Trainer rounded(plan, {});
    const double a = exact.step(made_up_tokens(61)).loss, b = rounded.step(made_up_tokens(61)).loss;
    CHECK(std::abs(a / b - 1.0) < 2e-3);
    CHECK(a != b);
    // A weight that routing does not touch directly.
    CHECK(relative_distance(rounded.read_gradient("lm_head.weight"), exact.read_gradient("lm_head.weight")) < 0.03);
}

TEST_CASE("tokens by expert: every copy is counted once, whatever the plan and what it recomputes") {
    const auto counts = [](const plan::Plan& plan) {
        train::Trainer trainer(plan, {});
        trainer.step(made_up_tokens(61));
        return trainer.routed_tokens();
    };
    const plan::Plan one = small_plan("deepseek3", 1, {});
    plan::Plan many = small_plan("deepseek3", 8, {{"tp", "2"}, {"ep", "4"}, {"pp", "2"}});
    many.recompute = plan::recompute::moe;
    const std::vector<std::vector<std::int64_t>> alone = counts(one);
    std::size_t routed = 0;
    for (const int kind : one.model->layers) routed += one.model->kinds[static_cast<std::size_t>(kind)].moe ? 1 : 0;
    REQUIRE(alone.size() == routed);
    for (const std::vector<std::int64_t>& layer : alone) {
        std::int64_t sum = 0;
        for (const std::int64_t count : layer) sum += count;
        CHECK(sum == one.gbs * one.seq * one.model->kinds.back().moe->top_k);
    }
    CHECK(counts(many) == alone);
}

TEST_CASE("clipping scales the update, not the reported norm") {
    const plan::Plan plan = small_plan("llama", 2, {});
    train::TrainOptions options;
    options.clip = 0.0;
    // AdamW's first update is proportional to the gradients with an epsilon far above them.
    options.eps = 1e3;
    options.weight_decay = 0.0;
    options.lr = 1e3;
    const auto update = [&](double clip) {
        options.clip = clip;
        train::Trainer trainer(plan, options);
        const std::vector<float> before = trainer.read_weight("lm_head.weight");
        const double norm = trainer.step(made_up_tokens(61)).grad_norm;
        std::vector<float> change = trainer.read_weight("lm_head.weight");
        double sum = 0.0;
        for (std::size_t i = 0; i < change.size(); ++i) sum += std::pow(static_cast<double>(change[i] - before[i]), 2);
        return std::pair{norm, std::sqrt(sum)};
    };
    const auto [norm, free] = update(0.0);
    const auto [clipped_norm, clipped] = update(norm / 4);
    CHECK(clipped_norm == norm);
    CHECK(clipped / free == nearly(0.25).epsilon(1e-3));
}

TEST_CASE("initial weights do not depend on the plan") {
    train::Trainer one(small_plan("deepseek3", 1), {});
    train::Trainer eight(small_plan("deepseek3", 8, {{"tp", "2"}, {"ep", "2"}, {"etp", "2"}, {"pp", "2"}}), {});
    for (const auto& [name, shape] : one.parameters()) {
        INFO(name);
        CHECK(one.read_weight(name) == eight.read_weight(name));
    }
    const std::vector<float> w = one.read_weight("model.layers.1.mlp.experts.5.up_proj.weight");
    double mean = 0.0, square = 0.0;
    for (const float x : w) {
        mean += x / static_cast<double>(w.size());
        square += static_cast<double>(x) * x / static_cast<double>(w.size());
    }
    CHECK(std::abs(mean) < 4 * 0.02 / std::sqrt(static_cast<double>(w.size())));
    CHECK(std::sqrt(square) == nearly(0.02).epsilon(0.15));
    CHECK_THROWS_AS(one.read_weight("model.layers.9.mlp.gate.weight"), Error);
    CHECK_THROWS_AS(one.write_weight("lm_head.weight", std::vector<float>(3)), Error);
}

TEST_CASE("a timeline has every op of every rank, in order, with busy times that add up") {
    const plan::Plan plan = small_plan("qwen3", 4, {{"tp", "2"}, {"ep", "2"}, {"pp", "2"}});
    train::TrainOptions options;
    options.permits = 2;
    train::Trainer trainer(plan, options);
    for (int step = 0; step < 4; ++step) trainer.step(made_up_tokens(61));
    const program::Timeline timeline = trainer.timeline();
    CHECK_FALSE(timeline.predicted);
    CHECK(timeline.ranks == std::vector<int>{0, 1, 2, 3});
    CHECK(timeline.pipeline_rank == std::vector<int>{0, 0, 1, 1});
    CHECK(timeline.step_seconds > 0.0);
    CHECK(timeline.tflops_per_gpu > 0.0);
    CHECK(timeline.memory_gib == trainer.memory_gib());
    std::size_t row = 0;
    double busy = 0.0;
    for (const int stage : timeline.pipeline_rank) {
        const program::Program& program = trainer.programs()[static_cast<std::size_t>(stage)];
        double end = 0.0;
        for (std::size_t s = 0; s < program.slots.size(); ++s) {
            const program::Template& ops = program.templates[static_cast<std::size_t>(program.slots[s].index)];
            for (std::size_t i = 0; i < ops.ops.size(); ++i, ++row) {
                const program::TimelineRow& r = timeline.rows.at(row);
                const bool same =
                    r.slot == static_cast<int>(s) && r.op == static_cast<int>(i) && r.kind == ops.ops[i].kind;
                const bool timed =
                    r.start >= end && r.end >= r.start && r.busy >= 0.0 && r.busy <= r.end - r.start + 1e-12;
                if (!same || !timed) FAIL("row ", row, " of ", program::to_string(r.kind));
                end = r.end;
                busy += r.busy;
            }
        }
        CHECK(end <= timeline.step_seconds);
    }
    CHECK(row == timeline.rows.size());
    CHECK(busy <= 2 * timeline.step_seconds);
}

TEST_CASE("learning rates follow their schedule") {
    train::TrainOptions o;
    o.steps = 101;
    o.lr = 1.0;
    CHECK(train::learning_rate(o, 0) == 1.0);
    CHECK(train::learning_rate(o, 100) == 1.0);
    o.warmup = 10;
    CHECK(train::learning_rate(o, 0) == nearly(0.1));
    CHECK(train::learning_rate(o, 9) == nearly(1.0));
    o.schedule = train::LearningRate::cosine;
    CHECK(train::learning_rate(o, 10) == nearly(1.0));
    CHECK(train::learning_rate(o, 55) == nearly(0.55));
    CHECK(train::learning_rate(o, 100) == nearly(0.1));
    CHECK(train::learning_rate(o, 500) == nearly(0.1));
    o.schedule = train::LearningRate::linear;
    CHECK(train::learning_rate(o, 10) == nearly(1.0));
    CHECK(train::learning_rate(o, 55) == nearly(0.55));
    CHECK(train::learning_rate(o, 100) == nearly(0.1));
    o.schedule = train::LearningRate::wsd;
    o.decay_steps = 21;
    CHECK(train::learning_rate(o, 10) == 1.0);
    CHECK(train::learning_rate(o, 80) == 1.0);
    CHECK(train::learning_rate(o, 90) == nearly(0.55));
    CHECK(train::learning_rate(o, 100) == nearly(0.1));
    o.decay_steps = 1000; // longer than what follows the warm-up
    CHECK(train::learning_rate(o, 55) == nearly(0.55));
    o.schedule = train::LearningRate::inverse_sqrt;
    CHECK(train::learning_rate(o, 9) == nearly(1.0));
    CHECK(train::learning_rate(o, 39) == nearly(0.5));
    CHECK(train::learning_rate(o, 100000) == nearly(0.1));
    // What all of them share: the warm-up, and no step back up behind it.
    for (const char* name : train::learning_rate_names) {
        CAPTURE(name);
        o.schedule = train::learning_rate_named(name);
        CHECK(train::learning_rate(o, 4) == nearly(0.5));
        for (std::int64_t step = 10; step < 200; ++step)
            CHECK(train::learning_rate(o, step) <= train::learning_rate(o, step - 1) * (1.0 + 1e-12));
    }
}

TEST_CASE("loads of a router: most over mean, and entropy over that of even loads") {
    const auto router = [](std::vector<std::int64_t> tokens) {
        return train::RouterStep{0, 0.0, 0.0, std::move(tokens)};
    };
    CHECK(router({10, 10, 10, 10}).load_entropy() == nearly(1.0));
    CHECK(router({30, 10, 0, 0}).max_over_mean() == 3.0);
    CHECK(router({30, 10, 0, 0}).load_entropy() ==
          nearly((0.75 * std::log(4.0 / 3.0) + 0.25 * std::log(4.0)) / std::log(4.0)));
    CHECK(router({40, 0, 0, 0}).load_entropy() == 0.0);
    CHECK(router({0, 0}).load_entropy() == 1.0);
    CHECK(router({}).max_over_mean() == 1.0);
}

TEST_CASE("options outside their range are refused by name") {
    const auto refused = [](auto change, const char* name) {
        train::TrainOptions options;
        change(options);
        CHECK_THROWS_WITH_AS(train::check_options(options), doctest::Contains(name), Error);
    };
    refused([](train::TrainOptions& o) { o.steps = 0; }, "--steps");
    refused([](train::TrainOptions& o) { o.lr = -1; }, "--lr");
    refused([](train::TrainOptions& o) { o.lr = std::numeric_limits<double>::quiet_NaN(); }, "--lr");
    refused([](train::TrainOptions& o) { o.warmup = -3; }, "--warmup");
    refused([](train::TrainOptions& o) { o.beta2 = 1.0; }, "--betas");
    refused([](train::TrainOptions& o) { o.eps = 0.0; }, "--eps");
    refused([](train::TrainOptions& o) { o.clip = -1.0; }, "--grad-clip");
    refused([](train::TrainOptions& o) { o.weight_decay = std::numeric_limits<double>::infinity(); }, "--weight-decay");
    train::TrainOptions cuda;
    cuda.backend = "cuda";
    CHECK_THROWS_WITH_AS(train::Trainer(small_plan("llama", 1), cuda), doctest::Contains("--backend cuda"), Error);
}

TEST_CASE("a run that diverges ends with one line") {
    train::TrainOptions options;
    options.steps = 20;
    train::Trainer trainer(small_plan("llama", 1), options);
    std::vector<float> weights = trainer.read_weight("lm_head.weight");
    weights[3] = std::numeric_limits<float>::infinity();
    trainer.write_weight("lm_head.weight", weights);
    CHECK_THROWS_WITH_AS(train::train(trainer, options, made_up_tokens(61), {}), doctest::Contains("step 1: loss"),
                         Error);
}

TEST_CASE("what the engine cannot run is refused by the field that asks for it") {
    const auto refused = [](const char* model, const std::vector<std::pair<std::string, std::string>>& fields,
                            const char* text) {
        const plan::Plan plan = small_plan(model, 8, fields);
        CHECK_THROWS_WITH_AS(run::check_executable(plan, lowered(plan), backends::cpu_backend()),
                             doctest::Contains(text), Error);
    };
    refused("qwen3", {{"ep", "8"}, {"dispatcher", "deepep"}}, "dispatcher = deepep");
    refused("qwen3", {{"ep", "4"}, {"etp", "2"}, {"dispatcher", "hybridep"}}, "dispatcher = hybridep: etp = 2");
    refused("qwen3", {{"ep", "8"}, {"cuda_graph", "full"}}, "cuda_graph = full");
    plan::Plan plan = small_plan("qwen3", 8, {{"ep", "8"}});
    plan.precision = machine::Precision::fp8_tensor;
    plan.stack = "bridge-26.08";
    CHECK_THROWS_WITH_AS(run::check_executable(plan, lowered(plan), backends::cpu_backend()),
                         doctest::Contains("precision = fp8-tensor"), Error);
    plan.precision = machine::Precision::fp32;
    plan.stack = "moe-plan";
    auto model = std::make_shared<model::Model>(*plan.model);
    model->not_executable = "some_field = 3";
    plan.model = model;
    CHECK_THROWS_WITH_AS(train::Trainer(plan, {}), doctest::Contains("some_field = 3"), Error);
}

TEST_CASE("communication that does not line up is found before the run") {
    const plan::Plan plan =
        small_plan("qwen3", 8, {{"tp", "2"}, {"ep", "2"}, {"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}});
    const plan::Mesh mesh(plan);
    const std::vector<program::Program> sound = lowered(plan);
    CHECK_NOTHROW(comm::check_communication(sound, mesh));

    std::vector<program::Program> programs = sound;
    std::get<program::PeerAttr>(first_op(programs[0], plan::SlotKind::forward, program::OpKind::send).attr).stage += 1;
    CHECK_THROWS_WITH_AS(comm::check_communication(programs, mesh), doctest::Contains("cannot finish: rank"), Error);

    programs = sound;
    for (program::Template& ops : programs[1].templates)
        for (program::Op& op : ops.ops)
            if (op.group.axes & plan::axis::pipeline && op.kind == program::OpKind::all_reduce)
                op.kind = program::OpKind::all_gather;
    CHECK_THROWS_WITH_AS(comm::check_communication(programs, mesh), doctest::Contains("do not line up: rank"), Error);

    // The stages' last collective, over all ranks, is missing on one of them.
    programs = sound;
    for (program::Template& ops : programs[1].templates)
        if (ops.kind == plan::SlotKind::finish)
            std::erase_if(ops.ops, [](const program::Op& op) { return op.kind == program::OpKind::all_reduce; });
    CHECK_THROWS_WITH_AS(comm::check_communication(programs, mesh), doctest::Contains("all_reduce"), Error);

    // A message of another size.
    programs = sound;
    program::Op& recv = first_op(programs[1], plan::SlotKind::forward, program::OpKind::recv);
    programs[1].tensors[static_cast<std::size_t>(recv.out[0])].rows += 1;
    CHECK_THROWS_WITH_AS(comm::check_communication(programs, mesh), doctest::Contains("expects it"), Error);

    // Micro-batches in another order.
    programs = sound;
    std::vector<std::size_t> forwards;
    for (std::size_t s = 0; s < programs[1].slots.size(); ++s)
        if (programs[1].templates[static_cast<std::size_t>(programs[1].slots[s].index)].kind == plan::SlotKind::forward)
            forwards.push_back(s);
    std::swap(programs[1].slots[forwards[0]].micro_batch, programs[1].slots[forwards[1]].micro_batch);
    CHECK_THROWS_WITH_AS(comm::check_communication(programs, mesh), doctest::Contains("micro-batch"), Error);
}
