// Router replay in the Program: choices are inputs of every micro-batch, and routers that run again take them.
#include "planner/lower/lower.hpp"
#include "planner/lower/passes/keep_routing.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/memory/memory.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/program.hpp"

#include <doctest/doctest.h>

#include <memory>

using namespace moe;

namespace {

plan::Plan plan_of(unsigned recompute) {
    plan::Plan plan;
    plan.model = std::make_shared<const model::Model>(families::load_model("tiny-qwen3-moe"));
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("h100"));
    plan.stack = "moe-plan";
    plan.seq = 256;
    plan.gbs = 8;
    plan.mbs = 2;
    plan.recompute = recompute;
    return plan;
}

int routers(const program::Program& program, program::Phase phase) {
    int count = 0;
    for (const program::Template& tmpl : program.templates)
        for (const program::Op& op : tmpl.ops) count += op.kind == program::OpKind::router && op.phase == phase ? 1 : 0;
    return count;
}

} // namespace

TEST_CASE("router replay: every layer's choice is an input of each micro-batch, which routers read again") {
    for (const unsigned recompute : {0u, plan::recompute::moe, plan::recompute::full}) {
        const plan::Plan plan = plan_of(recompute);
        REQUIRE(plan::check_plan(plan).message == "");
        const program::Program natural = lower::lower(plan, 0);
        CHECK((routers(natural, program::Phase::recompute) > 0) == (recompute != 0));
        for (const bool replay : {false, true}) {
            program::Program program = natural;
            const std::vector<passes::KeptRouting> kept = passes::keep_routing(program, replay);
            REQUIRE(kept.size() == plan.model->layers.size());
            const memory::MemoryPlan memory = memory::plan_memory(program);
            std::int64_t bytes = 0;
            for (std::size_t i = 0; i < kept.size(); ++i) {
                CHECK(kept[i].layer == static_cast<int>(i));
                CHECK(kept[i].experts == plan.model->kinds.front().moe->experts);
                const program::Tensor& index = program.tensors[static_cast<std::size_t>(kept[i].index)];
                CHECK(index.storage == program::Storage::input);
                CHECK(memory.places[static_cast<std::size_t>(kept[i].index)].instances == 4);
                bytes += 4 * index.bytes();
                CHECK(index.bytes() == 4 * 2 * 256 * kept[i].top_k);
            }
            const auto inputs = static_cast<std::size_t>(memory::MemoryClass::inputs);
            CHECK(memory.class_bytes[inputs] == memory::plan_memory(natural).class_bytes[inputs] + bytes);
            for (const program::Template& tmpl : program.templates)
                for (const program::Op& op : tmpl.ops) {
                    if (op.kind != program::OpKind::router) continue;
                    const program::TensorId index = kept[static_cast<std::size_t>(op.layer)].index;
                    CHECK((op.in.size() == 4 && op.in[3] == index) == replay);
                    CHECK((op.out[0] == index) == (op.phase == program::Phase::forward));
                }
        }
    }
}
