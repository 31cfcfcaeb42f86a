// The attention library's scratch: its formula on shapes whose scratch was read off an H200, and whom it is added to.
#include "planner/machine/hardware.hpp"
#include "planner/memory/library_memory.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"

#include <doctest/doctest.h>

TEST_CASE("attention scratch: gradients of queries in FP32 where any order will do") {
    // 32 heads of 4096 queries: 128 elements and a sum each.
    CHECK(moe::memory::attention_scratch({2, 16, 16, 128, 128, 4096}) == 256 + 32 * 4096 * 129 * 4);
    // Key heads shared by four: their gradients by query head besides.
    CHECK(moe::memory::attention_scratch({2, 16, 4, 128, 128, 4096}) ==
          256 + 32 * 4096 * 129 * 4 + 32 * 2 * 4096 * 256);
    CHECK(moe::memory::attention_scratch({1, 1, 1, 64, 64, 100, 10}) == 256 + 512 + 100 * 64 * 4);
}

TEST_CASE("attention scratch, deterministic: whole where it fits a slice, else slices of sequences or key heads, "
          "chunks and parts") {
    const double mib = 1 << 20;
    const auto scratch = [](moe::memory::AttentionWork work) {
        work.deterministic = true;
        return moe::memory::attention_scratch(work) - 256;
    };
    // 2 sequences of 16 heads: 32 heads of 4096 x 4096 x 2 bytes, a sum per query.
    CHECK(scratch({2, 16, 16, 128, 128, 4096}) == 32 * 32 * mib + 32 * 4096 * 4);
    // Key heads shared by four: their gradients by query head besides.
    CHECK(scratch({2, 16, 4, 128, 128, 4096}) == 32 * 32 * mib + 32 * 2 * 4096 * 256 + 32 * 4096 * 4);
    // 128 heads of one sequence take 4 GiB: 72 of them a slice; the H200 held 2305 MiB.
    CHECK(scratch({1, 128, 128, 192, 128, 4096}) == 72 * 32 * mib + 72 * 4096 * 4);
    // 4 sequences of 32 heads: two at a time; 2177 MiB there with heads shared by eight.
    CHECK(scratch({4, 32, 4, 128, 128, 4096}) == 64 * 32 * mib + 64 * 2 * 4096 * 256 + 64 * 4096 * 4);
    CHECK(scratch({1, 1, 1, 64, 64, 100}) == 128 * 128 * 2 + 512); // odd lengths are rounded to tiles
    // 32K tokens: one head of 2 GiB at a time, sums of its group's keys in FP32 and a part in BF16.
    CHECK(scratch({1, 16, 4, 128, 128, 32768}) == 2048 * mib + 32768 * (4.0 + 256 * 6));
    // 40K: one head would take 3.1 GiB, so half its queries at a time.
    CHECK(scratch({1, 8, 1, 128, 128, 40960}) == 1600 * mib + 20480 * 4.0 + 40960 * 256 * 6.0);
    // A window of 128: chunks of 512 queries with 640 keys at most, of 64 heads; 83 MiB on the H200.
    CHECK(scratch({1, 64, 8, 64, 64, 8192, 128}) ==
          64 * (512 * 640 * 2 + 512 * 4 + 640 * 128 * 2) + 8 * 128 * (8192 * 4 + 640 * 2));
}

TEST_CASE("attention scratch, deterministic on Hopper: FP32 gradients of queries, and sums of the keys at work") {
    const auto scratch = [](moe::memory::AttentionWork work) {
        work.deterministic = true;
        work.multiprocessors = 132;
        return moe::memory::attention_scratch(work);
    };
    // 16 key heads of 32 tiles of keys, of which a CTA has two: eight teams of 16 CTAs.
    const double rows = 4 * 32 * 4096, kept = 8 * 16 * 2 * 128 * (128 + 128) * 4.0;
    CHECK(scratch({4, 32, 4, 128, 128, 4096}) == rows * (128 * 4 + 8) + rows / 64 * 4 + kept);
    CHECK(scratch({1, 128, 128, 192, 128, 4096}) == 128 * 4096 * (192 * 4 + 8.0) + 128 * 64 * 4); // none are shared
    // 64 of 132 multiprocessors would work, and windows are the library's.
    for (const moe::memory::AttentionWork work : {moe::memory::AttentionWork{1, 32, 4, 128, 128, 4096},
                                                  {1, 64, 8, 64, 64, 8192, 128},
                                                  {1, 8, 8, 96, 96, 4096}}) {
        moe::memory::AttentionWork library = work;
        library.deterministic = true;
        CHECK(scratch(work) == moe::memory::attention_scratch(library));
    }
}

TEST_CASE("library memory: the engine's own plans in BF16 on a GPU have scratch, others the context alone") {
    moe::plan::Plan plan;
    plan.model = std::make_shared<const moe::model::Model>(moe::families::load_model("Qwen3-30B-A3B"));
    plan.hardware = std::make_shared<const moe::machine::Hardware>(moe::machine::load_hardware("h200"));
    plan.stack = "moe-plan";
    plan.seq = 4096;
    plan.mbs = 2;
    plan.precision = moe::machine::Precision::bf16;
    const double context = plan.hardware->context_bytes;
    CHECK(moe::memory::library_memory(plan) == context + moe::memory::attention_scratch({2, 32, 4, 128, 128, 4096}));
    plan.deterministic = true;
    CHECK(moe::memory::library_memory(plan) ==
          context + moe::memory::attention_scratch({2, 32, 4, 128, 128, 4096, 0, true, 132}));
    plan.deterministic = false;
    plan.tp = 4;
    CHECK(moe::memory::library_memory(plan) == context + moe::memory::attention_scratch({2, 8, 1, 128, 128, 4096}));
    plan.cp = 2; // a ring's step: half the sequence, and a dq of its own until it is added
    CHECK(moe::memory::library_memory(plan) ==
          context + moe::memory::attention_scratch({2, 8, 1, 128, 128, 2048}) + 2 * 2048 * 8 * (2 * 128 + 4));
    plan.cp_comm = moe::plan::ContextComm::alltoall;
    CHECK(moe::memory::library_memory(plan) == context + moe::memory::attention_scratch({2, 4, 1, 128, 128, 4096}));
    plan.precision = moe::machine::Precision::fp32;
    CHECK(moe::memory::library_memory(plan) == context);
    plan.offload = moe::plan::offload::optimizer;
    CHECK(moe::memory::library_memory(plan) == context + (7 << 20));
    plan.offload = 0;
    plan.precision = moe::machine::Precision::bf16;
    plan.stack = "bridge-26.08";
    CHECK(moe::memory::library_memory(plan) == context);
}
