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
moe::plan::Plan overlapped(double lost) {
    moe::machine::Hardware hardware = moe::machine::load_hardware("h200-measured");
    hardware.measured["lost_beside_exchange.x4"] = {{1.0, lost}};
    hardware.measured["lost_beside_collective.x4"] = {{1.0, 0.0}};
    moe::plan::Plan plan;
    plan.model = std::make_shared<const moe::model::Model>(moe::families::load_model("Qwen3-30B-A3B"));
    plan.hardware = std::make_shared<const moe::machine::Hardware>(hardware);
    plan.stack = "moe-plan";
    plan.gpus = plan.dp = plan.ep = 4;
    plan.seq = 4096;
    plan.gbs = 64;
    plan.mbs = 4;
    plan.capacity = 1.0;
    plan.dispatcher = moe::plan::Dispatcher::hybridep;
    plan.cuda_graph = moe::plan::CudaGraph::full;
    plan.ep_overlap = true;
    return plan;
}

bool moves_tokens(moe::program::OpKind kind) {
    return kind == moe::program::OpKind::dispatch_tokens || kind == moe::program::OpKind::combine_tokens;
}

bool in_pair(const moe::program::Program& program, const moe::program::TimelineRow& row) {
    const auto slot = static_cast<std::size_t>(row.slot);
    return program.slots[slot].merge >= 0 || (slot > 0 && program.slots[slot - 1].merge >= 0);
}

} // namespace

TEST_CASE("merged slots: every stream takes its ops in the order of the Program") {
    const moe::plan::Plan plan = overlapped(0.2);
    const moe::replay::Simulation played =
        moe::replay::simulate(plan, moe::stack::load_stack(plan.stack, *plan.hardware));
    const moe::program::Program program = moe::lower::lower(plan, 0);
    using Place = std::pair<std::size_t, std::size_t>; // slot, op
    for (const moe::program::Stream stream : {moe::program::Stream::compute, moe::program::Stream::expert}) {
        std::vector<Place> expected, found;
        for (moe::program::OpWalk walk(program); !walk.done(); walk.next())
            if (walk.merged() && walk.op().stream == stream) expected.emplace_back(walk.slot_number(), walk.index());
        for (const moe::program::TimelineRow& row : played.timeline.rows) {
            if (in_pair(program, row) && row.stream == stream)
                found.emplace_back(static_cast<std::size_t>(row.slot), static_cast<std::size_t>(row.op));
        }
        CHECK(!expected.empty());
        CHECK(found == expected);
    }
}

TEST_CASE("merged slots: products that leave multiprocessors take longer, others wait, and what else computes loses") {
    constexpr double lost = 0.25;
    const moe::plan::Plan plan = overlapped(lost);
    const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
    const moe::replay::Simulation played = moe::replay::simulate(plan, stack);
    const moe::program::Program program = moe::lower::lower(plan, 0);
    const moe::cost::Machine machine(*plan.hardware);
    const moe::cost::ProgramCosts costs = moe::cost::price(moe::cost::CostModel(plan, stack, machine), program);
    std::vector<std::vector<moe::program::TimelineRow>> rows(program.slots.size()); // by op
    std::vector<std::pair<double, double>> travels; // of tokens that have left, from when until when
    for (const moe::program::TimelineRow& row : played.timeline.rows)
        rows[static_cast<std::size_t>(row.slot)].push_back(row);
    for (std::vector<moe::program::TimelineRow>& slot : rows)
        std::sort(slot.begin(), slot.end(), [](const auto& a, const auto& b) { return a.op < b.op; });
    int reserving = 0, waiting = 0, losing = 0;
    for (moe::program::OpWalk walk(program); !walk.done(); walk.next()) {
        const moe::program::TimelineRow& row = rows[walk.slot_number()][walk.index()];
        const moe::cost::OpCost& cost = costs[static_cast<std::size_t>(walk.slot().index)][walk.index()];
        if (!walk.merged()) {
            REQUIRE(row.busy == nearly(cost.device));
            continue;
        }
        if (moves_tokens(row.kind)) travels.emplace_back(row.start, row.end);
        if (row.stream != moe::program::Stream::compute) continue;
        double beside = 0.0, wait = 0.0;
        for (const auto& [from, until] : travels) {
            beside += std::max(0.0, std::min(until, row.end) - std::max(from, row.start));
            if (from <= row.start) wait = std::max(wait, until - row.start);
        }
        if (walk.reserved_sms() > 0) {
            REQUIRE(row.busy == nearly(cost.merged * 132 / 108));
            ++reserving;
        } else if (row.kind == moe::program::OpKind::grouped_gemm) {
            REQUIRE(row.busy == nearly(cost.merged + wait).epsilon(1e-9));
            waiting += wait > 0.0 ? 1 : 0;
        } else {
            REQUIRE(row.busy == nearly(cost.merged + lost * beside).epsilon(1e-9));
            losing += beside > 0.0 ? 1 : 0;
        }
    }
    CHECK(reserving > 0);
    CHECK(losing > 0);
    MESSAGE(reserving, " leave multiprocessors, ", waiting, " wait, ", losing, " lose");
}

