// Small models of every router and attention kind, plans for them on this machine, and made-up tokens.
#pragma once

#include "engine/train/trainer.hpp"

#include <memory>
#include <string>
#include <utility>
#include <vector>

// (field, value): of a plan, or of a model's configuration with its value in JSON.
using Fields = std::vector<std::pair<std::string, std::string>>;

// "qwen3" (GQA, QK-norm, softmax router), "qwen2" (GQA with bias, gated shared expert), "deepseek3" (MLA with query
// latent, sigmoid group-limited router, shared experts, first layer dense), "deepseek2" (MLA without query latent,
// group-limited softmax), "deepseek3-mtp" (two layers of multi-token prediction), "gptoss" (windows in turns, sinks,
// biases everywhere, clamped gates), "mixtral", "llama" (dense). All have 4 layers, hidden 32 and 61 tokens of
// vocabulary, which no TP degree divides.
std::shared_ptr<const moe::model::Model> small_model(const std::string& kind, const Fields& changed = {});

// A model of two layers whose widths are 128 and its multiples on every rank of TP 2 and ETP 2, so that blocks of FP8
// are the same under all plans; not "gptoss", "llama" and "deepseek3-mtp".
std::shared_ptr<const moe::model::Model> wide_model(const std::string& kind, const Fields& changed = {});

// One-rank FP32 plan of 32 tokens per sequence, 8 sequences per step, changed by fields ("tp", "2"); dp and edp follow.
// The field "domain" is of the machine: so many ranks share NVLink.
moe::plan::Plan small_plan(const std::string& model, int ranks, const Fields& fields = {});
struct SmallBatch {
    std::int64_t seq = 32, gbs = 8;
};
moe::plan::Plan small_plan(std::shared_ptr<const moe::model::Model> model, int ranks, const Fields& fields,
                           SmallBatch batch = {});

// Deterministic tokens with some structure to learn: each depends on its predecessor. Documents of one to some twenty
// tokens, for plans that mask them.
moe::train::SampleSource made_up_tokens(std::int64_t vocab, std::uint64_t seed = 7);
// Those for a plan: where it masks documents, runs of tokens do not count.
moe::train::SampleSource made_up_samples(const moe::plan::Plan& plan);

// |a - b| / |b| in double, over whole tensors.
double relative_distance(const std::vector<float>& a, const std::vector<float>& b);
