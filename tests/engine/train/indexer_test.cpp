// Sparse attention trained: stages of the indexer, what they leave alone, and that an indexer learns what the heads
// see.
#include "planner/base/error.hpp"
#include "tests/engine/train/parity.hpp"

#include <doctest/doctest.h>

#include <algorithm>

using namespace moe;

namespace {

bool of_indexer(const std::string& name) { return name.find(".indexer.") != std::string::npos; }

} // namespace

TEST_CASE("indexer: in its warm-up nothing else moves, under every plan") {
    const Fields stage{{"indexer_stage", "warm_up"}};
    const plan::Plan plan = small_plan("deepseek32", 1, stage);
    const Trained one = train_three(plan);
    train::Trainer fresh(plan, three_steps());
    for (const auto& [name, weights] : one.weights) {
        CAPTURE(name);
        CHECK((weights == fresh.read_weight(name)) == !of_indexer(name));
    }
    for (Fields fields : {Fields{{"cp", "2"}, {"tp", "2"}, {"ep", "2"}}, Fields{{"pp", "2"}, {"tp", "4"}},
                          Fields{{"fsdp", "on"}, {"recompute", "full"}}}) {
        fields.insert(fields.end(), stage.begin(), stage.end());
        INFO(words_of(fields));
        const Trained got = train_three(small_plan("deepseek32", 8, fields));
        CHECK(disagreement(got, one, parity_tolerance, parity_tolerance) == "");
    }
}

TEST_CASE("indexer: without a loss it keeps its weights but for their decay, and all else is trained as with it") {
    const auto trained = [](const char* loss) {
        return train_three(small_plan("deepseek32", 1, {{"indexer_loss", loss}}));
    };
    const Trained none = trained("none"), much = trained("10");
    for (const auto& [name, gradient] : none.gradients) {
        CAPTURE(name);
        const bool zero = std::all_of(gradient.begin(), gradient.end(), [](float g) { return g == 0.0f; });
        if (of_indexer(name))
            CHECK(zero);
        else
            CHECK(gradient == much.gradients.at(name));
        if (!of_indexer(name)) continue;
        const std::vector<float>& other = much.gradients.at(name);
        CHECK(std::any_of(other.begin(), other.end(), [](float g) { return g != 0.0f; }));
    }
    // The loss enters by its coefficient.
    const Trained one = trained("1");
    for (const auto& [name, gradient] : one.gradients) {
        if (!of_indexer(name)) continue;
        CAPTURE(name);
        std::vector<float> tenfold = gradient;
        for (float& g : tenfold) g *= 10.0f;
        CHECK(relative_distance(much.gradients.at(name), tenfold) < 1e-5);
    }
}

TEST_CASE("indexer: what it learns brings its distribution near that of the heads") {
    train::TrainOptions options = three_steps();
    options.steps = 150;
    options.lr = 3e-3;
    options.eps = 1e-8;
    const plan::Plan plan = small_plan("deepseek32", 1, {{"indexer_stage", "warm_up"}});
    train::Trainer trainer(plan, options);
    const train::SampleSource source = made_up_samples(plan);
    const train::SampleSource same = [&](std::int64_t sample, std::span<std::int32_t> tokens) {
        source(sample % plan.gbs, tokens);
    };
    const double first = trainer.step(same).grad_norm;
    double last = first;
    for (int step = 1; step < options.steps; ++step) last = trainer.step(same).grad_norm;
    CHECK(last < 0.3 * first);
}
