// Documents that are masked: each is trained as if it were alone, under every plan, and a sample of one as ever.
#include "planner/base/error.hpp"
#include "tests/engine/train/parity.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>
#include <vector>

using namespace moe;

namespace {

using Documents = std::vector<std::int64_t>; // tokens of each

struct FirstStep {
    double loss = 0.0, mtp_loss = 0.0;
    std::map<std::string, std::vector<float>> gradients;
    std::int64_t labels = 0; // of an evaluation of the same samples
};

// One step over a sample of these documents, whose tokens are those from `first` on; the label behind it is of another.
FirstStep first_step(const std::string& model, const Documents& documents, std::int64_t first, const Fields& fields) {
    const std::int64_t seq = std::accumulate(documents.begin(), documents.end(), std::int64_t{0});
    Fields all{{"documents", "mask"}};
    all.insert(all.end(), fields.begin(), fields.end());
    train::TrainOptions options;
    options.steps = 1;
    options.permits = 2;
    train::Trainer trainer(small_plan(small_model(model), 1, all, {seq, 1}), options);
    const auto tokens = [first](std::int64_t, std::span<std::int32_t> out) {
        for (std::size_t i = 0; i < out.size(); ++i)
            out[i] = static_cast<std::int32_t>((first + static_cast<std::int64_t>(i)) * 37 % 61);
    };
    const auto starts = [&](std::int64_t, std::span<std::int32_t> out) {
        std::size_t at = 0;
        std::int32_t start = 0;
        for (const std::int64_t length : documents) {
            for (std::int64_t i = 0; i < length; ++i) out[at++] = start;
            start += static_cast<std::int32_t>(length);
        }
        out[at] = start;
    };
    const train::StepResult r = trainer.step({tokens, starts});
    FirstStep step{r.loss, r.mtp_loss, {}, 0};
    for (const auto& [name, shape] : trainer.parameters()) step.gradients[name] = trainer.read_gradient(name);
    return step;
}

double norm(const std::vector<float>& x) {
    double sum = 0.0;
    for (const float v : x) sum += static_cast<double>(v) * static_cast<double>(v);
    return std::sqrt(sum);
}

// Every label counts the same, and the last token of a document has none. In the loss of indexers every token does.
void check_packed(const std::string& model, const Documents& documents) {
    INFO(model);
    const FirstStep packed = first_step(model, documents, 0, {});
    const auto tokens = static_cast<double>(std::accumulate(documents.begin(), documents.end(), std::int64_t{0}));
    const double labels = tokens - static_cast<double>(documents.size());
    double loss = 0.0, total = 0.0;
    std::map<std::string, std::vector<float>> sums;
    std::int64_t first = 0;
    for (const std::int64_t length : documents) {
        const FirstStep alone = first_step(model, {length}, first, {});
        const double share = static_cast<double>(length - 1) / labels;
        loss += share * alone.loss;
        for (const auto& [name, gradient] : alone.gradients) {
            std::vector<float>& sum = sums[name];
            sum.resize(gradient.size(), 0.0f);
            const bool of_indexer = name.find(".indexer.") != std::string::npos;
            const double part = of_indexer ? static_cast<double>(length) / tokens : share;
            for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += static_cast<float>(part) * gradient[i];
        }
        first += length;
    }
    CHECK(packed.loss == nearly(loss).epsilon(1e-6));
    for (const auto& [name, gradient] : packed.gradients) total += std::pow(norm(gradient), 2);
    for (const auto& [name, gradient] : packed.gradients) {
        CAPTURE(name);
        const double size = norm(gradient),
                     off = relative_distance(sums.at(name), gradient) * (size > 0.0 ? size : 1.0);
        CHECK(off <= parity_tolerance * std::max(size, 1e-3 * std::sqrt(total)));
    }
}

} // namespace

TEST_CASE("packed documents train what each trains alone") {
    for (const char* model : {"qwen3", "qwen2", "deepseek3", "deepseek2", "mixtral", "gptoss", "llama", "qwen3next",
                              "qwen3.5", "nemotronh", "nemotron3", "deepseek32", "granite4", "gemma4"})
        check_packed(model, {9, 2, 14, 7});
}

// Documents of one token have no labels, and stand behind and before the one that counts.
TEST_CASE("the loss of a document is the same to the bit wherever it lies") {
    for (const char* model : {"qwen3", "deepseek3", "deepseek3-mtp", "gptoss", "llama"}) {
        INFO(model);
        const FirstStep alone = first_step(model, {17}, 5, {}),
                        packed = first_step(model, {1, 1, 1, 1, 1, 17, 1, 1}, 0, {});
        CHECK(packed.loss == alone.loss);
        CHECK(packed.mtp_loss == nearly(alone.mtp_loss).epsilon(1e-6));
    }
}

