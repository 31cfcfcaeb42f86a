// Communication inside layers: products beside their ring over TP, attention by heads over CP; bytes counted by hand.
#include "planner/lower/emit/builder.hpp"
#include "planner/lower/lower.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/memory/memory.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/plan_choices.hpp"
#include "planner/program/program.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <vector>

using namespace moe;

namespace {

plan::Plan llama(int tp, int cp) {
    plan::Plan plan;
    plan.model = std::make_shared<const model::Model>(families::load_model("Llama3-8B"));
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("h100"));
    plan.stack = "bridge-26.04";
    plan.seq = 8192;
    plan.gpus = tp * cp;
    plan.tp = tp;
    plan.cp = cp;
    plan.edp = tp * cp;
    plan.gbs = 2;
    return plan;
}

struct Sum {
    int count = 0;
    double bytes = 0.0, flops = 0.0;
};

// Ops of one layer of the forward (template 0) or backward.
Sum layer_ops(const plan::Plan& plan, int tmpl, program::OpKind kind) {
    const program::Program program = lower::lower(plan, 0);
    Sum sum;
    for (const program::Op& op : program.templates[static_cast<std::size_t>(tmpl)].ops)
        if (op.layer == 5 && op.kind == kind) ++sum.count, sum.bytes += op.bytes, sum.flops += op.flops;
    return sum;
}

} // namespace

TEST_CASE("tp_overlap: gathers become rings of tp - 1 steps, reductions four pieces, the work stays") {
    const plan::Plan plain = llama(4, 1);
    plan::Plan overlap = plain;
    overlap.tp_overlap = true;
    REQUIRE(plan::check_plan(overlap).message == "");
    const double hidden = 8192.0 * 4096 * 2; // the whole sequence in BF16
    // Forward: the inputs of QKV and FC1 are gathered, the outputs of the two others reduced.
    CHECK(layer_ops(plain, 0, program::OpKind::all_gather).bytes == 2 * hidden);
    CHECK(layer_ops(overlap, 0, program::OpKind::all_gather).count == 0);
    CHECK(layer_ops(overlap, 0, program::OpKind::ring_exchange).count == 2 * 3);
    CHECK(layer_ops(overlap, 0, program::OpKind::ring_exchange).bytes == 2 * 0.75 * hidden); // what leaves a rank
    CHECK(layer_ops(overlap, 0, program::OpKind::reduce_scatter).count == 2 * 4);
    CHECK(layer_ops(overlap, 0, program::OpKind::reduce_scatter).bytes ==
          layer_ops(plain, 0, program::OpKind::reduce_scatter).bytes);
    // Backward: gradients of the two row-parallel outputs come by ring, wgrad's inputs in one piece beside dgrad.
    CHECK(layer_ops(plain, 1, program::OpKind::all_gather).count == 4);
    CHECK(layer_ops(overlap, 1, program::OpKind::all_gather).count == 2);
    CHECK(layer_ops(overlap, 1, program::OpKind::ring_exchange).count == 2 * 3);
    CHECK(layer_ops(overlap, 1, program::OpKind::reduce_scatter).count == 2);
    for (const int tmpl : {0, 1})
        CHECK(layer_ops(overlap, tmpl, program::OpKind::gemm).flops ==
              layer_ops(plain, tmpl, program::OpKind::gemm).flops);
    // Weights are read once per piece, nothing else more often: 4 + 4 + 4 + 4 products instead of 4.
    const double weights = 2.0 / 4 * (4096.0 * 6144 + 4096.0 * 4096 + 3 * 4096.0 * 14336);
    CHECK(layer_ops(overlap, 0, program::OpKind::gemm).bytes - layer_ops(plain, 0, program::OpKind::gemm).bytes ==
          3 * weights);
    CHECK(
        memory::plan_memory(lower::lower(overlap, 0))
            .class_bytes[static_cast<std::size_t>(memory::MemoryClass::saved)] ==
        memory::plan_memory(lower::lower(plain, 0)).class_bytes[static_cast<std::size_t>(memory::MemoryClass::saved)]);
}

