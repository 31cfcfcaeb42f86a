// The quoter of estimators that have no closed form: it keeps plans and asks for their estimates.
#include "planner/machine/hardware.hpp"
#include "planner/search/search.hpp"

namespace moe {
namespace {

class PlainQuoter : public Quoter {
public:
    explicit PlainQuoter(Estimator& estimator) : estimator_(estimator) {}

    int layers(const Plan& plan) override {
        layers_.push_back(plan);
        return static_cast<int>(layers_.size()) - 1;
    }
    int stages(const Plan& plan) override {
        stages_.push_back(plan);
        return static_cast<int>(stages_.size()) - 1;
    }
    Quote quote(int layers, int stages) override {
        if (layers < 0) return {}; // of early_layers() and coarse_layers()
        Plan plan = layers_[static_cast<std::size_t>(layers)];
        const Plan& cut = stages_[static_cast<std::size_t>(stages)];
        plan.pp = cut.pp;
        plan.vpp = cut.vpp;
        plan.dp = cut.dp;
        plan.edp = cut.edp;
        plan.layout = cut.layout;
        plan.schedule = cut.schedule;
        plan.optimizer = cut.optimizer;
        const double bytes = estimator_.memory_bytes(plan);
        // What does not fit need not be timed.
        if (bytes > plan.hardware->memory_bytes) return {0.0, bytes};
        return {estimator_.estimate(plan).step_seconds, bytes};
    }
    double merged_seconds(const Plan&) override { return 0.0; }
    double early_floor(const Plan&) override { return 0.0; }
    int early_layers(const Plan&) override { return -1; }
    int coarse_layers(const Plan&) override { return -1; }
    double floor(int) override { return 0.0; }
    // Nothing is known to be better than anything else.
    std::vector<double> slowness(int handle) override { return {1.0 * handle, -1.0 * handle}; }
    double least_bytes(const Plan&) override { return 0.0; }
    double kept_bytes(const Plan&) override { return 0.0; }
    int placement(const Plan&) override { return 0; }
    void forget() override {
        layers_.clear();
        stages_.clear();
    }

private:
    Estimator& estimator_;
    std::vector<Plan> layers_, stages_;
};

} // namespace

std::unique_ptr<Quoter> Estimator::quoter() { return std::make_unique<PlainQuoter>(*this); }

} // namespace moe