TEST_CASE("samples of one document are trained to the bit as without masks") {
    for (const char* model : {"qwen3", "deepseek3-mtp", "gptoss"}) {
        for (const Fields& fields : {Fields{{"mbs", "2"}}, Fields{{"cp", "2"}, {"ep", "2"}, {"pp", "2"}},
                                     Fields{{"cp", "2"}, {"cp_comm", "alltoall"}, {"tp", "2"}}}) {
            INFO(model);
            const int ranks = fields.size() == 1 ? 1 : 4;
            const auto train = [&](const char* documents) {
                Fields all{{"documents", documents}};
                all.insert(all.end(), fields.begin(), fields.end());
                train::TrainOptions options;
                options.steps = 2;
                train::Trainer trainer(small_plan(model, ranks, all), options);
                const train::SampleSource whole(made_up_tokens(61).tokens);
                std::vector<double> out;
                for (int step = 0; step < 2; ++step) {
                    const train::StepResult r = trainer.step(whole);
                    out.insert(out.end(), {r.loss, r.mtp_loss, r.grad_norm});
                }
                return out;
            };
            CHECK(train("mask") == train("ignore"));
        }
    }
}

TEST_CASE("parity: documents stay apart under every plan") {
    const std::vector<std::pair<const char*, std::vector<Fields>>> cases{
        {"qwen3",
         {{{"tp", "2"}, {"cp", "2"}, {"ep", "4"}, {"mbs", "2"}},
          {{"cp", "4"}, {"cp_comm", "alltoall"}, {"ep", "8"}},
          {{"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}, {"ep", "2"}, {"recompute", "core_attn"}}}},
        {"gptoss", {{{"cp", "8"}, {"ep", "4"}}, {{"cp", "2"}, {"cp_comm", "alltoall"}, {"tp", "2"}, {"mbs", "2"}}}},
        {"deepseek3-mtp",
         {{{"cp", "2"}, {"tp", "2"}, {"pp", "2"}, {"mbs", "2"}},
          {{"pp", "4"}, {"schedule", "zero-bubble"}, {"recompute", "full"}, {"ep", "2"}}}}};
    for (const auto& [model, plans] : cases) {
        const Trained expected = train_three(small_plan(model, 1, {{"documents", "mask"}}));
        for (Fields fields : plans) {
            fields.emplace_back("documents", "mask");
            const Trained got = train_three(small_plan(model, 8, fields));
            CHECK(disagreement(got, expected, parity_tolerance, parity_tolerance) == "");
        }
    }
}

TEST_CASE("an evaluation keeps to documents as a step does") {
    for (const auto& [model, ranks, fields] :
         {std::tuple{"qwen3", 1, Fields{{"mbs", "2"}}}, std::tuple{"gptoss", 4, Fields{{"cp", "2"}, {"pp", "2"}}}}) {
        Fields all{{"documents", "mask"}};
        all.insert(all.end(), fields.begin(), fields.end());
        train::TrainOptions options;
        options.evaluates = true;
        train::Trainer trainer(small_plan(model, ranks, all), options);
        const train::SampleSource source = made_up_tokens(61);
        const train::Evaluation evaluation = trainer.evaluate(source, 8);
        CHECK(evaluation.tokens < 8 * 32);
        CHECK(evaluation.loss == nearly(trainer.step(source).loss).epsilon(1e-6));
    }
}

// The gradient of all labels is that of some of them and of the others, by their numbers.
TEST_CASE("labels that do not count are left out of loss and gradients") {
    for (const char* model : {"qwen3", "deepseek3", "gptoss", "mixtral"}) {
        INFO(model);
        const auto trained = [&](int kept) { // 1: those that are no multiples of three, 0: the others, 2: all
            train::TrainOptions options;
            options.evaluates = true;
            train::Trainer trainer(small_plan(model, 1, {{"documents", "mask"}, {"aux_loss", "0"}}), options);
            train::SampleSource source = made_up_tokens(61);
            if (kept < 2)
                source.counts = [kept](std::int64_t, std::span<std::int32_t> counts) {
                    for (std::size_t i = 0; i < counts.size(); ++i) counts[i] = (i % 3 != 0) == (kept == 1) ? 1 : 0;
                };
            const train::Evaluation evaluation = trainer.evaluate(source, 8);
            FirstStep step{trainer.step(source).loss, 0.0, {}, evaluation.tokens};
            CHECK(step.loss == nearly(evaluation.loss).epsilon(1e-6));
            for (const auto& [name, shape] : trainer.parameters()) step.gradients[name] = trainer.read_gradient(name);
            return step;
        };
        const FirstStep all = trained(2), some = trained(1), others = trained(0);
        const double part = static_cast<double>(some.labels) / static_cast<double>(all.labels);
        CHECK(some.labels + others.labels == all.labels);
        CHECK(part * some.loss + (1.0 - part) * others.loss == nearly(all.loss).epsilon(1e-6));
        for (const auto& of_name : all.gradients) {
            const std::string& name = of_name.first;
            const std::vector<float>& gradient = of_name.second;
            CAPTURE(name);
            std::vector<float> sum(gradient.size());
            for (std::size_t i = 0; i < sum.size(); ++i)
                sum[i] = static_cast<float>(part * static_cast<double>(some.gradients.at(name)[i]) +
                                            (1.0 - part) * static_cast<double>(others.gradients.at(name)[i]));
            CHECK(relative_distance(sum, gradient) < 1e-4);
        }
    }
}

TEST_CASE("labels that do not count need a plan that masks documents") {
    train::Trainer trainer(small_plan("qwen3", 1), {});
    train::SampleSource source = made_up_tokens(61);
    source.counts = [](std::int64_t, std::span<std::int32_t> counts) { std::fill(counts.begin(), counts.end(), 1); };
    CHECK_THROWS_WITH_AS(trainer.step(source), doctest::Contains("documents = mask"), Error);
}