TEST_CASE("cp_comm = alltoall: whole sequences of some heads, no ring; what moves and what is computed") {
    const plan::Plan ring = llama(1, 4);
    plan::Plan heads = ring;
    heads.cp_comm = plan::ContextComm::alltoall;
    REQUIRE(plan::check_plan(heads).message == "");
    const double tokens = 8192.0 / 4;
    CHECK(layer_ops(ring, 0, program::OpKind::ring_exchange).count == 3);
    CHECK(layer_ops(heads, 0, program::OpKind::ring_exchange).count == 0);
    // Packed queries, keys and values out (32 + 8 + 8 heads of 128), the output back (32 heads), in BF16.
    CHECK(layer_ops(heads, 0, program::OpKind::all_to_all).count == 2);
    CHECK(layer_ops(heads, 0, program::OpKind::all_to_all).bytes == tokens * 128 * (48 + 32) * 2);
    CHECK(layer_ops(heads, 1, program::OpKind::all_to_all).bytes == tokens * 128 * (48 + 32) * 2);
    // One attention over the whole sequence does what four over quarters do.
    CHECK(layer_ops(heads, 0, program::OpKind::attention).count == 1);
    CHECK(layer_ops(heads, 0, program::OpKind::attention).flops ==
          layer_ops(ring, 0, program::OpKind::attention).flops);
    CHECK(layer_ops(heads, 1, program::OpKind::attention_grad).flops ==
          layer_ops(ring, 1, program::OpKind::attention_grad).flops);

    plan::Plan eight = llama(1, 8); // 8 key-value heads
    eight.cp_comm = plan::ContextComm::alltoall;
    CHECK(plan::check_plan(eight).message == "");
    eight.tp = 2, eight.gpus = eight.edp = 16;
    CHECK(plan::check_plan(eight).counter == "cp_comm");
}

TEST_CASE("cp_comm = alltoall+ring: heads within a domain, keys and values round the domains, each once over the NIC") {
    plan::Plan ring = llama(2, 16); // 32 GPUs, 8 in a domain: 4 ranks of a CP group trade heads, 4 go round
    plan::Plan both = ring;
    both.cp_comm = plan::ContextComm::hierarchical;
    REQUIRE(plan::check_plan(both).message == "");
    CHECK(plan::context_inner(both) == 4);
    const plan::Mesh mesh(both);
    CHECK(mesh.members(emit::groups::context_inner, 1) == std::vector<int>{1, 3, 5, 7});
    CHECK(mesh.members(emit::groups::context_outer, 3) == std::vector<int>{3, 11, 19, 27});
    CHECK(mesh.members(emit::groups::context, 1).size() == 16);
    CHECK(mesh.coordinate(plan::Domain::dense, plan::axis::context, 11) == 5);
    CHECK(plan::group_size(both, emit::groups::context_inner) == 4);
    CHECK(plan::group_size(both, emit::groups::context_outer) == 4);
    CHECK(plan::group_size(both, emit::groups::samples) == 16);

    const double tokens = 8192.0 / 16;
    // Queries, keys and values of half the heads (TP 2): 16 + 4 + 4 of 128 out, the output back.
    CHECK(layer_ops(both, 0, program::OpKind::all_to_all).count == 2);
    CHECK(layer_ops(both, 0, program::OpKind::all_to_all).bytes == tokens * 128 * (24 + 16) * 2);
    // A hop carries four ranks' tokens and a fourth of their heads, as many bytes as a hop of the ring.
    const Sum hops = layer_ops(both, 0, program::OpKind::ring_exchange);
    CHECK(hops.count == 3);
    CHECK(hops.bytes == 3 * tokens * 128 * (4 + 4) * 2);
    CHECK(layer_ops(ring, 0, program::OpKind::ring_exchange).count == 15);
    for (const int tmpl : {0, 1})
        for (const program::OpKind kind : {program::OpKind::attention, program::OpKind::attention_grad})
            CHECK(layer_ops(both, tmpl, kind).flops == layer_ops(ring, tmpl, kind).flops);

    plan::Plan inside = llama(1, 8); // the whole group is in one domain
    inside.cp_comm = plan::ContextComm::hierarchical;
    CHECK(plan::check_plan(inside).counter == "cp_comm");
    plan::Plan wide = llama(8, 4); // a domain has one rank of it
    wide.cp_comm = plan::ContextComm::hierarchical;
    CHECK(plan::check_plan(wide).message.find("use ring") != std::string::npos);
}
