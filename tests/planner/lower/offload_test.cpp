// Offload: what leaves the device, by module; copies and bytes counted by hand; optimizer states in place of
// activations.
#include "planner/lower/lower.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/memory/memory.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/program.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

using namespace moe;

namespace {

constexpr std::int64_t tokens = 4096, layers = 48;

// Qwen3-30B-A3B on 8 GPUs with EP 8: 48 layers, hidden 2048, 32 heads and 4 key-value heads of 128, top 8 of 128
// experts of width 768.
plan::Plan qwen(unsigned offload) {
    static const auto model = std::make_shared<const model::Model>(families::load_model("Qwen3-30B-A3B"));
    static const auto hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("gb200-nvl72"));
    plan::Plan plan;
    plan.model = model;
    plan.hardware = hardware;
    plan.stack = "bridge-26.08";
    plan.seq = tokens;
    plan.gpus = plan.dp = plan.ep = 8;
    plan.gbs = 32;
    plan.dispatcher = plan::Dispatcher::hybridep;
    plan.capacity = 1.0; // routed buffers hold the balanced load exactly
    plan.offload = offload;
    return plan;
}

struct Copies {
    int out = 0, back = 0;
    double bytes = 0.0;
};

Copies copies(const plan::Plan& plan) {
    const program::Program program = lower::lower(plan, 0);
    Copies sum;
    for (int t = 0; t < 2; ++t)
        for (const program::Op& op : program.templates[static_cast<std::size_t>(t)].ops) {
            if (op.kind == program::OpKind::copy_to_host) ++sum.out, sum.bytes += op.bytes;
            if (op.kind == program::OpKind::copy_from_host) ++sum.back;
            if (op.kind == program::OpKind::copy_to_host || op.kind == program::OpKind::copy_from_host)
                CHECK(op.stream == program::Stream::host);
        }
    return sum;
}

std::int64_t bytes(const plan::Plan& plan, memory::MemoryClass c) {
    return memory::plan_memory(lower::lower(plan, 0)).class_bytes[static_cast<std::size_t>(c)];
}

} // namespace

TEST_CASE("each module's input leaves the device, once per layer, and is saved no more") {
    struct Row {
        unsigned module;
        std::int64_t columns, rows; // per layer, BF16
    };
    const std::int64_t saved = bytes(qwen(0), memory::MemoryClass::saved);
    for (const Row& row :
         {Row{plan::offload::attn_norm, 2048, tokens}, Row{plan::offload::qkv_linear, 2048, tokens},
          Row{plan::offload::core_attn, (32 + 2 * 4) * 128, tokens}, Row{plan::offload::attn_proj, 32 * 128, tokens},
          Row{plan::offload::mlp_norm, 2048, tokens}, Row{plan::offload::expert_fc1, 2048, 8 * tokens},
          Row{plan::offload::moe_act, 2 * 768, 8 * tokens}}) {
        CAPTURE(plan::offload::to_string(row.module));
        const plan::Plan plan = qwen(row.module);
        REQUIRE(plan::check_plan(plan).message == "");
        const std::int64_t each = 2 * row.columns * row.rows;
        const Copies sum = copies(plan);
        CHECK(sum.out == layers);
        CHECK(sum.back == layers);
        CHECK(sum.bytes == static_cast<double>(layers * each));
        CHECK(saved - bytes(plan, memory::MemoryClass::saved) == layers * each);
        // One buffer on the way out, one on the way back; they pass at different times.
        CHECK(bytes(plan, memory::MemoryClass::transient) - bytes(qwen(0), memory::MemoryClass::transient) <= each);
    }
}

// No host knows how many rows there are: our copies are of all planned ones, Megatron's of those that came.
TEST_CASE("routed rows: twice the capacity moves twice the bytes under moe-plan, and as many under other stacks") {
    for (const bool ours : {false, true}) {
        plan::Plan plan = qwen(plan::offload::moe_act);
        if (ours) plan.stack = "moe-plan";
        const double once = copies(plan).bytes;
        plan.capacity = 2.0;
        CHECK(copies(plan).bytes == nearly(ours ? 2.0 * once : once));
    }
}

TEST_CASE("what is recomputed or small stays; a set leaves together") {
    plan::Plan plan = qwen(plan::offload::qkv_linear);
    plan.recompute = plan::recompute::layernorm;
    CHECK(copies(plan).out == layers); // Megatron's norm lies within the projection
    plan.stack = "moe-plan";           // the projection's input is computed again from the norm's
    CHECK(copies(plan).out == 0);
    plan = qwen(plan::offload::attn_norm);
    plan.seq = 256; // 0.5 M elements
    CHECK(copies(plan).out == 0);
    CHECK(copies(qwen(plan::offload::expert_fc1 | plan::offload::moe_act)).out == 2 * layers);
}

TEST_CASE("offloaded optimizer states lie where activations lay") {
    const plan::Plan kept = qwen(0), away = qwen(plan::offload::optimizer);
    REQUIRE(plan::check_plan(away).message == "");
    const memory::MemoryPlan a = memory::plan_memory(lower::lower(kept, 0)),
                             b = memory::plan_memory(lower::lower(away, 0));
    const std::int64_t states = a.class_bytes[static_cast<std::size_t>(memory::MemoryClass::optimizer)],
                       activations = a.class_bytes[static_cast<std::size_t>(memory::MemoryClass::saved)] +
                                     a.class_bytes[static_cast<std::size_t>(memory::MemoryClass::transient)];
    CHECK(b.class_bytes[static_cast<std::size_t>(memory::MemoryClass::optimizer)] == 0);
    CHECK(a.arena_bytes - b.arena_bytes == std::min(states, activations));
    // Master weights and two moments, 12 bytes of every parameter: experts are 1/8 on a rank, the rest is sharded.
    double copied = 0.0;
    const program::Program program = lower::lower(away, 0);
    for (const program::Op& op : program.templates.back().ops)
        if (op.kind == program::OpKind::copy_from_host) copied += op.bytes;
    CHECK(copied == nearly(12.0 * 30.53e9 / 8).epsilon(0.002));
}
