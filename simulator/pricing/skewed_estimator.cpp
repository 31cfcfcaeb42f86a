// Turns skewed plans into plans of given loads and hands them to what prices those.
#include "simulator/pricing/skewed_estimator.hpp"

#include "planner/machine/hardware.hpp"

#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace moe {
namespace {

// Loads in steps of half a percent: plans of a search whose loads are alike share what is worked out for one of them.
Plan at_near_load(const Plan& plan, double load, double spread) {
    return at_load(plan, std::round(load * 200.0) / 200.0, spread);
}

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
        if (plan.routing != routing_ || plan.model != model_) {
            routing_ = plan.routing;
            model_ = plan.model;
            skewed_ = skewed(plan);
            loads_.clear();
        }
        return skewed_;
    }
    Plan loaded(const Plan& plan) {
        const auto [at, fresh] = loads_.try_emplace(plan.ep);
        if (fresh) at->second = tables_.least(plan);
        return at_near_load(plan, at->second.load, at->second.spread);
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
    std::string routing_ = Plan{}.routing; // of the last plan, as
    std::shared_ptr<const Model> model_;   // this is
    bool skewed_ = false;
    std::map<int, LeastLoad> loads_; // by EP
};

} // namespace

SkewedEstimator::SkewedEstimator(std::shared_ptr<const Hardware> hardware, Stack stack, SkewPoint point)
    : fast_(std::move(hardware), std::move(stack)), point_(point) {}

double SkewedEstimator::memory_bytes(const Plan& plan) {
    if (!skewed(plan)) return fast_.memory_bytes(plan);
    return fast_.memory_bytes(at_near_load(plan, at(tables_.memory(plan), point_), 0.0));
}

Estimate SkewedEstimator::estimate(const Plan& plan) { return at_point(plan, &FastEstimator::estimate); }
Estimate SkewedEstimator::play(const Plan& plan) { return at_point(plan, &FastEstimator::play); }

// At the load of the event-driven tier: rows fill tiles and waves in steps, between which nothing is linear.
Estimate SkewedEstimator::at_point(const Plan& plan, Estimate (FastEstimator::*price)(const Plan&)) {
    if (!skewed(plan)) return (fast_.*price)(plan);
    const StepLoads loads = tables_.of(plan);
    Estimate e = (fast_.*price)(at_near_load(plan, at(loads.time, point_), loads.spread));
    // The hottest rank changes from layer to layer, so that no rank fills up with the hottest layers' rows.
    if (!plan.hardware->cpu) e.memory_bytes = fast_.memory_bytes(at_near_load(plan, at(loads.memory, point_), 0.0));
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
