// Bounds are multiplied by the factor that estimates are multiplied by: it is the same for all plans that share layers.
#include "simulator/published/corrected_estimator.hpp"

#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"

namespace moe::published {
namespace {

// Handles of layers are those of the model below, whose factors are kept by handle.
class CorrectedBoundModel : public search::BoundModel {
public:
    CorrectedBoundModel(std::unique_ptr<search::BoundModel> below, Corrector& corrector)
        : below_(std::move(below)), corrector_(corrector) {}

    int layer_costs(const plan::Plan& plan) override { return kept(plan, below_->layer_costs(plan)); }
    int early_layer_costs(const plan::Plan& plan) override { return kept(plan, below_->early_layer_costs(plan)); }
    int near_layer_costs(const plan::Plan& plan) override { return kept(plan, below_->near_layer_costs(plan)); }
    int coarse_layer_costs(const plan::Plan& plan) override { return kept(plan, below_->coarse_layer_costs(plan)); }
    int stage_split(const plan::Plan& plan) override { return below_->stage_split(plan); }
    search::LowerBound bound(int layers, int stages) override {
        search::LowerBound bound = below_->bound(layers, stages);
        bound.step_seconds *= factors_.at(layers);
        return bound;
    }
    double merged_step_bound(const plan::Plan& plan) override {
        return below_->merged_step_bound(plan) * corrector_.factor(plan);
    }
    double early_step_bound(const plan::Plan& plan) override {
        return below_->early_step_bound(plan) * corrector_.factor(plan);
    }
    double step_bound(int layers) override {
        const auto found = factors_.find(layers);
        return below_->step_bound(layers) * (found == factors_.end() ? 1.0 : found->second);
    }
    // Plans of another factor are compared by that as well.
    std::vector<double> dominance_key(int layers) override {
        std::vector<double> key = below_->dominance_key(layers);
        key.push_back(factors_.at(layers));
        return key;
    }
    double least_bytes(const plan::Plan& plan) override { return below_->least_bytes(plan); }
    double kept_bytes(const plan::Plan& plan) override { return below_->kept_bytes(plan); }
    int placement(const plan::Plan& plan) override { return below_->placement(plan); }
    void forget() override {
        below_->forget();
        factors_.clear();
    }

private:
    int kept(const plan::Plan& plan, int handle) {
        factors_[handle] = corrector_.factor(plan);
        return handle;
    }

    std::unique_ptr<search::BoundModel> below_;
    Corrector& corrector_;
    std::map<int, double> factors_;
};

} // namespace

const Correction* Corrector::of(const plan::Plan& plan) {
    if (!neighbours_) return nullptr;
    Key key{plan.model->name, plan.hardware->name, static_cast<int>(plan.precision), plan.gpus, plan.seq};
    const std::lock_guard lock(mutex_);
    auto found = known_.find(key);
    if (found == known_.end()) found = known_.emplace(std::move(key), neighbours_->of(workload_of(plan, stack_))).first;
    return &found->second;
}

double Corrector::factor(const plan::Plan& plan) {
    const Correction* const correction = of(plan);
    return correction == nullptr ? 1.0 : correction->factor();
}

search::Estimate Corrector::apply(const plan::Plan& plan, const search::Estimate& estimate) {
    const Correction* const correction = of(plan);
    return correction == nullptr ? estimate : corrected(estimate, *correction);
}

pricing::Skew Corrector::apply(const plan::Plan& plan, pricing::Skew skew) {
    const double times = factor(plan);
    for (double routing::Quantiles::*point :
         {&routing::Quantiles::mean, &routing::Quantiles::p50, &routing::Quantiles::p99}) {
        skew.step_seconds.*point *= times;
        skew.tflops_per_gpu.*point /= times;
    }
    if (skew.replication) skew.replication->estimate = apply(plan, skew.replication->estimate);
    return skew;
}

std::unique_ptr<search::BoundModel> CorrectedEstimator::bound_model() {
    return std::make_unique<CorrectedBoundModel>(estimator_.bound_model(), corrector_);
}

} // namespace moe::published
