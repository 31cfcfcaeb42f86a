// Draws popularities from counters, turns them into loads, and sums them up over the layers of a step.
#include "simulator/routing/routing.hpp"

#include "planner/base/error.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/schedule.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace moe::routing {
namespace {

constexpr int layer_draws = 1024, step_draws = 512;
constexpr std::uint64_t seed = 0x6d6f652d706c616e; // any fixed number, as results must not change from run to run

std::uint64_t splitmix(std::uint64_t x) { // Steele, Lea and Flood 2014
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

// Random numbers of one draw by their position: nothing depends on who drew before.
class Stream {
public:
    Stream(std::uint64_t a, std::uint64_t b) : key_(splitmix(seed ^ splitmix(a ^ splitmix(b)))) {}
    // Inside (0, 1): 52 bits and a half are exact in a double.
    double uniform() { return (static_cast<double>(splitmix(key_ ^ splitmix(n_++)) >> 12) + 0.5) * 0x1p-52; }
    std::size_t below(std::size_t count) { return static_cast<std::size_t>(uniform() * static_cast<double>(count)); }
    double normal() { return std::sqrt(-2.0 * std::log(uniform())) * std::cos(6.283185307179586 * uniform()); }
    // Marsaglia and Tsang 2000; shapes below 1 by way of shape + 1.
    double gamma(double shape) {
        if (shape < 1.0) return gamma(shape + 1.0) * std::pow(uniform(), 1.0 / shape);
        const double d = shape - 1.0 / 3.0, c = 1.0 / std::sqrt(9.0 * d);
        for (;;) {
            const double x = normal(), v = std::pow(1.0 + c * x, 3.0);
            if (v > 0.0 && std::log(uniform()) < 0.5 * x * x + d * (1.0 - v + std::log(v))) return d * v;
        }
    }

private:
    std::uint64_t key_, n_ = 0;
};

std::vector<double> popularity(const plan::Routing& routing, int experts, int draw,
                               const std::vector<std::vector<double>>& counts) {
    Stream stream(static_cast<std::uint64_t>(draw), 1);
    const auto n = static_cast<std::size_t>(experts);
    std::vector<double> p(n, 1.0);
    switch (routing.kind) {
    case plan::RoutingKind::dirichlet:
        for (double& x : p) x = stream.gamma(routing.parameter);
        break;
    case plan::RoutingKind::zipf:
        for (std::size_t i = 0; i < n; ++i) p[i] = std::pow(static_cast<double>(i + 1), -routing.parameter);
        for (std::size_t i = n; i > 1; --i) std::swap(p[i - 1], p[stream.below(i)]);
        break;
    case plan::RoutingKind::histogram:
        p = counts[stream.below(counts.size())];
        if (p.size() != n)
            refuse("routing = {}: the histogram has {} experts, but the model has {}", routing.path, p.size(), n);
        break;
    case plan::RoutingKind::balanced:
    case plan::RoutingKind::load:
        break;
    }
    return p;
}

// Shares of the tokens that choose each expert: min(1, c p), adding up to top_k.
void choose_once(std::vector<double>& p, int top_k) {
    std::vector<bool> full(p.size(), false);
    double left = top_k;
    for (bool changed = true; changed;) {
        changed = false;
        double sum = 0.0;
        std::size_t open = 0;
        for (std::size_t i = 0; i < p.size(); ++i)
            if (!full[i]) sum += p[i], ++open;
        for (std::size_t i = 0; i < p.size(); ++i) {
            if (full[i]) continue;
            // Experts that nobody wants share what no other one can take.
            const double share = sum > 0.0 ? p[i] * left / sum : left / static_cast<double>(open);
            if (share < 1.0) continue;
            full[i] = changed = true;
        }
        left = top_k - static_cast<double>(std::count(full.begin(), full.end(), true));
        if (changed) continue;
        for (std::size_t i = 0; i < p.size(); ++i)
            p[i] = full[i]     ? 1.0
                   : sum > 0.0 ? p[i] * left / sum
                               : left / static_cast<double>(std::max<std::size_t>(open, 1));
    }
}

Quantiles quantiles(std::vector<double> values) {
    Quantiles q;
    q.mean = std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
    std::sort(values.begin(), values.end());
    const auto value = [&values](double share) {
        const double place = share * static_cast<double>(values.size() - 1);
        const auto i = static_cast<std::size_t>(place);
        const double part = place - static_cast<double>(i);
        return i + 1 < values.size() ? values[i] * (1.0 - part) + values[i + 1] * part : values.back();
    };
    q.p50 = value(0.5);
    q.p99 = value(0.99);
    return q;
}

// MoE layers of each pipeline rank.
std::vector<int> moe_layers(const plan::Plan& plan) {
    std::vector<int> count(static_cast<std::size_t>(plan.pp), 0);
    const std::vector<plan::Stage> all = plan::stages(plan);
    const auto routed = [&plan](int kind) { return plan.model->kinds[static_cast<std::size_t>(kind)].moe.has_value(); };
    for (std::size_t s = 0; s < all.size(); ++s) {
        int& here = count[s % count.size()];
        for (int i = 0; i < all[s].layers; ++i)
            here += routed(plan.model->layers[static_cast<std::size_t>(all[s].first_layer + i)]) ? 1 : 0;
        for (int i = 0; i < all[s].mtp; ++i) here += routed(plan.model->mtp[static_cast<std::size_t>(i)]) ? 1 : 0;
    }
    return count;
}

const model::Moe* experts_of(const model::Model& model) {
    for (const model::LayerKind& kind : model.kinds)
        if (kind.moe) return &*kind.moe;
    return nullptr;
}

// Over steps, the mean load of `layers` layers on the rank of the EP group where it is greatest. Hot experts lie
// anywhere in each layer: the drawn ranks are turned by a random number.
Quantiles fullest_rank(const LayerLoads& layer, int layers) {
    std::vector<double> fullest;
    const auto ranks = static_cast<std::size_t>(layer.ranks);
    for (int step = 0; step < step_draws; ++step) {
        Stream stream(static_cast<std::uint64_t>(step), 2);
        std::vector<double> sum(ranks, 0.0);
        for (int l = 0; l < layers; ++l) {
            const std::size_t row = stream.below(layer.hottest.size()) * ranks, turn = stream.below(ranks);
            for (std::size_t r = 0; r < ranks; ++r) sum[r] += layer.loads[row + (r + turn) % ranks];
        }
        fullest.push_back(*std::max_element(sum.begin(), sum.end()) / layers);
    }
    return quantiles(std::move(fullest));
}

} // namespace

bool skewed(const plan::Plan& plan) {
    const plan::RoutingKind kind = plan::routing_from_string(plan.routing).kind;
    return kind != plan::RoutingKind::balanced && kind != plan::RoutingKind::load;
}

double at(const Quantiles& q, SkewPoint point) {
    return point == SkewPoint::mean ? q.mean : point == SkewPoint::p50 ? q.p50 : q.p99;
}

plan::Plan at_load(const plan::Plan& plan, double load, double spread) {
    plan::Plan priced = plan;
    plan::Routing routing;
    if (load > 1.0 || spread > 0.0) {
        // Steps of a thousandth: plans of the same load share what is worked out for one of them.
        routing.kind = plan::RoutingKind::load;
        routing.load = std::max(1.0, std::round(load * 1e3) / 1e3);
        routing.spread = std::round(spread * 50.0) / 50.0;
    }
    priced.routing = plan::to_string(routing);
    return priced;
}

LayerLoads draw_layer_loads(const plan::Routing& routing, int experts, int top_k, int ranks,
                            const std::vector<std::vector<double>>& counts) {
    LayerLoads result;
    result.ranks = ranks;
    const std::size_t local = static_cast<std::size_t>(experts / ranks), n = static_cast<std::size_t>(ranks);
    double spread = 0.0;
    for (int draw = 0; draw < layer_draws; ++draw) {
        std::vector<double> share = popularity(routing, experts, draw, counts);
        choose_once(share, top_k);
        std::size_t hot = 0;
        std::vector<double> sum(n, 0.0);
        for (std::size_t e = 0; e < share.size(); ++e) sum[e / local] += share[e];
        for (std::size_t r = 0; r < n; ++r) {
            if (sum[r] > sum[hot]) hot = r;
            result.loads.push_back(static_cast<float>(sum[r] * ranks / top_k));
        }
        result.hottest.push_back(static_cast<float>(sum[hot] * ranks / top_k));
        const double mean = sum[hot] / static_cast<double>(local);
        double squares = 0.0;
        for (std::size_t e = hot * local; e < (hot + 1) * local; ++e) squares += (share[e] - mean) * (share[e] - mean);
        spread += mean > 0.0 ? std::sqrt(squares / static_cast<double>(local)) / mean : 0.0;
    }
    result.spread = spread / layer_draws;
    return result;
}

double pipeline_load(const std::vector<double>& beyond, const std::vector<int>& layers, double fill) {
    const int most = *std::max_element(layers.begin(), layers.end());
    const int all = std::accumulate(layers.begin(), layers.end(), 0);
    if (all == 0) return 1.0;
    // A rank with fewer MoE layers has to be that much hotter to hold up the others.
    const double slowest = *std::max_element(beyond.begin(), beyond.end()) / most;
    return 1.0 + (1.0 - fill) * slowest + fill * std::accumulate(beyond.begin(), beyond.end(), 0.0) / all;
}

LoadTables::Table& LoadTables::table(const plan::Plan& plan, const model::Moe& moe) {
    const auto [at, fresh] = tables_.try_emplace({plan.routing, moe.experts, moe.top_k, plan.ep});
    if (!fresh) return at->second;
    const plan::Routing routing = plan::routing_from_string(plan.routing);
    try {
        std::vector<std::vector<double>>& counts = histograms_[routing.path];
        if (routing.kind == plan::RoutingKind::histogram && counts.empty()) counts = load_histogram(routing.path);
        at->second.loads = draw_layer_loads(routing, moe.experts, moe.top_k, plan.ep, counts);
    } catch (...) {
        tables_.erase(at);
        throw;
    }
    return at->second;
}

const std::vector<int>& LoadTables::layers(const plan::Plan& plan) {
    const auto [at, fresh] = layers_.try_emplace({plan.model.get(), plan.pp, plan.vpp, plan.layout});
    if (fresh) {
        at->second = moe_layers(plan);
        if (std::find(models_.begin(), models_.end(), plan.model) == models_.end()) models_.push_back(plan.model);
    }
    return at->second;
}

Quantiles LoadTables::memory(const plan::Plan& plan) {
    const model::Moe* moe = experts_of(*plan.model);
    if (moe == nullptr) return {};
    const plan::Routing routing = plan::routing_from_string(plan.routing);
    if (!skewed(plan)) return {routing.load, routing.load, routing.load};
    const std::lock_guard<std::mutex> lock(mutex_);
    Table& drawn = table(plan, *moe);
    const std::vector<int>& counts = layers(plan);
    const int most = std::max(1, *std::max_element(counts.begin(), counts.end()));
    const auto [at, fresh] = drawn.memory.try_emplace(most);
    if (fresh) at->second = fullest_rank(drawn.loads, most);
    return at->second;
}

// A step takes as long as its most loaded pipeline rank at least, whose layers' hottest ranks have the mean load on
// average; single layers are more often below it than above.
LeastLoad LoadTables::least(const plan::Plan& plan) {
    constexpr double safe = 0.9; // share that is safe, as steps are draws
    const model::Moe* moe = experts_of(*plan.model);
    if (moe == nullptr || !skewed(plan)) return {};
    const std::lock_guard<std::mutex> lock(mutex_);
    const LayerLoads& drawn = table(plan, *moe).loads;
    const Quantiles hottest = quantiles({drawn.hottest.begin(), drawn.hottest.end()});
    return {1.0 + safe * (std::min(hottest.mean, hottest.p50) - 1.0), drawn.spread};
}

StepLoads LoadTables::of(const plan::Plan& plan) {
    StepLoads result;
    const model::Moe* moe = experts_of(*plan.model);
    if (moe == nullptr) return result;
    result.memory = memory(plan);
    const bool bounded = plan.capacity > 0.0 && plan.ep > 1;
    if (!skewed(plan)) {
        const plan::Routing routing = plan::routing_from_string(plan.routing);
        result.time = {routing.load, routing.load, routing.load};
        result.spread = routing.spread;
        result.overflow = bounded && routing.load > plan.capacity ? 1.0 : 0.0;
        return result;
    }
    // Entries never move or change once they are there.
    const auto [loads, ranks] = [&] {
        const std::lock_guard<std::mutex> lock(mutex_);
        return std::pair(&table(plan, *moe).loads, &layers(plan));
    }();
    const LayerLoads& drawn = *loads;
    const std::vector<int>& counts = *ranks;
    const double fill = plan.pp / (static_cast<double>(plan.micro_batches()) * plan.vpp + plan.pp - 1.0);
    std::vector<double> steps, beyond(counts.size());
    int overflows = 0;
    for (int step = 0; step < step_draws; ++step) {
        Stream stream(static_cast<std::uint64_t>(step), 3);
        bool over = false;
        for (std::size_t rank = 0; rank < counts.size(); ++rank) {
            beyond[rank] = 0.0;
            for (int i = 0; i < counts[rank]; ++i) {
                const double load = drawn.hottest[stream.below(drawn.hottest.size())];
                beyond[rank] += load - 1.0;
                over = over || load > plan.capacity;
            }
        }
        overflows += over ? 1 : 0;
        steps.push_back(pipeline_load(beyond, counts, fill));
    }
    result.time = quantiles(std::move(steps));
    result.spread = drawn.spread;
    if (bounded) result.overflow = static_cast<double>(overflows) / step_draws;
    return result;
}

plan::Plan at_time_load(const plan::Plan& plan, const StepLoads& loads, SkewPoint point) {
    return skewed(plan) ? at_load(plan, at(loads.time, point), loads.spread) : plan;
}

plan::Plan at_memory_load(const plan::Plan& plan, const StepLoads& loads, SkewPoint point) {
    return skewed(plan) ? at_load(plan, at(loads.memory, point), 0.0) : plan;
}

} // namespace moe::routing
