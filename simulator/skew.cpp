// Turns skewed plans into plans of given loads and hands them to what prices those.
#include "simulator/skew.hpp"

#include <cmath>

namespace moe {
namespace {

class BalancedQuoter : public Quoter {
public:
    explicit BalancedQuoter(std::unique_ptr<Quoter> quoter) : quoter_(std::move(quoter)) {}
    int layers(const Plan& plan) override { return quoter_->layers(balanced(plan)); }
    int stages(const Plan& plan) override { return quoter_->stages(balanced(plan)); }
    Quote quote(int layers, int stages) override { return quoter_->quote(layers, stages); }
    double merged_seconds(const Plan& plan) override { return quoter_->merged_seconds(balanced(plan)); }
    double early_floor(const Plan& plan) override { return quoter_->early_floor(balanced(plan)); }
    int early_layers(const Plan& plan) override { return quoter_->early_layers(balanced(plan)); }
    int coarse_layers(const Plan& plan) override { return quoter_->coarse_layers(balanced(plan)); }
    double floor(int layers) override { return quoter_->floor(layers); }
    std::vector<double> slowness(int layers) override { return quoter_->slowness(layers); }
    double least_bytes(const Plan& plan) override { return quoter_->least_bytes(balanced(plan)); }
    double kept_bytes(const Plan& plan) override { return quoter_->kept_bytes(plan); }
    int placement(const Plan& plan) override { return quoter_->placement(plan); }
    void forget() override { quoter_->forget(); }

private:
    static Plan balanced(Plan plan) {
        plan.routing = Plan{}.routing;
        return plan;
    }
    std::unique_ptr<Quoter> quoter_;
};

// Loads between which others are interpolated: what a search works out per segment and load is worked out for few.
struct Bracket {
    double low, high;
    double share; // of `high`
};

Bracket bracket(double load) {
    constexpr double step = 1.2;
    if (load <= 1.0) return {1.0, 1.0, 0.0};
    const double low = std::pow(step, std::floor(std::log(load) / std::log(step))), high = low * step;
    return {low, high, (load - low) / (high - low)};
}

void blend(Estimate& low, const Estimate& high, double share) {
    const auto mix = [share](double& a, double b) { a += share * (b - a); };
    mix(low.step_seconds, high.step_seconds);
    Breakdown& b = low.breakdown;
    const Breakdown& other = high.breakdown;
    mix(b.compute, other.compute);
    mix(b.tensor, other.tensor);
    mix(b.context, other.context);
    mix(b.expert, other.expert);
    mix(b.pipeline, other.pipeline);
    mix(b.bubble, other.bubble);
    mix(b.data, other.data);
    mix(b.optimizer, other.optimizer);
    mix(b.recompute, other.recompute);
    mix(b.host, other.host);
}

} // namespace

SkewedEstimator::SkewedEstimator(std::shared_ptr<const Hardware> hardware, Stack stack, SkewPoint point)
    : fast_(std::move(hardware), std::move(stack)), point_(point) {}

double SkewedEstimator::memory_bytes(const Plan& plan) {
    if (!skewed(plan)) return fast_.memory_bytes(plan);
    return memory_at(plan, at(tables_.memory(plan), point_));
}

double SkewedEstimator::memory_at(const Plan& plan, double load) {
    const Bracket near = bracket(load);
    const double low = fast_.memory_bytes(at_load(plan, near.low, 0.0));
    if (!(near.share > 0.0)) return low;
    return low + near.share * (fast_.memory_bytes(at_load(plan, near.high, 0.0)) - low);
}

Estimate SkewedEstimator::estimate(const Plan& plan) {
    if (!skewed(plan)) return fast_.estimate(plan);
    const StepLoads loads = tables_.of(plan);
    const Bracket loads_near = bracket(at(loads.time, point_));
    Estimate e = fast_.estimate(at_load(plan, loads_near.low, loads.spread));
    if (loads_near.share > 0.0)
        blend(e, fast_.estimate(at_load(plan, loads_near.high, loads.spread)), loads_near.share);
    // The hottest rank changes from layer to layer, so that no rank fills up with the hottest layers' rows.
    if (!plan.hardware->cpu) e.memory_bytes = memory_at(plan, at(loads.memory, point_));
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