TEST_CASE("merged slots: the fast estimate follows the order and the losses") {
    moe::plan::Plan plan = overlapped(0.25);
    for (const int pp : {1, 2}) {
        plan.pp = pp;
        plan.gpus = 4 * pp;
        plan.gbs = 128;
        const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
        const moe::replay::Simulation full = moe::replay::simulate(plan, stack, false);
        const double fast = moe::pricing::FastEstimator(plan.hardware, stack).estimate(plan).step_seconds;
        CHECK(fast == nearly(full.estimate.step_seconds).epsilon(0.02));
    }
}

TEST_CASE("a shared expert loses to the tokens of its layer, which the fast estimate follows") {
    const auto played = [](double lost, double& fast) {
        moe::plan::Plan plan = overlapped(lost);
        plan.model = std::make_shared<const moe::model::Model>(moe::families::load_model("DeepSeek-V2-Lite"));
        plan.ep_overlap = false;
        const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
        fast = moe::pricing::FastEstimator(plan.hardware, stack).estimate(plan).step_seconds;
        return moe::replay::simulate(plan, stack);
    };
    double before = 0.0, after = 0.0;
    const moe::replay::Simulation without = played(1e-9, before), with = played(0.25, after);
    double exchanged = 0.0, longer = 0.0; // products of the shared expert
    for (std::size_t i = 0; i < with.timeline.rows.size(); ++i) {
        const moe::program::TimelineRow& row = with.timeline.rows[i];
        if (moves_tokens(row.kind)) exchanged += row.busy;
        const double before_it = without.timeline.rows[i].busy;
        if (row.module == moe::program::Module::shared_experts)
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
    moe::machine::Hardware hardware = moe::machine::load_hardware("h200");
    moe::plan::Plan plan;
    plan.model = std::make_shared<const moe::model::Model>(moe::families::load_model("Qwen3-30B-A3B"));
    plan.gpus = plan.dp = plan.edp = 2;
    const auto beside = [&] {
        plan.hardware = std::make_shared<const moe::machine::Hardware>(hardware);
        const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, hardware);
        const moe::cost::Machine machine(*plan.hardware);
        return moe::cost::CostModel(plan, stack, machine).contention_price();
    };
    plan.stack = "moe-plan";
    CHECK(beside().lost == 0.0); // no tokens travel
    plan.ep = 2;
    plan.edp = 1;
    CHECK(beside().lost == nearly(24.0 / 132));
    CHECK(beside().reserved_slowdown == nearly(132.0 / 108));
    hardware.measured["lost_beside_exchange.x4"] = {{2e-3, 1e-3}};
    CHECK(beside().lost == nearly(0.5)); // of the nearest size
    CHECK(beside().reserved_slowdown == nearly(132.0 / 108));
    plan.pp = 2;
    plan.gpus = 4;
    CHECK(beside().reserved_slowdown == nearly(116.0 / 108)); // 16 are left to messages by every product
    plan.stack = "bridge-26.08";                              // states a share of its own
    CHECK(beside().none());
}

TEST_CASE("merged slots: ranks of 1F1B do not wait for each other's pairs, however many there are") {
    moe::plan::Plan plan = overlapped(0.2);
    plan.pp = 4;
    plan.gpus *= plan.pp;
    const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
    const auto played = [&](int micro_batches) {
        plan.gbs = plan.dp * plan.mbs * micro_batches;
        return moe::replay::simulate(plan, stack, false).estimate;
    };
    const moe::search::Estimate few = played(16), many = played(32);
    const double more = many.step_seconds - few.step_seconds;
    CHECK(many.breakdown.bubble - few.breakdown.bubble < 0.05 * more); // half of it with one more warm-up forward alone
    CHECK(more < 1.02 * 16.0 / 18.0 * few.step_seconds);
}
