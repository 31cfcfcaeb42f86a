// The cost of time stamps is taken out of recorded steps.
#include "engine/run/stamps.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

using namespace moe;

TEST_CASE("stamps: ops lose a stamp each and add up to the step without stamps") {
    const run::EventClock clock({1.0, 3.0, 4.0}, 3.4, 0.2);
    CHECK(clock.event_overhead() == nearly(0.2));
    CHECK(clock.removed_seconds() == nearly(0.6));
    CHECK(clock.without(0.0) == 0.0);
    CHECK(clock.without(1.0) == nearly(0.8));
    CHECK(clock.without(3.0) == nearly(2.6));
    CHECK(clock.without(4.0) == nearly(3.4));
    CHECK(clock.without(5.0) == nearly(4.4)); // behind the last op nothing is stamped
}

// A step of `count` ops of equal length, and what a recorded one takes.
run::EventClock steady(int count, double plain, double recorded, double usual) {
    std::vector<double> ends;
    for (int i = 1; i <= count; ++i) ends.push_back(recorded * i / count);
    return {std::move(ends), plain, usual};
}

TEST_CASE("stamps: a step of many short ops tells what they cost, one of long ops does not") {
    // 1,000 ops of 10 us, 5 us longer each: nothing but stamps can do that.
    const run::EventClock many = steady(1000, 10e-3, 15e-3, 4e-6);
    CHECK(many.event_overhead() == nearly(5e-6).epsilon(0.02));
    // 100 ops of 10 ms in a step that is 1 % longer: stamps of 0.1 ms are not seen elsewhere, slow steps are.
    const run::EventClock few = steady(100, 1.0, 1.01, 4e-6);
    CHECK(few.event_overhead() == nearly(4e-6).epsilon(0.01));
    for (const run::EventClock* clock : {&many, &few}) CHECK(clock->event_overhead() > 4e-6);
    CHECK(few.without(1.01) == nearly(1.0));
    CHECK(many.without(15e-3) == nearly(10e-3));
    // A quick one is stretched in the same way.
    CHECK(steady(100, 1.0, 0.99, 4e-6).without(0.495) == nearly(0.5));
}

TEST_CASE("stamps: times of other streams keep their order between those of the first") {
    const run::EventClock clock({1.0, 1.1, 3.0}, 2.4, 0.2);
    double last = 0.0;
    for (int i = 0; i <= 40; ++i) {
        const double time = clock.without(0.1 * i);
        CHECK(time >= last);
        CHECK(time <= 0.1 * i);
        last = time;
    }
}

TEST_CASE("stamps: an op shorter than a stamp keeps a tenth, and the sum is still right") {
    const run::EventClock clock({0.1, 2.1, 4.1}, 3.2, 0.3);
    CHECK(clock.without(0.1) < 0.02);
    CHECK(clock.without(0.1) > 0.0);
    CHECK(clock.without(4.1) == nearly(3.2).epsilon(1e-5));
}

TEST_CASE("stamps: nothing is taken out where the plain step is not known") {
    const run::EventClock clock({1.0, 4.0}, 0.0, 0.2);
    CHECK(clock.without(1.0) == 1.0);
    CHECK(clock.without(4.0) == 4.0);
    CHECK(clock.removed_seconds() == 0.0);
    CHECK(run::EventClock({}, 1.0, 0.2).without(2.0) == 2.0);
}
