// Bad steps: nothing changes to the bit, whatever the plan, the run goes on as if they had not been, and returns.
#include "engine/train/bad_steps.hpp"
#include "engine/train/checkpoint_writer.hpp"
#include "planner/base/error.hpp"
#include "tests/engine/train/parity.hpp"
#include "tests/support/folder.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

using namespace moe;

namespace {

train::TrainOptions skipping(double spike = 0.0) {
    train::TrainOptions options;
    options.steps = 40;
    options.skip_bad = true;
    options.spike = spike;
    options.permits = 2;
    return options;
}

using Weights = std::map<std::string, std::vector<float>>;

Weights weights_of(const train::Trainer& trainer) {
    Weights all;
    for (const auto& [name, shape] : trainer.parameters()) all[name] = trainer.read_weight(name);
    return all;
}

std::vector<weights::Slice> state_of(const train::Trainer& trainer) {
    weights::Snapshot snapshot;
    trainer.snapshot(snapshot);
    std::vector<weights::Slice> all;
    for (const weights::RankSlices& rank : snapshot.ranks)
        all.insert(all.end(), rank.slices.begin(), rank.slices.end());
    return all;
}

// A norm that is not finite, by a weight of that kind, which is put right again behind the step.
train::StepResult broken_step(train::Trainer& trainer, float value) {
    const std::string name = "model.norm.weight";
    const std::vector<float> before = trainer.read_weight(name);
    std::vector<float> broken = before;
    broken[3] = value;
    trainer.write_weight(name, broken);
    const train::StepResult result = trainer.step(made_up_samples(trainer.plan()));
    CHECK(trainer.read_weight(name)[4] == before[4]);
    trainer.write_weight(name, before);
    return result;
}

} // namespace

