// Plays each part of a layer alone, and finds the parts of other plans by what they depend on.
#include "simulator/bound/part_floors.hpp"

#include "planner/plan/plan.hpp"

#include <algorithm>
#include <optional>

namespace moe {
namespace {

// Nothing for what neither part's key tells: copies to the host, and steps of FSDP without a group.
std::optional<PartKind> part_of(const Op& op) {
    if (op.stream == Stream::host) return std::nullopt;
    if (op.stream == Stream::data) {
        if (op.group.axes == 0) return std::nullopt;
        return op.group.domain == Domain::expert ? PartKind::routed : PartKind::dense;
    }
    switch (op.module) {
    case Module::router:
    case Module::dispatch:
    case Module::experts:
    case Module::moe_act:
    case Module::combine:
        return PartKind::routed;
    default:
        return PartKind::dense;
    }
}

// The part's `work` alone.
LayerPart work_of(PartKind kind, const SegmentTerms::Priced& segment) {
    LayerPart part;
    std::vector<TensorId> held;
    for (std::size_t side = 0; side < 2; ++side)
        for (const Op& op : segment.program.templates[side].ops) {
            if (part_of(op) != kind) continue;
            held.clear();
            for (const std::vector<TensorId>* ids : {&op.in, &op.out})
                for (const TensorId id : *ids) {
                    if (id == no_tensor) continue;
                    const TensorId base = segment.program.tensors[static_cast<std::size_t>(id)].base;
                    held.push_back(base == no_tensor ? id : base);
                }
            std::sort(held.begin(), held.end());
            held.erase(std::unique(held.begin(), held.end()), held.end());
            double bytes = 0.0;
            for (const TensorId id : held)
                if (segment.program.tensors[static_cast<std::size_t>(id)].name != "segment_in")
                    bytes += static_cast<double>(segment.bytes[static_cast<std::size_t>(id)]);
            part.work[side] = std::max(part.work[side], bytes);
        }
    return part;
}

} // namespace

double least_seconds(const LayerPart& dense, const LayerPart& routed, int side) {
    double least = dense.alone[side] + routed.alone[side];
    for (std::size_t s = 0; s < stream_count; ++s)
        if (static_cast<Stream>(s) != Stream::data) // runs under other layers as well
            least = std::max(least, dense.busy[side][s] + routed.busy[side][s]);
    return least;
}

std::array<int, 2> PartFloors::places(const Placements& groups) {
    const auto [tensor, context, expert, expert_tensor, dispatch, data, expert_data, micro_batch] = groups;
    const std::array<std::vector<Placement>, 2> wanted{
        std::vector{tensor, context, data}, std::vector{expert, expert_tensor, dispatch, expert_data, micro_batch}};
    std::array<int, 2> numbers{};
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < 2; ++i) {
        const auto it = std::find(places_.begin(), places_.end(), wanted[i]);
        numbers[i] = static_cast<int>(it - places_.begin());
        if (it == places_.end()) places_.push_back(wanted[i]);
    }
    return numbers;
}

void PartFloors::learn(const Plan& plan, SegmentId id, std::array<int, 2> places, const SegmentTerms::Priced& segment) {
    std::vector<double> ends;
    for (const PartKind kind : {PartKind::dense, PartKind::routed}) {
        std::vector<OpCost> alone(segment.prices.size()), busy(segment.prices.size());
        std::size_t i = 0;
        for (const Template& tmpl : segment.program.templates)
            for (const Op& op : tmpl.ops) {
                if (part_of(op) == kind) {
                    busy[i].device = segment.prices[i].device;
                    if (op.module != Module::shared_experts && !runs_early(op)) alone[i].device = busy[i].device;
                }
                ++i;
            }
        LayerPart part = work_of(kind, segment);
        const std::vector<Op>& backward = segment.program.templates[1].ops;
        for (std::size_t k = 0; k < backward.size(); ++k)
            if (part_of(backward[k]) == kind) part.first_saves += segment.first_saves[k];
        constexpr double ahead = 1.0; // seconds; the host costs nothing here
        for (int side = 0; side < 2; ++side) {
            part.alone[side] = segment.flat.play(side, alone, ahead, 0.0, ends).end;
            part.busy[side] = segment.flat.busy(side, busy);
            if (kind == PartKind::routed) part.held_up[side] = segment.held_up[static_cast<std::size_t>(side)];
        }
        const int place = places[static_cast<std::size_t>(kind)];
        const std::lock_guard lock(mutex_);
        if (std::find(models_.begin(), models_.end(), plan.model) == models_.end()) models_.push_back(plan.model);
        if (kind == PartKind::dense)
            dense_.try_emplace({PlanKey<Subject::dense>(plan), id, place}, part);
        else
            routed_.try_emplace({PlanKey<Subject::routed>(plan), id, place}, part);
    }
}

} // namespace moe
