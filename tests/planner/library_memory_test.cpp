// The attention library's scratch: its formula on shapes whose scratch was read off an H200, and whom it is added to.
#include "planner/library_memory.hpp"
#include "planner/model.hpp"

#include <doctest/doctest.h>

TEST_CASE(
    "attention scratch: whole where it fits a slice, in slices of sequences or key heads beyond, none beyond a group") {
    const double mib = 1 << 20;
    // 2 sequences of 16 heads: 32 heads of 4096 x 4096 x 2 bytes, a sum per query.
    CHECK(moe::attention_scratch(2, 16, 16, 128, 128, 4096) == 32 * 32 * mib + 32 * 4096 * 4);
    // Key heads shared by four: their gradients by query head besides.
    CHECK(moe::attention_scratch(2, 16, 4, 128, 128, 4096) == 32 * 32 * mib + 32 * 2 * 4096 * 256 + 32 * 4096 * 4);
    // 128 heads of one sequence take 4 GiB: 72 of them a slice.
    CHECK(moe::attention_scratch(1, 128, 128, 192, 128, 4096) == 72 * 32 * mib + 72 * 4096 * 4);
    // 4 sequences of 32 heads: two at a time.
    CHECK(moe::attention_scratch(4, 32, 32, 128, 128, 4096) == 64 * 32 * mib + 64 * 4096 * 4);
    // Odd lengths are rounded to tiles; four queries to a key of 32K tokens are more than a group may take.
    CHECK(moe::attention_scratch(1, 1, 1, 64, 64, 100) == 128 * 128 * 2 + 512);
    CHECK(moe::attention_scratch(1, 16, 4, 128, 128, 32768) == 0.0);
}

TEST_CASE("library memory: the engine's own plans in BF16 on a GPU have scratch, others the context alone") {
    moe::Plan plan;
    plan.model = std::make_shared<const moe::Model>(moe::load_model("Qwen3-30B-A3B"));
    plan.hardware = std::make_shared<const moe::Hardware>(moe::load_hardware("h200"));
    plan.stack = "moe-plan";
    plan.seq = 4096;
    plan.mbs = 2;
    plan.precision = moe::Precision::bf16;
    const double context = plan.hardware->context_bytes;
    CHECK(moe::library_memory(plan) == context + moe::attention_scratch(2, 32, 4, 128, 128, 4096));
    plan.tp = 4;
    CHECK(moe::library_memory(plan) == context + moe::attention_scratch(2, 8, 1, 128, 128, 4096));
    plan.cp = 2; // a ring's runs go to plain kernels
    CHECK(moe::library_memory(plan) == context);
    plan.cp_comm = moe::ContextComm::alltoall;
    CHECK(moe::library_memory(plan) == context + moe::attention_scratch(2, 4, 1, 128, 128, 4096));
    plan.precision = moe::Precision::fp32;
    CHECK(moe::library_memory(plan) == context);
    plan.precision = moe::Precision::bf16;
    plan.stack = "bridge-26.08";
    CHECK(moe::library_memory(plan) == context);
}
