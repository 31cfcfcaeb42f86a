// Samples of ops become calls: of one shape, or of like work where ranks disturb each other.
#include "engine/bench/measured_calls.hpp"
#include "planner/plan/plan.hpp"
#include "tests/planner/base/fault_of.hpp"

#include <doctest/doctest.h>

using namespace moe;

namespace {

using Calls = std::vector<std::tuple<double, double, std::vector<double>>>;

Calls told(const std::vector<machine::MeasuredCall>& calls) {
    Calls result;
    for (const machine::MeasuredCall& c : calls) result.emplace_back(c.work, c.seconds, c.sides);
    return result;
}

} // namespace

TEST_CASE("samples of one shape are one call, their mean, sorted by work") {
    const std::vector<machine::MeasuredCall> samples{
        {8.0, 3.0, {4.0, 2.0}}, {6.0, 1.0, {3.0, 2.0}}, {8.0, 5.0, {4.0, 2.0}}, {8.0, 1.0, {2.0, 4.0}}};
    CHECK(told(bench::calls_of(samples, true)) ==
          Calls{{6.0, 1.0, {3.0, 2.0}}, {8.0, 1.0, {2.0, 4.0}}, {8.0, 4.0, {4.0, 2.0}}});
}

TEST_CASE("a call has the mean clock of its samples, where all of them have one") {
    const std::vector<machine::MeasuredCall> samples{{6.0, 1.0, {3.0, 2.0}, 1.5e9},
                                                     {6.0, 2.0, {3.0, 2.0}, 1.7e9},
                                                     {8.0, 3.0, {4.0, 2.0}, 1.9e9},
                                                     {8.0, 4.0, {4.0, 2.0}, 0.0}};
    const std::vector<machine::MeasuredCall> calls = bench::calls_of(samples, true);
    REQUIRE(calls.size() == 2);
    CHECK(calls[0].clock_hz == 1.6e9);
    CHECK(calls[1].clock_hz == 0.0);
    const std::vector<machine::MeasuredCall> later = bench::with_later("gemm", calls, {{8.0, 3.0, {4.0, 2.0}, 1.8e9}});
    REQUIRE(later.size() == 2);
    CHECK(later[0].clock_hz == 1.6e9);
    CHECK(later[1].clock_hz == 1.8e9);
}

TEST_CASE("beside copies to the host only the copies have a time of their own") {
    const unsigned away = plan::offload::core_attn | plan::offload::moe_act;
    for (const program::OpKind copy : {program::OpKind::copy_to_host, program::OpKind::copy_from_host})
        CHECK(bench::has_own_time(copy, away));
    for (const program::OpKind op : {program::OpKind::gemm, program::OpKind::bias_add}) {
        CHECK(!bench::has_own_time(op, away));
        CHECK(bench::has_own_time(op, 0));
    }
}

TEST_CASE("samples of like work are one call without sides") {
    const std::vector<machine::MeasuredCall> samples{{100.0, 1.0, {4.0}}, {120.0, 3.0, {5.0}}, {126.0, 9.0, {6.0}}};
    CHECK(told(bench::calls_of(samples, false)) == Calls{{110.0, 2.0, {}}, {126.0, 9.0, {}}});
}

TEST_CASE("later calls stand for those of the same shape, or of like work, and join the others") {
    const std::vector<machine::MeasuredCall> shaped{{6.0, 1.0, {3.0, 2.0}}, {8.0, 4.0, {4.0, 2.0}}};
    CHECK(told(bench::with_later("gemm", shaped, {{8.0, 2.0, {4.0, 2.0}}, {8.0, 7.0, {2.0, 4.0}}})) ==
          Calls{{6.0, 1.0, {3.0, 2.0}}, {8.0, 7.0, {2.0, 4.0}}, {8.0, 2.0, {4.0, 2.0}}});
    const std::vector<machine::MeasuredCall> plain{{100.0, 1.0, {}}, {200.0, 2.0, {}}};
    CHECK(told(bench::with_later("add", plain, {{120.0, 5.0, {}}})) == Calls{{120.0, 5.0, {}}, {200.0, 2.0, {}}});
    CHECK(told(bench::with_later("add", {}, plain)) == told(plain));
    CHECK(fault_of([&] {
              bench::with_later("gemm", plain, shaped);
          }).find("calls of gemm have 0 sides in the profile and 2") != std::string::npos);
}
