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
Plan qwen(unsigned offload) {
    static const auto model = std::make_shared<const Model>(load_model("Qwen3-30B-A3B"));
    static const auto hardware = std::make_shared<const Hardware>(load_hardware("gb200-nvl72"));
    Plan plan;
    plan.model = model;
    plan.hardware = hardware;
    plan.stack = "bridge-26.08";
    plan.seq = tokens;
    plan.gpus = plan.dp = plan.ep = 8;
    plan.gbs = 32;
    plan.dispatcher = Dispatcher::hybridep;
    plan.capacity = 1.0; // routed buffers hold the balanced load exactly
    plan.offload = offload;
    return plan;
}

struct Copies {
    int out = 0, back = 0;
    double bytes = 0.0;
};

Copies copies(const Plan& plan) {
    const Program program = lower(plan, 0);
    Copies sum;
    for (int t = 0; t < 2; ++t)
        for (const Op& op : program.templates[static_cast<std::size_t>(t)].ops) {
            if (op.kind == OpKind::copy_to_host) ++sum.out, sum.bytes += op.bytes;
            if (op.kind == OpKind::copy_from_host) ++sum.back;
            if (op.kind == OpKind::copy_to_host || op.kind == OpKind::copy_from_host) CHECK(op.stream == Stream::host);
        }
    return sum;
}

std::int64_t bytes(const Plan& plan, MemoryClass c) {
    return plan_memory(lower(plan, 0)).class_bytes[static_cast<std::size_t>(c)];
}

} // namespace

TEST_CASE("each module's input leaves the device, once per layer, and is saved no more") {
    struct Row {
        unsigned module;
        std::int64_t columns, rows; // per layer, BF16
    };
    const std::int64_t saved = bytes(qwen(0), MemoryClass::saved);
    for (const Row& row : {Row{offload::attn_norm, 2048, tokens}, Row{offload::qkv_linear, 2048, tokens},
                           Row{offload::core_attn, (32 + 2 * 4) * 128, tokens},
                           Row{offload::attn_proj, 32 * 128, tokens}, Row{offload::mlp_norm, 2048, tokens},
                           Row{offload::expert_fc1, 2048, 8 * tokens}, Row{offload::moe_act, 2 * 768, 8 * tokens}}) {
        CAPTURE(offload::to_string(row.module));
        const Plan plan = qwen(row.module);
        REQUIRE(check_plan(plan).message == "");
        const std::int64_t each = 2 * row.columns * row.rows;
        const Copies sum = copies(plan);
        CHECK(sum.out == layers);
        CHECK(sum.back == layers);
        CHECK(sum.bytes == static_cast<double>(layers * each));
        CHECK(saved - bytes(plan, MemoryClass::saved) == layers * each);
        // One buffer on the way out, one on the way back; they pass at different times.
        CHECK(bytes(plan, MemoryClass::transient) - bytes(qwen(0), MemoryClass::transient) <= each);
    }
}

// No host knows how many rows there are: our copies are of all planned ones, Megatron's of those that came.
TEST_CASE("routed rows: twice the capacity moves twice the bytes under moe-plan, and as many under other stacks") {
    for (const bool ours : {false, true}) {
        Plan plan = qwen(offload::moe_act);
        if (ours) plan.stack = "moe-plan";
        const double once = copies(plan).bytes;
        plan.capacity = 2.0;
        CHECK(copies(plan).bytes == nearly(ours ? 2.0 * once : once));
    }
}

TEST_CASE("what is recomputed or small stays; a set leaves together") {
    Plan plan = qwen(offload::qkv_linear);
    plan.recompute = recompute::layernorm;
    CHECK(copies(plan).out == layers); // Megatron's norm lies within the projection
    plan.stack = "moe-plan";           // the projection's input is computed again from the norm's
    CHECK(copies(plan).out == 0);
    plan = qwen(offload::attn_norm);
    plan.seq = 256; // 0.5 M elements
    CHECK(copies(plan).out == 0);
    CHECK(copies(qwen(offload::expert_fc1 | offload::moe_act)).out == 2 * layers);
}

TEST_CASE("offloaded optimizer states lie where activations lay") {
    const Plan kept = qwen(0), away = qwen(offload::optimizer);
    REQUIRE(check_plan(away).message == "");
    const MemoryPlan a = plan_memory(lower(kept, 0)), b = plan_memory(lower(away, 0));
    const std::int64_t states = a.class_bytes[static_cast<std::size_t>(MemoryClass::optimizer)],
                       activations = a.class_bytes[static_cast<std::size_t>(MemoryClass::saved)] +
                                     a.class_bytes[static_cast<std::size_t>(MemoryClass::transient)];
    CHECK(b.class_bytes[static_cast<std::size_t>(MemoryClass::optimizer)] == 0);
    CHECK(a.arena_bytes - b.arena_bytes == std::min(states, activations));
    // Master weights and two moments, 12 bytes of every parameter: experts are 1/8 on a rank, the rest is sharded.
    double copied = 0.0;
    const Program program = lower(away, 0);
    for (const Op& op : program.templates.back().ops)
        if (op.kind == OpKind::copy_from_host) copied += op.bytes;
    CHECK(copied == nearly(12.0 * 30.53e9 / 8).epsilon(0.002));
}
