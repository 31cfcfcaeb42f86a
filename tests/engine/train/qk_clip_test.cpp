// QK-clip: the rule against logits that are computed here, one rank's training under every plan, and resumption.
#include "engine/train/qk_clip.hpp"

#include "engine/backends/backends.hpp"
#include "engine/ops/backend.hpp"
#include "engine/train/checkpoint_writer.hpp"
#include "planner/base/error.hpp"
#include "planner/model/model.hpp"
#include "tests/engine/base/refusals.hpp"
#include "tests/engine/comm/prompt.hpp"
#include "tests/engine/train/first_logits.hpp"
#include "tests/engine/train/parity.hpp"
#include "tests/engine/train/random_cases.hpp"
#include "tests/support/draws.hpp"
#include "tests/support/folder.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

using namespace moe;

namespace {

using Row = std::vector<double>;

// Biases of queries and keys begin as zeros.
void set_biases(train::Trainer& trainer) {
    for (const auto& [name, shape] : trainer.parameters()) {
        if (name.find("q_proj.bias") == std::string::npos && name.find("k_proj.bias") == std::string::npos) continue;
        std::vector<float> values(static_cast<std::size_t>(shape.rows));
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.1f * std::sin(static_cast<float>(7 * i + 1));
        trainer.write_weight(name, values);
    }
}

// The samples of the first step in every step.
train::SampleSource same_samples(const plan::Plan& plan) {
    const train::SampleSource all = made_up_samples(plan);
    return {[all, gbs = plan.gbs](std::int64_t sample, std::span<std::int32_t> out) { all(sample % gbs, out); }};
}

// The factor of a row of a weight of layer 0 by the rule, from the heads' largest logits.
double factor(const model::Attention& a, const std::string& name, std::int64_t row, const Row& largest,
              const train::QkClip& clip) {
    const std::string of = name.substr(name.find("self_attn.") == std::string::npos ? 0 : name.find("self_attn.") + 10);
    const auto eta = [&](std::int64_t head, std::int64_t heads) {
        double most = -std::numeric_limits<double>::infinity();
        for (std::int64_t h = head / heads * heads; h < head / heads * heads + heads; ++h)
            most = std::max(most, largest[static_cast<std::size_t>(h)]);
        return most > clip.threshold ? clip.threshold / most : 1.0;
    };
    if (a.kind == model::AttentionKind::mla) {
        const int nope = a.qk_dim - a.rope_dim, wide = nope + a.v_dim;
        if (of == "q_proj.weight" || of == "q_b_proj.weight")
            return std::pow(eta(row / a.qk_dim, 1), row % a.qk_dim < nope ? clip.alpha : 1.0);
        if (of == "kv_b_proj.weight" && row % wide < nope) return std::pow(eta(row / wide, 1), 1.0 - clip.alpha);
        return 1.0;
    }
    const int share = a.heads / a.kv_heads;
    if (of == "q_proj.weight" || of == "q_proj.bias") return std::pow(eta(row / a.qk_dim, share), clip.alpha);
    if (of == "k_proj.weight" || of == "k_proj.bias")
        return std::pow(eta(row / a.qk_dim * share, share), 1.0 - clip.alpha);
    return 1.0;
}

// A threshold between the heads' largest logits, or those of the heads that share keys.
double between(const model::Attention& a, const Row& largest) {
    const std::size_t share = a.kind == model::AttentionKind::mla ? 1 : static_cast<std::size_t>(a.heads / a.kv_heads);
    Row groups;
    for (auto at = largest.begin(); at != largest.end(); at += static_cast<std::ptrdiff_t>(share))
        groups.push_back(*std::max_element(at, at + static_cast<std::ptrdiff_t>(share)));
    std::sort(groups.begin(), groups.end());
    const std::size_t middle = groups.size() / 2;
    return 0.5 * (groups[middle - 1] + groups[middle]);
}

Trained train_clipped(const plan::Plan& plan, double threshold, std::uint64_t seed = 1,
                      const ops::Backend* table = nullptr) {
    train::TrainOptions options = three_steps(seed);
    options.table = table;
    options.qk_clip.threshold = threshold;
    return train_three(plan, options);
}

// Below the largest logit of the first step, so that every step clips some heads.
double half_of_largest(const plan::Plan& one_rank) { return 0.5 * train_clipped(one_rank, 1e9).logits.front().largest; }

// Both have clipped the same heads, at the same logits.
std::string clips_differ(const Trained& got, const Trained& want) {
    for (std::size_t i = 0; i < want.logits.size(); ++i) {
        if (got.logits[i].clipped != want.logits[i].clipped)
            return fmt::format("step {} clipped {} heads, not {}", i + 1, got.logits[i].clipped,
                               want.logits[i].clipped);
        if (std::abs(got.logits[i].largest / want.logits[i].largest - 1.0) > 1e-4)
            return fmt::format("the largest logit of step {} is {}, not {}", i + 1, got.logits[i].largest,
                               want.logits[i].largest);
    }
    return {};
}

} // namespace

