// Takes from a plan what search takes from its user.
#include "simulator/published/recipe_request.hpp"

#include "planner/plan/plan_fields.hpp"

#include <string>

namespace moe::published {
namespace {

const char* const stated[] = {"routing",     "balance",      "load_balancing",  "aux_loss",         "z_loss",
                              "bias_update", "drop_policy",  "expert_capacity", "pad_to_capacity",  "fp8_scaling",
                              "bf16_layers", "gradients",    "deterministic",   "expert_precision", "input_jitter",
                              "drop_scope",  "indexer_loss", "indexer_stage"};

} // namespace

search::SearchRequest request_of(const plan::Plan& plan) {
    search::SearchRequest request;
    plan::Plan& base = request.base;
    base.model = plan.model;
    base.hardware = plan.hardware;
    base.stack = plan.stack;
    base.gpus = plan.gpus;
    base.gbs = plan.gbs;
    base.seq = plan.seq;
    request.precisions = {plan.precision};
    for (const char* field : stated) {
        const std::string text = plan::field_text(plan, field);
        if (text != plan::field_text(base, field)) request.fixed.emplace_back(field, text);
    }
    return request;
}

} // namespace moe::published
