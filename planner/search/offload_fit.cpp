// Adds up what each module spares, and asks the estimator only about the sets whose sums come near.
#include "planner/search/offload_fit.hpp"

#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/plan/schedule.hpp"
#include "planner/stack/stack.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <utility>

namespace moe::search {
namespace {

constexpr std::size_t modules = 7; // number of modules of activations: those below offload::optimizer
static_assert(1U << modules == plan::offload::optimizer);
constexpr std::size_t sets_kept = 1, sets_tried = 8;
// Pairs of the states that go to the host and the share of memory that the rest may take: the set that moves fewest
// bytes need not be the fastest, and a little less memory makes it another one.
constexpr std::pair<unsigned, double> room[] = {
    {0U, 1.0}, {0U, 0.9}, {plan::offload::optimizer, 1.0}, {plan::offload::optimizer, 0.9}};
constexpr double sums_are_near = 0.98; // share of the sum: a set may spare a little more than its modules

// Bytes of the plan with a set of offloaded modules; infinite where that is unsound or cannot be priced.
double bytes_with(plan::Plan plan, unsigned set, const stack::Stack& stack, Estimator& estimator) {
    plan.offload = set;
    if (!stack::sound(plan, stack)) return std::numeric_limits<double>::infinity();
    try {
        return estimator.memory_bytes(plan);
    } catch (const Error& error) {
        if (error.fault() != Fault::bad_input) throw;
        return std::numeric_limits<double>::infinity();
    }
}

// Micro-batches whose activations the first pipeline rank holds at one time.
double held_micro_batches(const plan::Plan& plan) {
    const std::vector<int> held = plan::in_flight(
        plan::order(plan.schedule, plan.pp, plan.vpp, plan.micro_batches(), 0, plan.ep_overlap), plan.vpp);
    return std::max(1.0, static_cast<double>(std::accumulate(held.begin(), held.end(), 0)) / plan.vpp);
}

} // namespace

std::vector<OffloadFit> offloaded_to_fit(const plan::Plan& plan, const stack::Stack& stack, Estimator& estimator) {
    std::vector<OffloadFit> result;
    const double memory = plan.hardware->memory_bytes, link = plan.hardware->host.bandwidth;
    const double bytes = bytes_with(plan, 0, stack, estimator);
    if (bytes <= memory || link <= 0.0) return result;
    std::array<double, modules> saved_bytes{}; // bytes saved by each module alone; 0 for those that cannot be offloaded
    for (std::size_t i = 0; i < modules; ++i)
        saved_bytes[i] = std::max(0.0, bytes - bytes_with(plan, 1U << i, stack, estimator));
    // Bytes are saved once for each micro-batch that is held; all micro-batches go and come back.
    const double ways = 2.0 * plan.micro_batches() / held_micro_batches(plan);

    for (const auto& [states, share] : room) {
        const double kept_bytes = bytes_with(plan, states, stack, estimator), too_many = kept_bytes - share * memory;
        std::vector<std::pair<double, unsigned>> sets;
        for (unsigned set = 0; set < 1U << modules; ++set) {
            double sum = 0.0;
            bool useful = true;
            for (std::size_t i = 0; i < modules; ++i) {
                if ((set >> i & 1U) == 0) continue;
                useful = useful && saved_bytes[i] > 0.0;
                sum += saved_bytes[i];
            }
            if (useful && sum >= sums_are_near * too_many) sets.emplace_back(sum, set | states);
        }
        std::sort(sets.begin(), sets.end());
        sets.resize(std::min(sets.size(), sets_tried));
        const double moved_states = states == 0 ? 0.0 : bytes - kept_bytes;
        std::size_t kept = 0;
        for (const auto& [sum, set] : sets) {
            if (kept == sets_kept) break;
            if (bytes_with(plan, set, stack, estimator) > share * memory) continue;
            ++kept;
            const auto same = [set = set](const OffloadFit& fit) { return fit.plan.offload == set; };
            if (std::any_of(result.begin(), result.end(), same)) continue;
            result.push_back({plan, (ways * sum + 2.0 * moved_states) / link});
            result.back().plan.offload = set;
        }
    }
    return result;
}

} // namespace moe::search
