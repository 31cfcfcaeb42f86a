// Balances drawn layers, prices the step at what load is left, and adds what the copies take.
#include "simulator/pricing/replication.hpp"

#include "planner/lower/lower.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/cost/cost.hpp"
#include "simulator/replay/simulate.hpp"
#include "simulator/routing/replication.hpp"

#include <algorithm>
#include <cmath>

namespace moe::pricing {
namespace {

// Shares of a link's rate, from 37.7 MB of weights and 75.5 MB of gradients a copy.
constexpr double direct_share = 0.79, relayed_share = 0.55 * direct_share, reduction_share = 0.19;
constexpr int largest_direct_domain = 8;
// Planning takes 67 to 78 us; sending tokens to copies instead takes 36 to 39, beside the weights.
constexpr double plan_seconds = 72e-6, reroute_seconds = 37e-6;

// The kind of layer with experts, and the experts.
std::pair<int, const model::LayerKind*> expert_layer(const model::Model& model) {
    for (std::size_t i = 0; i < model.kinds.size(); ++i)
        if (model.kinds[i].moe) return {static_cast<int>(i), &model.kinds[i]};
    return {-1, nullptr};
}

// Elements of one expert on one rank.
double elements_of(const plan::Plan& plan, const model::LayerKind& kind) {
    const std::int64_t width = kind.moe->latent > 0 ? kind.moe->latent : plan.model->hidden;
    return (kind.gated ? 3.0 : 2.0) * static_cast<double>(width * kind.moe->ffn) / plan.etp;
}

double weight_bytes(machine::Precision precision) {
    switch (precision) {
    case machine::Precision::fp32:
        return 4.0;
    case machine::Precision::bf16:
        return 2.0;
    case machine::Precision::nvfp4:
        return 0.5 + 1.0 / 16.0; // a scale of a byte for 16 elements
    default:
        return 1.0 + 1.0 / 32.0; // at most: a scale of a byte for 32 elements
    }
}

// What a layer's backward computes outside of its experts.
double backward_beside(const plan::Plan& plan, const stack::Stack& stack, int kind) {
    const cost::Machine machine(*plan.hardware);
    const cost::CostModel model(plan, stack, machine);
    const program::Program layer = lower::lower_segment(plan, lower::SegmentKind::layer, kind);
    const program::Template& backward = layer.templates[1];
    const std::vector<cost::OpCost> costs = cost::price(model, layer)[1];
    double seconds = 0.0;
    for (std::size_t i = 0; i < backward.ops.size(); ++i) {
        const program::Module module = backward.ops[i].module;
        const bool experts = module >= program::Module::dispatch && module <= program::Module::shared_experts;
        if (backward.ops[i].stream == program::Stream::compute && !experts) seconds += costs[i].device;
    }
    return seconds;
}

} // namespace

double copy_seconds(double copies, double bytes, int domain, double bandwidth) {
    const double direct = copies * bytes / (direct_share * bandwidth);
    if (domain <= largest_direct_domain) return direct;
    // The rank sends to as few relays as have no more receivers each than there are relays.
    const double relays = std::ceil((std::sqrt(1.0 + 4.0 * copies) - 1.0) / 2.0);
    return std::min(direct, relays * bytes / (relayed_share * bandwidth));
}

double reduction_seconds(double copies, double bytes, double bandwidth) {
    return copies * bytes / (reduction_share * bandwidth);
}

std::optional<Replication> replication_of(const plan::Plan& plan, const stack::Stack& stack, int slots,
                                          const Price& price) {
    const auto [index, kind] = expert_layer(*plan.model);
    if (!routing::skewed(plan) || kind == nullptr || plan.ep == 1 || plan.hardware->cpu) return std::nullopt;
    const cost::Routes routes(*plan.hardware);
    const int near = routes.placement(plan, {plan::Domain::expert, plan::axis::expert}).per_domain;
    if (near == 1) return std::nullopt;

    Replication r;
    r.slots = slots;
    const plan::Routing routing = plan::routing_from_string(plan.routing);
    const auto counts = routing.kind == plan::RoutingKind::histogram ? routing::load_histogram(routing.path)
                                                                     : std::vector<std::vector<double>>{};
    const routing::ReplicatedLoads drawn =
        routing::draw_replicated_loads(routing, kind->moe->experts, kind->moe->top_k, plan.ep, counts, slots, near);
    r.copies = drawn.copies;
    r.most_sent = drawn.most_sent;
    r.loads = routing::loads_over_steps(plan, drawn.loads);

    const double elements = elements_of(plan, *kind), bandwidth = plan.hardware->nvlink.bandwidth;
    const double weights = weight_bytes(plan.experts()) * elements, gradients = 4.0 * elements; // reduced in FP32
    r.slot_bytes = slots * (weights + gradients);
    r.plan_seconds = plan_seconds;
    r.weight_seconds = copy_seconds(r.most_sent, weights, near, bandwidth);
    r.gradient_seconds = reduction_seconds(r.most_sent, gradients, bandwidth);
    const plan::Plan balanced = routing::at_load(plan, 1.0, 0.0);
    r.exposed_seconds = std::max(0.0, r.gradient_seconds - backward_beside(balanced, stack, index));
    const double both_ways = r.plan_seconds + std::max(reroute_seconds, r.weight_seconds) + r.weight_seconds;
    // Micro-batches pass the rank that has most layers with experts one after another, and one passes the others.
    const std::vector<int> layers = routing::moe_layers(plan);
    const double passes = plan.micro_batches() + (plan.pp - 1.0) / plan.vpp;
    r.added_seconds = passes * *std::max_element(layers.begin(), layers.end()) * (both_ways + r.exposed_seconds);

    r.estimate = price(routing::at_load(plan, r.loads.time.mean, r.loads.spread));
    r.estimate.step_seconds += r.added_seconds;
    r.estimate.memory_bytes += r.slot_bytes;
    replay::fill_rates(plan, r.estimate);
    r.share_of_balanced = r.estimate.tokens_per_second_per_gpu / price(balanced).tokens_per_second_per_gpu;
    return r;
}

} // namespace moe::pricing
