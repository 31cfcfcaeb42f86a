// Training in fp8-tensor and in precisions that are emulated: plans against one rank, the formats against BF16, and
// what is refused.
#include "engine/backends/cpu/table.hpp"
#include "engine/run/executable.hpp"
#include "planner/lower/lower.hpp"
#include "tests/engine/base/refusals.hpp"
#include "tests/engine/train/parity.hpp"
#include "tests/support/draws.hpp"

#include <doctest/doctest.h>

#include <cmath>

using namespace moe;

namespace {

plan::Plan emulated_plan(const std::string& precision, int ranks, Fields fields, const std::string& kind = "qwen3",
                         const Fields& model = {}) {
    fields.insert(fields.begin(), {{"precision", precision}, {"balance", "forced"}});
    return small_plan(wide_model(kind, model), ranks, fields, {32, 4});
}

Trained trained(const std::string& precision, int ranks, const Fields& fields, const std::string& kind = "qwen3",
                const Fields& model = {}) {
    return train_three(emulated_plan(precision, ranks, fields, kind, model));
}

// Losses, gradients and weights as far as they may be apart.
struct Apart {
    double losses, gradients, weights;
};
void check_within(const Trained& got, const Trained& want, const Apart& most) {
    for (std::size_t i = 0; i < 3; ++i) CHECK(std::abs(got.losses[i] / want.losses[i] - 1.0) < most.losses);
    CHECK(total_distance(got.gradients, want.gradients) < most.gradients);
    CHECK(total_distance(got.weights, want.weights) < most.weights);
}

std::string refusal(const plan::Plan& plan) {
    return message([&] {
        std::vector<program::Program> programs;
        for (int stage = 0; stage < plan.pp; ++stage) programs.push_back(lower::lower(plan, stage));
        run::check_executable(plan, programs, backends::cpu_backend());
    });
}

const std::vector<std::string> precisions{"mxfp8", "nvfp4", "fp8-tensor"};

} // namespace

// Micro-batches are the same, and so are all blocks and all noise: sums in another order may still move a value across
// the edge of two codes, which are a fourth apart in E2M1, a third in E5M2 and a sixteenth in E4M3.
TEST_CASE("emulated: DP, PP and every schedule train as one rank") {
    for (const std::string& precision : precisions) {
        const Trained expected = trained(precision, 1, {});
        for (const Fields& fields : thinned(std::vector<Fields>{{},
                                                                {{"pp", "2"}},
                                                                {{"pp", "2"}, {"schedule", "zero-bubble"}},
                                                                {{"pp", "2"}, {"delay_wgrad", "on"}},
                                                                {{"fsdp", "on"}}})) {
            INFO(precision, " ", words_of(fields));
            const Trained got = trained(precision, 2, fields);
            CHECK(got.routed == expected.routed);
            check_within(got, expected, {1e-4, 1e-2, 1e-4});
        }
    }
}

// Rows of an expert come from all ranks of EP, and tokens of a sequence from all of TP: where wgrad's blocks lie, and
// which noise a row of an expert has, is the plan's. Scales of FP8 are powers of two, by which only what is 2^14 times
// smaller than its block's largest is rounded otherwise; E2M1 and its noise are as far from one rank as from BF16.
TEST_CASE("emulated: EP, TP, ETP and CP differ from one rank by less than the format does from BF16") {
    const Fields every_expert{{"num_experts_per_tok", "8"}};
    for (const std::string& precision : precisions) {
        const Trained bf16 = trained("bf16", 1, {}, "qwen3", every_expert),
                      expected = trained(precision, 1, {}, "qwen3", every_expert);
        const double format = total_distance(expected.gradients, bf16.gradients);
        const bool stochastic = precision == "nvfp4";
        for (const Fields& fields : thinned(std::vector<Fields>{{{"ep", "4"}},
                                                                {{"ep", "2"}, {"dispatcher", "allgather"}},
                                                                {{"ep", "2"}, {"ep_overlap", "on"}, {"capacity", "2"}},
                                                                {{"tp", "2"}, {"etp", "2"}, {"ep", "2"}},
                                                                {{"tp", "2"}, {"tp_overlap", "on"}},
                                                                {{"cp", "2"}, {"ep", "2"}}})) {
            INFO(precision, " ", words_of(fields));
            const Trained got = trained(precision, 4, fields, "qwen3", every_expert);
            const double away = total_distance(got.gradients, expected.gradients);
            CHECK(away < (stochastic ? 1.3 : 0.9) * format);
            // A wrong plan is far from BF16 as well.
            CHECK(total_distance(got.gradients, bf16.gradients) < 1.2 * format);
            check_within(got, expected, {stochastic ? 1e-2 : 5e-3, 1.0, stochastic ? 5e-3 : 2e-3});
        }
    }
}

