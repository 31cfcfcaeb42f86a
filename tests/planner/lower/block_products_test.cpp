// Products of whole blocks in mxfp8 and nvfp4: which products of a plan they are, and the memory that they take.
#include "planner/lower/lower.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/memory/library_memory.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/block_scaling.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/plan_choices.hpp"
#include "planner/program/block_products.hpp"
#include "planner/program/program.hpp"

#include <doctest/doctest.h>

#include <map>
#include <utility>

using namespace moe;

namespace {

plan::Plan plan_of(machine::Precision precision, const char* hardware, int tp = 1) {
    plan::Plan plan;
    plan.model = std::make_shared<const model::Model>(families::load_model("Qwen3-30B-A3B"));
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware(hardware));
    plan.stack = "moe-plan";
    plan.seq = 4096;
    plan.gpus = plan.tp = tp;
    plan.dp = plan.edp = 1;
    plan.ep = tp;
    plan.gbs = plan.mbs = 1;
    plan.precision = precision;
    return plan;
}

// Dense products of layers in a phase, outside of the router: in whole blocks, and all.
struct Count {
    int blocks = 0, all = 0;
    bool operator==(const Count&) const = default;
};
std::map<program::Phase, Count> products(const plan::Plan& plan, machine::Precision format) {
    const program::Program program = lower::lower(plan, 0);
    const program::BlockProducts found(program);
    std::map<program::Phase, Count> out;
    for (program::OpWalk walk(program); !walk.done(); walk.next()) {
        const program::Op& op = walk.op();
        const machine::Precision in = found.of(op);
        const bool layer = op.module == program::Module::attn_in || op.module == program::Module::attn_out;
        CHECK((in == machine::Precision::bf16 || (in == format && layer)));
        if (op.kind != program::OpKind::gemm || !layer) continue;
        Count& count = out[op.phase];
        ++count.all;
        count.blocks += in == format ? 1 : 0;
    }
    return out;
}

} // namespace

TEST_CASE("block products: all dense products of layers, neither router, head nor experts") {
    for (const machine::Precision format : {machine::Precision::mxfp8, machine::Precision::nvfp4}) {
        CAPTURE(machine::to_string(format));
        const plan::Plan plan = plan_of(format, "b200");
        REQUIRE(plan::check_plan(plan).message == "");
        const auto counts = products(plan, format);
        REQUIRE(counts.size() == 3); // forward, dgrad, wgrad
        for (const auto& [phase, count] : counts) {
            CHECK(count.blocks == count.all);
            CHECK(count.all == 2 * 48);
        }
        CHECK(products(plan_of(format, "h200"), format) == counts); // The Program is the same everywhere.
    }
    const auto none = products(plan_of(machine::Precision::bf16, "b200"), machine::Precision::bf16);
    for (const auto& [phase, count] : none) CHECK(count.all == 2 * 48);
}

TEST_CASE("block products: what TP gathers has one scale for each rank in nvfp4, and stays emulated") {
    const machine::Precision mx = machine::Precision::mxfp8, fp4 = machine::Precision::nvfp4;
    REQUIRE(plan::check_plan(plan_of(fp4, "b200", 2)).message == "");
    for (const auto& [phase, count] : products(plan_of(mx, "b200", 2), mx)) CHECK(count == Count{2 * 48, 2 * 48});
    auto counts = products(plan_of(fp4, "b200", 2), fp4);
    CHECK(counts[program::Phase::forward] == Count{48, 2 * 48}); // of the projection, whose input is this rank's own
    CHECK(counts[program::Phase::dgrad] == Count{2 * 48, 2 * 48});
    CHECK(counts[program::Phase::wgrad] == Count{48, 2 * 48});
}

TEST_CASE("block products: packed operands take memory where the GPU scales blocks") {
    const auto memory = [](machine::Precision precision, const char* hardware) {
        return memory::library_memory(plan_of(precision, hardware));
    };
    for (const machine::Precision format : {machine::Precision::mxfp8, machine::Precision::nvfp4}) {
        CHECK(plan::scales_blocks(plan_of(format, "b300")));
        CHECK(!plan::scales_blocks(plan_of(format, "h200")));
        CHECK(!plan::scales_blocks(plan_of(format, "rtx-5090")));
        CHECK(memory(format, "b200") == memory(machine::Precision::bf16, "b200") + 0x1p28);
        CHECK(memory(format, "h200") == memory(machine::Precision::bf16, "h200"));
    }
    plan::Plan head = plan_of(machine::Precision::bf16, "b200");
    CHECK(!plan::scales_blocks(head));
    head.head_precision = machine::Precision::mxfp8;
    CHECK(plan::scales_blocks(head));
    head.stack = head.hardware->default_stack;
    CHECK(!plan::scales_blocks(head));
}
