// What steps of the CUDA back end do to weights: bad steps, frozen weights and groups, averages.
#include "engine/train/trainer.hpp"
#include "planner/base/error.hpp"
#include "tests/engine/train/cuda_parity.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

using namespace moe;

TEST_CASE("cuda: a bad step changes no weight, in a graph too, and the next one is taken") {
    for (const char* graph : {"none", "full"})
        for (const Fields& fields : {Fields{{"bias_update", "0.01"}}, Fields{{"precision", "bf16"}},
                                     Fields{{"offload", "optimizer"}}, Fields{{"optimizer", "muon"}}}) {
            Fields all{{"cuda_graph", graph}};
            all.insert(all.end(), fields.begin(), fields.end());
            train::TrainOptions options;
            options.steps = 4;
            options.backend = "cuda";
            options.skip_bad = true;
            train::Trainer trainer(small_plan("deepseek3", 1, all), options);
            const train::SampleSource source = made_up_samples(trainer.plan());
            const auto weights = [&] {
                std::map<std::string, std::vector<float>> values;
                for (const auto& parameter : trainer.parameters())
                    values[parameter.first] = trainer.read_weight(parameter.first);
                return values;
            };
            CHECK_FALSE(trainer.step(source).skipped);
            const auto before = weights();
            const std::string name = "model.norm.weight";
            trainer.write_weight(name, std::vector<float>(before.at(name).size(), NAN));
            CHECK(trainer.step(source).skipped);
            trainer.write_weight(name, before.at(name));
            CHECK(weights() == before);
            const train::StepResult next = trainer.step(source);
            CHECK_FALSE(next.skipped);
            CHECK(std::isfinite(next.loss));
            CHECK(weights() != before);
        }
}

TEST_CASE("cuda: frozen weights keep every bit and groups move as on the CPU, in a graph too") {
    for (const char* graph : {"none", "full"})
        for (const Fields& fields : {Fields{{"bias_update", "0.01"}}, Fields{{"offload", "optimizer"}}}) {
            Fields all{{"cuda_graph", graph}};
            all.insert(all.end(), fields.begin(), fields.end());
            const plan::Plan plan = small_plan("deepseek3", 1, all);
            std::map<std::string, std::map<std::string, std::vector<float>>> before, after;
            std::map<std::string, double> norms;
            for (const char* backend : {"cpu", "cuda"}) {
                train::TrainOptions options;
                options.steps = 3;
                options.backend = backend;
                options.eps = 1e-3; // as in parity.cpp
                options.rules.freeze = {"embed*", "*router*", "layers.1"};
                options.rules.groups = {train::rate_group("*experts*=3,decay=0.5"), train::rate_group("norm=0.25")};
                plan::Plan run = plan;
                if (options.backend == "cpu") run.cuda_graph = plan::CudaGraph::none;
                train::Trainer trainer(run, options);
                const train::SampleSource source = made_up_samples(run);
                const auto read = [&](std::map<std::string, std::vector<float>>& values) {
                    for (const auto& parameter : trainer.parameters())
                        values[parameter.first] = trainer.read_weight(parameter.first);
                };
                read(before[backend]);
                norms[backend] = trainer.step(source).grad_norm;
                trainer.step(source);
                trainer.step(source);
                read(after[backend]);
                for (const auto& [name, values] : before[backend])
                    if (options.rules.of(name).frozen) CHECK(after[backend].at(name) == values);
            }
            CHECK(norms["cuda"] == doctest::Approx(norms["cpu"]).epsilon(1e-4));
            for (const auto& [name, values] : after["cpu"]) {
                const std::string held_name = name; // no structured binding can be captured
                CAPTURE(held_name);
                CHECK(relative_distance(after["cuda"].at(name), values) <= 1e-4);
            }
        }
}

