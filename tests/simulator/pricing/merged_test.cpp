// Merged slots: their order, and what tokens on their way take from what computes beside them.
#include "planner/lower/lower.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/program/program.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/pricing/fast_estimator.hpp"
#include "simulator/replay/ranks.hpp"
#include "simulator/replay/simulate.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace {

// Four GPUs as calibrated, tokens over peers' memory.
moe::Plan overlapped(double lost) {
    moe::Hardware hardware = moe::load_hardware("h200-measured");
    hardware.measured["lost_beside_exchange.x4"] = {{1.0, lost}};
    hardware.measured["lost_beside_collective.x4"] = {{1.0, 0.0}};
    moe::Plan plan;
    plan.model = std::make_shared<const moe::Model>(moe::load_model("Qwen3-30B-A3B"));
    plan.hardware = std::make_shared<const moe::Hardware>(hardware);
    plan.stack = "moe-plan";
    plan.gpus = plan.dp = plan.ep = 4;
    plan.seq = 4096;
    plan.gbs = 64;
    plan.mbs = 4;
    plan.capacity = 1.0;
    plan.dispatcher = moe::Dispatcher::hybridep;
    plan.cuda_graph = moe::CudaGraph::full;
    plan.ep_overlap = true;
    return plan;
}

bool moves_tokens(moe::OpKind kind) {
    return kind == moe::OpKind::dispatch_tokens || kind == moe::OpKind::combine_tokens;
}

bool in_pair(const moe::Program& program, const moe::TimelineRow& row) {
    const auto slot = static_cast<std::size_t>(row.slot);
    return program.slots[slot].merge >= 0 || (slot > 0 && program.slots[slot - 1].merge >= 0);
}

} // namespace

TEST_CASE("merged slots: every stream takes its ops in the order of the Program") {
    const moe::Plan plan = overlapped(0.2);
    const moe::Simulation played = moe::simulate(plan, moe::load_stack(plan.stack, *plan.hardware));
    const moe::Program program = moe::lower(plan, 0);
    using Place = std::pair<std::size_t, std::size_t>; // slot, op
    for (const moe::Stream stream : {moe::Stream::compute, moe::Stream::expert}) {
        std::vector<Place> expected, found;
        for (moe::OpWalk walk(program); !walk.done(); walk.next())
            if (walk.merged() && walk.op().stream == stream) expected.emplace_back(walk.slot_number(), walk.index());
        for (const moe::TimelineRow& row : played.timeline.rows) {
            if (in_pair(program, row) && row.stream == stream)
                found.emplace_back(static_cast<std::size_t>(row.slot), static_cast<std::size_t>(row.op));
        }
        CHECK(!expected.empty());
        CHECK(found == expected);
    }
}

TEST_CASE("merged slots: products that leave multiprocessors take longer, others wait, and what else computes loses") {
    constexpr double lost = 0.25;
    const moe::Plan plan = overlapped(lost);
    const moe::Stack stack = moe::load_stack(plan.stack, *plan.hardware);
    const moe::Simulation played = moe::simulate(plan, stack);
    const moe::Program program = moe::lower(plan, 0);
    const moe::Machine machine(*plan.hardware);
    const moe::ProgramCosts costs = moe::price(moe::CostModel(plan, stack, machine), program);
    std::vector<std::vector<moe::TimelineRow>> rows(program.slots.size()); // by op
    std::vector<std::pair<double, double>> travels; // of tokens that have left, from when until when
    for (const moe::TimelineRow& row : played.timeline.rows) rows[static_cast<std::size_t>(row.slot)].push_back(row);
    for (std::vector<moe::TimelineRow>& slot : rows)
        std::sort(slot.begin(), slot.end(), [](const auto& a, const auto& b) { return a.op < b.op; });
    int sparing = 0, waiting = 0, losing = 0;
    for (moe::OpWalk walk(program); !walk.done(); walk.next()) {
        const moe::TimelineRow& row = rows[walk.slot_number()][walk.index()];
        const moe::OpCost& cost = costs[static_cast<std::size_t>(walk.slot().index)][walk.index()];
        if (!walk.merged()) {
            REQUIRE(row.busy == nearly(cost.device));
            continue;
        }
        if (moves_tokens(row.kind)) travels.emplace_back(row.start, row.end);
        if (row.stream != moe::Stream::compute) continue;
        double beside = 0.0, wait = 0.0;
        for (const auto& [from, until] : travels) {
            beside += std::max(0.0, std::min(until, row.end) - std::max(from, row.start));
            if (from <= row.start) wait = std::max(wait, until - row.start);
        }
        if (walk.spared() > 0) {
            REQUIRE(row.busy == nearly(cost.merged * 132 / 108));
            ++sparing;
        } else if (row.kind == moe::OpKind::grouped_gemm) {
            REQUIRE(row.busy == nearly(cost.merged + wait).epsilon(1e-9));
            waiting += wait > 0.0 ? 1 : 0;
        } else {
            REQUIRE(row.busy == nearly(cost.merged + lost * beside).epsilon(1e-9));
            losing += beside > 0.0 ? 1 : 0;
        }
    }
    CHECK(sparing > 0);
    CHECK(losing > 0);
    MESSAGE(sparing, " leave multiprocessors, ", waiting, " wait, ", losing, " lose");
}