TEST_CASE("qk-clip: heads above the threshold are scaled by the rule, and all else keeps its bits") {
    struct Case {
        const char* model;
        Fields config, plan;
        int ranks;
    };
    for (const Case& c :
         {Case{"mixtral", {}, {}, 1},
          {"mixtral", {{"num_key_value_heads", "2"}}, {{"tp", "4"}, {"cp", "2"}, {"optimizer", "muon"}}, 8},
          {"qwen2", {{"num_key_value_heads", "4"}}, {{"tp", "2"}, {"cp", "2"}, {"cp_comm", "alltoall"}}, 8},
          {"deepseek2", {}, {{"tp", "2"}, {"cp", "2"}}, 4},
          {"deepseek32", {{"index_topk", "40"}}, {{"tp", "2"}, {"cp", "2"}}, 4}, // all keys are picked
          {"deepseek3", {}, {{"tp", "2"}, {"mbs", "2"}, {"recompute", "core_attn"}}, 4}}) {
        CAPTURE(c.model);
        Fields config = c.config;
        config.emplace_back("num_hidden_layers", "1");
        const plan::Plan plan = small_plan(small_model(c.model, config), c.ranks, c.plan);
        train::TrainOptions options = three_steps();
        const train::SampleSource source = same_samples(plan);
        train::Trainer plain(plan, options);
        set_biases(plain);
        const model::Attention& a = plan.model->kinds[static_cast<std::size_t>(plan.model->layers[0])].attention;
        const Row largest = first_logits(plain, source, plan.gbs);
        options.qk_clip = {between(a, largest), 0.3};
        train::Trainer clipped(plan, options);
        set_biases(clipped);
        const train::StepResult result = clipped.step(source);
        plain.step(source);
        REQUIRE(result.logits.has_value());
        CHECK(result.logits->largest ==
              doctest::Approx(*std::max_element(largest.begin(), largest.end())).epsilon(1e-5));
        CHECK(result.logits->clipped == a.heads / 2);
        int scaled = 0, kept = 0;
        for (const auto& [name, shape] : plain.parameters()) {
            const std::string held_name = name; // no structured binding can be captured
            CAPTURE(held_name);
            const std::vector<float> want = plain.read_weight(name), got = clipped.read_weight(name);
            for (std::int64_t row = 0; row < shape.rows; ++row) {
                const double by = factor(a, name, row, largest, options.qk_clip);
                const auto first = static_cast<std::ptrdiff_t>(row * shape.cols), end = first + shape.cols;
                if (by == 1.0) {
                    CHECK(std::equal(got.begin() + first, got.begin() + end, want.begin() + first));
                    kept += name.find("self_attn.q_") != std::string::npos;
                    continue;
                }
                ++scaled;
                for (std::ptrdiff_t i = first; i < end; ++i) {
                    const double exact = by * static_cast<double>(want[static_cast<std::size_t>(i)]);
                    CHECK(std::abs(got[static_cast<std::size_t>(i)] - exact) <= 1e-5 * std::abs(exact));
                }
            }
        }
        CHECK(scaled >= a.qk_dim);
        CHECK(kept >= a.qk_dim);
    }
}

TEST_CASE("qk-clip: the next forward uses the clipped weights, whose largest logit is the threshold") {
    for (const char* model : {"mixtral", "qwen2", "deepseek2", "deepseek3"})
        for (const char* precision : {"fp32", "bf16"}) {
            CAPTURE(model);
            CAPTURE(precision);
            const plan::Plan plan = small_plan(small_model(model, {{"num_hidden_layers", "1"}}), 2,
                                               {{"tp", "2"}, {"precision", precision}});
            train::TrainOptions options = three_steps();
            options.lr = 0.0;
            options.weight_decay = 0.0;
            const train::SampleSource source = same_samples(plan);
            const model::Attention& a = plan.model->kinds[static_cast<std::size_t>(plan.model->layers[0])].attention;
            train::Trainer begun(plan, options);
            set_biases(begun);
            const Row largest = first_logits(begun, source, plan.gbs);
            options.qk_clip.threshold = between(a, largest);
            const double off = precision == std::string("bf16") ? 2e-2 : 1e-5;
            train::Trainer trainer(plan, options);
            set_biases(trainer);
            const train::StepResult first = trainer.step(source), second = trainer.step(source);
            CHECK(first.logits->clipped == a.heads / 2);
            CHECK(first.logits->largest > options.qk_clip.threshold);
            CHECK(second.logits->largest == doctest::Approx(options.qk_clip.threshold).epsilon(off));
            CHECK(second.loss != first.loss);
        }
}

