// Conditions the process on runs, and applies what it expects to estimates.
#include "simulator/published/neighbours.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/stack/plan_words.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>

namespace moe::published {
namespace {

constexpr std::size_t shown_runs = 3; // runs that a correction names

double prior(const NeighbourModel& model, const stack::Workload& a, const stack::Workload& b) {
    return model.deviation * model.deviation * std::exp(-distance(model, a, b));
}

Cholesky decomposed(const NeighbourModel& model, const std::vector<stack::MeasuredRun>& runs) {
    std::vector<double> lower;
    lower.reserve(runs.size() * (runs.size() + 1) / 2);
    for (std::size_t i = 0; i < runs.size(); ++i) {
        for (std::size_t j = 0; j <= i; ++j) lower.push_back(prior(model, runs[i].workload, runs[j].workload));
        lower.back() += runs[i].noise * runs[i].noise;
    }
    return Cholesky(std::move(lower));
}

void widen(Spread& spread, const Spread& other) {
    spread.low = std::min(spread.low, other.low);
    spread.high = std::max(spread.high, other.high);
}

} // namespace

double doublings(double a, double b) { return std::abs(std::log2(a / b)); }

double distance(const NeighbourModel& model, const stack::Workload& a, const stack::Workload& b) {
    const auto of = [&model](Feature feature) { return model.distance[static_cast<std::size_t>(feature)]; };
    double sum = of(Feature::gpus) * doublings(a.gpus, b.gpus) + of(Feature::seq) * doublings(a.seq, b.seq);
    if (a.model != b.model) sum += of(Feature::model);
    if (a.family != b.family) sum += of(Feature::family);
    if (a.hardware != b.hardware) sum += of(Feature::hardware);
    if (a.generation != b.generation) sum += of(Feature::generation);
    if (a.precision != b.precision) sum += of(Feature::precision);
    if (a.stack != b.stack) sum += of(Feature::stack);
    if (a.software != b.software) sum += of(Feature::software);
    return sum;
}

double remaining(const NeighbourModel& model, double open_deviation, bool new_release) {
    return std::hypot(std::sqrt(model.unseen) * open_deviation, model.noise.at("A"),
                      new_release ? model.new_release : 0.0);
}

Spread spread_of(const NeighbourModel& model, const stack::Workload& workload, bool new_family, bool new_system) {
    const auto own = model.systems.find(workload.hardware);
    Spread spread = own == model.systems.end() ? model.all : own->second;
    if (new_family) widen(spread, model.new_family);
    if (new_system) widen(spread, model.new_system);
    return spread;
}

double Correction::factor() const { return std::exp(log_error); }

Neighbours::Neighbours(NeighbourModel model, std::vector<stack::MeasuredRun> runs)
    : model_(std::move(model)), runs_(std::move(runs)), covariance_(decomposed(model_, runs_)) {
    for (const stack::MeasuredRun& run : runs_) errors_.push_back(std::clamp(run.log_error, -model_.most, model_.most));
}

Neighbours Neighbours::with(const std::vector<stack::MeasuredRun>& runs) const {
    std::vector<stack::MeasuredRun> all = runs;
    for (const stack::MeasuredRun& known : runs_)
        if (std::none_of(runs.begin(), runs.end(), [&](const auto& run) { return run.run_id == known.run_id; }))
            all.push_back(known);
    return Neighbours(model_, std::move(all));
}

double Neighbours::covariance(const stack::Workload& a, const stack::Workload& b) const {
    Vector to_a, to_b;
    for (const stack::MeasuredRun& run : runs_) {
        to_a.push_back(prior(model_, a, run.workload));
        to_b.push_back(prior(model_, b, run.workload));
    }
    const Vector weights = covariance_.solve(std::move(to_b));
    return prior(model_, a, b) - std::inner_product(to_a.begin(), to_a.end(), weights.begin(), 0.0);
}

Correction Neighbours::of(const stack::Workload& workload, const std::string& without) const {
    Vector near;
    for (const stack::MeasuredRun& run : runs_) near.push_back(prior(model_, workload, run.workload));
    Vector weights = covariance_.solve(near);
    for (std::size_t i = 0; i < runs_.size(); ++i) {
        if (without.empty() || runs_[i].run_id != without) continue;
        // The weights of the others without it: its own is taken to 0 along its column of the inverse.
        Vector unit(runs_.size(), 0.0);
        unit[i] = 1.0;
        const Vector column = covariance_.solve(std::move(unit));
        const double share = weights[i] / column[i];
        for (std::size_t j = 0; j < weights.size(); ++j) weights[j] -= share * column[j];
    }
    Correction correction;
    correction.new_family = correction.new_system = correction.new_release = true;
    double known = 0.0;
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < runs_.size(); ++i) {
        if (!without.empty() && runs_[i].run_id == without) continue;
        ++correction.rows;
        correction.log_error += weights[i] * errors_[i];
        known += weights[i] * near[i];
        const stack::Workload& known_run = runs_[i].workload;
        const bool same_system = known_run.hardware == workload.hardware;
        correction.new_family = correction.new_family && known_run.family != workload.family;
        correction.new_system = correction.new_system && !same_system;
        correction.new_release = correction.new_release && !(same_system && known_run.stack == workload.stack);
        order.push_back(i);
    }
    const double open = std::sqrt(std::max(0.0, model_.deviation * model_.deviation - known));
    correction.deviation = remaining(model_, open, correction.new_release);
    correction.spread = spread_of(model_, workload, correction.new_family, correction.new_system);
    const auto part = [&](std::size_t i) { return std::abs(weights[i] * errors_[i]); };
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return part(a) > part(b); });
    order.resize(std::min(order.size(), shown_runs));
    for (const std::size_t i : order) correction.nearest.push_back({runs_[i].run_id, errors_[i], weights[i]});
    return correction;
}

