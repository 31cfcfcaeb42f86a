// Lowers a plan for its representatives, plays them, and sums up step time, rates, memory and breakdown.
#include "simulator/replay/simulate.hpp"

#include "planner/lower/lower.hpp"
#include "planner/memory/library_memory.hpp"
#include "planner/memory/retry_memory.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/program/communicators.hpp"
#include "planner/program/program.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/replay/ranks.hpp"

#include <algorithm>
#include <set>
#include <utility>

namespace moe {
namespace {

constexpr double gib = 1024.0 * 1024.0 * 1024.0;

// First global rank of every pipeline stage, and all ranks by stage.
std::vector<std::vector<int>> ranks_by_stage(const Plan& plan) {
    const Mesh mesh(plan);
    std::vector<std::vector<int>> ranks(static_cast<std::size_t>(plan.pp));
    for (int rank = 0; rank < plan.gpus; ++rank)
        ranks[static_cast<std::size_t>(mesh.coordinate(Domain::dense, axis::pipeline, rank))].push_back(rank);
    return ranks;
}

struct StagePrograms {
    std::vector<std::shared_ptr<const Program>> programs;
    std::vector<std::shared_ptr<const ProgramCosts>> costs;
    std::vector<std::shared_ptr<const Reuses>> reuses; // by stage
};

StagePrograms lower_all(const Plan& plan, const CostModel& model) {
    StagePrograms result;
    for (int stage = 0; stage < plan.pp; ++stage) {
        auto program = std::make_shared<const Program>(lower(plan, stage));
        result.costs.push_back(std::make_shared<const ProgramCosts>(price(model, *program)));
        result.reuses.push_back(plan.hardware->cpu ? nullptr : reuses_in(plan, *program));
        result.programs.push_back(std::move(program));
    }
    return result;
}

std::vector<RankRun> representatives(const Plan& plan, const StagePrograms& lowered, BesideCommunication beside) {
    std::vector<RankRun> runs;
    const auto add = [&](int rank, int represents, std::size_t stage) {
        RankRun run;
        run.rank = rank;
        run.represents = represents;
        run.program = lowered.programs[stage];
        run.costs = lowered.costs[stage];
        run.reuses = lowered.reuses[stage];
        run.beside = beside;
        runs.push_back(std::move(run));
    };
    const std::vector<std::vector<int>> ranks = ranks_by_stage(plan);
    if (!plan.hardware->cpu) {
        for (std::size_t stage = 0; stage < ranks.size(); ++stage)
            add(ranks[stage].front(), static_cast<int>(ranks[stage].size()), stage);
        return runs;
    }
    for (std::size_t stage = 0; stage < ranks.size(); ++stage)
        for (const int rank : ranks[stage]) add(rank, 1, stage);
    std::sort(runs.begin(), runs.end(), [](const RankRun& a, const RankRun& b) { return a.rank < b.rank; });
    return runs;
}

double last_end(const RankRun& run) {
    double end = 0.0;
    for (const TimelineRow& row : run.rows) end = std::max(end, row.end);
    return end;
}

Timeline timeline_of(const Plan& plan, std::vector<RankRun>& runs, bool keep_rows) {
    Timeline timeline;
    timeline.predicted = true;
    if (keep_rows) timeline.plan_json = plan_to_json(plan);
    for (RankRun& run : runs) {
        timeline.ranks.push_back(run.rank);
        timeline.pipeline_rank.push_back(run.program->pipeline_rank);
        timeline.represents.push_back(run.represents);
        if (!keep_rows) continue;
        const std::size_t first = timeline.rows.size();
        timeline.rows.insert(timeline.rows.end(), run.rows.begin(), run.rows.end());
        run.rows = {};
        std::stable_sort(timeline.rows.begin() + static_cast<std::ptrdiff_t>(first), timeline.rows.end(),
                         [](const TimelineRow& a, const TimelineRow& b) { return a.start < b.start; });
    }
    return timeline;
}

void add_memory(Simulation& result, const std::shared_ptr<const Program>& program) {
    result.memory.push_back(plan_memory_with_rerun(result.planned, *program));
    result.held.push_back(memory_breakdown(*program, result.memory.back()));
    result.memory_bytes.push_back(rank_memory_bytes(result.planned, *program, result.memory.back().arena_bytes));
    result.estimate.memory_bytes = std::max(result.estimate.memory_bytes, result.memory_bytes.back());
    result.estimate.host_bytes =
        std::max(result.estimate.host_bytes, static_cast<double>(result.memory.back().host_bytes));
}

} // namespace

std::vector<Unit> units_of(const Program& program, bool in_order) {
    std::vector<Unit> units;
    for (std::size_t i = 0; i < program.slots.size(); ++i) {
        Unit unit;
        unit.lanes[0].push_back(static_cast<int>(i));
        if (const int merge = program.slots[i].merge; merge >= 0) {
            unit.lanes[1].push_back(static_cast<int>(++i));
            if (in_order) unit.second = program.merges[static_cast<std::size_t>(merge)].from_backward;
        }
        units.push_back(std::move(unit));
    }
    return units;
}

double rank_memory_bytes(const Plan& plan, const Program& program, std::int64_t arena_bytes) {
    const double taken = static_cast<double>(arena_bytes) + library_memory(plan);
    if (joins_devices(plan)) return taken + communicators_of(program, Mesh(plan)).bytes(plan.hardware->communicators);
    std::set<std::pair<int, int>> groups;
    for (const Template& tmpl : program.templates)
        for (const Op& op : tmpl.ops)
            if (is_communication(op.kind)) groups.insert({static_cast<int>(op.group.domain), op.group.axes});
    return taken + bytes_among(plan.hardware->communicators.collective, 2) * static_cast<double>(groups.size());
}

void fill_rates(const Plan& plan, Estimate& e) {
    const double tokens = static_cast<double>(plan.gbs) * static_cast<double>(plan.seq);
    if (e.step_seconds > 0.0) {
        e.tokens_per_second_per_gpu = tokens / e.step_seconds / plan.gpus;
        e.tflops_per_gpu = model_flops_per_token(*plan.model, plan.seq, plan.tp) * e.tokens_per_second_per_gpu / 1e12;
    }
    const double ranks_sharing =
        plan.hardware->cpu ? plan.gpus : 1.0; // ranks of one process share the machine's memory
    const double host = plan.hardware->host_memory_bytes;
    e.fits = e.memory_bytes * ranks_sharing <= plan.hardware->memory_bytes && (host == 0.0 || e.host_bytes <= host);
}

Simulation simulate(const Plan& plan, const Stack& stack, bool keep_rows, SkewPoint point) {
    Simulation result;
    result.timed = result.planned = plan;
    if (skewed(plan)) {
        const StepLoads loads = LoadTables().of(plan);
        result.timed = at_time_load(plan, loads, point);
        result.planned = at_memory_load(plan, loads, point);
    }
    const Plan& timed = result.timed;
    const Machine machine(*plan.hardware);
    const CostModel model(timed, stack, machine);
    const StagePrograms lowered = lower_all(timed, model);
    std::vector<RankRun> runs = representatives(timed, lowered, model.beside_communication());
    if (plan.hardware->cpu)
        play_cores(timed, runs);
    else
        play_devices(stack, runs);

    Estimate& e = result.estimate;
    for (const RankRun& run : runs) {
        e.step_seconds = std::max(e.step_seconds, last_end(run));
        result.host_seconds = std::max(result.host_seconds, run.host_seconds);
        result.ops += static_cast<std::int64_t>(run.rows.size());
        result.ranks += run.represents;
    }
    for (std::size_t i = 0; i < runs.size(); ++i) {
        const Breakdown parts = breakdown_of(plan, runs[i], e.step_seconds);
        if (i > 0 && parts.bubble >= e.breakdown.bubble) continue;
        e.breakdown = parts;
        result.slowest = static_cast<int>(i);
    }
    e.breakdown.host += stack.costs.step_seconds;
    e.step_seconds += stack.costs.step_seconds;
    for (std::size_t stage = 0; stage < lowered.programs.size(); ++stage)
        add_memory(result, timed.routing == result.planned.routing
                               ? lowered.programs[stage]
                               : std::make_shared<const Program>(lower(result.planned, static_cast<int>(stage))));
    fill_rates(plan, e);
    result.timeline = timeline_of(plan, runs, keep_rows);
    result.timeline.step_seconds = e.step_seconds;
    result.timeline.tflops_per_gpu = e.tflops_per_gpu;
    result.timeline.memory_gib = e.memory_bytes / gib;
    return result;
}

} // namespace moe