TEST_CASE("qk-clip: any plan clips what one rank clips") {
    struct Case {
        const char* model;
        Fields config, plan;
        int ranks;
    };
    std::map<std::string, std::pair<double, Trained>> one;
    for (const Case& c : {Case{"mixtral", {}, {{"tp", "2"}, {"ep", "2"}, {"etp", "2"}}, 4},
                          {"mixtral", {}, {{"tp", "2"}, {"cp", "2"}, {"pp", "2"}, {"ep", "4"}}, 8},
                          {"mixtral", {}, {{"cp", "4"}, {"cp_comm", "alltoall"}, {"ep", "2"}}, 4},
                          {"mixtral", {}, {{"ep", "4"}, {"fsdp", "on"}, {"recompute", "full"}}, 4},
                          {"qwen2", {{"num_key_value_heads", "2"}}, {{"tp", "8"}, {"ep", "2"}}, 8},
                          {"gptoss", {}, {{"tp", "2"}, {"etp", "2"}, {"cp", "2"}, {"offload", "optimizer"}}, 4},
                          {"mixtral", {}, {{"cp", "4"}, {"cp_comm", "alltoall+ring"}, {"tp", "2"}, {"ep", "2"}}, 8},
                          {"llama", {}, {{"pp", "2"}, {"schedule", "zb-v"}, {"vpp", "2"}}, 4},
                          {"deepseek3", {}, {{"tp", "2"}, {"pp", "2"}, {"ep", "2"}}, 8},
                          {"deepseek3", {}, {{"cp", "2"}, {"cp_comm", "alltoall"}, {"tp", "2"}, {"ep", "4"}}, 4},
                          {"deepseek3-mtp", {}, {{"pp", "2"}, {"ep", "2"}, {"dispatcher", "hybridep"}}, 4},
                          {"nemotronh", {}, {{"tp", "2"}, {"pp", "2"}}, 4}}) {
        CAPTURE(c.model);
        CAPTURE(c.ranks);
        auto& [threshold, want] = one[c.model];
        if (want.losses.empty()) {
            const plan::Plan alone = small_plan(small_model(c.model, c.config), 1, {});
            threshold = half_of_largest(alone);
            want = train_clipped(alone, threshold);
            for (const train::LogitStep& step : want.logits) CHECK(step.clipped > 0);
            const Trained free = train_three(alone);
            CHECK(disagreement(free, want, parity_tolerance, parity_tolerance) != "");
        }
        const Trained got = train_clipped(small_plan(small_model(c.model, c.config), c.ranks, c.plan), threshold);
        CHECK(disagreement(got, want, parity_tolerance, parity_tolerance) == "");
        CHECK(clips_differ(got, want) == "");
    }
}

TEST_CASE("qk-clip: devices with a queue keep the logits until the step is done, and clip the same") {
    struct Case {
        const char* model;
        Fields plan;
        int ranks;
    };
    for (const Case& c : {Case{"mixtral", {}, 1},
                          {"mixtral", {{"tp", "2"}, {"cp", "2"}, {"recompute", "core_attn"}}, 4},
                          {"deepseek3-mtp", {{"pp", "2"}, {"ep", "2"}, {"tp", "2"}}, 4},
                          {"nemotronh", {{"tp", "2"}, {"pp", "2"}}, 4}}) {
        CAPTURE(c.model);
        CAPTURE(c.ranks);
        const plan::Plan plan = small_plan(c.model, c.ranks, c.plan);
        const double threshold = half_of_largest(small_plan(c.model, 1));
        const Trained want = train_clipped(plan, threshold), got = train_clipped(plan, threshold, 1, &prompt_backend());
        CHECK(want.logits.front().clipped > 0);
        CHECK(disagreement(got, want, parity_tolerance, parity_tolerance) == "");
        CHECK(clips_differ(got, want) == "");
    }
}

