// The loss of computing to gathers and reductions of data parallelism, and to copies with the host, beside it.
#include "planner/model/families/load_model.hpp"
#include "simulator/replay/contention.hpp"

#include "planner/lower/lower.hpp"
#include "planner/program/communicators.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/pricing/fast_estimator.hpp"
#include "simulator/replay/simulate.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace {

// GPUs as calibrated, whose experts' gradients are reduced over all of them.
moe::plan::Plan data_parallel(int gpus, double lost) {
    moe::machine::Hardware hardware = moe::machine::load_hardware("h200-measured");
    for (const char* key : {"lost_beside_collective.x2", "lost_beside_collective.x4"})
        hardware.measured[key] = {{1.0, lost}};
    moe::plan::Plan plan;
    plan.model = std::make_shared<const moe::model::Model>(moe::families::load_model("Qwen3-30B-A3B"));
    plan.hardware = std::make_shared<const moe::machine::Hardware>(hardware);
    plan.stack = "moe-plan";
    plan.gpus = plan.dp = plan.edp = gpus;
    plan.seq = 4096;
    plan.mbs = 1;
    plan.gbs = 4 * gpus;
    plan.cuda_graph = moe::plan::CudaGraph::full;
    return plan;
}

moe::cost::ContentionPrice contention_of(const moe::plan::Plan& plan) {
    const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
    const moe::cost::Machine machine(*plan.hardware);
    return moe::cost::CostModel(plan, stack, machine).contention_price();
}
double lost_to_collectives(const moe::plan::Plan& plan) { return contention_of(plan).to_collectives; }

// One GPU that offloads what attention saves.
moe::plan::Plan offloading() {
    moe::plan::Plan plan = data_parallel(1, 0.0);
    moe::model::Model model = *plan.model;
    model.layers.resize(4);
    plan.model = std::make_shared<const moe::model::Model>(model);
    plan.mbs = 2;
    plan.gbs = 8;
    plan.offload = moe::plan::offload::from_string("attn_norm+qkv_linear+core_attn+attn_proj");
    return plan;
}

} // namespace

TEST_CASE("beside communication work goes on at a lower rate") {
    const moe::replay::CommIntervals travels{{1.0, 2.0}, {3.0, 4.0}, {4.0, 5.0}};
    CHECK(moe::replay::slowed(travels, 0.5, 0.0, 1.0) == 0.0); // done before
    CHECK(moe::replay::slowed(travels, 0.5, 0.0, 1.25) == nearly(0.25));
    CHECK(moe::replay::slowed(travels, 0.5, 0.0, 1.5) == nearly(0.5)); // to the end of the first
    CHECK(moe::replay::slowed(travels, 0.5, 0.0, 2.5) == nearly(0.5)); // not to the second
    CHECK(moe::replay::slowed(travels, 0.5, 1.5, 2.0) == nearly(1.0)); // 0.5 beside one, 1 between, 1.5 beside others
    CHECK(moe::replay::slowed(travels, 0.5, 3.0, 4.0) == nearly(1.0)); // beyond the last
    CHECK(moe::replay::slowed({{0.5, 0.5}, {1.0, 2.0}}, 0.5, 0.0, 1.5) ==
          nearly(0.5)); // what takes no time stops nothing
    CHECK(moe::replay::slowed(travels, 0.5, 2.0, 1.0) == 0.0);
    CHECK(moe::replay::slowed(travels, 0.0, 0.0, 9.0) == 0.0);
    CHECK(moe::replay::slowed({}, 0.5, 0.0, 9.0) == 0.0);
}

TEST_CASE("beside gathers and reductions all that computes is longer by what they take of it") {
    constexpr double lost = 0.25;
    const moe::plan::Plan plan = data_parallel(2, lost);
    const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
    const moe::replay::Simulation played = moe::replay::simulate(plan, stack);
    const moe::program::Program program = moe::lower::lower(plan, 0);
    const moe::cost::Machine machine(*plan.hardware);
    const moe::cost::ProgramCosts costs = moe::cost::price(moe::cost::CostModel(plan, stack, machine), program);
    std::vector<std::pair<double, double>> collectives;
    for (const moe::program::TimelineRow& row : played.timeline.rows)
        if (row.stream == moe::program::Stream::data && moe::program::is_communication(row.kind))
            collectives.emplace_back(row.end - row.busy, row.end);
    REQUIRE(collectives.size() > 4);
    int products = 0, others = 0;
    for (const moe::program::TimelineRow& row : played.timeline.rows) {
        if (row.stream != moe::program::Stream::compute) continue;
        double beside = 0.0;
        for (const auto& [from, until] : collectives)
            beside += std::max(0.0, std::min(until, row.end) - std::max(from, row.end - row.busy));
        const auto t = static_cast<std::size_t>(program.slots[static_cast<std::size_t>(row.slot)].index);
        const double alone = costs[t][static_cast<std::size_t>(row.op)].device;
        CHECK(row.busy == nearly(alone + lost * beside).epsilon(1e-9));
        if (beside > 0.0) ++(row.kind == moe::program::OpKind::grouped_gemm ? products : others);
    }
    CHECK(products > 10);
    CHECK(others > 10);
}