TEST_CASE("a bad step changes no weight, moment or bias, under any plan") {
    const std::vector<std::pair<const char*, Fields>> cases{
        {"qwen3", {{"ep", "2"}, {"pp", "2"}}},
        {"deepseek3", {{"tp", "2"}, {"ep", "4"}, {"bias_update", "0.01"}}},
        {"gptoss", {{"cp", "2"}, {"precision", "bf16"}}},
        {"mixtral", {{"precision", "bf16"}, {"ep", "2"}, {"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}}}};
    for (const auto& [model, fields] : cases) {
        INFO(model);
        train::Trainer trainer(small_plan(model, 4, fields), skipping());
        const train::SampleSource source = made_up_samples(trainer.plan());
        CHECK_FALSE(trainer.step(source).skipped);
        const Weights before = weights_of(trainer);
        const std::vector<weights::Slice> state = state_of(trainer);
        for (const float value : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
            const train::StepResult bad = broken_step(trainer, value);
            CHECK(bad.skipped);
            CHECK_FALSE(std::isfinite(bad.grad_norm));
        }
        CHECK(weights_of(trainer) == before);
        const std::vector<weights::Slice> after = state_of(trainer);
        REQUIRE(after.size() == state.size());
        for (std::size_t i = 0; i < state.size(); ++i) CHECK(after[i].values == state[i].values);
        const train::StepResult next = trainer.step(source);
        CHECK_FALSE(next.skipped);
        CHECK(std::isfinite(next.loss));
        CHECK(weights_of(trainer) != before);
    }
}

TEST_CASE("a run with bad steps is the run without them, to the bit") {
    // The samples of steps 2 and 3 of one run are those of steps 4 and 5 of the other, which has bad ones in between.
    const auto train = [](bool bad) {
        const plan::Plan plan = small_plan("qwen3", 2, {{"ep", "2"}});
        train::Trainer trainer(plan, skipping());
        const train::SampleSource source = made_up_samples(plan);
        train::SampleSource same = source;
        same.tokens = [&source](std::int64_t sample, std::span<std::int32_t> out) { source(sample % 8, out); };
        trainer.step(same);
        if (bad)
            for (int i = 0; i < 2; ++i) CHECK(broken_step(trainer, -std::numeric_limits<float>::infinity()).skipped);
        trainer.step(same);
        trainer.step(same);
        return weights_of(trainer);
    };
    CHECK(train(true) == train(false));
}

TEST_CASE("spikes are norms far above the median of those before") {
    train::BadSteps bad;
    CHECK(bad.limit(2.0) == std::numeric_limits<float>::max());
    for (int i = 1; i <= 9; ++i) CHECK_FALSE(bad.add(static_cast<float>(i * i), bad.limit(2.0)));
    CHECK(bad.limit(2.0) == 100.0f); // twice the median 5, squared
    CHECK(bad.limit(0.0) == std::numeric_limits<float>::max());
    CHECK(bad.add(101.0f, bad.limit(2.0)));
    CHECK(bad.skipped() == 1);
    CHECK(bad.limit(2.0) == 100.0f); // a spike is none of the norms
    for (int i = 0; i < 64; ++i) CHECK_FALSE(bad.add(1.0f, bad.limit(2.0)));
    CHECK(bad.norms().size() == train::BadSteps::window);
    CHECK(bad.limit(3.0) == 9.0f);
    CHECK(train::BadSteps(std::vector<float>(9, 0.0f), 0).limit(2.0) > 0.0f);
}

TEST_CASE("a spiking step is skipped by every plan alike, and a resumed run knows the norms") {
    const Folder folder;
    const auto train = [&](int ranks, const Fields& fields, bool resumes) {
        Fields all{{"documents", "mask"}};
        all.insert(all.end(), fields.begin(), fields.end());
        train::Trainer trainer(small_plan("qwen3", ranks, all), skipping(1.5));
        std::vector<std::string> none;
        if (resumes) trainer.restore(*weights::newest_checkpoint(folder / "run", none));
        train::SampleSource source = made_up_tokens(61);
        source.counts = [](std::int64_t sample, std::span<std::int32_t> counts) {
            // Steps 10 and 14 are over a few labels alone, whose gradient is larger than the mean of many.
            const bool few = sample / 8 == 9 || sample / 8 == 13;
            for (std::size_t i = 0; i < counts.size(); ++i) counts[i] = !few || (sample % 8 == 0 && i < 6) ? 1 : 0;
        };
        std::vector<bool> skipped;
        while (trainer.steps_done() < 16) {
            skipped.push_back(trainer.step(source).skipped);
            if (trainer.steps_done() != 12 || resumes || ranks > 1) continue;
            train::CheckpointWriter writer(folder / "run", "test");
            writer.save(trainer);
            writer.finish();
        }
        return std::pair(skipped, weights_of(trainer));
    };
    const auto whole = train(1, {}, false), split = train(4, {{"tp", "2"}, {"ep", "2"}, {"pp", "2"}}, false),
               resumed = train(1, {}, true);
    std::vector<bool> spikes(16, false);
    spikes[9] = spikes[13] = true;
    CHECK(whole.first == spikes);
    CHECK(split.first == whole.first);
    CHECK(resumed.first == std::vector<bool>(whole.first.begin() + 12, whole.first.end()));
    CHECK(resumed.second == whole.second);
}

TEST_CASE("behind bad steps in a row a run goes back to its checkpoint, and on with other samples") {
    const Folder folder;
    train::TrainOptions options = skipping();
    options.steps = 8;
    train::Trainer trainer(small_plan("qwen3", 2, {{"ep", "2"}}), options);
    std::vector<std::int64_t> steps, first_samples;
    std::vector<std::string> said;
    std::int64_t broken = 0; // steps whose samples break the model
    train::CheckpointWriter writer(folder / "run", "test");
    const train::Saving saving{writer, 2, {}, 2, [&](const std::string& line) { said.push_back(line); }};
    const std::string name = "model.norm.weight";
    const std::vector<float> good = trainer.read_weight(name);
    train::SampleSource source = made_up_samples(trainer.plan());
    const train::SampleSource::Write tokens = source.tokens;
    source.tokens = [&](std::int64_t sample, std::span<std::int32_t> out) {
        if (sample % 8 == 0) first_samples.push_back(sample);
        tokens(sample, out);
    };
    train::train(
        trainer, options, source,
        [&](const train::StepResult& result) {
            steps.push_back(result.step);
            if (result.step != 5 || broken > 0) return;
            broken = 1; // From here on the weights are broken, until the run goes back.
            trainer.write_weight(name, std::vector<float>(good.size(), std::numeric_limits<float>::quiet_NaN()));
        },
        &saving);
    CHECK(steps == std::vector<std::int64_t>{1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8});
    CHECK(first_samples == std::vector<std::int64_t>{0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80});
    REQUIRE(said.size() == 1);
    CHECK(said.front() == "step 7: 2 bad steps in a row: going back to step 4, and on with the data behind");
    CHECK(std::isfinite(trainer.read_weight(name).front()));
}

TEST_CASE("a run that nothing helps ends with a line that says so") {
    const Folder folder;
    train::TrainOptions options = skipping();
    train::Trainer trainer(small_plan("llama", 1), options);
    train::CheckpointWriter writer(folder / "run", "test");
    const train::Saving saving{writer, 1, {}, 2};
    const train::SampleSource source = made_up_samples(trainer.plan());
    const auto broken = [&](const train::StepResult& result) {
        if (result.step < 2) return;
        trainer.write_weight("model.norm.weight", std::vector<float>(32, std::numeric_limits<float>::infinity()));
    };
    CHECK_THROWS_WITH_AS(train::train(trainer, options, source, broken, &saving),
                         doctest::Contains("2 bad steps in a row, 3 times from step 2 on"), Error);
}
