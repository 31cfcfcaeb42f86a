// What changes no bit of a gradient or loss: recomputation, split backwards, the number of cores.
#include "tests/engine/train/parity.hpp"

#include <doctest/doctest.h>

using namespace moe;

namespace {

void check_gradients_equal(const Trained& got, const Trained& expected) {
    for (const auto& [name, gradient] : expected.gradients) {
        INFO(name);
        CHECK(got.gradients.at(name) == gradient);
    }
}

} // namespace

TEST_CASE("parity: what is recomputed gives the very same gradients") {
    const std::map<std::string, std::vector<const char*>> sets{
        {"qwen3", {"layernorm+moe_act", "core_attn", "moe", "full"}},
        {"qwen2", {"moe_act+core_attn", "shared_experts+moe", "full"}},
        {"deepseek3", {"mla_up_proj+mlp", "layernorm+mla_up_proj+moe_act+core_attn", "shared_experts", "full"}},
        {"llama", {"mlp+layernorm", "core_attn", "full"}},
    };
    for (const auto& [model, choices] : sets) {
        Fields base{{"tp", "2"}, {"pp", "2"}};
        base.emplace_back(model == "llama" ? "cp" : "ep", "2");
        const Trained expected = train_three(small_plan(model, model == "llama" ? 8 : 4, base));
        for (const char* set : choices) {
            INFO(model, " ", set);
            Fields fields = base;
            fields.emplace_back("recompute", set);
            const Trained got = train_three(small_plan(model, model == "llama" ? 8 : 4, fields));
            CHECK(got.losses == expected.losses);
            check_gradients_equal(got, expected);
        }
    }
}

TEST_CASE("parity: split backwards give the very same bits as whole ones") {
    const Fields base{{"pp", "2"}, {"tp", "2"}, {"ep", "2"}};
    const Trained expected = train_three(small_plan("deepseek3", 8, base));
    const std::vector<Fields> schedules{{{"schedule", "zero-bubble"}},
                                        {{"schedule", "zb-v"}, {"vpp", "2"}},
                                        {{"schedule", "dualpipe-v"}, {"vpp", "2"}},
                                        {{"schedule", "zero-bubble"}, {"recompute", "layernorm+moe_act"}}};
    for (const Fields& schedule : schedules) {
        Fields fields = base;
        fields.insert(fields.end(), schedule.begin(), schedule.end());
        INFO(words_of(fields));
        const Trained got = train_three(small_plan("deepseek3", 8, fields));
        CHECK(got.losses[0] == expected.losses[0]);
        check_gradients_equal(got, expected);
    }
}

TEST_CASE("parity: runs repeat bit for bit, whatever the number of cores") {
    const plan::Plan plan = small_plan("qwen3", 8, {{"tp", "2"}, {"ep", "4"}, {"pp", "2"}});
    std::vector<std::vector<double>> losses;
    for (const int permits : {1, 3, 8}) {
        train::TrainOptions options;
        options.permits = permits;
        train::Trainer trainer(plan, options);
        losses.emplace_back();
        for (int step = 0; step < 3; ++step) losses.back().push_back(trainer.step(made_up_tokens(61)).loss);
    }
    CHECK(losses[0] == losses[1]);
    CHECK(losses[0] == losses[2]);
}
