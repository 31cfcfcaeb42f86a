// Lining up two timelines: sums by op kind against hand-made rows, and what is refused.
#include "tests/support/nearly.hpp"
#include "tools/report/comparison.hpp"

#include "planner/base/error.hpp"

#include <doctest/doctest.h>

#include <algorithm>

using namespace moe;
using namespace moe::tools;

namespace {

program::TimelineRow row(int rank, int op, program::OpKind kind, double start, double busy) {
    program::TimelineRow r;
    r.rank = rank;
    r.op = op;
    r.kind = kind;
    r.start = start;
    r.end = start + 2 * busy; // half of it waiting
    r.busy = busy;
    return r;
}

// Rank 0 stands for three ranks, rank 3 for itself.
program::Timeline predicted_timeline() {
    program::Timeline t;
    t.plan_json = "{}";
    t.ranks = {0, 3};
    t.pipeline_rank = {0, 1};
    t.represents = {3, 1};
    t.step_seconds = 10.0;
    t.tflops_per_gpu = 2.0;
    t.memory_gib = 4.0;
    t.rows = {row(0, 0, program::OpKind::gemm, 0.0, 1.0), row(0, 1, program::OpKind::add, 2.0, 0.5),
              row(3, 0, program::OpKind::gemm, 0.0, 3.0)};
    return t;
}

program::Timeline measured_timeline() {
    program::Timeline t = predicted_timeline();
    t.predicted = false;
    t.step_seconds = 8.0;
    t.tflops_per_gpu = 2.5;
    t.memory_gib = 4.5;
    t.ranks = {0, 1, 2, 3};
    t.pipeline_rank = {0, 0, 0, 1};
    t.represents = {1, 1, 1, 1};
    t.rows.clear();
    for (int rank = 0; rank < 3; ++rank) {
        t.rows.push_back(row(rank, 0, program::OpKind::gemm, 0.0, 2.0));
        t.rows.push_back(row(rank, 1, program::OpKind::add, 4.0, 0.25));
    }
    t.rows.push_back(row(3, 0, program::OpKind::gemm, 0.0, 2.0));
    return t;
}

} // namespace

TEST_CASE("sums by kind are means over the ranks that rows stand for") {
    const Comparison c = compare(predicted_timeline(), measured_timeline());
    REQUIRE(c.kinds.size() == 2);
    CHECK(c.kinds[0].kind == program::OpKind::gemm);
    CHECK(c.kinds[0].count == 4);
    CHECK(c.kinds[0].predicted == nearly((3 * 1.0 + 3.0) / 4));
    CHECK(c.kinds[0].measured == nearly(2.0));
    CHECK(c.kinds[1].kind == program::OpKind::add);
    CHECK(c.kinds[1].count == 3);
    CHECK(c.kinds[1].predicted == nearly(3 * 0.5 / 4));
    CHECK(c.kinds[1].measured == nearly(3 * 0.25 / 4));
    CHECK(c.error() == nearly(2.0 / 2.5 - 1));
    // Ranks 0 and 3 are in both: three ops line up, the furthest apart first.
    CHECK(c.matched == 3);
    REQUIRE(c.widest.size() == 3);
    CHECK(c.widest[2].measured.kind == program::OpKind::add);
    CHECK(c.widest[0].predicted.kind == program::OpKind::gemm);
}

TEST_CASE("timelines that do not belong together are refused") {
    const program::Timeline predicted = predicted_timeline(), measured = measured_timeline();
    CHECK_THROWS_AS(compare(measured, predicted), Error);
    CHECK_THROWS_AS(compare(predicted, predicted), Error);
    program::Timeline other = measured;
    other.plan_json = "{\"tp\": 2}";
    CHECK_THROWS_AS(compare(predicted, other), Error);
    other = measured;
    other.rows[0].kind = program::OpKind::rope;
    CHECK_THROWS_AS(compare(predicted, other), Error);
    other = measured;
    other.rows.pop_back();
    CHECK_THROWS_AS(compare(predicted, other), Error);
    other = measured;
    other.rows[0].rank = 77;
    CHECK_THROWS_AS(compare(predicted, other), Error);
}
