// Upcycling: the mixture's first loss is the dense model's, under every plan; what cannot be upcycled is named.
#include "engine/train/upcycle.hpp"
#include "planner/base/error.hpp"
#include "planner/model/model.hpp"
#include "tests/engine/base/refusals.hpp"
#include "tests/engine/train/samples.hpp"
#include "tests/support/folder.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

using namespace moe;

namespace {

train::TrainOptions seeded(std::uint64_t seed) {
    train::TrainOptions options;
    options.seed = seed;
    options.evaluates = true;
    return options;
}

struct Upcycled {
    const char* model;
    Fields changed;
    int ranks;
    Fields split;
};

} // namespace

TEST_CASE("upcycling: the first loss is the dense model's, under every plan") {
    // The dense model has an inner width of 64: experts of 64, 32 and 16 are 1, 2 and 4 shards.
    const std::vector<Upcycled> cases = {
        {"mixtral", {{"intermediate_size", "64"}}, 1, {}},
        {"mixtral", {}, 4, {{"ep", "4"}}},
        {"mixtral", {{"num_experts_per_tok", "4"}}, 8, {{"tp", "2"}, {"ep", "2"}, {"etp", "2"}, {"pp", "2"}}},
        {"mixtral",
         {{"intermediate_size", "16"}, {"num_experts_per_tok", "4"}, {"vocab_size", "70"}},
         2,
         {{"tp", "2"}}},
    };
    const Folder folder;
    train::Trainer dense(small_plan("llama", 1), seeded(3));
    const train::SampleSource tokens = made_up_tokens(dense.plan().model->vocab);
    dense.step(tokens); // so that the weights are no seed's
    train::export_weights(dense, folder / "dense");
    const double loss = dense.evaluate(tokens, 16).loss;
    for (const Upcycled& c : cases) {
        CAPTURE(c.changed.size());
        train::Trainer trainer(small_plan(small_model(c.model, c.changed), c.ranks, c.split), seeded(9));
        const train::LoadReport report = train::upcycle_weights(trainer, folder / "dense");
        CHECK(report.unused.empty());
        CHECK(report.difference.empty());
        const bool grows = trainer.plan().model->vocab > dense.plan().model->vocab;
        CHECK(report.grown_from == (grows ? dense.plan().model->vocab : 0));
        const double first = trainer.evaluate(tokens, 16).loss;
        if (!grows) CHECK(first == nearly(loss).epsilon(2e-6));
        for (int step = 0; step < 3; ++step) trainer.step(tokens);
        CHECK(trainer.evaluate(tokens, 16).loss < first); // and it trains
    }
}

TEST_CASE("upcycling: models and folders that do not allow it are named") {
    const Folder folder;
    const train::Trainer dense(small_plan("llama", 1), seeded(3));
    train::export_weights(dense, folder / "dense");
    const auto refusal = [&](const char* model, const Fields& changed) {
        train::Trainer trainer(small_plan(small_model(model, changed), 1, {}), seeded(9));
        const std::vector<float> before = trainer.read_weight("model.embed_tokens.weight");
        std::string text = message([&] { train::upcycle_weights(trainer, folder / "dense"); });
        CHECK(trainer.read_weight("model.embed_tokens.weight") == before);
        return text;
    };
    CHECK(mentions(refusal("llama", {}), "has no experts"));
    CHECK(mentions(refusal("qwen3", {{"norm_topk_prob", "false"}}), "norm_topk_prob is false"));
    CHECK(mentions(refusal("qwen3", {{"num_experts_per_tok", "4"}}), "layers.0.self_attn.k_norm.weight is missing"));
    CHECK(mentions(refusal("qwen2", {}), "shared experts"));
    CHECK(mentions(refusal("mixtral", {{"intermediate_size", "24"}}),
                   "an expert's width 24 does not divide the dense intermediate_size 64"));
    CHECK(mentions(refusal("mixtral", {{"intermediate_size", "16"}}),
                   "8 experts of which 2 are taken are no whole copies of 4 shards"));
    CHECK(mentions(refusal("mixtral", {{"num_hidden_layers", "2"}}), "num_hidden_layers is 2"));
    CHECK(mentions(refusal("gptoss", {}), "hidden_act of layer 0 is not that of") +
              mentions(refusal("gptoss", {}), "are no shards") >
          0);
    train::Trainer mixture(small_plan("mixtral", 1), seeded(9));
    train::export_weights(mixture, folder / "mixture");
    CHECK(mentions(message([&] { train::upcycle_weights(mixture, folder / "mixture"); }),
                   "holds no dense model: layer 0 has experts"));
}
