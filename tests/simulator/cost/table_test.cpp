// The embedding table on several stages: copies of its gradient are added up once per step.
#include "planner/lower/emit/parameters.hpp"
#include "planner/lower/lower.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/replay/simulate.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>

namespace {

// Two stages that lie in different NVLink domains: what passes between them takes one NIC.
moe::plan::Plan plan_of(bool tied) {
    moe::model::Model model = moe::families::load_model("Llama3-8B");
    model.tied_embeddings = tied;
    moe::plan::Plan plan;
    plan.model = std::make_shared<const moe::model::Model>(std::move(model));
    plan.hardware = std::make_shared<const moe::machine::Hardware>(moe::machine::load_hardware("h100"));
    plan.stack = "bridge-26.04";
    plan.seq = 4096;
    plan.gpus = 16;
    plan.dp = plan.edp = 8;
    plan.pp = 2;
    plan.gbs = 32;
    return plan;
}

} // namespace

TEST_CASE("which stages hold the embedding table") {
    CHECK(moe::emit::table_holders(plan_of(false)) == std::vector<int>{0});
    CHECK(moe::emit::table_holders(plan_of(true)) == std::vector<int>{0, 1});
    moe::plan::Plan mtp = plan_of(false);
    mtp.model = std::make_shared<const moe::model::Model>(moe::families::load_model("DeepSeek-V3"));
    mtp.gpus = 32, mtp.dp = mtp.edp = 4, mtp.pp = 8, mtp.vpp = 4;
    mtp.schedule = moe::plan::ScheduleKind::interleaved;
    mtp.layout = "Et*3|(tt|)*29m|L"; // MTP on stage 30 of 32
    CHECK(moe::emit::table_holders(mtp) == std::vector<int>{0, 6});
}

TEST_CASE("tied embeddings: each holder sends its gradient to the other and adds what comes") {
    const moe::plan::Plan plan = plan_of(true);
    REQUIRE(moe::plan::check_plan(plan).message == "");
    const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
    const moe::replay::Simulation simulation = moe::replay::simulate(plan, stack, true);
    // 128,256 x 4,096 gradients in FP32 over one 400 Gb/s NIC.
    const double bytes = 128256.0 * 4096 * 4, way = bytes / (50e9 * stack.costs.collective);
    double sent[2] = {0, 0}, added[2] = {0, 0}, norm = 1e9;
    for (const moe::program::TimelineRow& row : simulation.timeline.rows) {
        if (row.slot_kind != moe::plan::SlotKind::finish) continue;
        const int rank = row.rank == simulation.timeline.ranks[0] ? 0 : 1;
        if (row.kind == moe::program::OpKind::send) {
            CHECK(row.busy == nearly(way).epsilon(0.01));
            sent[rank] = row.end;
        }
        if (row.kind == moe::program::OpKind::add) added[rank] = row.start;
        if (row.kind == moe::program::OpKind::sum_squares) norm = std::min(norm, row.start);
    }
    CHECK(added[0] >= sent[1]);
    CHECK(added[1] >= sent[0]);
    CHECK(norm >= std::min(added[0], added[1]));
    const double apart =
        simulation.estimate.step_seconds - moe::replay::simulate(plan_of(false), stack, false).estimate.step_seconds;
    CHECK(apart > 0.5 * way);
}
