// Reads a model's own balancing from its config.json.
#include "planner/plan/own_balance.hpp"

#include "planner/base/json_object.hpp"
#include "planner/model/model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

namespace moe::plan {
namespace {

constexpr double bias_rate = 0.001;
constexpr double most = 1e6;

// The object of the config that states a field: that of a language model within a larger one, or the whole.
std::optional<JsonObject> stating(const JsonObject& config, const char* field) {
    if (config.has(field)) return config;
    for (const char* part : {"text_config", "llm_config", "language_config"})
        if (config.is_object(part) && config.object(part).has(field)) return config.object(part);
    return std::nullopt;
}

struct Routers {
    int layers = 0, top_k = 0; // of MoE layers, MTP left aside
    bool biased = false;       // any has a selection bias
};

Routers routers_of(const model::Model& model) {
    Routers routers;
    for (const int kind : model.layers) {
        const std::optional<model::Moe>& moe = model.kinds[static_cast<std::size_t>(kind)].moe;
        if (!moe) continue;
        ++routers.layers;
        routers.top_k = std::max(routers.top_k, moe->top_k);
        routers.biased = routers.biased || moe->router.expert_bias;
    }
    return routers;
}

} // namespace

OwnBalance own_balance(const Plan& plan, const std::string& place, WantedBalance wanted) {
    OwnBalance own{plan.router, ""};
    RouterTraining& r = own.router;
    const Routers routers = routers_of(*plan.model);
    if (r.counts_load() || r.forced || r.load_balancing == LoadBalancing::sinkhorn || routers.layers == 0) return own;
    const JsonObject config = JsonObject::parse(plan.model->config_json, place);
    if (!wanted.aux_loss) {
        // As the caller has it.
    } else if (const auto in = stating(config, "router_aux_loss_coef")) {
        const double coefficient = in->number("router_aux_loss_coef", 0.0, most);
        r.aux_loss = coefficient * routers.top_k / routers.layers;
        own.said =
            fmt::format("router_aux_loss_coef {} as in transformers, a mean over layers: aux_loss {:.3g} in each",
                        coefficient, r.aux_loss);
    } else if (const auto alpha = stating(config, "aux_loss_alpha")) {
        r.aux_loss = alpha->number("aux_loss_alpha", 0.0, most);
        if (!alpha->boolean_or("seq_aux", true)) r.load_balancing = LoadBalancing::global;
        own.said = fmt::format("aux_loss_alpha {} in each layer as in DeepSeek's code and Megatron", r.aux_loss);
    }
    if (r.aux_loss == 0.0) {
        r.load_balancing = plan.router.load_balancing;
        own.said.clear();
    }
    if (r.aux_loss > 0.0) own.said += fmt::format(" ({})", to_string(r.load_balancing));
    if (wanted.bias_update && routers.biased && (plan.offload & offload::states) == 0 && !plan.lora.on()) {
        r.bias_update = bias_rate;
        own.said += fmt::format("{}selection bias moved by {} a step as in DeepSeek-V3", own.said.empty() ? "" : "; ",
                                bias_rate);
    }
    return own;
}

} // namespace moe::plan
