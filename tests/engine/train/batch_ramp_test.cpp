// Ramp-up of the batch: Megatron's rule, steps that are those of plans with the smaller batch, the same training under
// any plan and through checkpoints.
#include "engine/train/checkpoint_writer.hpp"
#include "engine/train/trainer.hpp"
#include "planner/base/error.hpp"
#include "planner/program/timeline.hpp"
#include "tests/engine/base/refusals.hpp"
#include "tests/engine/train/parity.hpp"
#include "tests/support/folder.hpp"

#include <doctest/doctest.h>

#include <memory>

using namespace moe;

namespace {

train::TrainOptions options_of(int steps, const train::BatchRamp& ramp = {}) {
    train::TrainOptions options;
    options.steps = steps;
    options.permits = 2;
    options.eps = 1e-3; // as in parity.cpp
    options.ramp = ramp;
    return options;
}

std::map<std::string, std::vector<float>> weights_of(const train::Trainer& trainer) {
    std::map<std::string, std::vector<float>> all;
    for (const auto& [name, shape] : trainer.parameters()) all[name] = trainer.read_weight(name);
    return all;
}

// Goes on in `next` where `trainer` stands.
void pass_on(const train::Trainer& trainer, train::Trainer& next, const std::string& folder) {
    train::CheckpointWriter writer(folder, "test");
    writer.save(trainer);
    writer.finish();
    std::vector<std::string> skipped;
    next.restore(*weights::newest_checkpoint(folder, skipped));
}

} // namespace

TEST_CASE("ramp-up: the batch by the samples that were taken") {
    const train::BatchRamp ramp = train::batch_ramp("8,8,100");
    // From 8 to 32 are three increments, one for every 33 1/3 samples.
    for (const auto& [consumed, batch] : std::vector<std::pair<std::int64_t, std::int64_t>>{
             {0, 8}, {33, 8}, {34, 16}, {66, 16}, {67, 24}, {99, 24}, {100, 32}, {101, 32}, {1'000'000, 32}})
        CHECK(ramp.batch(consumed, 32) == batch);
    CHECK(ramp.steps(32) == 5 + 2 + 2); // 0 to 32 by 8, 40 and 56 by 16, 72 and 96 by 24
    CHECK(train::BatchRamp{}.batch(0, 32) == 32);
    for (const char* text : {"8", "8,8", "8,8,0", "8,8,100,1", "0,8,100", "a,8,100", "8,8,"})
        CHECK(mentions(message([&] { train::batch_ramp(text); }), "must be START,INCREMENT,SAMPLES"));
}

TEST_CASE("ramp-up: each step is that of a plan with its batch, bit for bit") {
    const Folder folder;
    const train::BatchRamp ramp{2, 2, 18};
    const plan::Plan plan = small_plan("qwen3", 2, {{"ep", "2"}, {"aux_loss", "0.1"}});
    const train::SampleSource source = made_up_samples(plan);
    train::Trainer ramped(plan, options_of(12, ramp));
    std::unique_ptr<train::Trainer> by_hand;
    std::int64_t batch = 0, samples = 0;
    std::vector<std::int64_t> batches;
    for (int step = 0; step < 12; ++step) {
        const std::int64_t due = ramp.batch(samples, plan.gbs);
        if (due != batch) {
            auto next = std::make_unique<train::Trainer>(train::with_batch(plan, due), options_of(12));
            if (by_hand) pass_on(*by_hand, *next, folder / std::to_string(step));
            by_hand = std::move(next);
            batch = due;
            batches.push_back(batch);
        }
        const train::StepResult want = by_hand->step(source), got = ramped.step(source);
        samples += batch;
        CHECK(got.tokens == batch * plan.seq);
        CHECK(got.loss == want.loss);
        CHECK(got.grad_norm == want.grad_norm);
        REQUIRE(got.routers.size() == want.routers.size());
        for (std::size_t i = 0; i < got.routers.size(); ++i) {
            CHECK(got.routers[i].tokens == want.routers[i].tokens);
            CHECK(got.routers[i].aux_loss == want.routers[i].aux_loss);
        }
        CHECK(ramped.recorded() == (batch == plan.gbs));
    }
    CHECK(batches == std::vector<std::int64_t>{2, 4, 6, 8});
    CHECK(weights_of(ramped) == weights_of(*by_hand));
    CHECK(ramped.timeline().rows.size() == by_hand->timeline().rows.size());
}

TEST_CASE("ramp-up: any plan, and a run that goes on from a checkpoint under another, trains the same") {
    const train::BatchRamp ramp{4, 4, 12};
    const train::TrainOptions options = options_of(6, ramp);
    const plan::Plan one = small_plan("deepseek3", 1, {{"documents", "mask"}});
    const train::SampleSource source = made_up_samples(one);
    train::Trainer whole(one, options);
    std::vector<double> losses;
    for (int step = 0; step < 6; ++step) losses.push_back(whole.step(source).loss);
    const std::vector<Fields> plans{
        {{"documents", "mask"}, {"tp", "2"}, {"ep", "4"}, {"recompute", "moe_act"}},
        {{"documents", "mask"}, {"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}, {"offload", "optimizer"}},
        {{"documents", "mask"}, {"cp", "2"}, {"pp", "2"}, {"schedule", "zero-bubble"}},
    };
    for (const Fields& fields : plans) {
        const Folder folder;
        const plan::Plan plan = small_plan("deepseek3", 4, fields);
        train::Trainer first(plan, options);
        for (int step = 0; step < 2; ++step)
            CHECK(first.step(source).loss == doctest::Approx(losses[static_cast<std::size_t>(step)]).epsilon(1e-5));
        train::Trainer second(small_plan("deepseek3", 2, {{"documents", "mask"}, {"ep", "2"}}), options);
        pass_on(first, second, folder / "run");
        for (int step = 2; step < 6; ++step) {
            const double want = losses[static_cast<std::size_t>(step)];
            CHECK(first.step(source).loss == doctest::Approx(want).epsilon(1e-5));
            CHECK(second.step(source).loss == doctest::Approx(want).epsilon(1e-5));
        }
    }
}

TEST_CASE("ramp-up: batches that the plan cannot run are refused by name") {
    const auto refused = [](Fields fields, const train::BatchRamp& ramp, const char* why) {
        const std::string said = message([&] { train::Trainer(small_plan("qwen3", 4, fields), options_of(2, ramp)); });
        CAPTURE(said);
        CHECK(mentions(said, why));
    };
    refused({}, {8, 8, 10}, "starts with 8 samples, the plan's gbs is 8");
    refused({}, {2, 4, 10}, "from 2 to gbs = 8 are 6 samples, which 4 does not divide");
    refused({}, {2, 2, 10}, "--rampup-batch-size 2,2,10: a batch of 2: "); // of four ranks
    refused({{"ep", "4"}, {"capacity", "1"}}, {4, 4, 10}, "set capacity none");
    refused({{"ep", "4"}, {"aux_loss", "0.1"}, {"load_balancing", "global_aux_loss"}}, {4, 4, 10}, "global_aux_loss");
}
