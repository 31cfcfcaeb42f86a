// Passages: the clocks of host and device through pieces of work in a row.
#include "simulator/replay/max_plus.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

namespace {

constexpr double never = moe::replay::MaxPlusMatrix::never;

// Two kernels of `device` seconds, each issued in `host` seconds; the second needs the neighbour's message. With
// `waits` the host issues the second when the first is through.
moe::replay::MaxPlusMatrix two_kernels(double host, double device, bool waits) {
    moe::replay::MaxPlusMatrix p;
    p.from_host =
        waits ? moe::replay::StreamClocks{device + host, 2.0 * device, never}
              : moe::replay::StreamClocks{2.0 * host, host + device + (device > host ? device - host : 0.0), never};
    p.from_device = {waits ? device + host : never, 2.0 * device, never};
    p.from_message = {never, device, never};
    return p;
}

} // namespace

TEST_CASE("a host that is ahead stays ahead, one that is late stays late") {
    const moe::replay::MaxPlusMatrix fast = two_kernels(1.0, 3.0, false), slow = two_kernels(5.0, 3.0, false);
    CHECK_FALSE(fast.waits());
    moe::replay::MaxPlusMatrix many_fast, many_slow;
    for (int i = 0; i < 10; ++i) {
        many_fast = many_fast.then(fast);
        many_slow = many_slow.then(slow);
    }
    const moe::replay::StreamClocks ahead = many_fast.after({}, never), late = many_slow.after({}, never);
    CHECK(ahead.device == nearly(60.0)); // the device sets the pace
    CHECK(ahead.host == nearly(20.0));
    CHECK(late.host == nearly(100.0)); // the host does
    CHECK(late.device == nearly(98.0));
    // The slow host is not late yet with a lead of 50 seconds.
    CHECK(many_slow.after({-50.0, 0.0, 0.0}, never).device == nearly(60.0));
}

TEST_CASE("a host that waits loses its lead, however long it was") {
    const moe::replay::MaxPlusMatrix p = two_kernels(1.0, 3.0, true);
    REQUIRE(p.waits());
    CHECK(p.after({-100.0, 0.0, 0.0}, never).host == nearly(4.0));
    CHECK(p.then(p).after({-100.0, 0.0, 0.0}, never).host == nearly(10.0));
}

TEST_CASE("only the first piece of a row waits for the neighbour's message") {
    const moe::replay::MaxPlusMatrix p = two_kernels(1.0, 3.0, false), both = p.then(p);
    CHECK(both.after({}, 2.0).device == nearly(12.0)); // there before it is needed
    CHECK(both.after({}, 7.0).device == nearly(16.0));
    const moe::replay::MaxPlusMatrix nothing;
    CHECK(nothing.then(p).after({}, 7.0).device == nearly(13.0)); // the empty work ends when the message comes
}
