// Turns skewed plans into plans of given loads and hands them to what prices those.
#include "simulator/pricing/skewed_estimator.hpp"

#include "planner/machine/hardware.hpp"

#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace moe::pricing {
namespace {

// Loads in steps of half a percent: plans of a search whose loads are alike share what is worked out for one of them.
plan::Plan at_near_load(const plan::Plan& plan, double load, double spread) {
    return routing::at_load(plan, std::round(load * 200.0) / 200.0, spread);
}

// Steps are bounded at a load that none of theirs is below, memory at balanced routing: the hottest rank changes from
// layer to layer, so that no rank fills up as a step slows down. One bound model for each.
class SkewedBoundModel : public search::BoundModel {
public:
    SkewedBoundModel(std::unique_ptr<search::BoundModel> time, std::unique_ptr<search::BoundModel> memory,
                     routing::LoadTables& tables)
        : time_(std::move(time)), memory_(std::move(memory)), tables_(tables) {}
    int layer_costs(const plan::Plan& plan) override { return handle(plan, &search::BoundModel::layer_costs); }
    int stage_split(const plan::Plan& plan) override { return handle(plan, &search::BoundModel::stage_split); }
    int early_layer_costs(const plan::Plan& plan) override {
        return handle(plan, &search::BoundModel::early_layer_costs);
    }
    int near_layer_costs(const plan::Plan& plan) override {
        return handle(plan, &search::BoundModel::near_layer_costs);
    }
    int coarse_layer_costs(const plan::Plan& plan) override {
        return handle(plan, &search::BoundModel::coarse_layer_costs);
    }
    search::LowerBound bound(int layers, int stages) override {
        const Handles &l = of(layers), &s = of(stages);
        search::LowerBound bound = time_->bound(l.time, s.time);
        if (skewed_) bound.memory_bytes = memory_->bound(l.memory, s.memory).memory_bytes;
        return bound;
    }
    double merged_step_bound(const plan::Plan& plan) override {
        return at_time(plan, &search::BoundModel::merged_step_bound);
    }
    double early_step_bound(const plan::Plan& plan) override {
        return at_time(plan, &search::BoundModel::early_step_bound);
    }
    double step_bound(int layers) override { return time_->step_bound(of(layers).time); }
    std::vector<double> dominance_key(int layers) override { return time_->dominance_key(of(layers).time); }
    double least_bytes(const plan::Plan& plan) override { return memory_->least_bytes(plan); }
    double kept_bytes(const plan::Plan& plan) override { return memory_->kept_bytes(plan); }
    int placement(const plan::Plan& plan) override { return time_->placement(plan); }
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
    bool skews(const plan::Plan& plan) {
        if (plan.routing != routing_ || plan.model != model_) {
            routing_ = plan.routing;
            model_ = plan.model;
            skewed_ = routing::skewed(plan);
            loads_.clear();
        }
        return skewed_;
    }
    plan::Plan loaded(const plan::Plan& plan) {
        const auto [at, fresh] = loads_.try_emplace(plan.ep);
        if (fresh) at->second = tables_.least(plan);
        return at_near_load(plan, at->second.load, at->second.spread);
    }
    double at_time(const plan::Plan& plan, double (search::BoundModel::*ask)(const plan::Plan&)) {
        return skews(plan) ? (*time_.*ask)(loaded(plan)) : (*time_.*ask)(plan);
    }
    int handle(const plan::Plan& plan, int (search::BoundModel::*ask)(const plan::Plan&)) {
        if (skews(plan))
            handles_.push_back({(*time_.*ask)(loaded(plan)), (*memory_.*ask)(routing::at_load(plan, 1.0, 0.0))});
        else
            handles_.push_back({(*time_.*ask)(plan), -1});
        return static_cast<int>(handles_.size()) - 1;
    }

    std::unique_ptr<search::BoundModel> time_, memory_;
    routing::LoadTables& tables_;
    std::vector<Handles> handles_;               // handles of layers and of stages
    std::string routing_ = plan::Plan{}.routing; // routing of the last plan
    std::shared_ptr<const model::Model> model_;  // model of the last plan
    bool skewed_ = false;
    std::map<int, routing::LeastLoad> loads_; // loads by EP
};

} // namespace

SkewedEstimator::SkewedEstimator(std::shared_ptr<const machine::Hardware> hardware, stack::Stack stack,
                                 routing::SkewPoint point)
    : fast_(std::move(hardware), std::move(stack)), point_(point) {}

double SkewedEstimator::memory_bytes(const plan::Plan& plan) {
    if (!routing::skewed(plan)) return fast_.memory_bytes(plan);
    return fast_.memory_bytes(at_near_load(plan, routing::at(tables_.memory(plan), point_), 0.0));
}

search::Estimate SkewedEstimator::estimate(const plan::Plan& plan) { return at_point(plan, &FastEstimator::estimate); }
search::Estimate SkewedEstimator::play(const plan::Plan& plan) { return at_point(plan, &FastEstimator::play); }

// Prices the load of the event-driven tier: rows fill tiles and waves in steps, between which nothing is linear.
search::Estimate SkewedEstimator::at_point(const plan::Plan& plan,
                                           search::Estimate (FastEstimator::*price)(const plan::Plan&)) {
    if (!routing::skewed(plan)) return (fast_.*price)(plan);
    const routing::StepLoads loads = tables_.of(plan);
    search::Estimate e = (fast_.*price)(at_near_load(plan, routing::at(loads.time, point_), loads.spread));
    // The hottest rank changes from layer to layer, so that no rank fills up with the hottest layers' rows.
    if (!plan.hardware->cpu)
        e.memory_bytes = fast_.memory_bytes(at_near_load(plan, routing::at(loads.memory, point_), 0.0));
    replay::fill_rates(plan, e);
    return e;
}

std::unique_ptr<search::BoundModel> SkewedEstimator::bound_model() {
    return std::make_unique<SkewedBoundModel>(fast_.bound_model(), fast_.bound_model(), tables_);
}

Skew skew_of(const plan::Plan& plan, const stack::Stack& stack, const replay::Simulation& mean, int slots) {
    Skew skew;
    routing::LoadTables tables;
    skew.loads = tables.of(plan);
    const auto at_point = [&](routing::SkewPoint point) {
        return routing::skewed(plan) && point != routing::SkewPoint::mean
                   ? replay::simulate(plan, stack, false, point).estimate
                   : mean.estimate;
    };
    const auto fill = [&](routing::SkewPoint point, double routing::Quantiles::*value) {
        const search::Estimate e = at_point(point);
        skew.step_seconds.*value = e.step_seconds;
        skew.tflops_per_gpu.*value = e.tflops_per_gpu;
        skew.memory_bytes.*value = e.memory_bytes;
    };
    fill(routing::SkewPoint::mean, &routing::Quantiles::mean);
    fill(routing::SkewPoint::p50, &routing::Quantiles::p50);
    fill(routing::SkewPoint::p99, &routing::Quantiles::p99);
    skew.replication = replication_of(plan, stack, slots, [&stack](const plan::Plan& loaded) {
        return replay::simulate(loaded, stack, false).estimate;
    });
    return skew;
}

} // namespace moe::pricing
