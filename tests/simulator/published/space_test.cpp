// The recipes of published runs against the space that search explores for their models, GPUs and batches.
#include "planner/base/files.hpp"
#include "simulator/published/run_plan.hpp"
#include "tests/simulator/published/outside_of_space.hpp"
#include "tests/support/draws.hpp"

#include <doctest/doctest.h>

#include <string>

using namespace moe;

TEST_CASE("every published recipe of a MoE model is a candidate of search") {
    published::RunPlanner planner(machine::load_coefficients());
    std::size_t rows = 0;
    for (const published::Run& run : published::load_runs(profiles_folder() + "/runs")) {
        const published::PlannedRun planned = planner.plan(run);
        if (!planned.skipped.empty() || planned.kind == "dense") continue;
        CAPTURE(run.run_id);
        if (rows++ % draw_share() != 0) continue;
        for (const search::OutsideField& field : search::outside_of_space(planned.plan, planner.stack(planned.plan))) {
            CHECK_MESSAGE(false, field.field << " = " << field.value << ": " << field.words);
            CHECK(field.value != field.words);
        }
    }
    CHECK(rows >= 250);
}

TEST_CASE("a plan outside of the space says which field is, and what there is instead") {
    published::RunPlanner planner(machine::load_coefficients());
    for (const published::Run& run : published::load_runs(profiles_folder() + "/runs")) {
        published::PlannedRun planned = planner.plan(run);
        if (!planned.skipped.empty() || planned.kind == "dense") continue;
        const stack::Stack& stack = planner.stack(planned.plan);
        if (!search::outside_of_space(planned.plan, stack).empty()) continue;
        plan::Plan& plan = planned.plan;
        plan.head_precision = machine::Precision::nvfp4;
        plan.rank_order = "tp-cp-ep-pp-dp";
        const auto outside = search::outside_of_space(plan, stack);
        REQUIRE(outside.size() == 2);
        CHECK(outside[0].field == "rank_order");
        CHECK(outside[0].words == "tp-cp-ep-dp-pp");
        CHECK(outside[1].field == "head_precision");
        CHECK(outside[1].value == "nvfp4");
        return;
    }
    FAIL("no row is a candidate");
}
