// The average of the weights: what it is, the same under every plan, through checkpoints, bad steps and exports.
#include "engine/train/checkpoint_writer.hpp"
#include "engine/train/huggingface.hpp"
#include "tests/engine/base/refusals.hpp"
#include "tests/engine/train/parity.hpp"
#include "tests/engine/train/random_cases.hpp"
#include "tests/support/folder.hpp"

#include <doctest/doctest.h>

#include <limits>

using namespace moe;

namespace {

constexpr double decay = 0.75;

train::TrainOptions averaging(double ema = decay) {
    train::TrainOptions options;
    options.steps = 4;
    options.permits = 2;
    options.eps = 1e-3; // as in parity.cpp
    options.skip_bad = true;
    options.ema = ema;
    return options;
}

using Weights = std::map<std::string, std::vector<float>>;

Weights averages_of(const train::Trainer& trainer) {
    Weights all;
    for (const auto& [name, shape] : trainer.parameters()) all[name] = trainer.read_average(name);
    return all;
}

Weights weights_of(const train::Trainer& trainer) {
    Weights all;
    for (const auto& [name, shape] : trainer.parameters()) all[name] = trainer.read_weight(name);
    return all;
}

// Moves `average` as the formula says.
void follow(Weights& average, const Weights& weights) {
    for (auto& [name, values] : average)
        for (std::size_t i = 0; i < values.size(); ++i)
            values[i] += static_cast<float>(1.0 - decay) * (weights.at(name)[i] - values[i]);
}

void save(const std::string& folder, const train::Trainer& trainer) {
    train::CheckpointWriter writer(folder, "test");
    writer.save(trainer);
    writer.finish();
}

std::unique_ptr<weights::StoredCheckpoint> stored(const std::string& folder) {
    std::vector<std::string> skipped;
    return weights::newest_checkpoint(folder, skipped);
}

} // namespace

TEST_CASE("the average moves by its share of the way behind every step that moves the weights, to the bit") {
    for (const Fields& fields : {Fields{{"ep", "2"}, {"tp", "2"}}, Fields{{"pp", "2"}, {"offload", "optimizer"}},
                                 Fields{{"precision", "bf16"}}}) {
        train::Trainer trainer(small_plan("qwen3", 4, fields), averaging()), plain(trainer.plan(), averaging(0.0));
        const train::SampleSource source = made_up_samples(trainer.plan());
        Weights average = weights_of(trainer);
        CHECK(averages_of(trainer) == average);
        for (int step = 0; step < 3; ++step) {
            trainer.step(source);
            plain.step(source);
            const Weights now = weights_of(trainer);
            CHECK(now == weights_of(plain)); // The training does not know of it.
            CHECK(averages_of(trainer) != now);
            follow(average, now);
            CHECK(averages_of(trainer) == average);
        }
        const std::vector<float> norm = trainer.read_weight("model.norm.weight");
        trainer.write_weight("model.norm.weight",
                             std::vector<float>(norm.size(), std::numeric_limits<float>::infinity()));
        CHECK(trainer.step(source).skipped);
        CHECK(averages_of(trainer) == average);
    }
}

TEST_CASE("random plans average what one rank does") {
    const auto train = [](const RandomCase& c) {
        train::Trainer trainer(plan_of(c), averaging());
        const train::SampleSource source = made_up_samples(trainer.plan());
        for (int step = 0; step < 3; ++step) trainer.step(source);
        return averages_of(trainer);
    };
    std::size_t held = 0;
    for (const RandomCase& c : random_cases(11262026, 6, 1)) {
        if (c.text().find("bf16") != std::string::npos) continue;
        CAPTURE(c.text());
        ++held;
        const Weights want = train(one_rank_of(c)), got = train(c);
        REQUIRE(got.size() == want.size());
        for (const auto& [name, values] : want) {
            const std::string held_name = name; // no structured binding can be captured
            CAPTURE(held_name);
            CHECK(relative_distance(got.at(name), values) <= parity_tolerance);
        }
    }
    CHECK(held > 0);
}

TEST_CASE("a checkpoint keeps the average, any plan goes on with it, and export writes it") {
    const Folder folder;
    const plan::Plan plan = small_plan("qwen3", 2, {{"ep", "2"}});
    train::Trainer whole(plan, averaging());
    const train::SampleSource source = made_up_samples(plan);
    whole.step(source);
    save(folder / "run", whole);
    const Weights saved = averages_of(whole);
    whole.step(source);
    const auto checkpoint = stored(folder / "run");
    CHECK(checkpoint->state().ema == decay);

    train::Trainer same(plan, averaging()), other(small_plan("qwen3", 4, {{"tp", "2"}, {"pp", "2"}}), averaging());
    for (train::Trainer* trainer : {&same, &other}) {
        trainer->restore(*checkpoint);
        CHECK(averages_of(*trainer) == saved);
        trainer->step(source);
    }
    CHECK(averages_of(same) == averages_of(whole));
    for (const auto& [name, values] : averages_of(whole)) {
        const std::string held_name = name; // no structured binding can be captured
        CAPTURE(held_name);
        CHECK(relative_distance(other.read_average(name), values) <= parity_tolerance);
    }
    whole.go_back(*checkpoint);
    CHECK(averages_of(whole) == saved);

    train::ExportOptions average;
    average.average = true;
    train::export_weights(*checkpoint, folder / "average", average);
    train::export_weights(*checkpoint, folder / "weights");
    train::Trainer loaded(plan, averaging(0.0));
    train::load_weights(loaded, folder / "average");
    CHECK(weights_of(loaded) == saved);
    train::load_weights(loaded, folder / "weights");
    CHECK(weights_of(loaded) != saved);
}

TEST_CASE("a run without an average has none in its checkpoint, and one that begins starts from the weights") {
    const Folder folder;
    const plan::Plan plan = small_plan("llama", 1);
    train::Trainer plain(plan, averaging(0.0));
    plain.step(made_up_samples(plan));
    save(folder / "run", plain);
    const auto checkpoint = stored(folder / "run");
    train::ExportOptions average;
    average.average = true;
    CHECK(mentions(message([&] { train::export_weights(*checkpoint, folder / "average", average); }),
                   "holds no average of the weights: train with --ema DECAY"));
    train::Trainer trainer(plan, averaging());
    trainer.restore(*checkpoint);
    CHECK(averages_of(trainer) == weights_of(plain));
    for (const double wrong : {-0.1, 1.0, std::numeric_limits<double>::quiet_NaN()})
        CHECK(mentions(message([&] { train::Trainer(plan, averaging(wrong)); }), "--ema "));
}
