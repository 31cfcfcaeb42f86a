// The memory that Megatron Core holds where our own engine does not: outputs that its recomputation keeps, FP32 copies
// of its optimizer, buffers of its dispatcher.
#include "planner/lower/lower.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/memory/library_memory.hpp"
#include "planner/memory/memory.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/program.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <memory>

using namespace moe;

namespace {

// 16 H100 on one stage.
plan::Plan plan_of(const char* model, const char* stack, int ep) {
    plan::Plan plan;
    plan.model = std::make_shared<model::Model>(families::load_model(model));
    plan.hardware = std::make_shared<machine::Hardware>(machine::load_hardware("h100"));
    plan.stack = stack;
    plan.gpus = plan.dp = 16;
    plan.ep = ep;
    plan.edp = 16 / ep;
    plan.gbs = 16;
    plan.seq = 4096;
    REQUIRE(plan::check_plan(plan).message == "");
    return plan;
}

std::int64_t saved(plan::Plan plan, unsigned recomputed) {
    plan.recompute = recomputed;
    return memory::plan_memory(lower::lower(plan, 0)).class_bytes[static_cast<std::size_t>(memory::MemoryClass::saved)];
}

// Saved bytes that recomputation of a set spares.
std::int64_t saved_by(const plan::Plan& plan, unsigned set) { return saved(plan, 0) - saved(plan, set); }

// Bytes of one norm in every layer: its output in BF16.
double norms(const plan::Plan& plan) {
    return 2.0 * static_cast<double>(plan.tokens_local() * plan.model->hidden) *
           static_cast<double>(plan.model->layers.size());
}

} // namespace

TEST_CASE("Megatron recomputes norms that are modules of their own, not those within a projection") {
    const plan::Plan theirs = plan_of("Qwen3-30B-A3B", "bridge-26.04", 8),
                     ours = plan_of("Qwen3-30B-A3B", "moe-plan", 8);
    CHECK(static_cast<double>(saved_by(theirs, plan::recompute::layernorm)) ==
          nearly(norms(theirs)).epsilon(0.01)); // experts'
    CHECK(static_cast<double>(saved_by(ours, plan::recompute::layernorm)) == nearly(2.0 * norms(ours)).epsilon(0.01));
    const plan::Plan latent = plan_of("DeepSeek-V3", "bridge-26.04", 16); // MLA's is one; not those of the 3 dense MLPs
    const double layers = static_cast<double>(latent.model->layers.size());
    CHECK(static_cast<double>(saved_by(latent, plan::recompute::layernorm)) ==
          nearly((2.0 * layers - 3.0) / layers * norms(latent)).epsilon(0.03));
    // Mamba's projection has its norm within as well: only the experts' are left.
    const plan::Plan hybrid = plan_of("Nemotron-3-Nano", "bridge-26.08", 8);
    CHECK(static_cast<double>(saved_by(hybrid, plan::recompute::layernorm)) ==
          nearly(23.0 / 52.0 * norms(hybrid)).epsilon(0.03));
}

TEST_CASE("Megatron: the norm within an MLP is recomputed with the MLP") {
    const plan::Plan theirs = plan_of("Llama3-8B", "bridge-26.04", 1), ours = plan_of("Llama3-8B", "moe-plan", 1);
    CHECK(saved_by(theirs, plan::recompute::layernorm) == 0);
    CHECK(static_cast<double>(saved_by(theirs, plan::recompute::mlp) - saved_by(ours, plan::recompute::mlp)) ==
          nearly(norms(ours)).epsilon(0.01));
}

TEST_CASE("Megatron: a recomputed attention core leaves its output with the projection behind it") {
    const plan::Plan theirs = plan_of("Llama3-8B", "bridge-26.04", 1), ours = plan_of("Llama3-8B", "moe-plan", 1);
    const double heads = 32.0, rows = static_cast<double>(theirs.tokens_local()) * 32.0; // tokens of all layers
    CHECK(static_cast<double>(saved_by(ours, plan::recompute::core_attn)) ==
          nearly(rows * heads * (2 * 128 + 4)).epsilon(0.01));
    CHECK(static_cast<double>(saved_by(theirs, plan::recompute::core_attn)) == nearly(rows * heads * 4).epsilon(0.01));
}