TEST_CASE("merged slots: the fast estimate follows the order and the losses") {
    moe::Plan plan = overlapped(0.25);
    for (const int pp : {1, 2}) {
        plan.pp = pp;
        plan.gpus = 4 * pp;
        plan.gbs = 128;
        const moe::Stack stack = moe::load_stack(plan.stack, *plan.hardware);
        const moe::Simulation full = moe::simulate(plan, stack, false);
        const double fast = moe::FastEstimator(plan.hardware, stack).estimate(plan).step_seconds;
        CHECK(fast == nearly(full.estimate.step_seconds).epsilon(0.02));
    }
}

TEST_CASE("a shared expert loses to the tokens of its layer, which the fast estimate follows") {
    const auto played = [](double lost, double& fast) {
        moe::Plan plan = overlapped(lost);
        plan.model = std::make_shared<const moe::Model>(moe::load_model("DeepSeek-V2-Lite"));
        plan.ep_overlap = false;
        const moe::Stack stack = moe::load_stack(plan.stack, *plan.hardware);
        fast = moe::FastEstimator(plan.hardware, stack).estimate(plan).step_seconds;
        return moe::simulate(plan, stack);
    };
    double before = 0.0, after = 0.0;
    const moe::Simulation without = played(1e-9, before), with = played(0.25, after);
    double exchanged = 0.0, longer = 0.0; // products of the shared expert
    for (std::size_t i = 0; i < with.timeline.rows.size(); ++i) {
        const moe::TimelineRow& row = with.timeline.rows[i];
        if (moves_tokens(row.kind)) exchanged += row.busy;
        const double before_it = without.timeline.rows[i].busy;
        if (row.module == moe::Module::shared_experts)
            longer += row.busy - before_it;
        else
            CHECK(row.busy == nearly(before_it).epsilon(1e-9));
    }
    CHECK(longer > 0.02 * exchanged);
    CHECK(longer < 0.25 * exchanged);
    CHECK(before == nearly(without.estimate.step_seconds).epsilon(0.005));
    CHECK(after == nearly(with.estimate.step_seconds).epsilon(0.005));
}

TEST_CASE("merged slots: tokens take multiprocessors from what computes, of all but products what was measured") {
    moe::Hardware hardware = moe::load_hardware("h200");
    moe::Plan plan;
    plan.model = std::make_shared<const moe::Model>(moe::load_model("Qwen3-30B-A3B"));
    plan.gpus = plan.dp = plan.edp = 2;
    const auto beside = [&] {
        plan.hardware = std::make_shared<const moe::Hardware>(hardware);
        const moe::Stack stack = moe::load_stack(plan.stack, hardware);
        const moe::Machine machine(*plan.hardware);
        return moe::CostModel(plan, stack, machine).beside_communication();
    };
    plan.stack = "moe-plan";
    CHECK(beside().lost == 0.0); // no tokens travel
    plan.ep = 2;
    plan.edp = 1;
    CHECK(beside().lost == nearly(24.0 / 132));
    CHECK(beside().sparing == nearly(132.0 / 108));
    hardware.measured["lost_beside_exchange.x4"] = {{2e-3, 1e-3}};
    CHECK(beside().lost == nearly(0.5)); // of the nearest size
    CHECK(beside().sparing == nearly(132.0 / 108));
    plan.pp = 2;
    plan.gpus = 4;
    CHECK(beside().sparing == nearly(116.0 / 108)); // 16 are left to messages by every product
    plan.stack = "bridge-26.08";                    // states a share of its own
    CHECK(beside().none());
}

TEST_CASE("merged slots: ranks of 1F1B do not wait for each other's pairs, however many there are") {
    moe::Plan plan = overlapped(0.2);
    plan.pp = 4;
    plan.gpus *= plan.pp;
    const moe::Stack stack = moe::load_stack(plan.stack, *plan.hardware);
    const auto played = [&](int micro_batches) {
        plan.gbs = plan.dp * plan.mbs * micro_batches;
        return moe::simulate(plan, stack, false).estimate;
    };
    const moe::Estimate few = played(16), many = played(32);
    const double more = many.step_seconds - few.step_seconds;
    CHECK(many.breakdown.bubble - few.breakdown.bubble < 0.05 * more); // half of it with one more warm-up forward alone
    CHECK(more < 1.02 * 16.0 / 18.0 * few.step_seconds);
}