TEST_CASE("emulated: recomputation, offload and a run again change no bit") {
    for (const std::string& precision : precisions) {
        const Trained expected = trained(precision, 1, {}, "deepseek3");
        for (const Fields& fields :
             thinned(std::vector<Fields>{{{"recompute", "mlp+moe+shared_experts"}},
                                         {{"recompute", "full"}},
                                         {{"recompute", "layernorm+moe_act+mla_up_proj"}},
                                         {},
                                         {{"offload", "attn_norm+qkv_linear+core_attn+attn_proj+mlp_norm+expert_fc1"}},
                                         {{"offload", "optimizer_step"}}})) {
            INFO(precision, " ", words_of(fields));
            const Trained got = trained(precision, 1, fields, "deepseek3");
            if (precision == "fp8-tensor" && words_of(fields).find("optimizer_step") != std::string::npos) {
                check_within(got, expected, {1e-3, 3e-2, 1e-3}); // products in BF16: sums in another order
                continue;
            }
            CHECK(got.losses == expected.losses);
            CHECK(got.gradients == expected.gradients);
            CHECK(got.weights == expected.weights);
        }
    }
}

TEST_CASE("emulated: fp8-tensor in FP8 is what it is emulated, and wgrad in FP8 what it is in BF16") {
    for (const char* scaling : {"current", "delayed"})
        for (const char* kind : {"qwen3", "deepseek3"}) {
            const auto with = [&](Fields fields) {
                fields.emplace_back("fp8_scaling", scaling);
                return trained("fp8-tensor", 1, fields, kind);
            };
            const Trained expected = with({}), bf16 = trained("bf16", 1, {}, kind);
            const double format = total_distance(expected.gradients, bf16.gradients);
            CHECK(format > 2e-2);
            for (const Fields& fields : std::vector<Fields>{{{"offload", "optimizer_step"}},
                                                            {{"fp8_wgrad", "on"}},
                                                            {{"fp8_wgrad", "on"}, {"recompute", "full"}}}) {
                INFO(std::string(kind), " ", std::string(scaling), " ", words_of(fields));
                check_within(with(fields), expected, {1e-3, 0.3 * format, 1e-3});
            }
        }
}

TEST_CASE("emulated: each format is another training than BF16, and near to it; the narrower, the farther") {
    const Trained bf16 = trained("bf16", 1, {});
    std::map<std::string, double> off;
    for (const std::string& precision : precisions) {
        INFO(precision);
        const Trained got = trained(precision, 1, {});
        for (std::size_t i = 0; i < 3; ++i) CHECK(std::abs(got.losses[i] / bf16.losses[i] - 1.0) < 2e-2);
        off[precision] = total_distance(got.gradients, bf16.gradients);
        const Trained head = trained(precision, 1, {{"head_precision", precision}}),
                      experts = trained(precision, 1, {{"expert_precision", "bf16"}});
        CHECK(head.losses[0] != got.losses[0]);
        CHECK(experts.losses[0] != got.losses[0]);
        const double of_experts = total_distance(experts.gradients, bf16.gradients);
        CHECK(of_experts > 0.0);
        CHECK(of_experts < off[precision]);
    }
    CHECK(off["mxfp8"] > 5e-3);
    CHECK(off["mxfp8"] < 0.12);
    CHECK(off["fp8-tensor"] > off["mxfp8"]); // gradients have two bits
    CHECK(off["nvfp4"] > off["fp8-tensor"]);
    CHECK(off["nvfp4"] < 0.8);
}

