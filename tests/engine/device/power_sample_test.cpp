// Readings of power and clocks, and their means.
#include "engine/device/power_sample.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

using namespace moe;

namespace {

device::PowerLog::Time after(double seconds) {
    return device::PowerLog::Time{} +
           std::chrono::duration_cast<device::PowerLog::Time::duration>(std::chrono::duration<double>(seconds));
}

} // namespace

TEST_CASE("draw: the mean is that of the last seconds, and nothing is said of less than one") {
    device::PowerLog log;
    CHECK(log.mean().seconds == 0.0);
    CHECK(log.due(after(0.0)));
    for (int i = 0; i <= 100; ++i) { // 100 W for five seconds, 700 W at half the clock for five
        const double t = 0.1 * i, joules = 10.0 + (t < 5.0 ? 100.0 * t : 500.0 + 700.0 * (t - 5.0));
        log.add(after(t), {joules, 700.0, t < 5.0 ? 2e9 : 1e9, 2e9});
        if (i == 9) CHECK(log.mean().seconds == 0.0);
        if (i == 20) CHECK(log.mean().watts == nearly(100.0));
    }
    CHECK_FALSE(log.due(after(10.1)));
    CHECK(log.due(after(10.3)));
    const device::MeanPower mean = log.mean();
    CHECK(mean.seconds == nearly(device::PowerLog::kept_seconds));
    CHECK(mean.watts == nearly(700.0));
    CHECK(mean.limit_watts == 700.0);
    CHECK(mean.clock_hz == nearly(1e9));
    CHECK(mean.top_clock_hz == 2e9);
}

TEST_CASE("draw: devices that say nothing leave nothing, of several the mean and the slowest clock count") {
    device::PowerLog log;
    for (const double t : {0.0, 2.0}) log.add(after(t), device::combined({{}}));
    CHECK(log.mean().seconds == 0.0);
    const device::PowerSample both = device::combined({{10.0, 700.0, 1.5e9, 2e9}, {30.0, 500.0, 1.2e9, 1.9e9}});
    CHECK(both.joules == 20.0);
    CHECK(both.limit_watts == 600.0);
    CHECK(both.clock_hz == 1.2e9);
    CHECK(both.top_clock_hz == 1.9e9);
    CHECK(device::combined({}).joules == 0.0);
}
