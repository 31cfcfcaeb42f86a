// The bound model of estimators that have no closed form: it keeps plans and asks for their estimates.
#include "planner/machine/hardware.hpp"
#include "planner/search/search.hpp"

namespace moe::search {
namespace {

class PlainBoundModel : public BoundModel {
public:
    explicit PlainBoundModel(Estimator& estimator) : estimator_(estimator) {}

    int layer_costs(const plan::Plan& plan) override {
        layers_.push_back(plan);
        return static_cast<int>(layers_.size()) - 1;
    }
    int stage_split(const plan::Plan& plan) override {
        stages_.push_back(plan);
        return static_cast<int>(stages_.size()) - 1;
    }
    LowerBound bound(int layers, int stages) override {
        if (layers < 0) return {}; // Early and coarse handles have no costs here.
        plan::Plan plan = layers_[static_cast<std::size_t>(layers)];
        const plan::Plan& cut = stages_[static_cast<std::size_t>(stages)];
        plan.pp = cut.pp;
        plan.vpp = cut.vpp;
        plan.dp = cut.dp;
        plan.edp = cut.edp;
        plan.layout = cut.layout;
        plan.schedule = cut.schedule;
        plan.optimizer = cut.optimizer;
        const double bytes = estimator_.memory_bytes(plan);
        // A plan that does not fit need not be timed.
        if (bytes > plan.hardware->memory_bytes) return {0.0, bytes};
        return {estimator_.estimate(plan).step_seconds, bytes};
    }
    double merged_step_bound(const plan::Plan&) override { return 0.0; }
    double early_step_bound(const plan::Plan&) override { return 0.0; }
    int early_layer_costs(const plan::Plan&) override { return -1; }
    int near_layer_costs(const plan::Plan&) override { return -1; }
    int coarse_layer_costs(const plan::Plan&) override { return -1; }
    double step_bound(int) override { return 0.0; }
    // Nothing is known to be better than anything else.
    std::vector<double> dominance_key(int handle) override { return {1.0 * handle, -1.0 * handle}; }
    double least_bytes(const plan::Plan&) override { return 0.0; }
    double kept_bytes(const plan::Plan&) override { return 0.0; }
    int placement(const plan::Plan&) override { return 0; }
    void forget() override {
        layers_.clear();
        stages_.clear();
    }

private:
    Estimator& estimator_;
    std::vector<plan::Plan> layers_, stages_;
};

} // namespace

std::unique_ptr<BoundModel> Estimator::bound_model() { return std::make_unique<PlainBoundModel>(*this); }

} // namespace moe::search
