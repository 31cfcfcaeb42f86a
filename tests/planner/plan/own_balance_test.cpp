// The balance that a model's config states, in the words of a plan.
#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/own_balance.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <string>

using namespace moe;
using Json = nlohmann::json;

namespace {

plan::Plan plan_for(const std::string& name, const Json& changed = Json::object()) {
    Json config = Json::parse(families::load_model(name).config_json);
    config.update(changed);
    plan::Plan plan;
    plan.model = std::make_shared<const model::Model>(families::model_from_json(config.dump(), name));
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("cpu-local"));
    plan.stack = "moe-plan";
    return plan;
}

} // namespace

TEST_CASE("transformers' coefficient is a mean over layers that a balanced router brings to top k") {
    plan::Plan plan = plan_for("Qwen3-30B-A3B", {{"router_aux_loss_coef", 0.001}}); // 48 layers, top 8
    const plan::OwnBalance own = plan::own_balance(plan, "here");
    CHECK(own.router.aux_loss == doctest::Approx(0.001 * 8 / 48));
    CHECK(own.router.bias_update == 0.0);
    CHECK(own.router.load_balancing == plan.router.load_balancing);
    CHECK(own.said.find("router_aux_loss_coef 0.001 as in transformers") == 0);
    CHECK(own.said.find("seq_aux_loss") != std::string::npos);
}

TEST_CASE("DeepSeek's coefficient is that of each layer, and a selection bias moves") {
    const plan::Plan plan = plan_for("DeepSeek-V3", {{"aux_loss_alpha", 0.0001}, {"seq_aux", true}});
    const plan::OwnBalance own = plan::own_balance(plan, "here");
    CHECK(own.router.aux_loss == 0.0001);
    CHECK(own.router.bias_update == 0.001);
    CHECK(own.router.load_balancing == plan::LoadBalancing::sequence);
    CHECK(own.said.find("aux_loss_alpha 0.0001 in each layer") == 0);
    CHECK(own.said.find("selection bias moved by 0.001 a step") != std::string::npos);
    const plan::Plan whole = plan_for("DeepSeek-V2", {{"aux_loss_alpha", 0.01}, {"seq_aux", false}});
    CHECK(plan::own_balance(whole, "here").router.load_balancing == plan::LoadBalancing::global);
    const plan::OwnBalance some = plan::own_balance(plan, "here", {false, true});
    CHECK(some.router.aux_loss == 0.0);
    CHECK(some.router.bias_update == 0.001);
}

TEST_CASE("what a plan or its model chooses stays") {
    const Json coefficient{{"router_aux_loss_coef", 0.02}};
    for (const auto& [field, value] : {std::pair{"aux_loss", "0.1"}, {"z_loss", "0.001"}, {"balance", "forced"}}) {
        CAPTURE(field);
        plan::Plan plan = plan_for("tiny-qwen3-moe", coefficient);
        plan::set_field(plan, field, value);
        const plan::OwnBalance own = plan::own_balance(plan, "here");
        CHECK(own.router == plan.router);
        CHECK(own.said.empty());
    }
    plan::Plan sinkhorn = plan_for("tiny-qwen3-moe", coefficient);
    sinkhorn.router.load_balancing = plan::LoadBalancing::sinkhorn; // has no loss
    CHECK(plan::own_balance(sinkhorn, "here").router == sinkhorn.router);
    for (const plan::Plan& plan :
         {plan_for("Llama3-8B", coefficient), plan_for("tiny-qwen3-moe", {{"router_aux_loss_coef", 0.0}}),
          plan_for("tiny-qwen3-moe", {{"router_aux_loss_coef", nullptr}})}) {
        const plan::OwnBalance own = plan::own_balance(plan, "here");
        CHECK(own.router == plan.router);
        CHECK(own.said.empty());
    }
    plan::Plan offloaded = plan_for("DeepSeek-V3");
    plan::set_field(offloaded, "offload", "optimizer");
    CHECK(plan::own_balance(offloaded, "here").router.bias_update == 0.0);
    plan::Plan adapted = plan_for("DeepSeek-V3");
    plan::set_field(adapted, "lora", "16");
    CHECK(plan::own_balance(adapted, "here").router.bias_update == 0.0);
}

TEST_CASE("a coefficient that is no number is refused by its field") {
    const plan::Plan plan = plan_for("tiny-qwen3-moe", {{"router_aux_loss_coef", "much"}});
    try {
        plan::own_balance(plan, "here");
        FAIL("not refused");
    } catch (const Error& error) {
        CHECK(std::string(error.what()).find("here: router_aux_loss_coef = \"much\"") == 0);
    }
}
