// Training in blockwise FP8: every plan against one rank, FP8 against BF16, and what is refused.
#include "engine/backends/cpu/table.hpp"
#include "engine/run/executable.hpp"
#include "planner/lower/lower.hpp"
#include "planner/memory/memory.hpp"
#include "planner/plan/plan_choices.hpp"
#include "tests/engine/base/refusals.hpp"
#include "tests/engine/train/parity.hpp"
#include "tests/support/draws.hpp"

#include <doctest/doctest.h>

#include <cmath>

using namespace moe;

namespace {

plan::Plan fp8_plan(const std::string& kind, int ranks, Fields fields, const Fields& model = {}) {
    fields.insert(fields.begin(), {"precision", "fp8-blockwise"});
    return small_plan(wide_model(kind, model), ranks, fields, {16, 8});
}

// Allows for three steps what rounding to one of two neighbouring codes, 1/16 apart, may do.
void check_near(const Trained& got, const Trained& expected) {
    for (std::size_t i = 0; i < 3; ++i) CHECK(std::abs(got.losses[i] / expected.losses[i] - 1.0) < 1e-3);
    CHECK(total_distance(got.gradients, expected.gradients) < 6e-2);
    CHECK(total_distance(got.weights, expected.weights) < 1e-3);
}

// Experts are chosen by turns: where a sum's order moves a value across the edge of two E4M3 codes, the router's near
// ties may fall the other way. Such a value is a sixteenth apart itself; with some other weights there is none, while a
// wrong plan is wrong with all. The processor, whose exponentials may differ in a last bit, decides which weights have
// one.
void check_same(const std::string& kind, int ranks, const std::vector<Fields>& plans, const Fields& common = {},
                const Fields& model = {}) {
    Fields shared = common;
    shared.emplace_back("balance", "forced");
    const plan::Plan alone = fp8_plan(kind, 1, shared, model);
    const Trained expected = train_three(alone);
    for (Fields fields : thinned(plans)) {
        fields.insert(fields.begin(), shared.begin(), shared.end());
        INFO(kind, " ", words_of(fields));
        const plan::Plan plan = fp8_plan(kind, ranks, fields, model);
        const Trained got = train_three(plan);
        CHECK(got.routed == expected.routed);
        check_near(got, expected);
        std::string off = disagreement(got, expected, parity_tolerance, parity_tolerance);
        for (std::uint64_t seed = 2; !off.empty() && seed <= 6; ++seed) {
            MESSAGE("codes that flip: ", off);
            const Trained other = train_three(plan, seed), reference = train_three(alone, seed);
            off = disagreement(other, reference, parity_tolerance, parity_tolerance);
            check_near(other, reference);
        }
        CHECK(off == "");
    }
}

// TP adds up partial sums in BF16 and CP takes softmax in parts: a value that is rounded otherwise may fall to the next
// of FP8's, which are 1/16 apart. Every token goes to every expert, so that no choice depends on it.
void check_close(const std::string& kind, const std::vector<Fields>& plans, const Fields& model,
                 const Fields& alone = {}) {
    const Trained expected = train_three(fp8_plan(kind, 1, alone, model));
    for (const Fields& fields : thinned(plans)) {
        INFO(kind, " ", words_of(fields));
        const Trained got = train_three(fp8_plan(kind, 4, fields, model));
        check_near(got, expected);
    }
}

std::int64_t bytes_of_class(const plan::Plan& plan, memory::MemoryClass memory_class) {
    return memory::plan_memory(lower::lower(plan, 0)).class_bytes[static_cast<std::size_t>(memory_class)];
}

std::string refusal(const plan::Plan& plan) {
    return message([&] {
        std::vector<program::Program> programs;
        for (int stage = 0; stage < plan.pp; ++stage) programs.push_back(lower::lower(plan, stage));
        run::check_executable(plan, programs, backends::cpu_backend());
    });
}

} // namespace

TEST_CASE("fp8: EP, DP, PP and every schedule have the losses, gradients and weights of one rank") {
    check_same("qwen3", 4,
               {
                   {{"ep", "4"}},
                   {{"ep", "2"}, {"dispatcher", "allgather"}},
                   {{"ep", "2"}, {"ep_overlap", "on"}},
                   {{"ep", "4"}, {"capacity", "2"}},
                   {{"pp", "2"}, {"ep", "2"}},
                   {{"pp", "2"}, {"schedule", "zero-bubble"}, {"ep", "2"}},
               });
    check_same("deepseek3", 2, {{{"ep", "2"}}, {{"pp", "2"}, {"delay_wgrad", "on"}}});
    check_same("qwen2", 2, {{{"ep", "2"}}}, {{"head_precision", "fp8-blockwise"}},
               {{"shared_expert_intermediate_size", "128"}});
}

