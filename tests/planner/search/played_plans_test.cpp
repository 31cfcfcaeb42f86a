// Plans that are played: each distinct one once, and nothing for those that do not fit or have no price.
#include "planner/search/played_plans.hpp"

#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "tests/planner/search/small_space.hpp"

#include <doctest/doctest.h>

#include <atomic>

namespace moe {
namespace {

// Seconds are the micro-batch's size. A size of 3 does not fit, one of 5 has no price.
class Counted : public search::Estimator {
public:
    double memory_bytes(const plan::Plan& plan) override {
        return plan.mbs == 3 ? 2.0 * plan.hardware->memory_bytes : 1.0;
    }
    search::Estimate estimate(const plan::Plan& plan) override {
        ++calls;
        if (plan.mbs == 5) refuse("mbs 5: has no price");
        search::Estimate e;
        e.step_seconds = static_cast<double>(plan.mbs);
        return e;
    }
    std::atomic<int> calls = 0;
};

} // namespace

TEST_CASE("a plan that is reached twice is played once, within a batch and in a later one") {
    plan::Plan plan = small_space::small_request().base;
    const auto sized = [&plan](std::int64_t mbs) {
        plan.mbs = mbs;
        return plan;
    };
    Counted estimator;
    Workers workers(2);
    search::PlayedPlans played(estimator, workers);
    const auto first = played.of({sized(1), sized(2), sized(1), sized(3), sized(5)});
    CHECK(estimator.calls == 3);
    REQUIRE(first.size() == 5);
    REQUIRE((first[0] && first[1] && first[2]));
    CHECK(first[0]->step_seconds == 1.0);
    CHECK(first[1]->step_seconds == 2.0);
    CHECK(first[2]->step_seconds == 1.0);
    CHECK_FALSE(first[3]);
    CHECK_FALSE(first[4]);
    plan.capacity = 1.5; // A field that no ranking compares.
    const auto second = played.of({sized(2), sized(5)});
    plan.capacity = 0.0;
    const auto third = played.of({sized(2), sized(5)});
    CHECK(estimator.calls == 5);
    CHECK(second[0]->step_seconds == 2.0);
    CHECK(third[0]->step_seconds == 2.0);
    CHECK_FALSE(third[1]);
}

} // namespace moe