std::vector<stack::MeasuredRun> measured_runs(const NeighbourModel& model, const std::vector<Residual>& residuals) {
    std::vector<stack::MeasuredRun> runs;
    for (const Residual& r : residuals) {
        const auto noise = model.noise.find(r.tier);
        if (noise == model.noise.end())
            refuse("profiles/runs/residuals.json: {}: no noise of tier {}", r.run_id, r.tier);
        runs.push_back({r.run_id, r.workload, r.fitted, noise->second});
    }
    return runs;
}

std::optional<Neighbours> load_neighbours(const stack::Stack& stack) {
    const std::string folder = profiles_folder() + "/runs";
    const std::string path = folder + "/neighbours.json", residuals = folder + "/residuals.json";
    if (stack.executable || !std::filesystem::exists(path) || !std::filesystem::exists(residuals)) return std::nullopt;
    const NeighbourModel model = neighbour_model_from_json(read_file(path), path);
    Neighbours known(model, measured_runs(model, residuals_from_json(read_file(residuals), residuals)));
    return stack.anchors.empty() ? known : known.with(stack.anchors);
}

std::vector<LeftOutCoverage> left_out_coverage() {
    const std::string path = profiles_folder() + "/runs/neighbours.json";
    if (!std::filesystem::exists(path)) return {};
    return neighbour_model_from_json(read_file(path), path).coverage;
}

stack::Workload workload_of(const plan::Plan& plan, const stack::Stack& stack) {
    stack::Workload w;
    w.model = plan.model->name;
    w.family = plan.model->architecture;
    w.hardware = stack::plan_word(plan, "hardware");
    w.generation = stack::plan_word(plan, "hardware.generation");
    w.precision = machine::to_string(plan.precision);
    w.stack = stack.name.substr(0, stack.name.find(','));
    w.software = stack.published.empty() ? w.stack : stack.published.front().source;
    w.gpus = plan.gpus;
    w.seq = static_cast<double>(plan.seq);
    return w;
}

search::Estimate corrected(search::Estimate estimate, const Correction& correction) {
    const double factor = correction.factor(), before = estimate.step_seconds;
    estimate.step_seconds *= factor;
    estimate.breakdown.neighbours += estimate.step_seconds - before;
    estimate.tflops_per_gpu /= factor;
    estimate.tokens_per_second_per_gpu /= factor;
    return estimate;
}

IntervalResult interval_of(const plan::Plan& plan, const search::Estimate& estimate, bool executable,
                           const Correction* correction) {
    const bool new_stack = is_new_stack(plan);
    IntervalResult of_residuals = correction == nullptr || new_stack
                                      ? interval_of(plan, estimate, load_residuals(plan, executable), new_stack)
                                      : IntervalResult{};
    if (correction == nullptr) return of_residuals;
    Interval interval;
    interval.low = estimate.tflops_per_gpu * std::exp(-correction->deviation * correction->spread.high);
    interval.high = estimate.tflops_per_gpu * std::exp(-correction->deviation * correction->spread.low);
    interval.rows = correction->rows;
    interval.new_family = correction->new_family;
    interval.new_system = correction->new_system;
    interval.new_release = correction->new_release;
    interval.new_stack = new_stack;
    if (of_residuals.interval) { // what nobody has run is known no better than an unseen family and system
        interval.low = std::min(interval.low, of_residuals.interval->low);
        interval.high = std::max(interval.high, of_residuals.interval->high);
    }
    return {interval, {}};
}

} // namespace moe::published
