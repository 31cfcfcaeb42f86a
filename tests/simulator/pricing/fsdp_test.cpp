// FSDP on the clock: gathers priced by hand, under the layer before and no further ahead.
#include "planner/lower/lower.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/replay/simulate.hpp"
#include "tests/support/nearly.hpp"
#include "tests/support/published_plan.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>

namespace {

moe::plan::Plan llama() {
    moe::plan::Plan plan = published_plan("Llama3-8B", "h100", "torchtitan", 8192);
    plan.gpus = plan.dp = plan.edp = 8;
    plan.gbs = 8;
    plan.fsdp = true;
    return plan;
}

struct Span {
    double start = 1e9, end = 0.0;
};

} // namespace

TEST_CASE("a layer's weights come under the layer before it, and not before the layer two ahead is done") {
    const moe::plan::Plan plan = llama();
    const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
    const moe::replay::Simulation simulation = moe::replay::simulate(plan, stack, true);
    std::map<int, Span> gather, work; // of the forward, by layer; products are the last to read weights
    for (const moe::program::TimelineRow& row : simulation.timeline.rows) {
        if (row.slot_kind != moe::plan::SlotKind::forward || row.layer < 0) continue;
        if (row.kind != moe::program::OpKind::all_gather && row.kind != moe::program::OpKind::gemm) continue;
        Span& span = row.kind == moe::program::OpKind::all_gather ? gather[row.layer] : work[row.layer];
        span.start = std::min(span.start, row.start);
        span.end = std::max(span.end, row.end);
    }
    REQUIRE(gather.size() == 32);
    for (int layer = 2; layer < 32; ++layer) {
        CAPTURE(layer);
        CHECK(gather[layer].start >= work[layer - 2].end - 1e-9);
        CHECK(gather[layer].end <= work[layer - 1].end); // hidden: a layer computes for longer
        CHECK(gather[layer].start < work[layer - 1].end);
    }
    // 218.1 M parameters in BF16 over 8 GPUs: 7/8 of 436 MB at the ring's share of 450 GB/s.
    const double seconds = 0.875 * 2.0 * 218'112'000 / (450e9 * stack.costs.collective);
    CHECK(gather[5].end - gather[5].start == nearly(seconds).epsilon(0.03));
}

TEST_CASE("where links are slow, a micro-batch takes two gathers and one reduction of every layer") {
    moe::plan::Plan plan = llama();
    auto slow = std::make_shared<moe::machine::Hardware>(*plan.hardware);
    slow->nvlink.bandwidth /= 100.0;
    plan.hardware = slow;
    plan.seq = 512;
    plan.gbs = 32; // four micro-batches
    const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
    const moe::replay::Simulation four = moe::replay::simulate(plan, stack, false);
    plan.gbs = 24;
    const moe::replay::Simulation three = moe::replay::simulate(plan, stack, false);
    const double layers = 32 * 218'112'000.0, ends = 2 * 525'336'576.0;
    const double bytes = 0.875 * (2.0 * (2.0 * layers + ends) + 4.0 * (layers + ends));
    const double expected = bytes / (4.5e9 * stack.costs.collective);
    CHECK(four.estimate.step_seconds - three.estimate.step_seconds == nearly(expected).epsilon(0.02));
}
