// The recipes of published runs against the space that search explores for their models, GPUs and batches.
#include "planner/base/files.hpp"
#include "simulator/published/run_plan.hpp"
#include "tests/simulator/published/outside_of_space.hpp"

#include <doctest/doctest.h>

#include <map>
#include <string>

using namespace moe;

namespace {

// Why a recipe may have a field otherwise than every candidate. No other field may be outside.
const std::map<std::string, std::string>& reasons() {
    static const std::map<std::string, std::string> all{
        {"attention_precision", "search leaves the core of attention unquantized"},
        {"head_precision", "search leaves the LM head unquantized"},
        {"cuda_graph", "search has none, partial and full; recipes also name scopes one by one"},
        {"capacity", "search plans the stack's usual capacity for whole graphs, and none otherwise"},
        {"paged_stash", "as capacity"},
        {"fsdp", "where FSDP has a pipeline beside it, or the stack excludes it"},
        {"layout", "search has the even and the balanced cut; these recipes move a layer by hand"},
        {"recompute", "moe with a module inside of it, which it repeats anyway"},
        {"vpp", "chunks of a size that fewer chunks have too"},
    };
    return all;
}

} // namespace

TEST_CASE("published recipes of MoE models are candidates of search, but for fields that are named") {
    published::RunPlanner planner(machine::load_coefficients());
    std::map<std::string, int> fields;
    int rows = 0, inside = 0;
    for (const published::Run& run : published::load_runs(profiles_folder() + "/runs")) {
        const published::PlannedRun planned = planner.plan(run);
        if (!planned.skipped.empty() || planned.kind == "dense") continue;
        CAPTURE(run.run_id);
        ++rows;
        const auto outside = search::outside_of_space(planned.plan, planner.stack(planned.plan));
        inside += outside.empty() ? 1 : 0;
        for (const search::OutsideField& field : outside) {
            CHECK_MESSAGE(reasons().count(field.field) == 1,
                          field.field << " = " << field.value << ": " << field.words);
            CHECK(field.value != field.words);
            ++fields[field.field];
        }
    }
    CHECK(rows >= 250);
    CHECK(inside >= 145);
    // A reason that no recipe needs any more is to be taken out.
    for (const auto& [field, reason] : reasons()) CHECK_MESSAGE(fields[field] > 0, field);
}

TEST_CASE("a plan outside of the space says which field is, and what there is instead") {
    published::RunPlanner planner(machine::load_coefficients());
    for (const published::Run& run : published::load_runs(profiles_folder() + "/runs")) {
        published::PlannedRun planned = planner.plan(run);
        if (!planned.skipped.empty() || planned.kind == "dense") continue;
        const stack::Stack& stack = planner.stack(planned.plan);
        if (!search::outside_of_space(planned.plan, stack).empty()) continue;
        plan::Plan& plan = planned.plan;
        plan.head_precision = machine::Precision::fp8_tensor;
        plan.rank_order = "tp-cp-ep-pp-dp";
        const auto outside = search::outside_of_space(plan, stack);
        REQUIRE(outside.size() == 2);
        CHECK(outside[0].field == "rank_order");
        CHECK(outside[0].words == "tp-cp-ep-dp-pp");
        CHECK(outside[1].field == "head_precision");
        CHECK(outside[1].value == "fp8-tensor");
        return;
    }
    FAIL("no row is a candidate");
}
