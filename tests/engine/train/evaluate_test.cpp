// Evaluation under any plan: it gives the loss of the weights, and leaves every bit of the training as it is.
#include "engine/data/in_order.hpp"
#include "planner/base/error.hpp"
#include "planner/model/model.hpp"
#include "tests/engine/data/write_dataset.hpp"
#include "tests/engine/train/random_cases.hpp"
#include "tests/support/draws.hpp"
#include "tests/support/folder.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>

using namespace moe;

namespace {

struct Trained {
    std::vector<double> losses, norms;
    std::map<std::string, std::vector<float>> weights;
    std::vector<double> evaluated;
};

Trained train_three(const plan::Plan& plan, bool evaluates) {
    train::TrainOptions options;
    options.lr = 1e-2;
    options.evaluates = evaluates;
    train::Trainer trainer(plan, options);
    const train::SampleSource tokens = made_up_tokens(plan.model->vocab),
                              others = made_up_tokens(plan.model->vocab, 11);
    Trained result;
    for (int step = 0; step < 3; ++step) {
        if (evaluates) result.evaluated.push_back(trainer.evaluate(others, plan.gbs + 1).loss);
        const train::StepResult done = trainer.step(tokens);
        result.losses.push_back(done.loss);
        result.norms.push_back(done.grad_norm);
    }
    for (const auto& [name, shape] : trainer.parameters()) result.weights[name] = trainer.read_weight(name);
    return result;
}

train::SampleSource shortened(const train::SampleSource& source, std::int64_t from, std::size_t tokens) {
    return [source, from, tokens](std::int64_t sample, std::span<std::int32_t> out) {
        source(from + sample, out);
        std::fill(out.begin() + static_cast<std::ptrdiff_t>(tokens), out.end(), -1);
    };
}

} // namespace

TEST_CASE("evaluation changes no bit of the training, under any plan") {
    for (const RandomCase& c : random_cases(35, draws(24), 4)) {
        INFO(c.text());
        const plan::Plan plan = plan_of(c);
        const Trained with = train_three(plan, true), without = train_three(plan, false);
        CHECK(with.losses == without.losses);
        CHECK(with.norms == without.norms);
        CHECK(with.weights == without.weights);
        for (const double loss : with.evaluated) CHECK(std::isfinite(loss));
        CHECK(with.evaluated[0] != with.evaluated[2]);
    }
}

TEST_CASE("an evaluation has the loss of a step over the same samples, and of one rank") {
    for (const RandomCase& c : random_cases(36, draws(24), 4)) {
        INFO(c.text());
        const plan::Plan plan = plan_of(c), one = plan_of(one_rank_of(c));
        const train::SampleSource tokens = made_up_tokens(plan.model->vocab);
        train::TrainOptions options;
        options.lr = 0.0;
        options.evaluates = true;
        train::Trainer trainer(plan, options), alone(one, options);
        const train::Evaluation evaluated = trainer.evaluate(tokens, plan.gbs);
        // Within documents the labels that lead to another one do not count.
        const std::int64_t all = plan.gbs * plan.seq;
        CHECK((plan.documents == plan::Documents::mask ? evaluated.tokens < all : evaluated.tokens == all));
        const bool bf16 = plan.precision == machine::Precision::bf16;
        CHECK(evaluated.loss == nearly(trainer.step(tokens).loss).epsilon(bf16 ? 1e-3 : 1e-5));
        const train::Evaluation by_one = alone.evaluate(tokens, plan.gbs);
        CHECK(evaluated.tokens == by_one.tokens);
        CHECK(evaluated.loss == nearly(by_one.loss).epsilon(bf16 ? 2e-2 : 1e-5));
    }
}

TEST_CASE("the last batch may be filled up, and the last sample be shorter") {
    const train::SampleSource tokens = made_up_tokens(61);
    train::TrainOptions options;
    options.evaluates = true;
    const auto evaluate = [&](std::int64_t gbs, const train::SampleSource& source, std::int64_t samples) {
        train::Trainer trainer(small_plan(small_model("qwen3"), 1, {}, {32, gbs}), options);
        return trainer.evaluate(source, samples);
    };
    const train::Evaluation eleven = evaluate(4, tokens, 11), one_by_one = evaluate(1, tokens, 11);
    CHECK(eleven.tokens == 11 * 32);
    CHECK(one_by_one.tokens == 11 * 32);
    CHECK(eleven.loss == nearly(one_by_one.loss).epsilon(1e-6));
    double sum = 0.0;
    for (std::int64_t s = 0; s < 3; ++s) sum += evaluate(1, shortened(tokens, s, 11), 1).loss / 3.0;
    const train::Evaluation cut = evaluate(4, shortened(tokens, 0, 11), 3);
    CHECK(cut.tokens == 3 * 10);
    CHECK(cut.loss == nearly(sum).epsilon(1e-6));
}

TEST_CASE("ranks that take no step hold the loss of those that do, in less memory") {
    for (const char* model : {"qwen3", "deepseek3", "gptoss"}) {
        const plan::Plan plan = small_plan(model, 2, {{"ep", "2"}});
        train::TrainOptions training, using_only;
        training.evaluates = true;
        using_only.forward_only = lower::ForwardOnly{true, 0};
        train::Trainer trains(plan, training), uses(plan, using_only);
        const train::SampleSource tokens = made_up_tokens(61);
        CHECK(uses.evaluate(tokens, 16).loss == trains.evaluate(tokens, 16).loss);
        CHECK(uses.arena_gib() < 0.6 * trains.arena_gib());
    }
    train::Trainer plain(small_plan("qwen3", 1), train::TrainOptions{});
    CHECK_THROWS_AS(plain.evaluate(made_up_tokens(61), 1), Error);
}

TEST_CASE("a dataset is read in order to its last token") {
    const Folder folder;
    std::vector<std::int32_t> ids;
    for (int i = 0; i < 75; ++i) ids.push_back(i % 61);
    write_dataset<std::int32_t>(folder / "d", 4, {ids});
    const data::InOrder data(folder / "d", 32, 61);
    REQUIRE(data.samples() == 3);
    std::vector<std::int32_t> sample(33);
    for (std::int64_t s = 0; s < 3; ++s) {
        data.read(s, sample);
        for (std::size_t i = 0; i < sample.size(); ++i) {
            const std::size_t at = static_cast<std::size_t>(s) * 32 + i;
            CHECK(sample[i] == (at < ids.size() ? ids[at] : -1));
        }
    }
}