// Kept layers have buckets of their own, over which the norm of the gradient is summed in another order: a weight may
// round to the next number of BF16.
TEST_CASE("emulated: layers that stay in BF16 train as in BF16, with the bits of its gradients") {
    const Trained bf16 = trained("bf16", 1, {});
    for (const std::string& precision : thinned(precisions)) {
        INFO(precision);
        const Trained none = trained(precision, 1, {{"bf16_layers", "1+1"}}),
                      some = trained(precision, 1, {{"bf16_layers", "0+1"}}), all = trained(precision, 1, {});
        CHECK(none.losses[0] == bf16.losses[0]);
        for (std::size_t i = 1; i < 3; ++i) CHECK(std::abs(none.losses[i] / bf16.losses[i] - 1.0) < 2e-5);
        CHECK(none.gradients == bf16.gradients);
        CHECK(total_distance(none.weights, bf16.weights) < 1e-5);
        CHECK(some.losses != bf16.losses);
        CHECK(total_distance(some.gradients, bf16.gradients) < total_distance(all.gradients, bf16.gradients));
    }
}

TEST_CASE("emulated: experts in NVFP4 beside blockwise FP8 and BF16, on one rank and with a pipeline") {
    for (const char* precision : {"fp8-blockwise", "bf16"}) {
        INFO(std::string(precision));
        const Fields experts{{"expert_precision", "nvfp4"}};
        const Trained plain = trained(precision, 1, {}), mixed = trained(precision, 1, experts);
        CHECK(mixed.losses[0] != plain.losses[0]);
        check_within(mixed, plain, {2e-2, 0.8, 1e-2});
        Fields split = experts;
        split.emplace_back("pp", "2");
        check_within(trained(precision, 2, split), mixed, {1e-4, 1e-2, 1e-4});
    }
}

// The same samples in every step, without learning: what differs is the noise.
TEST_CASE("emulated: stochastic rounding has its own noise in every step and seed, and an evaluation has none") {
    const auto run = [](std::uint64_t seed, bool evaluates) {
        train::TrainOptions options = three_steps(seed);
        options.lr = 0.0;
        options.evaluates = evaluates;
        const plan::Plan plan = emulated_plan("nvfp4", 1, {});
        train::Trainer trainer(plan, options);
        const train::SampleSource source = [tokens = made_up_tokens(61)](std::int64_t sample,
                                                                         std::span<std::int32_t> out) {
            tokens(sample % 4, out);
        };
        std::vector<std::vector<float>> gradients;
        std::vector<double> losses;
        for (int step = 0; step < 2; ++step) {
            if (evaluates) losses.push_back(trainer.evaluate(source, 4).loss);
            losses.push_back(trainer.step(source).loss);
            gradients.push_back(trainer.read_gradient("model.layers.0.self_attn.q_proj.weight"));
        }
        for (const double loss : losses) CHECK(loss == losses[0]); // the forward rounds to nearest
        return gradients;
    };
    const auto first = run(1, false), again = run(1, true);
    CHECK(first[0] != first[1]);
    CHECK(relative_distance(first[0], first[1]) < 1.0);
    CHECK(first == again);
}

TEST_CASE("emulated: what is not emulated is refused by name") {
    CHECK(refusal(emulated_plan("mxfp8", 1, {})) == "no error");
    CHECK(refusal(emulated_plan("fp8-tensor", 1, {{"fp8_scaling", "delayed"}})) == "no error");
    CHECK(mentions(refusal(emulated_plan("mxfp8", 1, {{"attention_precision", "mxfp8"}})),
                   "attention_precision = mxfp8"));
    plan::Plan published = emulated_plan("mxfp8", 1, {});
    published.stack = "bridge-26.08";
    CHECK(mentions(refusal(published), "precision = mxfp8"));
}