TEST_CASE("Megatron's optimizer copies BF16 gradients and moments to FP32") {
    plan::Plan plan = plan_of("Qwen3-30B-A3B", "bridge-26.08", 8);
    const auto copies = [&plan](machine::Precision precision, machine::Precision gradients, bool bf16_moments) {
        plan.precision = precision;
        plan.gradients = gradients;
        plan.optimizer.moments = bf16_moments ? plan::Moments::bf16 : plan::Moments::fp32;
        return plan.optimizer_copy_bytes();
    };
    CHECK(copies(machine::Precision::bf16, machine::Precision::fp32, false) == 0);
    CHECK(copies(machine::Precision::bf16, machine::Precision::bf16, false) == 4);
    CHECK(copies(machine::Precision::bf16, machine::Precision::bf16, true) == 8); // gradients are read as they are
    CHECK(copies(machine::Precision::mxfp8, machine::Precision::bf16, true) == 12);
    CHECK(copies(machine::Precision::fp8_tensor, machine::Precision::bf16, true) == 12); // current scaling
    plan.fp8_scaling = plan::Fp8Scaling::delayed;
    CHECK(copies(machine::Precision::fp8_tensor, machine::Precision::bf16, true) == 8);
    CHECK(copies(machine::Precision::mxfp8, machine::Precision::fp32, true) == 8);
    plan.fsdp = true;
    CHECK(plan.optimizer_copy_bytes() == 0);
    plan.fsdp = false;
    for (const char* other : {"moe-plan", "torchtitan", "torchtitan,no-fused_router"}) {
        plan.stack = other;
        CHECK(plan.optimizer_copy_bytes() == 0);
    }
    plan.stack = "bridge-26.04,no-fused_router";
    CHECK(plan.optimizer_copy_bytes() == 8);

    // Beside the states, where activations lay: what a rank holds where layers are computed again and copies are the
    // larger part. Gradients in FP32 take the place of their copies.
    plan = plan_of("Qwen3-30B-A3B", "bridge-26.08", 8);
    plan.seq = 64;
    plan.recompute = plan::recompute::full;
    plan.gradients = machine::Precision::bf16;
    const program::Program program = lower::lower(plan, 0);
    double own = 0.0, states = 0.0;
    for (const program::Bucket& b : program.buckets) {
        own += static_cast<double>(b.elements / b.group_size);
        states += 4.0 * static_cast<double>(b.elements);
    }
    CHECK(static_cast<double>(memory::plan_memory(program).arena_bytes) == nearly(states + 16.0 * own).epsilon(1e-3));
}

TEST_CASE("HybridEP holds room for every token of its group") {
    // csrc/hybrid_ep/buffer/intranode.cu: tokens in BF16, probabilities of all 256 experts, scales of 128 columns.
    const double all = 64.0 * 4096;
    CHECK(memory::hybrid_ep_buffers({4096, 7168, 4, 64, 1}) == all * (7168 * 2 + 256 * 4 + 56 * 4));
    // Eight domains of eight: dispatch and combine apart, probabilities of a domain's 32 experts; internode.cu: tokens
    // that leave (with probabilities of all experts), and three times those of the seven other domains.
    CHECK(memory::hybrid_ep_buffers({4096, 7168, 4, 8, 8}) == all * (2 * (7168 * 2 + 32 * 4) + 56 * 4) +
                                                                  4096.0 * (7168 * 2 + 256 * 4) +
                                                                  3 * 7 * 4096.0 * (7168 * 2 + 32 * 4));
    CHECK(memory::hybrid_ep_buffers({100, 1024, 2, 8, 1}) ==
          8 * 512.0 * (1024 * 2 + 16 * 4 + 8 * 4)); // 512 tokens at least

    plan::Plan plan = plan_of("DeepSeek-V3", "bridge-26.08", 16);
    plan.dispatcher = plan::Dispatcher::hybridep;
    const double context = plan.hardware->context_bytes;
    CHECK(memory::library_memory(plan) == context + memory::hybrid_ep_buffers({4096, 7168, 16, 8, 2}));
    plan.tp = 2, plan.dp = 8; // tokens are shared out over TP before they travel
    CHECK(memory::library_memory(plan) == context + memory::hybrid_ep_buffers({2048, 7168, 16, 8, 2}));
    plan.hardware = std::make_shared<machine::Hardware>(machine::load_hardware("gb200-nvl72"));
    CHECK(memory::library_memory(plan) == context + memory::hybrid_ep_buffers({2048, 7168, 16, 16, 1}));
    plan.model =
        std::make_shared<model::Model>(families::load_model("Nemotron-3-Super")); // travels in its latent width
    CHECK(memory::library_memory(plan) == context + memory::hybrid_ep_buffers({2048, 1024, 32, 16, 1}));
    plan.dispatcher = plan::Dispatcher::ncclep; // taken as large
    CHECK(memory::library_memory(plan) == context + memory::hybrid_ep_buffers({2048, 1024, 32, 16, 1}));
    plan.dispatcher = plan::Dispatcher::alltoall;
    CHECK(memory::library_memory(plan) == context);
    plan.dispatcher = plan::Dispatcher::deepep;
    CHECK(memory::library_memory(plan) == context + memory::deep_ep_buffers(1024, 16));
    plan.dispatcher = plan::Dispatcher::hybridep;
    plan.ep = 1, plan.edp = 16;
    CHECK(memory::library_memory(plan) == context);
    plan.model = std::make_shared<model::Model>(families::load_model("Llama3-8B"));
    plan.ep = 16, plan.edp = 1;
    CHECK(memory::library_memory(plan) == context);
}

TEST_CASE("DeepEP holds chunks of tokens on their way, however many there are") {
    constexpr double token = 2 * 7168 + 8 + 128 * 16, workspace = 32 << 20; // csrc/config.hpp, 7168 of DeepSeek-V3
    CHECK(memory::deep_ep_buffers(7168, 8) == nearly(10 * 8 * (5 * 4 + 256 * token) + workspace).epsilon(1e-6));
    CHECK(memory::deep_ep_buffers(7168, 4) == nearly(10 * 4 * (5 * 4 + 256 * token) + workspace).epsilon(1e-6));
    // Eight nodes: to and from each of them besides.
    CHECK(memory::deep_ep_buffers(7168, 64) ==
          nearly(10 * 8 * (19 * 4 + 288 * token) + (1 << 20) + workspace + 10 * 8 * 2 * (18 * 4 + 128 * (token + 16)))
              .epsilon(1e-6));
    CHECK(memory::deep_ep_buffers(7168, 160) > memory::deep_ep_buffers(7168, 128));
}
