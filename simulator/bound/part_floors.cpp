// Plays each part of a layer alone, and finds the parts of other plans by what they depend on.
#include "simulator/bound/part_floors.hpp"

#include "planner/memory/packing.hpp"
#include "planner/plan/plan.hpp"

#include <algorithm>
#include <optional>

namespace moe::bound {
namespace {

// Nothing for what neither part's key tells: copies to the host, and steps of FSDP without a group.
std::optional<PartKind> part_of(const program::Op& op) {
    if (op.stream == program::Stream::host) return std::nullopt;
    if (op.stream == program::Stream::data || op.module == program::Module::data_parallel) {
        if (op.group.axes == 0) return std::nullopt;
        return op.group.domain == plan::Domain::expert ? PartKind::routed : PartKind::dense;
    }
    switch (op.module) {
    case program::Module::router:
    case program::Module::dispatch:
    case program::Module::experts:
    case program::Module::moe_act:
    case program::Module::combine:
        return PartKind::routed;
    default:
        return PartKind::dense;
    }
}

// The part's `work` alone. Beside a backward, a forward comes to the model's head when the backward has left it: what
// the head saves of each is never there twice, and counts for the backward.
LayerPart work_of(PartKind kind, bool head, const SegmentTerms::Priced& segment) {
    LayerPart part;
    const std::vector<memory::Use> use = memory::uses(segment.program);
    std::vector<program::TensorId> held;
    for (std::size_t side = 0; side < 2; ++side)
        for (const program::Op& op : segment.program.templates[side].ops) {
            if (part_of(op) != kind) continue;
            held.clear();
            for (const program::Operands* ids : {&op.in, &op.out})
                for (const program::TensorId id : *ids) {
                    if (id == program::no_tensor) continue;
                    const program::TensorId base = segment.program.tensors[static_cast<std::size_t>(id)].base;
                    held.push_back(base == program::no_tensor ? id : base);
                }
            std::sort(held.begin(), held.end());
            held.erase(std::unique(held.begin(), held.end()), held.end());
            double bytes = 0.0;
            for (const program::TensorId id : held) {
                const bool twice = head && side == 0 && use[static_cast<std::size_t>(id)].saved();
                if (id != segment.program.io.segment_in && !twice)
                    bytes += static_cast<double>(segment.bytes[static_cast<std::size_t>(id)]);
            }
            part.work[side] = std::max(part.work[side], bytes);
        }
    return part;
}

} // namespace

void LayerPart::add_behind(const LayerPart& other) {
    for (int side = 0; side < 2; ++side) {
        alone[side] += other.alone[side];
        held_up[side] += other.held_up[side];
        work[side] = std::max(work[side], other.work[side]);
        for (std::size_t s = 0; s < program::stream_count; ++s)
            if (static_cast<program::Stream>(s) != program::Stream::data) busy[side][s] += other.busy[side][s];
    }
    first_saves += other.first_saves;
}

double least_seconds(const LayerPart& dense, const LayerPart& routed, int side) {
    double least = dense.alone[side] + routed.alone[side];
    for (std::size_t s = 0; s < program::stream_count; ++s)
        if (static_cast<program::Stream>(s) != program::Stream::data) // The data stream runs under other layers too.
            least = std::max(least, dense.busy[side][s] + routed.busy[side][s]);
    return least;
}

std::array<int, 2> PartFloors::places(const estimate::Placements& groups) {
    const auto [tensor, context, expert, expert_tensor, dispatch, data, expert_data, micro_batch, inner, outer, keys,
                in_domain, over_domains] = groups;
    const std::array<std::vector<cost::Placement>, 2> wanted{
        std::vector{tensor, context, data, inner, outer, keys},
        std::vector{expert, expert_tensor, dispatch, expert_data, micro_batch, in_domain, over_domains}};
    std::array<int, 2> numbers{};
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < 2; ++i) {
        const auto it = std::find(places_.begin(), places_.end(), wanted[i]);
        numbers[i] = static_cast<int>(it - places_.begin());
        if (it == places_.end()) places_.push_back(wanted[i]);
    }
    return numbers;
}

void PartFloors::learn(const plan::Plan& plan, estimate::SegmentId id, std::array<int, 2> places,
                       const SegmentTerms::Priced& segment) {
    std::vector<double> ends;
    for (const PartKind kind : {PartKind::dense, PartKind::routed}) {
        std::vector<cost::OpCost> alone(segment.prices.size()), busy(segment.prices.size());
        std::size_t i = 0;
        for (const program::Template& tmpl : segment.program.templates)
            for (const program::Op& op : tmpl.ops) {
                if (part_of(op) == kind) {
                    busy[i].device = segment.prices[i].device;
                    if (op.module != program::Module::shared_experts && !runs_early(op))
                        alone[i].device = busy[i].device;
                }
                ++i;
            }
        LayerPart part = work_of(kind, lower::is_head(id.kind), segment);
        const std::vector<program::Op>& backward = segment.program.templates[1].ops;
        for (std::size_t k = 0; k < backward.size(); ++k)
            if (part_of(backward[k]) == kind) part.first_saves += segment.first_saves[k];
        constexpr double ahead = 1.0; // seconds of lead, so that the host costs nothing
        for (int side = 0; side < 2; ++side) {
            part.alone[side] = segment.flat.play(side, alone, ahead, 0.0, ends).end;
            part.busy[side] = segment.flat.busy(side, busy);
            if (kind == PartKind::routed) part.held_up[side] = segment.held_up[static_cast<std::size_t>(side)];
        }
        const int place = places[static_cast<std::size_t>(kind)];
        const std::lock_guard lock(mutex_);
        if (std::find(models_.begin(), models_.end(), plan.model) == models_.end()) models_.push_back(plan.model);
        if (kind == PartKind::dense)
            dense_.try_emplace({plan::PlanKey<plan::Subject::dense>(plan), id, place}, part);
        else
            routed_.try_emplace({plan::PlanKey<plan::Subject::routed>(plan), id, place}, part);
    }
}

} // namespace moe::bound
