// Plans that a search finds for torchtitan and for AutoModel can be launched there as they are.
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/search/refined_search.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/pricing/fast_estimator.hpp"
#include "tests/support/draws.hpp"
#include "tools/launch/engine_launch.hpp"

#include <doctest/doctest.h>

#include <algorithm>

using namespace moe;

TEST_CASE("engines: what a search finds for torchtitan and AutoModel they can be told" * doctest::skip(sanitized())) {
    struct Asked {
        const char *stack, *model;
        int gpus;
        tools::EngineLaunch (*launch)(const plan::Plan&, const tools::Nodes&);
    };
    for (const Asked& asked : {Asked{"automodel", "Qwen3-30B-A3B", 64, tools::automodel_launch},
                               Asked{"automodel", "MiniMax-M2", 64, tools::automodel_launch},
                               Asked{"automodel", "Llama3-8B", 16, tools::automodel_launch},
                               Asked{"torchtitan", "Qwen3-30B-A3B", 64, tools::torchtitan_launch},
                               Asked{"torchtitan", "Llama3-8B", 16, tools::torchtitan_launch}}) {
        CAPTURE(asked.stack);
        CAPTURE(asked.model);
        search::SearchRequest request;
        plan::Plan& base = request.base;
        base.model = std::make_shared<const model::Model>(families::load_model(asked.model));
        base.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("h100"));
        const stack::Stack stack = stack::load_stack(asked.stack, *base.hardware);
        base.stack = stack.name;
        base.gpus = asked.gpus, base.gbs = 512, base.seq = 4096;
        request.precisions = {machine::Precision::bf16};
        request.threads = 2;
        pricing::FastEstimator estimator(base.hardware, stack);
        const search::SearchResult result = search::refined_search(request, stack, estimator);
        CHECK_FALSE(result.plans.empty());
        for (const auto& [plan, estimate] : result.plans) {
            CHECK(stack::check_stack(plan, stack).message == "");
            CHECK_NOTHROW(asked.launch(plan, {"job", asked.gpus / 8, 8}));
        }
        CHECK(std::any_of(result.pruned.begin(), result.pruned.end(), [&asked](const auto& reason) {
            return reason.first.starts_with(std::string(asked.stack) + ": ");
        }));
    }
}