TEST_CASE("qk-clip: random plans over 1 to 16 ranks clip and train what one rank does") {
    const std::uint64_t seed = environment("MOE_PLAN_SEED", 1), plans = environment("MOE_PLAN_PLANS", draws(150));
    const std::size_t per_model = std::min<std::size_t>(10, 1 + plans / 15); // few plans are of several models
    struct Reference {
        double threshold = 0.0;
        Trained trained;
    };
    std::map<std::string, Reference> known;
    std::size_t tried = 0, near_ties = 0;
    const std::vector<RandomCase> cases = random_cases(seed + 1000, plans, per_model);
    for (std::size_t i = 0; i < cases.size(); ++i) {
        const RandomCase& c = cases[i];
        const plan::Plan plan = plan_of(c);
        const auto takes = [&] { train::check_qk_clip({1.0, 0.5}, plan, {}, backends::backend_named("cpu")); };
        if (message(takes) != "no error" || plan.precision != machine::Precision::fp32) continue;
        if (i % per_model == 0) known.clear();
        const RandomCase alone = one_rank_of(c);
        Reference& reference = known[alone.text()];
        if (reference.trained.losses.empty()) {
            reference.threshold = half_of_largest(plan_of(alone));
            reference.trained = train_clipped(plan_of(alone), reference.threshold);
        }
        ++tried;
        const std::string held_text = c.text();
        CAPTURE(held_text);
        const Trained got = train_clipped(plan, reference.threshold);
        if (got.routed != reference.trained.routed) { // scores that are equal up to rounding
            ++near_ties;
            continue;
        }
        CHECK(disagreement(got, reference.trained, parity_tolerance, weight_tolerance(plan), moment_underflow(plan)) ==
              "");
        CHECK(clips_differ(got, reference.trained) == "");
    }
    MESSAGE(tried, " plans of ", plans, ", ", near_ties, " with a near tie of the router");
    CHECK(tried * 8 >= plans);
    CHECK(near_ties <= 1 + tried / 20);
}

TEST_CASE("qk-clip: a run that goes on from a checkpoint, under another plan too, is the run without a pause") {
    const Folder folder;
    for (const char* model : {"mixtral", "deepseek3"}) {
        const plan::Plan plan = small_plan(model, 2, {{"ep", "2"}, {"optimizer", "muon"}});
        train::TrainOptions options = three_steps();
        options.ema = 0.5;
        options.qk_clip.threshold = half_of_largest(small_plan(model, 1));
        const train::SampleSource source = made_up_samples(plan);
        train::Trainer whole(plan, options);
        CHECK(whole.step(source).logits->clipped > 0);
        train::CheckpointWriter writer(folder / model, "test");
        writer.save(whole);
        writer.finish();
        const train::StepResult second = whole.step(source);
        std::vector<std::string> skipped;
        const auto stored = weights::newest_checkpoint(folder / model, skipped);
        REQUIRE(stored != nullptr);
        train::Trainer same(plan, options),
            other(small_plan(model, 4, {{"tp", "2"}, {"ep", "2"}, {"optimizer", "muon"}}), options);
        same.restore(*stored);
        other.restore(*stored);
        CHECK(same.step(source).loss == second.loss);
        CHECK(other.step(source).logits->clipped == second.logits->clipped);
        for (const auto& [name, shape] : whole.parameters()) {
            const std::string held_name = name; // no structured binding can be captured
            CAPTURE(held_name);
            CHECK(same.read_weight(name) == whole.read_weight(name));
            CHECK(same.read_average(name) == whole.read_average(name));
            CHECK(relative_distance(other.read_weight(name), whole.read_weight(name)) <= parity_tolerance);
        }
    }
}

TEST_CASE("qk-clip: a bad step clips nothing, and smaller batches are clipped as well") {
    train::TrainOptions options = three_steps();
    options.steps = 40;
    options.skip_bad = true;
    options.spike = 1.0000001;
    options.ramp = train::batch_ramp("2,2,6");
    options.qk_clip.threshold = half_of_largest(small_plan("mixtral", 1));
    train::Trainer trainer(small_plan("mixtral", 2, {{"ep", "2"}}), options);
    const train::SampleSource source = made_up_samples(trainer.plan());
    const std::string name = "model.layers.1.self_attn.q_proj.weight";
    int bad = 0;
    for (int step = 0; step < 30; ++step) {
        const std::vector<float> before = trainer.read_weight(name);
        const train::StepResult result = trainer.step(source);
        bad += result.skipped;
        if (step == 0) CHECK(result.tokens == 2 * trainer.plan().seq);
        if (step == 0) CHECK(result.logits->clipped > 0);
        CHECK(std::isfinite(result.logits->largest));
        if (result.skipped) CHECK(result.logits->clipped == 0);
        CHECK((trainer.read_weight(name) == before) == result.skipped);
    }
    CHECK(bad > 0);
    CHECK(bad < 30);
}
