// FSDP: what a rank keeps, what it gathers and reduces per layer, and that no more than two layers are whole at once.
#include "planner/lower/lower.hpp"
#include "planner/memory/memory.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/program/program.hpp"
#include "tests/support/nearly.hpp"
#include "tests/support/published_plan.hpp"

#include <doctest/doctest.h>

#include <map>

using namespace moe;

namespace {

Plan llama(int dp) {
    Plan plan = published_plan("Llama3-8B", "h100", "torchtitan", 8192);
    plan.gpus = plan.dp = plan.edp = dp;
    plan.gbs = 2 * dp;
    plan.fsdp = true;
    return plan;
}

std::map<OpKind, int> counts(const Template& tmpl) {
    std::map<OpKind, int> result;
    for (const Op& op : tmpl.ops) ++result[op.kind];
    return result;
}

double bytes(const Template& tmpl, OpKind kind) {
    double sum = 0.0;
    for (const Op& op : tmpl.ops)
        if (op.kind == kind) sum += op.bytes;
    return sum;
}

// 8.03 B parameters: 32 layers of 218.1 M, embedding and head of 525.3 M each (Llama 3's table 3, arXiv 2407.21783).
constexpr double layer = 218'112'000, end = 525'336'576, all = 32 * layer + 2 * end + 4096;

} // namespace

TEST_CASE("FSDP gathers each layer before its forward and its backward and reduces it behind its backward") {
    const Plan plan = llama(8);
    REQUIRE(check_plan(plan).message == "");
    const Program program = lower(plan, 0);
    const Template &forward = program.templates[0], &backward = program.templates[1];
    CHECK(counts(forward)[OpKind::all_gather] == 34);  // 32 layers, embedding, final norm with LM head
    CHECK(counts(backward)[OpKind::all_gather] == 32); // the head is still there, the embedding is not read
    CHECK(counts(backward)[OpKind::reduce_scatter] == 34);
    CHECK(bytes(forward, OpKind::all_gather) == nearly(2.0 * all).epsilon(1e-4));
    CHECK(bytes(backward, OpKind::all_gather) == nearly(2.0 * 32 * layer).epsilon(1e-4));
    CHECK(bytes(backward, OpKind::reduce_scatter) == nearly(4.0 * all).epsilon(1e-4));
    // The step's ends neither gather nor reduce any more.
    for (const Template& tmpl : program.templates)
        if (tmpl.kind == SlotKind::begin || tmpl.kind == SlotKind::finish) {
            CHECK(bytes(tmpl, OpKind::all_gather) == 0.0);
            CHECK(bytes(tmpl, OpKind::reduce_scatter) == 0.0);
        }
}

TEST_CASE("FSDP keeps shards: 2 + 4 + 12 bytes of every parameter over the group, and two layers at work") {
    const Plan plan = llama(8);
    const auto of = [](const Plan& p, MemoryClass c) {
        return static_cast<double>(plan_memory(lower(p, 0)).class_bytes[static_cast<std::size_t>(c)]);
    };
    CHECK(of(plan, MemoryClass::weights) == nearly(2.0 * all / 8).epsilon(1e-3));
    CHECK(of(plan, MemoryClass::gradients) == nearly(4.0 * all / 8).epsilon(1e-3));
    CHECK(of(plan, MemoryClass::optimizer) == nearly(12.0 * all / 8).epsilon(1e-3));
    Plan bf16 = plan;
    bf16.gradients = Precision::bf16;
    CHECK(of(bf16, MemoryClass::gradients) == nearly(2.0 * all / 8).epsilon(1e-3));
    // Under full recomputation a layer's own work is small beside two layers' weights and gradients in one pass.
    Plan whole = plan, sharded = plan;
    whole.fsdp = false;
    whole.seq = sharded.seq = 256;
    whole.recompute = sharded.recompute = recompute::full;
    const double grown = of(sharded, MemoryClass::transient) - of(whole, MemoryClass::transient);
    CHECK(grown < 2.0 * (2.0 + 4.0) * layer + 4.0 * end);
    CHECK(grown > 2.0 * (2.0 + 4.0) * layer - 4.0 * end);
}

TEST_CASE("FSDP in a pipeline leaves weights gathered for the whole step, as the distributed optimizer does") {
    Plan plan = llama(4);
    plan.gpus = 8, plan.pp = 2;
    REQUIRE(check_plan(plan).message == "");
    Plan plain = plan;
    plain.fsdp = false;
    const Program a = lower(plan, 0), b = lower(plain, 0);
    CHECK(plan_memory(a).arena_bytes == plan_memory(b).arena_bytes);
    CHECK(counts(a.templates[0]) == counts(b.templates[0]));
}

TEST_CASE("experts whose group is one rank stay whole, the others are sharded over their own group") {
    Plan plan = llama(8);
    plan.model = std::make_shared<const Model>(load_model("Qwen3-30B-A3B"));
    plan.seq = 4096;
    const auto expert_gathers = [&](int ep) {
        plan.ep = ep, plan.edp = 8 / ep;
        REQUIRE(check_plan(plan).message == "");
        int gathers = 0;
        const Program program = lower(plan, 0);
        for (const Op& op : program.templates[0].ops)
            if (op.kind == OpKind::all_gather && op.stream == Stream::data && op.group.domain == Domain::expert) {
                CHECK(group_size(plan, op.group) == 8 / ep);
                ++gathers;
            }
        return gathers;
    };
    CHECK(expert_gathers(8) == 0);
    CHECK(expert_gathers(2) == 48);
}
