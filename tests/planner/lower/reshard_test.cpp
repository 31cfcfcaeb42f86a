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

plan::Plan llama(int dp) {
    plan::Plan plan = published_plan("Llama3-8B", "h100", "torchtitan", 8192);
    plan.gpus = plan.dp = plan.edp = dp;
    plan.gbs = 2 * dp;
    plan.fsdp = true;
    return plan;
}

std::map<program::OpKind, int> counts(const program::Template& tmpl) {
    std::map<program::OpKind, int> result;
    for (const program::Op& op : tmpl.ops) ++result[op.kind];
    return result;
}

double bytes(const program::Template& tmpl, program::OpKind kind) {
    double sum = 0.0;
    for (const program::Op& op : tmpl.ops)
        if (op.kind == kind) sum += op.bytes;
    return sum;
}

// 8.03 B parameters: 32 layers of 218.1 M, embedding and head of 525.3 M each (Llama 3's table 3, arXiv 2407.21783).
constexpr double layer = 218'112'000, end = 525'336'576, all = 32 * layer + 2 * end + 4096;

} // namespace

TEST_CASE("FSDP gathers each layer before its forward and its backward and reduces it behind its backward") {
    const plan::Plan plan = llama(8);
    REQUIRE(plan::check_plan(plan).message == "");
    const program::Program program = lower::lower(plan, 0);
    const program::Template &forward = program.templates[0], &backward = program.templates[1];
    CHECK(counts(forward)[program::OpKind::all_gather] == 34);  // 32 layers, embedding, final norm with LM head
    CHECK(counts(backward)[program::OpKind::all_gather] == 32); // the head is still there, the embedding is not read
    CHECK(counts(backward)[program::OpKind::reduce_scatter] == 34);
    CHECK(bytes(forward, program::OpKind::all_gather) == nearly(2.0 * all).epsilon(1e-4));
    CHECK(bytes(backward, program::OpKind::all_gather) == nearly(2.0 * 32 * layer).epsilon(1e-4));
    CHECK(bytes(backward, program::OpKind::reduce_scatter) == nearly(4.0 * all).epsilon(1e-4));
    // The step's ends neither gather nor reduce any more.
    for (const program::Template& tmpl : program.templates)
        if (tmpl.kind == plan::SlotKind::begin || tmpl.kind == plan::SlotKind::finish) {
            CHECK(bytes(tmpl, program::OpKind::all_gather) == 0.0);
            CHECK(bytes(tmpl, program::OpKind::reduce_scatter) == 0.0);
        }
}

TEST_CASE("FSDP keeps shards: 2 + 4 + 12 bytes of every parameter over the group, and two layers at work") {
    const plan::Plan plan = llama(8);
    const auto of = [](const plan::Plan& p, memory::MemoryClass c) {
        return static_cast<double>(memory::plan_memory(lower::lower(p, 0)).class_bytes[static_cast<std::size_t>(c)]);
    };
    CHECK(of(plan, memory::MemoryClass::weights) == nearly(2.0 * all / 8).epsilon(1e-3));
    CHECK(of(plan, memory::MemoryClass::gradients) == nearly(4.0 * all / 8).epsilon(1e-3));
    CHECK(of(plan, memory::MemoryClass::optimizer) == nearly(12.0 * all / 8).epsilon(1e-3));
    plan::Plan bf16 = plan;
    bf16.gradients = machine::Precision::bf16;
    CHECK(of(bf16, memory::MemoryClass::gradients) == nearly(2.0 * all / 8).epsilon(1e-3));
    // Under full recomputation a layer's own work is small beside two layers' weights and gradients in one pass.
    plan::Plan whole = plan, sharded = plan;
    whole.fsdp = false;
    whole.seq = sharded.seq = 256;
    whole.recompute = sharded.recompute = plan::recompute::full;
    const double grown = of(sharded, memory::MemoryClass::transient) - of(whole, memory::MemoryClass::transient);
    CHECK(grown < 2.0 * (2.0 + 4.0) * layer + 4.0 * end);
    CHECK(grown > 2.0 * (2.0 + 4.0) * layer - 4.0 * end);
}

TEST_CASE("FSDP in a pipeline leaves weights gathered for the whole step, as the distributed optimizer does") {
    plan::Plan plan = llama(4);
    plan.gpus = 8, plan.pp = 2;
    REQUIRE(plan::check_plan(plan).message == "");
    plan::Plan plain = plan;
    plain.fsdp = false;
    const program::Program a = lower::lower(plan, 0), b = lower::lower(plain, 0);
    CHECK(memory::plan_memory(a).arena_bytes == memory::plan_memory(b).arena_bytes);
    CHECK(counts(a.templates[0]) == counts(b.templates[0]));
}

TEST_CASE("experts whose group is one rank stay whole, the others are sharded over their own group") {
    plan::Plan plan = llama(8);
    plan.model = std::make_shared<const model::Model>(families::load_model("Qwen3-30B-A3B"));
    plan.seq = 4096;
    const auto expert_gathers = [&](int ep) {
        plan.ep = ep, plan.edp = 8 / ep;
        REQUIRE(plan::check_plan(plan).message == "");
        int gathers = 0;
        const program::Program program = lower::lower(plan, 0);
        for (const program::Op& op : program.templates[0].ops)
            if (op.kind == program::OpKind::all_gather && op.stream == program::Stream::data &&
                op.group.domain == plan::Domain::expert) {
                CHECK(plan::group_size(plan, op.group) == 8 / ep);
                ++gathers;
            }
        return gathers;
    };
    CHECK(expert_gathers(8) == 0);
    CHECK(expert_gathers(2) == 48);
}
