// Residuals of runs near a workload correct its predictions: a Gaussian process over a few named features.
//
// log(predicted / measured) of a run is taken as a function g of its workload plus noise of the single run. g has mean
// 0 and the covariance deviation^2 exp(-d) of two workloads at distance d: a sum of what they differ in, see
// NeighbourModel. Rasmussen and Williams, Gaussian Processes for Machine Learning, chapter 2 has the formulas. What
// lies near known runs is corrected by them, what lies far from all keeps its prediction.
//
// The features are those of a request, not of a plan: every plan of one precision is corrected alike. The order of
// plans stays as physics has it, and lower bounds stay bounds.
#pragma once

#include "planner/plan/fwd.hpp"
#include "planner/stack/stack.hpp"
#include "planner/stack/workload.hpp"
#include "simulator/published/cholesky.hpp"
#include "simulator/published/interval.hpp"

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace moe::published {

// Distances of workloads by feature; the whole is their sum. `family` counts beside `model` where another model is of
// another architecture, as do `generation` beside `hardware` and `software` beside `stack`; `gpus` and `seq` count for
// each doubling.
enum class Feature : std::uint8_t { model, family, hardware, generation, precision, stack, software, gpus, seq };
inline constexpr std::size_t feature_count = 9;
const char* to_string(Feature feature);

// Quantiles (1 - interval_coverage) / 2 and their mirror of (log error - correction) / deviation, over left-out runs.
struct Spread {
    double low = 0.0, high = 0.0;
};

// How many runs lay within their intervals where the fit and the process had not seen them.
struct Coverage {
    double inside = 0.0, width = 0.0; // share of the runs; mean of high / low - 1
};
struct LeftOutCoverage {
    std::string left_out; // with the run: "row", "family", "system", "model", "system and release"
    Coverage all;
    std::map<std::string, Coverage> systems; // by hardware profile, of those with a spread of their own
};

// profiles/runs/neighbours.json, as tools/fit writes it.
struct NeighbourModel {
    double deviation = 0.0; // standard deviation of g
    // How often the variance of g that runs leave open counts in what remains: a fit is off by more without a whole
    // family than with its rows, from which the deviation is known.
    double unseen = 1.0;
    // Standard deviation of what remains beside these where no run of the system under its stack is known.
    double new_release = 0.0;
    std::array<double, feature_count> distance{};
    std::map<std::string, double> noise; // standard deviation of one run's log error, by tier
    double most = 0.0;                   // |log error| beyond which a run counts as one of that much
    Spread all, new_family, new_system;
    std::map<std::string, Spread> systems; // by hardware profile, of those with enough rows
    std::vector<LeftOutCoverage> coverage; // of the fitted runs, by what was left out
    std::string source;
};
NeighbourModel neighbour_model_from_json(const std::string& text, const std::string& place);
std::string to_json(const NeighbourModel& model);

// How many doublings lie between two counts, either above 0.
double doublings(double a, double b);

// The standard deviation of what remains of one run, where runs leave so much of g open; new_release: no run of the
// system under its stack is known.
double remaining(const NeighbourModel& model, double open_deviation, bool new_release);
// The spread of what remains for a workload: its system's own where there is one, wider for a family or a system of
// which no run is known.
Spread spread_of(const NeighbourModel& model, const stack::Workload& workload, bool new_family, bool new_system);

// d of two workloads.
double distance(const NeighbourModel& model, const stack::Workload& a, const stack::Workload& b);

struct Influence { // of one run on a correction
    std::string run_id;
    double log_error = 0.0; // of the run, log(predicted / measured)
    double weight = 0.0;    // by which it enters: the correction is the sum of weight * log_error
};
struct Correction {
    double log_error = 0.0; // expected log(predicted / true) of a plan of the workload
    double deviation = 0.0; // standard deviation of what remains, the single run's noise included
    Spread spread;          // of what remains, in units of `deviation`
    bool new_family = false, new_system = false, new_release = false;
    int rows = 0;                   // runs that it rests on
    std::vector<Influence> nearest; // a few, those of the largest part in log_error first
    // Seconds of a corrected step over those predicted.
    double factor() const;
};

class Neighbours {
public:
    Neighbours(NeighbourModel model, std::vector<stack::MeasuredRun> runs);
    // `without`: the id of a run that is taken as not known.
    Correction of(const stack::Workload& workload, const std::string& without = {}) const;
    // Covariance of g at two workloads, given the runs.
    double covariance(const stack::Workload& a, const stack::Workload& b) const;
    // With further runs; one of the same id takes a known run's place.
    Neighbours with(const std::vector<stack::MeasuredRun>& runs) const;
    const NeighbourModel& model() const { return model_; }

private:
    NeighbourModel model_;
    std::vector<stack::MeasuredRun> runs_;
    Vector errors_; // log errors within +-most
    Cholesky covariance_;
};

// The runs of profiles/runs/residuals.json, with the noise of their tiers.
std::vector<stack::MeasuredRun> measured_runs(const NeighbourModel& model, const std::vector<Residual>& residuals);

// What corrects plans of a stack: published runs and those that the stack's own file holds. Empty for the executable
// stack, whose errors the published ones are not, and where the profiles hold no model.
std::optional<Neighbours> load_neighbours(const stack::Stack& stack);

// Of the fitted runs, as profiles/runs/neighbours.json says; empty where there is none.
std::vector<LeftOutCoverage> left_out_coverage();

stack::Workload workload_of(const plan::Plan& plan, const stack::Stack& stack);

// The estimate with its step longer by the correction's factor, which is the part `neighbours` of its breakdown.
search::Estimate corrected(search::Estimate estimate, const Correction& correction);
// The interval around an estimate: of its correction where there is one, else of load_residuals().
IntervalResult interval_of(const plan::Plan& plan, const search::Estimate& estimate, bool executable,
                           const Correction* correction);

} // namespace moe::published
