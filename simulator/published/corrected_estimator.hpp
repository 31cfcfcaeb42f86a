// An estimator whose prices are corrected by the residuals of runs nearby; so are its bounds.
#pragma once

#include "planner/search/pricing.hpp"
#include "simulator/pricing/skewed_estimator.hpp"
#include "simulator/published/neighbours.hpp"

#include <map>
#include <mutex>
#include <optional>
#include <tuple>

namespace moe::published {

// Corrections of the plans of one stack, each worked out once. Thread-safe.
class Corrector {
public:
    // No neighbours: corrects nothing.
    Corrector(const stack::Stack& stack, std::optional<Neighbours> neighbours)
        : stack_(stack), neighbours_(std::move(neighbours)) {}
    // Of load_neighbours(), or of none where `on` is false.
    Corrector(const stack::Stack& stack, bool on)
        : Corrector(stack, on ? load_neighbours(stack) : std::optional<Neighbours>()) {}

    // nullptr where nothing is corrected; valid as long as the corrector.
    const Correction* of(const plan::Plan& plan);
    double factor(const plan::Plan& plan); // 1 where nothing is corrected
    search::Estimate apply(const plan::Plan& plan, const search::Estimate& estimate);
    // Step times and rates, at every point of the skew.
    pricing::Skew apply(const plan::Plan& plan, pricing::Skew skew);

private:
    using Key = std::tuple<std::string, std::string, int, int, std::int64_t>; // model, machine, precision, gpus, seq
    const stack::Stack stack_;
    const std::optional<Neighbours> neighbours_;
    std::mutex mutex_;
    std::map<Key, Correction> known_;
};

// Both must outlive it.
class CorrectedEstimator : public search::Estimator {
public:
    CorrectedEstimator(search::Estimator& estimator, Corrector& corrector)
        : estimator_(estimator), corrector_(corrector) {}
    double memory_bytes(const plan::Plan& plan) override { return estimator_.memory_bytes(plan); }
    search::Estimate estimate(const plan::Plan& plan) override {
        return corrector_.apply(plan, estimator_.estimate(plan));
    }
    search::Estimate play(const plan::Plan& plan) override { return corrector_.apply(plan, estimator_.play(plan)); }
    std::unique_ptr<search::BoundModel> bound_model() override;

private:
    search::Estimator& estimator_;
    Corrector& corrector_;
};

} // namespace moe::published
