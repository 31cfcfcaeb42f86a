// Sparse attention trained: stages of the indexer, what they leave alone, and that an indexer learns what the heads
// see.
#include "planner/base/error.hpp"
#include "planner/model/model.hpp"
#include "tests/engine/train/parity.hpp"
#include "tests/support/draws.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

using namespace moe;

namespace {

bool of_indexer(const std::string& name) { return name.find(".indexer.") != std::string::npos; }

// Fresh weights see all keys nearly alike. These heads tell them apart, so that a divergence is no rounding error.
void sharpen(train::Trainer& trainer) {
    for (const auto& [name, shape] : trainer.parameters()) {
        if (name.find("self_attn.q_b_proj.weight") == std::string::npos) continue;
        std::vector<float> weight = trainer.read_weight(name);
        for (float& w : weight) w *= 50.0f;
        trainer.write_weight(name, weight);
    }
}

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

TEST_CASE("indexer: its loss is reported by layer, in proportion to its coefficient, and only where there is one") {
    const auto first_step = [](const Fields& fields) {
        const plan::Plan plan = small_plan("deepseek32", 1, fields);
        train::Trainer trainer(plan, three_steps());
        return trainer.step(made_up_samples(plan)).indexers;
    };
    const plan::Plan plan = small_plan("deepseek32", 1, {});
    std::vector<int> layers; // with an indexer of their own, MTP's behind the model's
    std::vector<int> kinds = plan.model->layers;
    kinds.insert(kinds.end(), plan.model->mtp.begin(), plan.model->mtp.end());
    for (std::size_t layer = 0; layer < kinds.size(); ++layer)
        if (plan.model->kinds[static_cast<std::size_t>(kinds[layer])].attention.indexes())
            layers.push_back(static_cast<int>(layer));
    const std::vector<train::IndexerStep> one = first_step({}), ten = first_step({{"indexer_loss", "10"}});
    REQUIRE(one.size() == layers.size());
    REQUIRE(ten.size() == layers.size());
    for (std::size_t i = 0; i < one.size(); ++i) {
        CHECK(one[i].layer == layers[i]);
        CHECK(one[i].loss > 0.0); // a divergence
        CHECK(ten[i].loss == nearly(10.0 * one[i].loss).epsilon(1e-5));
    }
    CHECK(first_step({{"indexer_loss", "none"}}).empty());
    // Over all keys a query has more of them to tell apart.
    CHECK(first_step({{"indexer_stage", "dense_loss"}})[0].loss > one[0].loss);
}

// In the warm-up the first layer's loss depends on its own indexer's weights alone, of which it has a gradient,
// whatever they are: what is reported is what is trained.
TEST_CASE("indexer: its reported loss changes along its weights as their gradient says") {
    const plan::Plan plan = small_plan("deepseek32", 1, {{"indexer_stage", "warm_up"}});
    const train::SampleSource source = made_up_samples(plan);
    const auto first_loss = [&](train::Trainer& trainer) { return trainer.step(source).indexers.at(0).loss; };
    train::Trainer start(plan, three_steps());
    sharpen(start);
    CHECK(first_loss(start) > 0.01);
    for (const auto& [name, shape] : start.parameters()) {
        if (name.find("layers.0.") == std::string::npos || !of_indexer(name)) continue;
        CAPTURE(name);
        const std::vector<float> gradient = start.read_gradient(name);
        double square = 0.0;
        for (const float g : gradient) square += static_cast<double>(g) * static_cast<double>(g);
        const auto along = [&](double way) {
            train::Trainer trainer(plan, three_steps());
            sharpen(trainer);
            std::vector<float> weight = trainer.read_weight(name);
            for (std::size_t i = 0; i < weight.size(); ++i)
                weight[i] += static_cast<float>(way) * gradient[i] / static_cast<float>(std::sqrt(square));
            trainer.write_weight(name, weight);
            return first_loss(trainer);
        };
        constexpr double way = 0.01;
        CHECK((along(way) - along(-way)) / (2.0 * way) == nearly(std::sqrt(square)).epsilon(0.05));
    }
}

TEST_CASE("indexer: its loss is the same under every plan, counted once") {
    const Trained one = train_three(small_plan("deepseek32", 1, {}), three_steps(), sharpen);
    REQUIRE(!one.indexer_losses.empty());
    CHECK(*std::min_element(one.indexer_losses.begin(), one.indexer_losses.end()) > 0.005);
    for (const Fields& fields :
         {Fields{{"tp", "4"}, {"mbs", "2"}}, Fields{{"tp", "2"}, {"cp", "2"}, {"ep", "2"}, {"recompute", "full"}},
          Fields{{"pp", "2"}, {"tp", "2"}, {"schedule", "zero-bubble"}}, Fields{{"pp", "2"}, {"fsdp", "on"}}}) {
        INFO(words_of(fields));
        const Trained got = train_three(small_plan("deepseek32", 8, fields), three_steps(), sharpen);
        REQUIRE(got.indexer_losses.size() == one.indexer_losses.size());
        for (std::size_t i = 0; i < one.indexer_losses.size(); ++i)
            CHECK(got.indexer_losses[i] == nearly(one.indexer_losses[i]).epsilon(1e-4));
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

TEST_CASE("indexer: what it learns brings its distribution near that of the heads" * doctest::skip(sanitized())) {
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
    const train::StepResult first = trainer.step(same);
    train::StepResult last = first;
    for (int step = 1; step < options.steps; ++step) last = trainer.step(same);
    CHECK(last.grad_norm < 0.3 * first.grad_norm);
    REQUIRE(!first.indexers.empty());
    for (std::size_t i = 0; i < first.indexers.size(); ++i) CHECK(last.indexers[i].loss < first.indexers[i].loss);
}
