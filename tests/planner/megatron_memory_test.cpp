// What Megatron Core holds where our own engine does not: FP32 copies of its optimizer, buffers of its dispatcher.
#include "planner/library_memory.hpp"
#include "planner/lower.hpp"
#include "planner/memory.hpp"
#include "tests/nearly.hpp"

#include <doctest/doctest.h>

#include <memory>

using namespace moe;

namespace {

// 16 H100 on one stage.
Plan plan_of(const char* model, const char* stack, int ep) {
    Plan plan;
    plan.model = std::make_shared<Model>(load_model(model));
    plan.hardware = std::make_shared<Hardware>(load_hardware("h100"));
    plan.stack = stack;
    plan.gpus = plan.dp = 16;
    plan.ep = ep;
    plan.edp = 16 / ep;
    plan.gbs = 16;
    plan.seq = 4096;
    REQUIRE(check_plan(plan).message == "");
    return plan;
}

} // namespace

TEST_CASE("Megatron's optimizer copies BF16 gradients and moments to FP32") {
    Plan plan = plan_of("Qwen3-30B-A3B", "bridge-26.08", 8);
    const auto copies = [&plan](Precision precision, Precision gradients, bool bf16_moments) {
        plan.precision = precision;
        plan.gradients = gradients;
        plan.optimizer.bf16_moments = bf16_moments;
        return plan.optimizer_copy_bytes();
    };
    CHECK(copies(Precision::bf16, Precision::fp32, false) == 0);
    CHECK(copies(Precision::bf16, Precision::bf16, false) == 4);
    CHECK(copies(Precision::bf16, Precision::bf16, true) == 8); // gradients are read as they are
    CHECK(copies(Precision::mxfp8, Precision::bf16, true) == 12);
    CHECK(copies(Precision::fp8_tensor, Precision::bf16, true) == 12); // current scaling
    plan.fp8_scaling = Fp8Scaling::delayed;
    CHECK(copies(Precision::fp8_tensor, Precision::bf16, true) == 8);
    CHECK(copies(Precision::mxfp8, Precision::fp32, true) == 8);
    plan.fsdp = true;
    CHECK(plan.optimizer_copy_bytes() == 0);
    plan.fsdp = false;
    plan.stack = "moe-plan";
    CHECK(plan.optimizer_copy_bytes() == 0);

    // Beside the states, where activations lay: what a rank holds where layers are computed again and copies are the
    // larger part. Gradients in FP32 take the place of their copies.
    plan = plan_of("Qwen3-30B-A3B", "bridge-26.08", 8);
    plan.seq = 64;
    plan.recompute = recompute::full;
    plan.gradients = Precision::bf16;
    const Program program = lower(plan, 0);
    double own = 0.0, states = 0.0;
    for (const Bucket& b : program.buckets) {
        own += static_cast<double>(b.elements / b.group_size);
        states += 4.0 * static_cast<double>(b.elements);
    }
    CHECK(static_cast<double>(plan_memory(program).arena_bytes) == nearly(states + 16.0 * own).epsilon(1e-3));
}

TEST_CASE("HybridEP holds room for every token of its group") {
    // csrc/hybrid_ep/buffer/intranode.cu: tokens in BF16, probabilities of all 256 experts, scales of 128 columns.
    const double all = 64.0 * 4096;
    CHECK(hybrid_ep_buffers({4096, 7168, 4, 64, 1}) == all * (7168 * 2 + 256 * 4 + 56 * 4));
    // Eight domains of eight: dispatch and combine apart, probabilities of a domain's 32 experts; internode.cu: tokens
    // that leave (with probabilities of all experts), and three times those of the seven other domains.
    CHECK(hybrid_ep_buffers({4096, 7168, 4, 8, 8}) == all * (2 * (7168 * 2 + 32 * 4) + 56 * 4) +
                                                          4096.0 * (7168 * 2 + 256 * 4) +
                                                          3 * 7 * 4096.0 * (7168 * 2 + 32 * 4));
    CHECK(hybrid_ep_buffers({100, 1024, 2, 8, 1}) == 8 * 512.0 * (1024 * 2 + 16 * 4 + 8 * 4)); // 512 tokens at least

    Plan plan = plan_of("DeepSeek-V3", "bridge-26.08", 16);
    plan.dispatcher = Dispatcher::hybridep;
    const double context = plan.hardware->context_bytes;
    CHECK(library_memory(plan) == context + hybrid_ep_buffers({4096, 7168, 16, 8, 2}));
    plan.tp = 2, plan.dp = 8; // tokens are shared out over TP before they travel
    CHECK(library_memory(plan) == context + hybrid_ep_buffers({2048, 7168, 16, 8, 2}));
    plan.hardware = std::make_shared<Hardware>(load_hardware("gb200-nvl72"));
    CHECK(library_memory(plan) == context + hybrid_ep_buffers({2048, 7168, 16, 16, 1}));
    plan.model = std::make_shared<Model>(load_model("Nemotron-3-Super")); // travels in its latent width
    CHECK(library_memory(plan) == context + hybrid_ep_buffers({2048, 1024, 32, 16, 1}));
    plan.dispatcher = Dispatcher::alltoall;
    CHECK(library_memory(plan) == context);
    plan.dispatcher = Dispatcher::hybridep;
    plan.ep = 1, plan.edp = 16;
    CHECK(library_memory(plan) == context);
    plan.model = std::make_shared<Model>(load_model("Llama3-8B"));
    plan.ep = 16, plan.edp = 1;
    CHECK(library_memory(plan) == context);
}
