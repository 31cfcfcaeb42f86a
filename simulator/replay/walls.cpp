// Sums the rows of the slowest rank against its Program's FLOPs and bytes.
#include "simulator/replay/walls.hpp"

#include "planner/lower/lower.hpp"
#include "planner/model/model.hpp"
#include "planner/program/program.hpp"
#include "simulator/cost/cost.hpp"

#include <algorithm>
#include <array>
#include <map>

namespace moe {
namespace {

const char* axis_of(const Op& op) {
    if (op.kind == OpKind::send || op.kind == OpKind::recv) return "pipeline";
    if (op.group.axes & axis::data) return "data";
    if (op.group.domain == Domain::expert) return "expert";
    if (op.group.axes & axis::context) return "context";
    if (op.group.axes & axis::tensor) return "tensor";
    return "data"; // of the whole job: the gradient norm
}

double exposed_of(const Breakdown& b, const std::string& axis) {
    if (axis == "tensor") return b.tensor;
    if (axis == "context") return b.context;
    if (axis == "expert") return b.expert;
    if (axis == "pipeline") return b.pipeline;
    return b.data;
}

const char* class_of(OpKind kind) {
    switch (kind) {
    case OpKind::gemm:
        return "products";
    case OpKind::grouped_gemm:
        return "grouped products";
    case OpKind::attention:
    case OpKind::attention_grad:
    case OpKind::pick_keys:
    case OpKind::pick_keys_grad:
        return "attention";
    case OpKind::permute_map:
    case OpKind::permute:
    case OpKind::unpermute:
    case OpKind::sort_rows:
    case OpKind::unsort_rows:
        return "rows";
    case OpKind::scan:
    case OpKind::scan_grad:
        return "scans";
    case OpKind::copy_to_host:
    case OpKind::copy_from_host:
        return "copies to the host and back";
    default:
        return "other";
    }
}

double ideal_seconds(const Plan& plan, const Op& op, const Program& program) {
    const Hardware& hardware = *plan.hardware;
    const bool copies = op.kind == OpKind::copy_to_host || op.kind == OpKind::copy_from_host;
    if (copies && !hardware.cpu) return op.bytes / std::max(1.0, hardware.host.bandwidth);
    const bool product = op.kind == OpKind::gemm || op.kind == OpKind::grouped_gemm;
    const Precision precision = product ? gemm_precision(op, program) : plan.core_attention();
    const double peak = hardware.peak_flops[static_cast<std::size_t>(precision)];
    const double compute = peak > 0.0 ? op.flops / peak : 0.0;
    return std::max(compute, hardware.memory_bandwidth > 0.0 ? op.bytes / hardware.memory_bandwidth : 0.0);
}

template <class Wall>
std::vector<Wall> by_time(const std::map<std::string, Wall>& walls) {
    std::vector<Wall> list;
    for (const auto& [name, wall] : walls) list.push_back(wall);
    std::stable_sort(list.begin(), list.end(), [](const Wall& a, const Wall& b) { return a.busy > b.busy; });
    return list;
}

void add_rows(const Plan& plan, const Stack& stack, const Simulation& simulation, const Program& program, int rank,
              Walls& walls) {
    std::map<std::string, CommunicationWall> communication;
    std::map<std::string, ComputeWall> compute;
    for (const TimelineRow& row : simulation.timeline.rows) {
        if (row.rank != rank) continue;
        const auto t = static_cast<std::size_t>(program.slots[static_cast<std::size_t>(row.slot)].index);
        const Op& op = program.templates[t].ops[static_cast<std::size_t>(row.op)];
        ++walls.launches;
        walls.issue_seconds += host_seconds(plan, stack, op);
        if (is_communication(op.kind)) {
            CommunicationWall& wall = communication[axis_of(op)];
            wall.axis = axis_of(op);
            wall.busy += row.busy;
            wall.bytes += op.bytes;
            ++wall.ops;
            continue;
        }
        ComputeWall& wall = compute[class_of(op.kind)];
        wall.name = class_of(op.kind);
        wall.busy += row.busy;
        wall.ideal += ideal_seconds(plan, op, program);
        if (row.phase == Phase::recompute) wall.repeated += row.busy;
        ++wall.ops;
    }
    for (OpWalk walk(program); !walk.done(); walk.next()) {
        walls.sparing += walk.spared() > 0 ? 1 : 0;
        walls.spared = std::max(walls.spared, walk.spared());
    }
    walls.communication = by_time(communication);
    walls.compute = by_time(compute);
    for (CommunicationWall& wall : walls.communication)
        wall.exposed = exposed_of(simulation.estimate.breakdown, wall.axis);
}

void add_memory(const Plan& plan, const Simulation& simulation, Walls& walls) {
    const auto fullest = std::max_element(simulation.memory_bytes.begin(), simulation.memory_bytes.end());
    walls.fullest = static_cast<int>(fullest - simulation.memory_bytes.begin());
    walls.memory_bytes = *fullest;
    // Ranks of one process share the machine's memory.
    walls.memory_limit = plan.hardware->memory_bytes / (plan.hardware->cpu ? plan.gpus : 1);
    const MemoryBreakdown& held = simulation.held[static_cast<std::size_t>(walls.fullest)];
    double rest = walls.memory_bytes;
    const auto add = [&](const std::string& name, std::int64_t bytes) {
        rest -= static_cast<double>(bytes);
        if (bytes > 0) walls.memory.emplace_back(name, static_cast<double>(bytes));
    };
    for (int i = 0; i < memory_class_count; ++i)
        if (static_cast<MemoryClass>(i) != MemoryClass::saved)
            add(to_string(static_cast<MemoryClass>(i)), held.classes[static_cast<std::size_t>(i)]);
    for (const auto& [module, bytes] : held.saved) add(std::string("saved by ") + to_string(module), bytes);
    if (rest > 0.0) walls.memory.emplace_back("context and communicators", rest);
    std::stable_sort(walls.memory.begin(), walls.memory.end(),
                     [](const auto& a, const auto& b) { return a.second > b.second; });
}

} // namespace

Walls walls(const Plan& plan, const Stack& stack, const Simulation& simulation) {
    Walls result;
    const auto slowest = static_cast<std::size_t>(simulation.slowest);
    result.stage = simulation.timeline.pipeline_rank[slowest];
    add_rows(plan, stack, simulation, lower(simulation.timed, result.stage), simulation.timeline.ranks[slowest],
             result);
    add_memory(plan, simulation, result);
    const double peak = plan.hardware->peak_flops[static_cast<std::size_t>(plan.precision)];
    const double flops = model_flops_per_token(*plan.model, plan.seq, plan.tp) * static_cast<double>(plan.gbs) *
                         static_cast<double>(plan.seq);
    if (peak > 0.0) result.model_seconds = flops / plan.gpus / peak;
    return result;
}

} // namespace moe
