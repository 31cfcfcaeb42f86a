// Plans of models whose layers differ from each other are priced, by closed forms as by play.
#include "planner/model/families/load_model.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/pricing/fast_estimator.hpp"
#include "simulator/replay/simulate.hpp"
#include "tests/support/mixed_models.hpp"
#include "tests/support/nearly.hpp"
#include "tests/support/published_plan.hpp"

#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

using namespace moe;

TEST_CASE("models of mixed layers: closed forms and play agree in time within 3 %, in memory within 1 %") {
    std::vector<std::string> configs = small_mixed_models();
    configs.push_back(small_granite());
    for (const std::string& config : configs) {
        CAPTURE(config);
        for (const unsigned recomputed : {0U, plan::recompute::layernorm | plan::recompute::moe_act}) {
            plan::Plan plan = published_plan("Qwen3-30B-A3B", "h100", "bridge-26.06");
            plan.model = std::make_shared<const model::Model>(families::model_from_json(config, "config.json"));
            plan.gpus = plan.dp = plan.ep = 8;
            plan.edp = 1;
            plan.gbs = 64;
            plan.mbs = 2;
            plan.recompute = recomputed;
            REQUIRE(plan::check_plan(plan).message == "");
            const stack::Stack stack = stack::load_stack(plan.stack, *plan.hardware);
            pricing::FastEstimator estimator(plan.hardware, stack);
            const search::Estimate fast = estimator.estimate(plan);
            const search::Estimate played = replay::simulate(plan, stack, false).estimate;
            CHECK(fast.step_seconds == nearly(played.step_seconds).epsilon(0.03));
            CHECK(fast.memory_bytes == nearly(played.memory_bytes).epsilon(0.01));
            CHECK(played.step_seconds > 0.0);
        }
    }
}
