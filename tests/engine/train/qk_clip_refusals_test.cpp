// QK-clip at its edges: logits that are not finite, layers without any, and what is refused by option and reason.
#include "engine/train/qk_clip.hpp"

#include "engine/backends/backends.hpp"
#include "engine/ops/backend.hpp"
#include "planner/base/error.hpp"
#include "planner/model/model.hpp"
#include "tests/engine/base/refusals.hpp"
#include "tests/engine/train/parity.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

using namespace moe;

TEST_CASE("qk-clip: logits that are not finite scale nothing, and neither do layers without logits") {
    const auto model = small_model("deepseek3");
    const float most = std::numeric_limits<float>::infinity();
    const std::vector<float> odd{most, -most, std::nanf(""), 0.5f, -3.0f, 1.0f, 1.0f, 1.0f};
    CHECK(train::clipping({1.0, 0.5}, *model, {odd, odd, odd, odd}).factors.empty());
    CHECK(train::clipping({1.0, 0.5}, *model, {}).heads == 0);
    const train::Clipping one = train::clipping({1.0, 0.5}, *model, {{}, {0, 4, 0, 0, 0, 0, 0, 0}});
    CHECK(one.heads == 1);
    REQUIRE(one.factors.size() == 2);
    const std::vector<float>& q = one.factors.at("model.layers.1.self_attn.q_b_proj.weight");
    CHECK(q[11] == 1.0f);
    CHECK(q[12] == 0.5f);
    CHECK(q[19] == 0.5f);
    CHECK(q[20] == 0.25f); // the part that turns
    CHECK(q[23] == 0.25f);
    CHECK(q[24] == 1.0f);
}

TEST_CASE("qk-clip is refused where it cannot be, by the option and the reason") {
    const auto refusal = [](const plan::Plan& plan, const train::QkClip& clip, const train::WeightRules& rules = {},
                            const ops::Backend* table = nullptr) {
        return message([&] {
            train::TrainOptions options;
            options.qk_clip = clip;
            options.rules = rules;
            options.table = table;
            train::Trainer trainer(plan, options);
        });
    };
    const plan::Plan plain = small_plan("mixtral", 1);
    CHECK(refusal(plain, {100.0, 0.5}) == "no error");
    CHECK(mentions(refusal(plain, {-1.0, 0.5}), "--qk-clip -1: must be above 0, or 0 (off)"));
    CHECK(mentions(refusal(plain, {1.0, 1.5}), "--qk-clip-alpha 1.5: must be between 0 and 1"));
    CHECK(mentions(refusal(small_plan("qwen3", 1), {100.0, 0.5}), "--qk-clip 100: layer 0 of "));
    CHECK(mentions(refusal(small_plan("olmoe", 1), {100.0, 0.5}), "normalizes its queries and keys"));
    CHECK(mentions(refusal(small_plan("dbrx", 1), {100.0, 0.5}), "cuts its queries and keys"));
    CHECK(mentions(refusal(small_plan("mixtral", 1, {{"lora", "4"}}), {100.0, 0.5}), "which lora = 4"));
    CHECK(mentions(refusal(plain, {100.0, 0.5}, {{"layers.2"}, {}}),
                   "--qk-clip 100: scales model.layers.2.self_attn.q_proj.weight, which --freeze layers.2 keeps"));
    CHECK(mentions(
        refusal(small_plan(small_model("nemotronh", {{"hybrid_override_pattern", "\"M-M-\""}}), 1, {}), {100.0, 0.5}),
        "has no attention with logits of queries and keys"));
    ops::Backend silent = backends::backend_named("cpu");
    silent.name = "silent";
    silent.tells_logits = false;
    CHECK(mentions(refusal(plain, {100.0, 0.5}, {}, &silent),
                   "--qk-clip 100: attention of the silent back end does not tell its largest logits"));
    ops::Backend dense = backends::backend_named("cpu");
    dense.name = "dense";
    dense.tells_picked_logits = false;
    CHECK(refusal(plain, {100.0, 0.5}, {}, &dense) == "no error");
    const std::string picked = refusal(small_plan("deepseek32", 1), {100.0, 0.5}, {}, &dense);
    CAPTURE(picked);
    CHECK(mentions(picked, "--qk-clip 100: layer 0 of "));
    CHECK(mentions(picked, "attends to keys that an indexer picks, of which the dense back end does not tell the "
                           "largest logits, --backend cpu does"));
}
