// Whether two models are one: what is computed is the same, whatever their configs say or leave to defaults.
#pragma once

#include "planner/model/fwd.hpp"

namespace moe::model {

// Compares everything but names, the config's text and what the files hold beside the language model.
bool same_computation(const Model& a, const Model& b);

} // namespace moe::model