TEST_CASE(
    "fp8: tokens that are quantized before they travel over peer memory train as those that are where they arrive") {
    const Fields wide{{"hidden_size", "512"}}; // whose scales are whole 16 bytes
    const auto trained = [&](const char* dispatcher, const Fields& more) {
        Fields fields{{"ep", "2"}, {"dispatcher", dispatcher}};
        fields.insert(fields.end(), more.begin(), more.end());
        return train_three(fp8_plan("qwen3", 2, fields, wide));
    };
    const Trained expected = trained("alltoall", {});
    for (const Fields& fields :
         std::vector<Fields>{{}, {{"recompute", "full"}}, {{"ep_overlap", "on"}, {"capacity", "2"}}}) {
        INFO(words_of(fields));
        const Trained got = trained("hybridep", fields);
        CHECK(got.losses == expected.losses);
        CHECK(got.gradients == expected.gradients);
        CHECK(got.weights == expected.weights);
    }
    const program::Program program =
        lower::lower(fp8_plan("qwen3", 2, {{"ep", "2"}, {"dispatcher", "hybridep"}}, wide), 0);
    int exchanges = 0;
    for (const program::Template& ops : program.templates)
        for (const program::Op& op : ops.ops) {
            if (op.kind != program::OpKind::dispatch_tokens) continue;
            const program::Dtype dtype = program.tensors[static_cast<std::size_t>(op.in[0])].dtype;
            CHECK(dtype == (op.phase == program::Phase::forward ? program::Dtype::fp8_block
                                                                : program::Dtype::bf16)); // gradients go as they are
            ++exchanges;
        }
    CHECK(exchanges > 0);
}

TEST_CASE("fp8: recomputation and offload change no bit") {
    const Trained expected = train_three(fp8_plan("deepseek3", 1, {}));
    for (const Fields& fields :
         std::vector<Fields>{{{"recompute", "full"}},
                             {{"recompute", "layernorm+moe_act+mla_up_proj+shared_experts"}},
                             {{"offload", "attn_norm+qkv_linear+core_attn+attn_proj+mlp_norm+expert_fc1+moe_act"}}}) {
        INFO(words_of(fields));
        const Trained got = train_three(fp8_plan("deepseek3", 1, fields));
        CHECK(got.losses == expected.losses);
        CHECK(got.gradients == expected.gradients);
        CHECK(got.weights == expected.weights);
    }
}

TEST_CASE("fp8: TP, ETP and CP differ by the rounding of BF16") {
    check_close("qwen3",
                {
                    {{"tp", "2"}, {"ep", "4"}},
                    {{"tp", "2"}, {"etp", "2"}, {"ep", "2"}},
                    {{"tp", "2"}, {"tp_overlap", "on"}},
                    {{"cp", "2"}, {"ep", "2"}},
                },
                {{"num_experts_per_tok", "8"}});
    check_close("deepseek3", {{{"tp", "2"}, {"ep", "2"}}},
                {{"num_experts_per_tok", "8"}, {"n_group", "1"}, {"topk_group", "1"}});
}

// Blocks along tokens begin where a rank's tokens do: other blocks round what is 2^-14 of their largest otherwise,
// which is far below the tolerances.
TEST_CASE("fp8: wgrad in FP8 over ranks is that of one; it differs from wgrad in BF16 in gradients of weights alone") {
    const Fields low{{"fp8_wgrad", "on"}};
    check_same("qwen3", 4,
               {
                   {{"ep", "4"}},
                   {{"ep", "2"}, {"dispatcher", "allgather"}},
                   {{"ep", "2"}, {"ep_overlap", "on"}, {"capacity", "2"}},
                   {{"pp", "2"}, {"schedule", "zero-bubble"}, {"ep", "2"}},
               },
               low);
    check_same("qwen2", 2, {{{"ep", "2"}}}, {{"head_precision", "fp8-blockwise"}, {"fp8_wgrad", "on"}},
               {{"shared_expert_intermediate_size", "128"}});
    check_same("deepseek3", 2, {{{"pp", "2"}, {"delay_wgrad", "on"}}, {{"recompute", "full"}, {"ep", "2"}}}, low);
    check_close("qwen3",
                {
                    {{"tp", "2"}, {"etp", "2"}, {"ep", "2"}, {"fp8_wgrad", "on"}},
                    {{"tp", "2"}, {"tp_overlap", "on"}, {"fp8_wgrad", "on"}},
                    {{"cp", "2"}, {"ep", "2"}, {"fp8_wgrad", "on"}},
                },
                {{"num_experts_per_tok", "8"}}, low);
    const Trained wide = train_three(fp8_plan("qwen3", 1, {})), narrow = train_three(fp8_plan("qwen3", 1, low));
    CHECK(narrow.losses[0] == wide.losses[0]); // the first forward is the same
    const double off = total_distance(narrow.gradients, wide.gradients);
    CHECK(off > 1e-3);
    CHECK(off < 0.1);
    for (std::size_t i = 1; i < 3; ++i) CHECK(std::abs(narrow.losses[i] / wide.losses[i] - 1.0) < 3e-3);
}

