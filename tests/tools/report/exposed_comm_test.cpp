// Exposed communication of hand-made timelines.
#include "tests/support/nearly.hpp"
#include "tools/report/exposed_comm.hpp"

#include <doctest/doctest.h>

using namespace moe;

namespace {

program::TimelineRow row(int rank, program::OpKind kind, double start, double end) {
    program::TimelineRow r;
    r.rank = rank;
    r.kind = kind;
    r.start = start;
    r.end = end;
    return r;
}

} // namespace

TEST_CASE("exposed communication: what no other op of the rank covers, once where several run, mean over ranks") {
    program::Timeline t;
    CHECK(tools::exposed_communication(t) == 0.0);
    t.rows = {row(0, program::OpKind::gemm, 0.0, 2.0), row(0, program::OpKind::all_gather, 1.0, 4.0),
              row(0, program::OpKind::all_reduce, 3.0, 5.0), row(0, program::OpKind::add, 4.5, 6.0),
              row(0, program::OpKind::send, 7.0, 7.5)};
    CHECK(tools::exposed_communication(t) == nearly(2.5 + 0.5)); // 2 to 4.5, 7 to 7.5
    t.rows.push_back(row(1, program::OpKind::gemm, 0.0, 7.0));
    t.rows.push_back(row(1, program::OpKind::recv, 2.0, 6.0)); // hidden as a whole
    CHECK(tools::exposed_communication(t) == nearly(1.5));
}

TEST_CASE("exposed communication: copies from and to the host neither hide it nor are any") {
    using tools::SpanSort;
    const tools::SpanTotals totals = tools::totals_of({{0.0, 4.0, SpanSort::communication},
                                                       {1.0, 2.0, SpanSort::work},
                                                       {2.0, 5.0, SpanSort::copy},
                                                       {7.0, 8.0, SpanSort::copy}});
    CHECK(totals.exposed == nearly(3.0));
    CHECK(totals.busy == nearly(6.0));
    CHECK(tools::totals_of({}).busy == 0.0);
}
