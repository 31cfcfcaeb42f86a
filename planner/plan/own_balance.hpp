// The balancing of experts that a model was published with, for plans that choose none.
#pragma once

#include "planner/plan/plan.hpp"

#include <string>

namespace moe::plan {

struct OwnBalance {
    RouterTraining router; // that of the plan, with what the model's own trainer adds
    std::string said;      // the quantities with their convention, "" where nothing is added
};

// What the plan's model states, over the tokens that the plan's load_balancing names unless said otherwise:
// - router_aux_loss_coef c, as transformers takes it (load_balancing_loss_func of modeling_mixtral.py): one mean over
//   the tokens of all MoE layers, which a balanced router of top k brings to k. A layer's own coefficient, by the form
//   of RouterTraining, is then c * k / layers.
// - aux_loss_alpha, as DeepSeek's own code takes it (modeling_deepseek.py of DeepSeek-V2): in every layer, over
//   the global batch where seq_aux is false. RouterTraining has the same form.
// - A selection bias moves by 0.001 per step (arXiv 2412.19437 section 4.2).
// A plan that chooses any of aux_loss, z_loss, bias_update and sinkhorn, or forces the choice, gets nothing; a plan
// whose optimizer is offloaded, or that trains adapters, gets no bias_update. Only quantities that are `wanted` are
// added.
struct WantedBalance {
    bool aux_loss = true, bias_update = true;
};
// Throws Error (bad_input) naming `place`, where the model's config stands, and the field whose value is senseless.
OwnBalance own_balance(const Plan& plan, const std::string& place, WantedBalance wanted = {});

} // namespace moe::plan
