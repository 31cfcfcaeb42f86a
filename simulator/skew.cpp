// Turns skewed plans into plans of given loads and hands them to what prices those.
#include "simulator/skew.hpp"

#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace moe {
namespace {

// Steps are quoted at a load that none of theirs is below, memory at balanced routing: the hottest rank changes from
// layer to layer, so that no rank fills up as a step slows down. One quoter for each.
class SkewedQuoter : public Quoter {
public:
    SkewedQuoter(std::unique_ptr<Quoter> time, std::unique_ptr<Quoter> memory, LoadTables& tables)
        : time_(std::move(time)), memory_(std::move(memory)), tables_(tables) {}
    int layers(const Plan& plan) override { return handle(plan, &Quoter::layers); }
    int stages(const Plan& plan) override { return handle(plan, &Quoter::stages); }
    int early_layers(const Plan& plan) override { return handle(plan, &Quoter::early_layers); }
    int coarse_layers(const Plan& plan) override { return handle(plan, &Quoter::coarse_layers); }
    Quote quote(int layers, int stages) override {
        const Handles &l = of(layers), &s = of(stages);
        Quote quote = time_->quote(l.time, s.time);
        if (skewed_) quote.memory_bytes = memory_->quote(l.memory, s.memory).memory_bytes;
        return quote;
    }
    double merged_seconds(const Plan& plan) override { return at_time(plan, &Quoter::merged_seconds); }
    double early_floor(const Plan& plan) override { return at_time(plan, &Quoter::early_floor); }
    double floor(int layers) override { return time_->floor(of(layers).time); }
    std::vector<double> slowness(int layers) override { return time_->slowness(of(layers).time); }
    double least_bytes(const Plan& plan) override { return memory_->least_bytes(plan); }
    double kept_bytes(const Plan& plan) override { return memory_->kept_bytes(plan); }
    int placement(const Plan& plan) override { return time_->placement(plan); }
    void forget() override {
        time_->forget();
        memory_->forget();
        handles_.clear();
    }

private:
    struct Handles {
        int time, memory;
    };
    const Handles& of(int handle) const { return handles_[static_cast<std::size_t>(handle)]; }
    bool skews(const Plan& plan) {
        if (plan.routing != routing_) {
            routing_ = plan.routing;
            skewed_ = skewed(plan);
            loads_.clear();
        }
        return skewed_;
    }
    Plan loaded(const Plan& plan) {
        const auto [at, fresh] = loads_.try_emplace(plan.ep);
        if (fresh) at->second = tables_.least(plan);
        return at_load(plan, at->second.load, at->second.spread);
    }
    double at_time(const Plan& plan, double (Quoter::*ask)(const Plan&)) {
        return skews(plan) ? (*time_.*ask)(loaded(plan)) : (*time_.*ask)(plan);
    }
    int handle(const Plan& plan, int (Quoter::*ask)(const Plan&)) {
        if (skews(plan))
            handles_.push_back({(*time_.*ask)(loaded(plan)), (*memory_.*ask)(at_load(plan, 1.0, 0.0))});
        else
            handles_.push_back({(*time_.*ask)(plan), -1});
        return static_cast<int>(handles_.size()) - 1;
    }

    std::unique_ptr<Quoter> time_, memory_;
    LoadTables& tables_;
    std::vector<Handles> handles_;         // of layers and of stages
    std::string routing_ = Plan{}.routing; // of the plans of the search
    bool skewed_ = false;
    std::map<int, LeastLoad> loads_; // by EP
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

std::unique_ptr<Quoter> SkewedEstimator::quoter() {
    return std::make_unique<SkewedQuoter>(fast_.quoter(), fast_.quoter(), tables_);
}

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
