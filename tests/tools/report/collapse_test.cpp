// Collapsed routers: told once, when nearly all tokens have gone to the same expert for ten steps.
#include "planner/model/families/load_model.hpp"
#include "tools/report/collapse.hpp"

#include <doctest/doctest.h>

#include <string>
#include <vector>

namespace {

moe::train::StepResult step_of(std::vector<std::vector<std::int64_t>> loads) {
    moe::train::StepResult step;
    for (std::size_t layer = 0; layer < loads.size(); ++layer)
        step.routers.push_back({static_cast<int>(layer), 0.0, 0.0, std::move(loads[layer])});
    return step;
}

} // namespace

TEST_CASE("a router that collapsed is told once, with its layer and load") {
    const moe::model::Model model = moe::families::load_model("tiny-qwen3-moe"); // 8 experts, 2 for each token
    moe::tools::CollapseWatch watch(model);
    const std::vector<std::int64_t> even(8, 25), all{100, 100, 0, 0, 0, 0, 0, 0}, most{92, 8, 20, 20, 20, 20, 10, 10};
    for (int i = 0; i < 9; ++i) CHECK(watch.add(step_of({even, all})).empty());
    CHECK(watch.add(step_of({even, even})).empty()); // the row begins anew
    for (int i = 0; i < 9; ++i) CHECK(watch.add(step_of({most, all})).empty());
    const std::vector<std::string> lines = watch.add(step_of({most, all}));
    REQUIRE(lines.size() == 2);
    CHECK(lines[0].rfind("layer 0: its router has collapsed: one expert has 3.68 times", 0) == 0);
    CHECK(lines[1].find("4.00 times the mean load, of 4.00 at most") != std::string::npos);
    for (int i = 0; i < 20; ++i) CHECK(watch.add(step_of({most, all})).empty());
}

TEST_CASE("loads are no news where every token goes to every expert, or the model has no such layer") {
    moe::model::Model model = moe::families::load_model("tiny-qwen3-moe");
    for (moe::model::LayerKind& kind : model.kinds)
        if (kind.moe) kind.moe->top_k = kind.moe->experts;
    moe::tools::CollapseWatch watch(model);
    for (int i = 0; i < 20; ++i) CHECK(watch.add(step_of({std::vector<std::int64_t>(8, 25), {40, 0}})).empty());
}
