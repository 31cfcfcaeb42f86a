// Turns skewed plans into plans of given loads and hands them to what prices those.
#include "simulator/skew.hpp"

namespace moe {
namespace {

class BalancedQuoter : public Quoter {
public:
    explicit BalancedQuoter(std::unique_ptr<Quoter> quoter) : quoter_(std::move(quoter)) {}
    int layers(const Plan& plan) override { return quoter_->layers(balanced(plan)); }
    int stages(const Plan& plan) override { return quoter_->stages(balanced(plan)); }
    Quote quote(int layers, int stages) override { return quoter_->quote(layers, stages); }
    double floor(int layers) override { return quoter_->floor(layers); }
    std::vector<double> burdens(int layers) override { return quoter_->burdens(layers); }
    double least_bytes(const Plan& plan) override { return quoter_->least_bytes(balanced(plan)); }
    int placement(const Plan& plan) override { return quoter_->placement(plan); }
    void forget() override { quoter_->forget(); }

private:
    static Plan balanced(Plan plan) {
        plan.routing = Plan{}.routing;
        return plan;
    }
    std::unique_ptr<Quoter> quoter_;
};

} // namespace

SkewedEstimator::SkewedEstimator(std::shared_ptr<const Hardware> hardware, Stack stack, SkewPoint point)
    : fast_(std::move(hardware), std::move(stack)), point_(point) {}

double SkewedEstimator::memory_bytes(const Plan& plan) {
    if (!skewed(plan)) return fast_.memory_bytes(plan);
    return fast_.memory_bytes(at_memory_load(plan, tables_.of(plan), point_));
}

Estimate SkewedEstimator::estimate(const Plan& plan) {
    if (!skewed(plan)) return fast_.estimate(plan);
    const StepLoads loads = tables_.of(plan);
    Estimate e = fast_.estimate(at_time_load(plan, loads, point_));
    // The hottest rank changes from layer to layer, so that no rank fills up with the hottest layers' rows.
    if (!plan.hardware->cpu) e.memory_bytes = fast_.memory_bytes(at_memory_load(plan, loads, point_));
    fill_rates(plan, e);
    return e;
}

std::unique_ptr<Quoter> SkewedEstimator::quoter() { return std::make_unique<BalancedQuoter>(fast_.quoter()); }

Skew skew_of(const Plan& plan, const Stack& stack, const Simulation& mean) {
    Skew skew;
    LoadTables tables;
    skew.loads = tables.of(plan);
    const auto at_point = [&](SkewPoint point) {
        return skewed(plan) && point != SkewPoint::mean ? simulate(plan, stack, false, point).estimate : mean.estimate;
    };
    const auto fill = [&](SkewPoint point, double Quantiles::*value) {
        const Estimate e = at_point(point);
        skew.step_seconds.*value = e.step_seconds;
        skew.tflops_per_gpu.*value = e.tflops_per_gpu;
        skew.memory_bytes.*value = e.memory_bytes;
    };
    fill(SkewPoint::mean, &Quantiles::mean);
    fill(SkewPoint::p50, &Quantiles::p50);
    fill(SkewPoint::p99, &Quantiles::p99);
    return skew;
}

} // namespace moe
