// Variants: sound plans one choice away, from what recipes name, with pinned fields left alone.
#include "planner/search/variants.hpp"

#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan_fields.hpp"
#include "planner/plan/schedule.hpp"
#include "planner/stack/stack.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>

using namespace moe;

namespace {

// DeepSeek-V3 on 256 GB200 in a pipeline of 4 with 4 chunks.
plan::Plan deepseek() {
    plan::Plan plan;
    plan.model = std::make_shared<const model::Model>(families::load_model("DeepSeek-V3"));
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("gb200-nvl72"));
    plan.stack = "bridge-26.08";
    plan.gpus = 256, plan.gbs = 4096, plan.seq = 4096;
    plan.precision = machine::Precision::mxfp8;
    plan.pp = 4, plan.vpp = 4, plan.dp = 64, plan.ep = 64;
    plan.edp = 1;
    plan.schedule = plan::ScheduleKind::interleaved;
    plan.dispatcher = plan::Dispatcher::hybridep;
    plan.cuda_graph = plan::CudaGraph::full;
    plan.capacity = 1.5;
    return plan;
}

} // namespace

TEST_CASE("variants are sound, differ in one choice or have rows as routed, and hold what the stack's recipes name") {
    const plan::Plan plan = deepseek();
    const stack::Stack stack = stack::load_stack(plan.stack, *plan.hardware);
    REQUIRE(stack::sound(plan, stack));
    std::map<std::string, int> changed;
    for (const plan::Plan& other : search::variants(plan, stack, {})) {
        CHECK(stack::sound(other, stack));
        const std::vector<plan::FieldChange> changes = plan::differences(plan, other);
        REQUIRE_FALSE(changes.empty());
        const bool cut = std::all_of(changes.begin(), changes.end(), [](const plan::FieldChange& change) {
            return change.field == "layout" || change.field == "vpp" || change.field == "schedule";
        });
        const bool routed = other.capacity == 0.0;
        if (routed) CHECK((!other.paged_stash && other.cuda_graph != plan::CudaGraph::full));
        CHECK((cut || routed || changes.size() == 1));
        ++changed[cut ? "layout" : routed ? "routed" : changes.front().field];
    }
    for (const char* field : {"layout", "routed", "attention_precision", "head_precision", "paged_stash"}) {
        CAPTURE(field);
        CHECK(changed[field] > 0);
    }
    CHECK(changed["delay_wgrad"] == 0); // It needs EP overlap.
}

TEST_CASE("variants leave pinned fields alone") {
    const plan::Plan plan = deepseek();
    const stack::Stack stack = stack::load_stack(plan.stack, *plan.hardware);
    const std::set<std::string> pinned{"layout", "head_precision", "fsdp"};
    for (const plan::Plan& other : search::variants(plan, stack, pinned))
        for (const plan::FieldChange& change : plan::differences(plan, other))
            CHECK_MESSAGE(!pinned.contains(change.field), change.field);
}

TEST_CASE("choices that only some machines' recipes name are tried there alone") {
    const auto varies = [](const char* hardware, const std::string& field) {
        const stack::Stack stack = stack::load_stack("bridge-26.08", machine::load_hardware(hardware));
        const std::vector<search::Variation> all = search::variations(stack);
        return std::any_of(all.begin(), all.end(), [&](const search::Variation& v) { return v.field == field; });
    };
    CHECK(varies("gb300-nvl72", "attention_precision"));
    CHECK_FALSE(varies("h100", "attention_precision"));
    CHECK(varies("h100", "cuda_graph"));
}

TEST_CASE("wgrad in FP8 is tried where calls of it were measured, in plans that multiply so, by our stack") {
    plan::Plan plan;
    plan.model = std::make_shared<const model::Model>(families::load_model("Qwen3-30B-A3B"));
    machine::Hardware hardware = machine::load_hardware("h200");
    plan.stack = "moe-plan";
    plan.seq = 4096, plan.gpus = plan.dp = plan.ep = 8, plan.gbs = 8;
    plan.precision = machine::Precision::fp8_blockwise;
    const auto tries = [&] {
        plan.hardware = std::make_shared<const machine::Hardware>(hardware);
        const stack::Stack stack = stack::load_stack(plan.stack, *plan.hardware);
        REQUIRE(stack::sound(plan, stack));
        const std::vector<plan::Plan> all = search::variants(plan, stack, {});
        return std::any_of(all.begin(), all.end(), [](const plan::Plan& other) { return other.fp8_wgrad; });
    };
    CHECK_FALSE(tries());
    hardware.measured["grouped_gemm.wgrad.fp8-blockwise"] = {};
    CHECK(tries());
    plan.precision = machine::Precision::bf16;
    CHECK_FALSE(tries());
}
