// FSDP: what a rank keeps, what it gathers and reduces per layer, and that no more than two layers are whole at once.
#include "planner/lower/lower.hpp"
#include "planner/memory/memory.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/program/program.hpp"
#include "tests/planner/plan/sample_plans.hpp"
#include "tests/support/nearly.hpp"
#include "tests/support/published_plan.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <set>
#include <vector>

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

TEST_CASE("whole weights are read behind the gather of their own layer, in every template") {
    for (plan::Plan plan : sample_plans()) {
        if (!plan.reshards()) continue;
        CAPTURE(plan::plan_to_json(plan).substr(0, 900));
        const program::Program program = lower::lower(plan, 0);
        std::set<program::TensorId> gathered; // whole weights of layers, and the copies that the backward has of them
        for (const program::Bucket& b : program.buckets)
            if (b.layer >= 0) gathered.insert(b.gathered);
        for (std::size_t id = 0; id < program.tensors.size(); ++id)
            if (gathered.contains(program.tensors[id].again_of)) gathered.insert(static_cast<program::TensorId>(id));
        gathered.erase(program::no_tensor);
        std::size_t reads = 0;
        for (const program::Template& tmpl : program.templates) {
            std::map<program::TensorId, int> layer; // whose weights a buffer holds
            for (const program::Op& op : tmpl.ops) {
                for (const program::TensorId id : op.in) {
                    if (id == program::no_tensor) continue;
                    const program::TensorId base = program.tensors[static_cast<std::size_t>(id)].base;
                    if (!gathered.contains(base)) continue;
                    ++reads;
                    REQUIRE(layer.contains(base));
                    CHECK(layer[base] == op.layer);
                }
                for (const program::TensorId id : op.out)
                    if (gathered.contains(id)) layer[id] = op.layer;
            }
        }
        CHECK(reads > 0);
    }
}

TEST_CASE("our stack zeroes whole gradients and adds their own part to the shard by ops, within the same memory") {
    plan::Plan plan = llama(8);
    const program::Program published = lower::lower(plan, 0);
    plan.stack = "moe-plan";
    REQUIRE(plan::check_plan(plan).message == "");
    const program::Program own = lower::lower(plan, 0);
    double added = 0.0;
    for (const program::Op& op : own.templates[1].ops) {
        if (op.module != program::Module::data_parallel || op.kind != program::OpKind::add) continue;
        added += op.bytes;
        CHECK(op.out == std::vector{op.in[1]});
        CHECK(own.tensors[static_cast<std::size_t>(op.in[0])].shard_group.axes != 0);
    }
    CHECK(added == nearly(3.0 * 4.0 * all / 8).epsilon(1e-3));
    const auto zeros = [](const program::Program& program) {
        double sum = 0.0;
        for (const program::Op& op : program.templates[1].ops)
            if (op.kind == program::OpKind::zero) sum += op.bytes;
        return sum;
    };
    CHECK(zeros(published) == 0.0);
    // Products set all but the embedding's gradient, norms and padding.
    CHECK(zeros(own) == nearly(4.0 * end).epsilon(1e-2));
    CHECK(counts(own.templates[1])[program::OpKind::reduce_scatter] == 34);
}

TEST_CASE("HSDP gathers within a copy, sums over copies once in a step, and counts squares once") {
    plan::Plan plan = llama(8);
    plan.fsdp_replicas = 2;
    REQUIRE(plan::check_plan(plan).message == "");
    const program::Program program = lower::lower(plan, 0);
    const plan::Mesh mesh(plan);
    CHECK(mesh.members({plan::Domain::dense, plan::axis::shards}, 5) == std::vector{4, 5, 6, 7});
    CHECK(mesh.members({plan::Domain::dense, plan::axis::replicas}, 5) == std::vector{1, 5});
    CHECK(mesh.members({plan::Domain::dense, plan::axis::data}, 5) == std::vector{0, 1, 2, 3, 4, 5, 6, 7});
    CHECK(to_string(plan::Group{plan::Domain::dense, plan::axis::shards}) == "dp_shard");
    std::size_t sums = 0;
    double bytes = 0.0;
    for (const program::Slot& slot : program.slots)
        for (const program::Op& op : program.templates[static_cast<std::size_t>(slot.index)].ops) {
            if (op.kind == program::OpKind::all_gather || op.kind == program::OpKind::reduce_scatter)
                CHECK(plan::group_size(plan, op.group) == 4);
            if (op.kind != program::OpKind::all_reduce || op.group.axes != plan::axis::replicas) continue;
            ++sums;
            bytes += op.bytes;
        }
    CHECK(plan.micro_batches() == 2);
    CHECK(sums == program.buckets.size());
    CHECK(bytes == nearly(4.0 * all / 4).epsilon(1e-3));
    const program::Template& finish = program.templates.back();
    const auto scale = std::find_if(finish.ops.begin(), finish.ops.end(),
                                    [](const program::Op& op) { return op.kind == program::OpKind::scale; });
    REQUIRE(scale != finish.ops.end());
    CHECK(std::get<program::ScaleAttr>(scale->attr).factor == 0.5);
}

TEST_CASE("our stack reduces gradients in BF16: a copy of FP32 sums, or what products write under FSDP") {
    plan::Plan plan = llama(8);
    plan.stack = "moe-plan";
    plan.gradients = machine::Precision::bf16;
    for (const bool fsdp : {false, true}) {
        plan.fsdp = fsdp;
        const program::Program program = lower::lower(plan, 0);
        for (const program::Bucket& b : program.buckets)
            CHECK(program.tensors[static_cast<std::size_t>(b.gradients)].dtype == program::Dtype::f32);
        double reduced = 0.0, cast = 0.0;
        for (const program::Template& tmpl : program.templates)
            for (const program::Op& op : tmpl.ops) {
                if (op.kind == program::OpKind::cast) cast += op.bytes;
                if (op.kind != program::OpKind::reduce_scatter) continue;
                CHECK(program.tensors[static_cast<std::size_t>(op.in[0])].dtype == program::Dtype::bf16);
                reduced += op.bytes;
            }
        // Under FSDP the template of the last micro-batch stands beside that of the others.
        const double times = fsdp ? 2.0 : 1.0;
        CHECK(reduced == nearly(times * 2.0 * all).epsilon(1e-3));
        // There products write BF16, and only the embedding's gradient and norms' are cast.
        CHECK(cast == nearly(fsdp ? times * 6.0 * end : 6.0 * all * 9.0 / 8.0).epsilon(1e-2));
    }
}