TEST_CASE("fast and event-driven agree on what gathers and reductions take") {
    for (const int gpus : {2, 4})
        for (const bool recomputes : {false, true})
            for (const int micro_batches : {1, 4}) {
                CAPTURE(gpus);
                CAPTURE(recomputes);
                CAPTURE(micro_batches);
                double fast[2], full[2];
                for (const bool loses : {false, true}) {
                    moe::plan::Plan plan = data_parallel(gpus, loses ? 0.4 : 0.0);
                    plan.gbs = micro_batches * gpus;
                    plan.ep = 2;
                    plan.edp = gpus / 2;
                    plan.recompute = recomputes ? moe::plan::recompute::moe_act : 0u;
                    const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
                    fast[loses] = moe::pricing::FastEstimator(plan.hardware, stack).estimate(plan).step_seconds;
                    full[loses] = moe::replay::simulate(plan, stack, false).estimate.step_seconds;
                    CHECK(fast[loses] == nearly(full[loses]).epsilon(0.005));
                }
                CHECK(full[1] > full[0] * 1.0005);
                // A reduction's first half millisecond is beside an exchange of the next layer, which loses nothing to
                // it; the fast estimate counts as much of that as a backward has in the mean.
                const double lost = full[1] - full[0];
                CHECK(std::abs(fast[1] - fast[0] - lost) < std::max(0.2 * lost, 0.002 * full[0]));
            }
}

TEST_CASE("what gathers and reductions take is what was measured among GPUs of an NVLink domain") {
    CHECK(lost_to_collectives(data_parallel(2, 0.3)) == nearly(0.3));
    CHECK(lost_to_collectives(data_parallel(8, 0.3)) == nearly(0.3)); // of the nearest size
    CHECK(lost_to_collectives(data_parallel(16, 0.3)) == nearly(24.0 / 132));
    CHECK(lost_to_collectives(data_parallel(1, 0.3)) == 0.0);
    moe::plan::Plan plan = data_parallel(2, 0.3);
    plan.ep = 2; // the gradients of all but experts are still reduced
    plan.edp = 1;
    CHECK(lost_to_collectives(plan) == nearly(0.3));
    plan.tp = 2;
    plan.dp = 1;
    CHECK(lost_to_collectives(plan) == 0.0);
    plan.stack = "bridge-26.08"; // fitted to published steps, which hold it
    CHECK(lost_to_collectives(plan) == 0.0);
}

TEST_CASE("beside copies to the host and back by kernels products of experts leave them what the rest loses") {
    const moe::plan::Plan plan = offloading();
    const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
    const moe::replay::Simulation played = moe::replay::simulate(plan, stack);
    const moe::program::Program program = moe::lower::lower(plan, 0);
    const moe::cost::Machine machine(*plan.hardware);
    const moe::cost::ProgramCosts costs = moe::cost::price(moe::cost::CostModel(plan, stack, machine), program);
    const double lost = contention_of(plan).to_copies;
    CHECK(lost == nearly(2.0 / 132));
    std::vector<const moe::program::TimelineRow*> copies;
    for (const moe::program::TimelineRow& row : played.timeline.rows)
        if (moe::program::copies_with_host(row.kind)) copies.push_back(&row);
    REQUIRE(copies.size() == 2 * 4 * 4 * 4); // out and back, of four tensors, layers and micro-batches
    int products = 0, others = 0;
    for (const moe::program::TimelineRow& row : played.timeline.rows) {
        if (row.stream != moe::program::Stream::compute) continue;
        double beside = 0.0;
        for (const moe::program::TimelineRow* copy : copies)
            if (std::pair(copy->slot, copy->op) < std::pair(row.slot, row.op)) // Those that come later are not known.
                beside +=
                    std::max(0.0, std::min(copy->end, row.end) - std::max(copy->end - copy->busy, row.end - row.busy));
        const auto t = static_cast<std::size_t>(program.slots[static_cast<std::size_t>(row.slot)].index);
        const double alone = costs[t][static_cast<std::size_t>(row.op)].device;
        const bool product = row.kind == moe::program::OpKind::grouped_gemm;
        CHECK(row.busy == nearly(alone + (product ? 0.0 : lost * beside)).epsilon(1e-9));
        if (beside > 0.0) ++(product ? products : others);
    }
    CHECK(products > 10);
    CHECK(others > 10);

    // Products of experts are longer by the multiprocessors that they leave, and only where activations are copied.
    const auto product_seconds = [&](const char* offload) {
        moe::plan::Plan other = plan;
        other.offload = moe::plan::offload::from_string(offload);
        const moe::program::Program lowered = moe::lower::lower(other, 0);
        const moe::cost::CostModel model(other, stack, machine);
        double seconds = 0.0;
        for (const moe::program::Op& op : lowered.templates[0].ops)
            if (op.kind == moe::program::OpKind::grouped_gemm) seconds += model(op, lowered).device;
        CHECK(moe::program::reserved_sms_of(lowered, other.pp) == moe::program::reserved_sms_of(other));
        return seconds;
    };
    CHECK(product_seconds("attn_norm") == nearly(132.0 / 130 * product_seconds("none")));
    CHECK(product_seconds("optimizer") == nearly(product_seconds("none")));

    // Steps that are not captured copy by the copy engine.
    moe::plan::Plan queued = plan;
    queued.cuda_graph = moe::plan::CudaGraph::none;
    CHECK(contention_of(queued).to_copies == 0.0);
    moe::plan::Plan published = plan;
    published.stack = "bridge-26.08";
    CHECK(contention_of(published).to_copies == 0.0);
}

TEST_CASE("fast and event-driven agree on what copies with the host take") {
    moe::plan::Plan plan = offloading();
    const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
    for (const char* offload : {"attn_norm", "attn_norm+qkv_linear+core_attn+attn_proj", "moe_act+optimizer"}) {
        CAPTURE(offload);
        plan.offload = moe::plan::offload::from_string(offload);
        const double fast = moe::pricing::FastEstimator(plan.hardware, stack).estimate(plan).step_seconds;
        CHECK(fast == nearly(moe::replay::simulate(plan, stack, false).estimate.step_seconds).epsilon(0.01));
    }
}
