// Routing skew: from a distribution of tokens over experts to the load of the hottest rank, layer by layer and per
// step.
//
// Model. In every layer and step, experts have a popularity p (a draw of the workload's distribution). A token chooses
// an expert at most once, so expert e gets the share min(1, c p_e) of the tokens, c such that the shares add up to
// top_k. Popularity is the layer's, not the micro-batch's: routers change slowly against a step, and with thousands of
// tokens per expert chance adds about a per cent. All replicas of an expert see the same popularity.
//
// Every layer's dispatch and combine meet all ranks of the EP group, so a layer takes as long as on its hottest rank,
// whose identity changes from layer to layer; which rank that is does not matter for the time, but does for memory,
// where each rank adds up its own loads.
#pragma once

#include "planner/model/fwd.hpp"
#include "planner/plan/routing.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace moe::routing {

// Draws of one layer's loads; a load is a rank's rows over the mean rank's.
struct LayerLoads {
    int ranks = 1;              // ranks of the EP group
    std::vector<float> loads;   // [draw][rank]
    std::vector<float> hottest; // load by draw
    double spread = 0.0; // spread of rows over the experts of the hottest rank, see Routing::spread; mean over draws
};

inline constexpr int layer_draws = 1024;
// Shares of the tokens that choose each expert in one of the draws of a layer, 0 to layer_draws - 1; they add up to
// top_k. `counts`: for a histogram, tokens by layer and expert; else empty. Deterministic: draws are keyed by a fixed
// seed. Throws Error (bad_input) for a histogram of another number of experts.
std::vector<double> draw_shares(const plan::Routing& routing, int experts, int top_k, int draw,
                                const std::vector<std::vector<double>>& counts);
// The loads of all draws.
LayerLoads draw_layer_loads(const plan::Routing& routing, int experts, int top_k, int ranks,
                            const std::vector<std::vector<double>>& counts);

// Token counts by layer and expert that a run recorded: a CSV file with one line of counts per layer (a header line of
// words is skipped), or a JSON list of lists, or a JSON object that holds it under "counts". Throws Error (bad_input).
std::vector<std::vector<double>> load_histogram(const std::string& path);

struct Quantiles {
    double mean = 1.0, p50 = 1.0, p99 = 1.0;
};
enum class SkewPoint : std::uint8_t { mean, p50, p99 };
double at(const Quantiles& q, SkewPoint point);

// The loads of a plan over steps.
struct StepLoads {
    // The load which, the same in every layer, makes the step as long as the drawn loads do.
    Quantiles time;
    // The load which, the same in every layer, fills a rank as the fullest rank is filled.
    Quantiles memory;
    double spread = 0.0;
    double overflow = 0.0; // probability that a step exceeds the planned capacity somewhere and is run again
};

// MoE layers of each pipeline rank.
std::vector<int> moe_layers(const plan::Plan& plan);
// Of a plan whose layers have these loads.
StepLoads loads_over_steps(const plan::Plan& plan, const LayerLoads& layer);

// A lower bound of a layer's load: no plan's steps have less, at any point.
struct LeastLoad {
    double load = 1.0, spread = 0.0;
};

// Loads of plans of any machine, drawn once each. Thread-safe.
class LoadTables {
public:
    // 1 throughout for balanced routing, and for plans without experts.
    StepLoads of(const plan::Plan& plan);
    Quantiles memory(const plan::Plan& plan); // memory of of() alone
    LeastLoad least(const plan::Plan& plan);  // a bound for plans with as many EP ranks

private:
    using Key = std::tuple<std::string, int, int, int>; // routing, experts, top_k, EP
    struct Table {
        LayerLoads loads;
        std::map<int, Quantiles> memory; // quantiles by MoE layers of the rank that has most
    };
    using Cut = std::tuple<const model::Model*, int, int, std::string>; // model, PP, VPP, layout

    Table& table(const plan::Plan& plan, const model::Moe& moe);
    const std::vector<int>& layers(const plan::Plan& plan);

    std::mutex mutex_;
    std::map<Key, Table> tables_;
    std::map<std::string, std::vector<std::vector<double>>> histograms_;
    std::map<Cut, std::vector<int>> layers_;                  // MoE layers by pipeline rank
    std::vector<std::shared_ptr<const model::Model>> models_; // kept alive, since keys point to them
};

// The step load of pipeline ranks with `layers` MoE layers each, whose drawn loads exceed 1 by `beyond` in sum. A
// pipeline passes m - 1 of m micro-batches at the pace of its most loaded rank, and one through all ranks in turn;
// ranks behind the most loaded one hide a part of that, so that the result is an upper bound (a test plays pipelines
// against it: at most 4 % above for m >= 4 pp). fill: the share of the one micro-batch, pp / (m * vpp + pp - 1).
double pipeline_load(const std::vector<double>& beyond, const std::vector<int>& layers, double fill);

// True where the plan's routing is a distribution, which has no price before it becomes a load.
bool skewed(const plan::Plan& plan);

// The plan with a load for its routing; balanced for load 1 without spread.
plan::Plan at_load(const plan::Plan& plan, double load, double spread);
// The plan with its distribution replaced by the loads of one point: `time` for pricing, `memory` for planning bytes.
// The plan itself where its routing is balanced or given as a load.
plan::Plan at_time_load(const plan::Plan& plan, const StepLoads& loads, SkewPoint point);
plan::Plan at_memory_load(const plan::Plan& plan, const StepLoads& loads, SkewPoint point);

} // namespace moe::routing