TEST_CASE("cuda: the average of the weights follows them by the formula, in a graph too") {
    for (const char* graph : {"none", "full"})
        for (const Fields& fields : {Fields{{"precision", "bf16"}}, Fields{{"offload", "optimizer"}}}) {
            Fields all{{"cuda_graph", graph}};
            all.insert(all.end(), fields.begin(), fields.end());
            train::TrainOptions options;
            options.steps = 3;
            options.backend = "cuda";
            options.ema = 0.75;
            train::Trainer trainer(small_plan("qwen3", 1, all), options);
            const train::SampleSource source = made_up_samples(trainer.plan());
            std::map<std::string, std::vector<float>> average;
            for (const auto& parameter : trainer.parameters())
                average[parameter.first] = trainer.read_weight(parameter.first);
            for (int step = 0; step < 3; ++step) {
                trainer.step(source);
                for (auto& [name, values] : average) {
                    const std::vector<float> now = trainer.read_weight(name);
                    for (std::size_t i = 0; i < values.size(); ++i) values[i] += 0.25f * (now[i] - values[i]);
                    CHECK(trainer.read_average(name) == values);
                }
            }
        }
}

TEST_CASE("cuda: QK-clip sees the logits that the CPU sees and scales the same heads, in a graph too") {
    // Steps whose logits, losses and heads are compared; the threshold is half of the first step's largest logit.
    const auto run = [](plan::Plan plan, const std::string& backend, double threshold, auto&& take) {
        if (backend == "cpu") plan.cuda_graph = plan::CudaGraph::none;
        train::TrainOptions options;
        options.steps = 3;
        options.backend = backend;
        options.eps = 1e-3; // as in parity.cpp
        options.qk_clip.threshold = threshold;
        train::Trainer trainer(plan, options);
        const train::SampleSource source = made_up_samples(plan);
        for (int step = 0; step < 3; ++step) take(trainer.step(source));
        std::map<std::string, std::vector<float>> weights;
        for (const auto& parameter : trainer.parameters())
            weights[parameter.first] = trainer.read_weight(parameter.first);
        return weights;
    };
    for (const char* model : {"mixtral", "qwen2", "gptoss", "deepseek3", "deepseek3-mtp"})
        for (const Fields& fields :
             {Fields{}, Fields{{"mbs", "2"}, {"cuda_graph", "full"}},
              Fields{{"documents", "mask"}, {"recompute", "core_attn"}, {"cuda_graph", "full"}}}) {
            CAPTURE(model);
            CAPTURE(fields.size());
            const plan::Plan plan = small_plan(model, 1, fields);
            double threshold = 0.0;
            run(plan, "cpu", 1e9, [&](const train::StepResult& r) {
                if (r.step == 1) threshold = 0.5 * r.logits->largest;
            });
            std::map<std::string, std::vector<train::StepResult>> steps;
            std::map<std::string, std::map<std::string, std::vector<float>>> weights;
            for (const char* backend : {"cpu", "cuda"})
                weights[backend] =
                    run(plan, backend, threshold, [&](const train::StepResult& r) { steps[backend].push_back(r); });
            for (std::size_t i = 0; i < 3; ++i) {
                const train::StepResult &got = steps["cuda"][i], &want = steps["cpu"][i];
                CHECK(got.logits->largest == doctest::Approx(want.logits->largest).epsilon(1e-4));
                CHECK(got.logits->clipped == want.logits->clipped);
                CHECK(got.loss == doctest::Approx(want.loss).epsilon(1e-4));
            }
            CHECK(steps["cpu"][0].logits->clipped > 0);
            for (const auto& [name, values] : weights["cpu"]) {
                const std::string held_name = name; // no structured binding can be captured
                CAPTURE(held_name);
                CHECK(relative_distance(weights["cuda"].at(name), values) <= 1e-4);
            }
        }
}

TEST_CASE("cuda: QK-clip of keys that an indexer picks is refused by name") {
    train::TrainOptions options;
    options.backend = "cuda";
    options.qk_clip.threshold = 100.0;
    CHECK_THROWS_WITH_AS(train::Trainer(small_plan("deepseek32", 1), options),
                         doctest::Contains("attends to keys that an indexer picks"), Error);
}
