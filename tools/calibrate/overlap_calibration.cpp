// Trainings on all GPUs at once beside the prices of their ops.
#include "tools/calibrate/overlap_calibration.hpp"

#include "engine/backends/backends.hpp"
#include "engine/bench/microbench.hpp"
#include "engine/bench/microbench_grid.hpp"
#include "planner/lower/lower.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/measured.hpp"
#include "planner/program/timeline.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/cost/cost.hpp"
#include "simulator/replay/contention.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

namespace moe::tools {

namespace {

struct Recorded {
    plan::Plan plan;
    std::vector<std::vector<program::TimelineRow>> ranks;
};

// All ranks share the model as `sharing` says, and its tokens go to experts over peers' memory. EP overlap merges, with
// four micro-batches, all slots but the first and the last.
Recorded record(bench::Point point, const bench::Sharing& sharing, const machine::Hardware& hardware,
                const std::string& backend, bool overlap = false) {
    point.sharing = sharing;
    Recorded result{bench::plan_of(point, backends::backend_named(backend)), {}};
    plan::Plan& plan = result.plan;
    plan.hardware = std::make_shared<const machine::Hardware>(hardware);
    plan.dispatcher = plan::Dispatcher::hybridep;
    plan.router.forced = true;
    plan.gbs = 4 * plan.dp * plan.mbs;
    plan.ep_overlap = overlap;
    result.ranks = bench::record_training(plan, backend);
    return result;
}

const program::Slot& slot_of(const program::Program& program, const program::TimelineRow& row) {
    return program.slots[static_cast<std::size_t>(row.slot)];
}

// Calls visit(op, price, seconds by rank) for every op of the step.
template <class Visit>
void compare_pairs(const Recorded& recorded, Visit visit) {
    const plan::Plan& plan = recorded.plan;
    const stack::Stack stack = stack::load_stack(plan.stack, *plan.hardware);
    const cost::Machine machine(*plan.hardware);
    const cost::CostModel model(plan, stack, machine);
    const program::Program program = lower::lower(plan, 0);
    std::vector<double> seconds(recorded.ranks.size());
    for (std::size_t i = 0; i < recorded.ranks.front().size(); ++i) {
        const program::Op& op = *program::op_of(program, recorded.ranks.front()[i]);
        for (std::size_t r = 0; r < seconds.size(); ++r) seconds[r] = recorded.ranks[r][i].busy;
        visit(op, model(op, program).device, seconds);
    }
}

// GPUs at the limit of their power hold different clocks, and the others wait for the slowest.
void add_large_products(const Recorded& recorded, machine::MeasuredCall& sum) {
    std::vector<double> took(recorded.ranks.size(), 0.0);
    compare_pairs(recorded, [&](const program::Op& op, double price, const std::vector<double>& seconds) {
        if (!program::is_large_product(op, price, *recorded.plan.hardware)) return;
        sum.work += price;
        for (std::size_t r = 0; r < took.size(); ++r) took[r] += seconds[r];
    });
    sum.seconds += *std::max_element(took.begin(), took.end());
}

// Ranks do not come at the same time, and what runs beside a collective slows it down. The median: some are hidden by
// what is computed beside them, whatever they take.
double wait_seconds(const Recorded& recorded) {
    std::vector<double> longer;
    compare_pairs(recorded, [&](const program::Op& op, double price, const std::vector<double>& seconds) {
        if (!program::is_communication(op.kind) || op.stream == program::Stream::data) return;
        const double mean = std::accumulate(seconds.begin(), seconds.end(), 0.0) / static_cast<double>(seconds.size());
        longer.push_back(mean - price);
    });
    const auto middle = longer.begin() + static_cast<std::ptrdiff_t>(longer.size() / 2);
    std::nth_element(longer.begin(), middle, longer.end());
    return std::max(*middle, 1e-9);
}

// The intervals in which the ops of one rank's step ran that say so.
template <class Says>
replay::CommIntervals travels_of(const std::vector<program::TimelineRow>& rows, Says says) {
    replay::CommIntervals travels;
    for (const program::TimelineRow& row : rows)
        if (says(row)) travels.emplace_back(row.end - row.busy, row.end);
    return travels;
}

double seconds_beside(const replay::CommIntervals& travels, const program::TimelineRow& row) {
    double beside = 0.0;
    for (const auto& [from, until] : travels)
        beside += std::max(0.0, std::min(until, row.end) - std::max(from, row.end - row.busy));
    return beside;
}

// Mean seconds of ops of like place.
template <class Place>
class Known {
public:
    void add(const Place& place, double seconds) {
        auto& [sum, calls] = places_[place];
        sum += seconds, ++calls;
    }
    // Negative where nothing is known.
    double seconds(const Place& place) const {
        const auto at = places_.find(place);
        return at == places_.end() ? -1.0 : at->second.first / at->second.second;
    }

private:
    std::map<Place, std::pair<double, int>> places_;
};

bool moves_tokens(const program::Op& op) {
    return op.kind == program::OpKind::dispatch_tokens || op.kind == program::OpKind::combine_tokens;
}

// Ops of merged slots that tokens were on their way beside for at least half of their time: that time, and by how much
// the ops are longer than where slots run one by one. Products of experts leave multiprocessors or wait, and are priced
// by that.
void add_losses(const Recorded& apart, const Recorded& overlapped, machine::MeasuredCall& sum) {
    const program::Program alone = lower::lower(apart.plan, 0), program = lower::lower(overlapped.plan, 0);
    for (std::size_t r = 0; r < overlapped.ranks.size(); ++r) {
        Known<std::pair<int, int>> known; // costs by (template, op), which are the same in both
        for (const program::TimelineRow& row : apart.ranks[r]) known.add({slot_of(alone, row).index, row.op}, row.busy);
        const auto travels = travels_of(overlapped.ranks[r], [&](const program::TimelineRow& row) {
            return moves_tokens(*program::op_of(program, row));
        });
        for (const program::TimelineRow& row : overlapped.ranks[r]) {
            const auto slot = static_cast<std::size_t>(row.slot);
            const bool merged = program.slots[slot].merge >= 0 || (slot > 0 && program.slots[slot - 1].merge >= 0);
            const double usual = known.seconds({slot_of(program, row).index, row.op});
            if (!merged || row.stream != program::Stream::compute || row.kind == program::OpKind::grouped_gemm ||
                usual < 0.0)
                continue;
            const double beside = seconds_beside(travels, row);
            if (beside < 0.5 * row.busy) continue;
            sum.work += beside;
            sum.seconds += row.busy - usual;
        }
    }
}

// Adds the losses of ops that compute beside gathers and reductions of data parallelism, which the first forward and
// the last backward of a step have: beside the same ops of other micro-batches. Those of the first backward are none of
// these, since its products set gradients.
void add_collective_losses(const Recorded& recorded, machine::MeasuredCall& sum) {
    for (const std::vector<program::TimelineRow>& rows : recorded.ranks) {
        const auto travels = travels_of(rows, [](const program::TimelineRow& row) {
            return row.stream == program::Stream::data && program::is_communication(row.kind);
        });
        using Place =
            std::tuple<plan::SlotKind, int, int>; // (slot's kind, its chunk, number among the ops that compute there)
        Known<Place> known;
        std::vector<std::tuple<Place, double, double>> beside; // (place, seconds beside a collective, of the op)
        int slot = -1, number = 0;
        for (const program::TimelineRow& row : rows) {
            if (row.stream != program::Stream::compute) continue;
            number = row.slot == slot ? number + 1 : 0;
            slot = row.slot;
            const Place place{row.slot_kind, row.chunk, number};
            const double seconds = seconds_beside(travels, row);
            if (seconds >= 0.5 * row.busy)
                beside.emplace_back(place, seconds, row.busy);
            else if (seconds == 0.0 && (row.slot_kind == plan::SlotKind::forward || row.micro_batch > 0))
                known.add(place, row.busy);
        }
        for (const auto& [place, seconds, busy] : beside) {
            const double usual = known.seconds(place);
            if (usual < 0.0) continue;
            sum.work += seconds;
            sum.seconds += busy - usual;
        }
    }
}

} // namespace

void measure_in_step(machine::Hardware& hardware, const std::string& backend, int gpus) {
    const bench::Point wide[] = {{"mixtral", 4096, 32, 8, 128, 12288, 8, 2, 0, 32768, 4096, 2},
                                 {"qwen3", 2048, 24, 4, 128, 896, 64, 8, 6144, 65536, 4096, 2}},
                       narrow{"qwen3", 1536, 12, 4, 128, 768, 16, 4, 4096, 16384, 2048, 2};
    machine::Hardware alone = hardware; // hardware without what was measured of other groups, or before
    for (const char* key : program::in_step_keys)
        std::erase_if(alone.measured, [&](const auto& family) { return family.first.rfind(key, 0) == 0; });
    const bench::Sharing experts{.ranks = gpus, .dp = gpus, .ep = gpus};
    machine::MeasuredCall large, lost, lost_to_collectives;
    for (const bench::Point& point : wide) {
        const Recorded apart = record(point, experts, alone, backend);
        add_large_products(apart, large);
        add_collective_losses(apart, lost_to_collectives);
        add_losses(apart, record(point, experts, alone, backend, true), lost);
    }
    add_collective_losses(record(narrow, {.ranks = gpus, .dp = gpus}, alone, backend), lost_to_collectives);
    const double wait = wait_seconds(record(narrow, {.ranks = gpus, .tp = gpus, .ep = gpus}, alone, backend));
    hardware.measured[program::group_key(program::products_key, gpus)] = {large};
    hardware.measured[program::group_key(program::waits_key, gpus)] = {{0.0, wait, {}}};
    for (const auto& [key, sum] :
         {std::pair{program::losses_key, lost}, std::pair{program::collectives_key, lost_to_collectives}})
        hardware.measured[program::group_key(key, gpus)] = {{sum.work, std::max(sum.seconds, 1e-9), {}}};
}

} // namespace moe::tools
