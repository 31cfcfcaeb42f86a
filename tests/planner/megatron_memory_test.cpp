// What Megatron Core holds where our own engine does not: buffers of its dispatcher.
#include "planner/library_memory.hpp"
#include "planner/plan.hpp"

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
