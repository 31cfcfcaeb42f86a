// Sums the rows of the slowest rank against its Program's FLOPs and bytes.
#include "simulator/replay/walls.hpp"

#include "planner/lower/lower.hpp"
#include "planner/model/model.hpp"
#include "planner/program/program.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/cost/alignment.hpp"
#include "simulator/cost/block_scaled.hpp"
#include "simulator/cost/cost.hpp"

#include <algorithm>
#include <array>
#include <map>

namespace moe::replay {
namespace {

const char* axis_of(const program::Op& op) {
    if (op.kind == program::OpKind::send || op.kind == program::OpKind::recv) return "pipeline";
    if (op.group.axes & plan::axis::any_data) return "data";
    if (op.group.domain == plan::Domain::expert) return "expert";
    if (op.group.axes & plan::axis::any_context) return "context";
    if (op.group.axes & plan::axis::any_tensor) return "tensor";
    return "data"; // The gradient norm's group is the whole job.
}

double exposed_of(const search::Breakdown& b, const std::string& axis) {
    if (axis == "tensor") return b.tensor;
    if (axis == "context") return b.context;
    if (axis == "expert") return b.expert;
    if (axis == "pipeline") return b.pipeline;
    return b.data;
}

const char* class_of(program::OpKind kind) {
    switch (kind) {
    case program::OpKind::gemm:
        return "products";
    case program::OpKind::grouped_gemm:
        return "grouped products";
    case program::OpKind::attention:
    case program::OpKind::attention_grad:
    case program::OpKind::pick_keys:
    case program::OpKind::pick_keys_grad:
        return "attention";
    case program::OpKind::permute_map:
    case program::OpKind::permute:
    case program::OpKind::unpermute:
    case program::OpKind::sort_rows:
    case program::OpKind::unsort_rows:
        return "rows";
    case program::OpKind::delta_rule:
    case program::OpKind::delta_rule_grad:
        return "delta rules";
    case program::OpKind::ssd:
    case program::OpKind::ssd_grad:
    case program::OpKind::scan:
    case program::OpKind::scan_grad:
        return "scans";
    case program::OpKind::copy_to_host:
    case program::OpKind::copy_from_host:
        return "copies to the host and back";
    default:
        return "other";
    }
}

double ideal_seconds(const plan::Plan& plan, const stack::Stack& stack, const program::Op& op,
                     const program::Program& program) {
    const machine::Hardware& hardware = *plan.hardware;
    const bool copies = op.kind == program::OpKind::copy_to_host || op.kind == program::OpKind::copy_from_host ||
                        op.kind == program::OpKind::adamw_on_host;
    if (copies && !hardware.cpu) return op.bytes / std::max(1.0, hardware.host.bandwidth);
    const bool product = op.kind == program::OpKind::gemm || op.kind == program::OpKind::grouped_gemm;
    const machine::Precision precision = !product ? plan.core_attention()
                                         : cost::block_scaled(stack.costs, plan, op, program)
                                             ? cost::block_scaled_format(stack.costs, plan, op, program)
                                             : cost::gemm_precision(op, program);
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

void add_rows(const plan::Plan& plan, const stack::Stack& stack, const Simulation& simulation,
              const program::Program& program, int rank, Walls& walls) {
    std::map<std::string, CommunicationWall> communication;
    std::map<std::string, ComputeWall> compute;
    for (const program::TimelineRow& row : simulation.timeline.rows) {
        if (row.rank != rank) continue;
        const auto t = static_cast<std::size_t>(program.slots[static_cast<std::size_t>(row.slot)].index);
        const program::Op& op = program.templates[t].ops[static_cast<std::size_t>(row.op)];
        ++walls.launches;
        walls.issue_seconds += cost::host_seconds(plan, stack, op);
        if (program::is_communication(op.kind)) {
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
        if (const std::int64_t width = cost::unaligned_width(op, program); width > 0 && !plan.hardware->cpu) {
            walls.unaligned_width = walls.unaligned == 0 ? width : std::min(walls.unaligned_width, width);
            ++walls.unaligned;
            walls.unaligned_seconds += row.busy * (1.0 - 1.0 / cost::alignment_slowdown(stack.costs, op, program));
        }
        wall.ideal += ideal_seconds(plan, stack, op, program);
        if (row.phase == program::Phase::recompute) wall.repeated += row.busy;
        ++wall.ops;
    }
    for (program::OpWalk walk(program); !walk.done(); walk.next()) {
        walls.reserving += walk.reserved_sms() > 0 ? 1 : 0;
        walls.reserved_sms = std::max(walls.reserved_sms, walk.reserved_sms());
    }
    walls.communication = by_time(communication);
    walls.compute = by_time(compute);
    for (CommunicationWall& wall : walls.communication)
        wall.exposed = exposed_of(simulation.estimate.breakdown, wall.axis);
}

void add_memory(const plan::Plan& plan, const Simulation& simulation, Walls& walls) {
    const auto fullest = std::max_element(simulation.memory_bytes.begin(), simulation.memory_bytes.end());
    walls.fullest = static_cast<int>(fullest - simulation.memory_bytes.begin());
    walls.memory_bytes = *fullest;
    // Ranks of one process share the machine's memory.
    walls.memory_limit = plan.hardware->memory_bytes / (plan.hardware->cpu ? plan.gpus : 1);
    const memory::MemoryBreakdown& held = simulation.held[static_cast<std::size_t>(walls.fullest)];
    double rest = walls.memory_bytes;
    const auto add = [&](const std::string& name, std::int64_t bytes) {
        rest -= static_cast<double>(bytes);
        if (bytes > 0) walls.memory.emplace_back(name, static_cast<double>(bytes));
    };
    for (int i = 0; i < memory::memory_class_count; ++i)
        if (static_cast<memory::MemoryClass>(i) != memory::MemoryClass::saved)
            add(memory::to_string(static_cast<memory::MemoryClass>(i)), held.classes[static_cast<std::size_t>(i)]);
    for (const auto& [module, bytes] : held.saved) add(std::string("saved by ") + program::to_string(module), bytes);
    if (rest > 0.0) walls.memory.emplace_back("context and communicators", rest);
    std::stable_sort(walls.memory.begin(), walls.memory.end(),
                     [](const auto& a, const auto& b) { return a.second > b.second; });
}

} // namespace

Walls walls(const plan::Plan& plan, const stack::Stack& stack, const Simulation& simulation) {
    Walls result;
    const auto slowest = static_cast<std::size_t>(simulation.slowest);
    result.stage = simulation.timeline.pipeline_rank[slowest];
    add_rows(plan, stack, simulation, lower::lower(simulation.timed, result.stage), simulation.timeline.ranks[slowest],
             result);
    add_memory(plan, simulation, result);
    const double peak = plan.hardware->peak_flops[static_cast<std::size_t>(plan.computed_in(plan.precision))];
    const double flops = plan::flops_per_token(plan) * static_cast<double>(plan.gbs) * static_cast<double>(plan.seq);
    if (peak > 0.0) result.model_seconds = flops / plan.gpus / peak;
    return result;
}

} // namespace moe::replay
