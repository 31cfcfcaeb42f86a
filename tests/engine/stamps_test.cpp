// The cost of time stamps is taken out of recorded steps.
#include "engine/stamps.hpp"

#include <doctest/doctest.h>

using namespace moe;

TEST_CASE("stamps: ops lose a stamp each and add up to the step without stamps") {
    const StampClock clock({1.0, 3.0, 4.0}, 3.4);
    CHECK(clock.stamp_seconds() == doctest::Approx(0.2));
    CHECK(clock.removed_seconds() == doctest::Approx(0.6));
    CHECK(clock.without(0.0) == 0.0);
    CHECK(clock.without(1.0) == doctest::Approx(0.8));
    CHECK(clock.without(3.0) == doctest::Approx(2.6));
    CHECK(clock.without(4.0) == doctest::Approx(3.4));
    CHECK(clock.without(5.0) == doctest::Approx(4.4)); // behind the last op nothing is stamped
}

TEST_CASE("stamps: times of other streams keep their order between those of the first") {
    const StampClock clock({1.0, 1.1, 3.0}, 2.4);
    double last = 0.0;
    for (int i = 0; i <= 40; ++i) {
        const double time = clock.without(0.1 * i);
        CHECK(time >= last);
        CHECK(time <= 0.1 * i);
        last = time;
    }
}

TEST_CASE("stamps: an op shorter than a stamp keeps a tenth, and the sum is still right") {
    const StampClock clock({0.1, 2.1, 4.1}, 3.2);
    CHECK(clock.without(0.1) == doctest::Approx(0.01));
    CHECK(clock.without(4.1) == doctest::Approx(3.2).epsilon(1e-5));
}

TEST_CASE("stamps: nothing is taken out where the plain step is not known, or is not shorter") {
    for (const double plain : {0.0, 4.0, 5.0}) {
        const StampClock clock({1.0, 4.0}, plain);
        CHECK(clock.without(1.0) == 1.0);
        CHECK(clock.without(4.0) == 4.0);
        CHECK(clock.removed_seconds() == 0.0);
    }
    CHECK(StampClock({}, 1.0).without(2.0) == 2.0);
}
