// Routers that send nearly all tokens to the same experts, told while a training goes on.
#pragma once

#include "engine/train/trainer.hpp"
#include "planner/model/model.hpp"

#include <map>
#include <string>
#include <vector>

namespace moe::tools {

// Watches the loads of all layers. A router has collapsed where its hottest expert has had at least 0.9 of the most
// that one can have (every token, which is experts / top_k times the mean) for ten steps in a row.
class CollapseWatch {
public:
    explicit CollapseWatch(const model::Model& model, double aux_loss = 0.0) : model_(model), aux_loss_(aux_loss) {}
    // A line for each layer whose router collapsed with this step; a layer is told once.
    std::vector<std::string> add(const train::StepResult& step);

private:
    double most(const train::RouterStep& router) const;

    const model::Model& model_;
    double aux_loss_;        // the plan's
    std::map<int, int> hot_; // steps in a row, by layer
};

} // namespace moe::tools