TEST_CASE("fp8: experts or all other linears alone, and the LM head") {
    const Trained bf16 = train_three(small_plan(wide_model("qwen3"), 1, {{"precision", "bf16"}}, {16, 8}));
    std::vector<double> losses{bf16.losses[2]};
    for (const Fields& fields :
         std::vector<Fields>{{{"precision", "fp8-blockwise"}},
                             {{"precision", "fp8-blockwise"}, {"head_precision", "fp8-blockwise"}},
                             {{"precision", "fp8-blockwise"}, {"expert_precision", "bf16"}},
                             {{"precision", "bf16"}, {"expert_precision", "fp8-blockwise"}}}) {
        INFO(words_of(fields));
        const Trained got = train_three(small_plan(wide_model("qwen3"), 1, fields, {16, 8}));
        for (std::size_t i = 0; i < 3; ++i) CHECK(std::abs(got.losses[i] / bf16.losses[i] - 1.0) < 3e-3);
        const double off = total_distance(got.gradients, bf16.gradients);
        CHECK(off < 0.15);
        CHECK(off > 1e-3); // it is another precision
        for (const double other : losses) CHECK(got.losses[2] != other);
        losses.push_back(got.losses[2]);
    }
}

TEST_CASE("fp8: layers that stay in BF16 train as in BF16, all of them to the bit; over ranks as alone") {
    const auto trained = [](const Fields& fields) {
        return train_three(small_plan(wide_model("qwen3"), 1, fields, {16, 8}));
    };
    const Trained bf16 = trained({{"precision", "bf16"}}), all = trained({{"precision", "fp8-blockwise"}});
    const Trained none = trained({{"precision", "fp8-blockwise"}, {"bf16_layers", "1+1"}}); // of two layers
    CHECK(none.losses == bf16.losses);
    CHECK(none.gradients == bf16.gradients);
    CHECK(none.weights == bf16.weights);
    const double off = total_distance(all.gradients, bf16.gradients);
    for (const char* layers : {"1+0", "0+1"}) {
        INFO(layers);
        const Trained some = trained({{"precision", "fp8-blockwise"}, {"bf16_layers", layers}});
        CHECK(some.losses != bf16.losses);
        CHECK(some.losses != all.losses);
        CHECK(total_distance(some.gradients, bf16.gradients) < off);
    }
    check_same("qwen3", 2, {{{"ep", "2"}}, {{"pp", "2"}}}, {{"bf16_layers", "1+0"}});
}

TEST_CASE(
    "fp8: inputs of products are saved in one byte, those of experts by token; their activations are made again") {
    const plan::Plan bf16 = small_plan(wide_model("qwen3"), 1, {{"precision", "bf16"}, {"mbs", "2"}}, {16, 8});
    const plan::Plan fp8 = fp8_plan("qwen3", 1, {{"mbs", "2"}});
    // Bytes by layer and token: the normed inputs of query, key and value and of the K experts, and the experts'
    // activations.
    const std::int64_t tokens = 32, layers = 2, copies = 2, width = 256, wide = width + copies * (width + width);
    const std::int64_t saved =
        bytes_of_class(bf16, memory::MemoryClass::saved) - bytes_of_class(fp8, memory::MemoryClass::saved);
    // Norms keep their own input, not their output; scales are 4 bytes of 128.
    CHECK(saved == layers * tokens * (wide * 2 - 2 * (width + width / 128 * 4)));
    CHECK(refusal(fp8) == "no error");
}

TEST_CASE("fp8: what products in FP8 cannot take is refused by name") {
    CHECK(mentions(refusal(fp8_plan("qwen3", 1, {{"offload", "optimizer"}})), "offload = optimizer"));
    CHECK(mentions(refusal(fp8_plan("deepseek3", 1, {}, {{"q_lora_rank", "24"}})), "q_lora_rank is 24"));
    CHECK(mentions(refusal(fp8_plan("qwen3", 32, {{"tp", "8"}, {"etp", "32"}})), "width of an expert per rank is 8"));
    plan::Plan other = fp8_plan("qwen3", 1, {});
    other.stack = "bridge-26.08";
    other.precision = machine::Precision::mxfp8;
    CHECK(mentions(refusal(other), "precision = mxfp8"));
    other.precision = machine::Precision::bf16;
    other.head_precision = machine::Precision::fp8_tensor;
    CHECK(mentions(refusal(other), "head_precision = fp8-tensor"));
}
