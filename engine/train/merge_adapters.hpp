// Low-rank adapters as parts of the weights beside which they stand.
#pragma once

#include "engine/train/trainer.hpp"
#include "planner/plan/lora.hpp"

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace moe::train {

using WeightReader = std::function<std::vector<float>(const std::string& name)>;

// True for A and B of an adapter.
bool is_adapter(const std::string& parameter);
// A reader of W + alpha / rank * B A, summed in double precision, for weights [n, k] with an adapter among `shapes`,
// and of others as they are. `shapes` keeps the weights without their adapters.
WeightReader with_adapters_merged(const plan::Lora& lora, std::map<std::string, Trainer::Shape>& shapes,
                                  const WeightReader& read);

} // namespace moe::train
