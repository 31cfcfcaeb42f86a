// Products beside their ring over TP on the clock: whichever of the two is slower sets the pace.
#include "planner/stack/stack.hpp"
#include "simulator/replay/simulate.hpp"
#include "tests/support/nearly.hpp"
#include "tests/support/published_plan.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

namespace {

struct Span {
    double start, end;
    double seconds() const { return end - start; }
};

// Rows of a layer's forward in the order of start: one kind of op of one module.
std::vector<Span> spans(const moe::program::Timeline& timeline, moe::program::OpKind kind,
                        moe::program::Module module) {
    std::vector<Span> list;
    for (const moe::program::TimelineRow& row : timeline.rows)
        if (row.slot_kind == moe::plan::SlotKind::forward && row.layer == 5 && row.kind == kind && row.module == module)
            list.push_back({row.start, row.end});
    std::sort(list.begin(), list.end(), [](const Span& a, const Span& b) { return a.start < b.start; });
    return list;
}

} // namespace

TEST_CASE("a ring slower than its product is waited for, a faster one is hidden but for nothing") {
    moe::plan::Plan plan = published_plan("Llama3-8B", "h100", "bridge-26.04", 8192);
    plan.gpus = plan.tp = plan.edp = 4;
    plan.gbs = 1;
    plan.cuda_graph = moe::plan::CudaGraph::partial; // the host far ahead
    plan.tp_overlap = true;
    moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
    stack.costs.collective = 0.6; // between the work of QKV and that of FC1
    const moe::replay::Simulation simulation = moe::replay::simulate(plan, stack, true);
    // 2,048 tokens of 4,096 columns in BF16 per step over one NVLink.
    const double step = 2048.0 * 4096 * 2 / (450e9 * stack.costs.collective);
    for (const auto module : {moe::program::Module::attn_in, moe::program::Module::mlp}) {
        const std::vector<Span> ring = spans(simulation.timeline, moe::program::OpKind::ring_exchange, module);
        std::vector<Span> gemm = spans(simulation.timeline, moe::program::OpKind::gemm, module);
        REQUIRE(ring.size() == 3);
        REQUIRE(gemm.size() >= 4);
        gemm.resize(4);                                         // FC2's four pieces follow those of FC1
        CHECK(ring[0].seconds() == nearly(step).epsilon(0.25)); // latency and start beside the wire
        const double r = ring[0].seconds(), g = gemm[0].seconds();
        const double expected = r > g ? 3 * r + g : 4 * g;
        CHECK((r > g) == (module == moe::program::Module::attn_in)); // QKV is a quarter of FC1's work
        CHECK(gemm[3].end - gemm[0].start == nearly(expected).epsilon(1e-6));
    }
}
