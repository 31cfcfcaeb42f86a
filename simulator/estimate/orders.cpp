// The order of turns of a pipeline's ranks, worked out once for each kind of schedule.
#include "planner/plan/plan.hpp"
#include "simulator/estimate/step_model.hpp"

namespace moe::estimate {
namespace {

// A backward of two slots as if it were the first of them: what it needs is there until then, whatever stays longer.
std::vector<plan::Turn> until_dgrad(std::vector<plan::Turn> turns) {
    std::erase_if(turns, [](const plan::Turn& turn) { return turn.kind == plan::SlotKind::wgrad; });
    for (plan::Turn& turn : turns)
        if (turn.kind == plan::SlotKind::dgrad) turn.kind = plan::SlotKind::backward;
    return turns;
}

} // namespace

const Orders::Order& Orders::of(const plan::Plan& plan, int micro_batches, int rank) {
    const std::array<int, 6> key{static_cast<int>(plan.schedule), plan.pp, plan.vpp, micro_batches, rank,
                                 plan.ep_overlap ? 1 : 0};
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto it = orders_.find(key);
        if (it != orders_.end()) return *it->second;
    }
    auto result = std::make_unique<Order>();
    result->turns = plan::order(plan.schedule, plan.pp, plan.vpp, micro_batches, rank, plan.ep_overlap);
    result->kept = plan::kept_together(
        plan::splits_backward(plan.schedule) ? until_dgrad(result->turns) : result->turns, plan.vpp);
    const std::lock_guard<std::mutex> lock(mutex_);
    return *orders_.emplace(key, std::move(result)).first->second;
}

} // namespace moe::estimate
