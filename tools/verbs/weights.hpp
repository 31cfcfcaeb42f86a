// Weights that a verb uses as they are, in ranks that take no step.
#pragma once

#include "engine/train/trainer.hpp"
#include "planner/plan/plan.hpp"
#include "tools/print/console.hpp"
#include "tools/verbs/verbs.hpp"

#include <cstdint>
#include <memory>

namespace moe::tools {

class UsedWeights {
public:
    // Finds the model of --model or --checkpoint. Throws Error (bad_input) where neither or both are given, and where
    // the folder holds no such thing.
    explicit UsedWeights(const WeightsOptions& options);

    const std::shared_ptr<const model::Model>& model() const { return model_; }
    // The most positions that the model's config states, `fallback` where it states none.
    std::int64_t positions(std::int64_t fallback) const;
    // One FP32 or BF16 rank with such a batch.
    plan::Plan plan(std::int64_t seq, std::int64_t gbs) const;
    // Ranks of the plan with the weights; what the folder holds beside them is told as a warning.
    std::unique_ptr<train::Trainer> ranks(const plan::Plan& plan, lower::ForwardOnly what, Console& console) const;

private:
    const WeightsOptions& options_;
    std::unique_ptr<weights::StoredCheckpoint> checkpoint_; // null: --model
    std::shared_ptr<const model::Model> model_;
};

} // namespace moe::tools
