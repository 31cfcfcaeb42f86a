// Lowers a plan for its representatives, plays them, and sums up step time, rates, memory and breakdown.
#include "simulator/replay/simulate.hpp"

#include "planner/lower/lower.hpp"
#include "planner/lower/unnamed.hpp"
#include "planner/memory/library_memory.hpp"
#include "planner/memory/retry_memory.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/overflow_retry.hpp"
#include "planner/program/communicators.hpp"
#include "planner/program/program.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/replay/ranks.hpp"

#include <algorithm>
#include <set>
#include <utility>
#include <variant>

namespace moe::replay {
namespace {

constexpr double gib = 1024.0 * 1024.0 * 1024.0;

// First global rank of every pipeline stage, and all ranks by stage.
std::vector<std::vector<int>> ranks_by_stage(const plan::Plan& plan) {
    const plan::Mesh mesh(plan);
    std::vector<std::vector<int>> ranks(static_cast<std::size_t>(plan.pp));
    for (int rank = 0; rank < plan.gpus; ++rank)
        ranks[static_cast<std::size_t>(mesh.coordinate(plan::Domain::dense, plan::axis::pipeline, rank))].push_back(
            rank);
    return ranks;
}

struct StagePrograms {
    std::vector<std::shared_ptr<const program::Program>> programs;
    std::vector<std::shared_ptr<const cost::ProgramCosts>> costs;
    std::vector<std::shared_ptr<const memory::Reuses>> reuses; // reuses by stage
};

StagePrograms lower_all(const plan::Plan& plan, const cost::CostModel& model, bool named) {
    StagePrograms result;
    for (int stage = 0; stage < plan.pp; ++stage) {
        auto program = std::make_shared<const program::Program>(named ? lower::lower(plan, stage)
                                                                      : lower::lower_unnamed(plan, stage));
        result.costs.push_back(std::make_shared<const cost::ProgramCosts>(cost::price(model, *program)));
        result.reuses.push_back(plan.hardware->cpu ? nullptr : reuses_in(plan, *program));
        result.programs.push_back(std::move(program));
    }
    return result;
}

std::vector<RankRun> representatives(const plan::Plan& plan, const StagePrograms& lowered,
                                     cost::ContentionPrice contention) {
    std::vector<RankRun> runs;
    const auto add = [&](int rank, int represents, std::size_t stage) {
        RankRun run;
        run.rank = rank;
        run.represents = represents;
        run.program = lowered.programs[stage];
        run.costs = lowered.costs[stage];
        run.reuses = lowered.reuses[stage];
        run.contention = contention;
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

// Every slot of a template runs once for a micro-batch.
double core_seconds(const program::Program& program, const cost::ProgramCosts& costs) {
    double seconds = 0.0;
    for (std::size_t t = 0; t < program.templates.size(); ++t)
        for (std::size_t i = 0; i < program.templates[t].ops.size(); ++i) {
            const auto* attention = std::get_if<program::AttentionAttr>(&program.templates[t].ops[i].attr);
            if (attention != nullptr && attention->documents) seconds += costs[t][i].device;
        }
    return seconds;
}

double last_end(const RankRun& run) {
    double end = 0.0;
    for (const program::TimelineRow& row : run.rows) end = std::max(end, row.end);
    return end;
}

program::Timeline timeline_of(const plan::Plan& plan, std::vector<RankRun>& runs, bool keep_rows) {
    program::Timeline timeline;
    timeline.predicted = true;
    if (keep_rows) timeline.plan_json = plan::plan_to_json(plan);
    for (RankRun& run : runs) {
        timeline.ranks.push_back(run.rank);
        timeline.pipeline_rank.push_back(run.program->pipeline_rank);
        timeline.represents.push_back(run.represents);
        if (!keep_rows) continue;
        const std::size_t first = timeline.rows.size();
        timeline.rows.insert(timeline.rows.end(), run.rows.begin(), run.rows.end());
        run.rows = {};
        std::stable_sort(
            timeline.rows.begin() + static_cast<std::ptrdiff_t>(first), timeline.rows.end(),
            [](const program::TimelineRow& a, const program::TimelineRow& b) { return a.start < b.start; });
    }
    return timeline;
}

void add_memory(Simulation& result, const std::shared_ptr<const program::Program>& program) {
    result.memory.push_back(memory::plan_memory_with_retry(result.planned, *program));
    result.held.push_back(memory::memory_breakdown(*program, result.memory.back()));
    const std::int64_t arena = result.memory.back().arena_bytes;
    double bytes = rank_memory_bytes(result.planned, *program, arena);
    // The step in its place exchanges more rows, for which the engine has room from the start.
    if (const std::optional<plan::Plan> again = plan::overflow_retry_plan(result.planned))
        bytes = std::max(bytes, rank_memory_bytes(*again, lower::lower_unnamed(*again, program->pipeline_rank), arena));
    result.memory_bytes.push_back(bytes);
    result.estimate.memory_bytes = std::max(result.estimate.memory_bytes, result.memory_bytes.back());
    result.estimate.host_bytes =
        std::max(result.estimate.host_bytes, static_cast<double>(result.memory.back().host_bytes));
}

} // namespace

std::vector<Unit> units_of(const program::Program& program, bool in_order) {
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

double rank_memory_bytes(const plan::Plan& plan, const program::Program& program, std::int64_t arena_bytes) {
    const double taken = static_cast<double>(arena_bytes) + memory::library_memory(plan);
    if (program::joins_devices(plan))
        return taken + program::communicators_of(program, plan::Mesh(plan)).bytes(plan.hardware->communicators);
    std::set<std::pair<int, int>> groups;
    for (const program::Template& tmpl : program.templates)
        for (const program::Op& op : tmpl.ops)
            if (program::is_communication(op.kind)) groups.insert({static_cast<int>(op.group.domain), op.group.axes});
    return taken +
           machine::bytes_among(plan.hardware->communicators.collective, 2) * static_cast<double>(groups.size());
}

void fill_rates(const plan::Plan& plan, search::Estimate& e) {
    const double tokens = static_cast<double>(plan.gbs) * static_cast<double>(plan.seq);
    if (e.step_seconds > 0.0) {
        e.tokens_per_second_per_gpu = tokens / e.step_seconds / plan.gpus;
        e.tflops_per_gpu = plan::flops_per_token(plan) * e.tokens_per_second_per_gpu / 1e12;
    }
    const double ranks_sharing =
        plan.hardware->cpu ? plan.gpus : 1.0; // The ranks of one process share the machine's memory.
    const double host = plan.hardware->host_memory_bytes;
    e.fits = e.memory_bytes * ranks_sharing <= plan.hardware->memory_bytes && (host == 0.0 || e.host_bytes <= host);
}

namespace {

struct Played {
    StagePrograms lowered;
    std::vector<RankRun> runs;
};

// Fills what simulate() says of time.
Played play(const plan::Plan& plan, const stack::Stack& stack, routing::SkewPoint point, Simulation& result,
            RowRoom* room = nullptr) {
    result.timed = result.planned = plan;
    if (routing::skewed(plan)) {
        const routing::StepLoads loads = routing::LoadTables().of(plan);
        result.timed = routing::at_time_load(plan, loads, point);
        result.planned = routing::at_memory_load(plan, loads, point);
    }
    const cost::Machine machine(*plan.hardware);
    const cost::CostModel model(result.timed, stack, machine);
    Played played;
    played.lowered = lower_all(result.timed, model, room == nullptr);
    played.runs = representatives(result.timed, played.lowered, model.contention_price());
    for (std::size_t stage = 0; stage < played.lowered.programs.size(); ++stage)
        result.core_seconds =
            std::max(result.core_seconds, core_seconds(*played.lowered.programs[stage], *played.lowered.costs[stage]));
    std::vector<RankRun>& runs = played.runs;
    if (room != nullptr)
        for (RankRun& run : runs) run.rows = room->take();
    if (plan.hardware->cpu)
        play_cores(result.timed, runs);
    else
        play_devices(stack, runs);

    search::Estimate& e = result.estimate;
    for (const RankRun& run : runs) {
        e.step_seconds = std::max(e.step_seconds, last_end(run));
        result.host_seconds = std::max(result.host_seconds, run.host_seconds);
        result.ops += static_cast<std::int64_t>(run.rows.size());
        result.ranks += run.represents;
    }
    for (std::size_t i = 0; i < runs.size(); ++i) {
        const search::Breakdown parts = breakdown_of(plan, runs[i], e.step_seconds);
        if (i > 0 && parts.bubble >= e.breakdown.bubble) continue;
        e.breakdown = parts;
        result.slowest = static_cast<int>(i);
    }
    e.breakdown.host += stack.costs.step_seconds;
    e.step_seconds += stack.costs.step_seconds;
    return played;
}

} // namespace

std::vector<program::TimelineRow> RowRoom::take() {
    const std::lock_guard lock(mutex_);
    if (spare_.empty()) return {};
    std::vector<program::TimelineRow> rows = std::move(spare_.back());
    spare_.pop_back();
    return rows;
}

void RowRoom::give(std::vector<program::TimelineRow> rows) {
    rows.clear();
    const std::lock_guard lock(mutex_);
    spare_.push_back(std::move(rows));
}

Simulation timed(const plan::Plan& plan, const stack::Stack& stack, RowRoom& room) {
    Simulation result;
    Played played = play(plan, stack, routing::SkewPoint::mean, result, &room);
    for (RankRun& run : played.runs) room.give(std::move(run.rows));
    search::Estimate& e = result.estimate;
    if (plan.offload != 0)
        for (const std::shared_ptr<const program::Program>& program : played.lowered.programs)
            e.host_bytes = std::max(e.host_bytes, static_cast<double>(memory::host_memory(*program)));
    fill_rates(plan, e);
    return result;
}

Simulation simulate(const plan::Plan& plan, const stack::Stack& stack, bool keep_rows, routing::SkewPoint point) {
    Simulation result;
    auto [lowered, runs] = play(plan, stack, point, result);
    const plan::Plan& timed = result.timed;
    search::Estimate& e = result.estimate;
    for (std::size_t stage = 0; stage < lowered.programs.size(); ++stage)
        add_memory(result, timed.routing == result.planned.routing
                               ? lowered.programs[stage]
                               : std::make_shared<const program::Program>(
                                     lower::lower(result.planned, static_cast<int>(stage))));
    fill_rates(plan, e);
    result.timeline = timeline_of(plan, runs, keep_rows);
    result.timeline.step_seconds = e.step_seconds;
    result.timeline.tflops_per_gpu = e.tflops_per_gpu;
    result.timeline.memory_gib = e.memory_bytes / gib;
    return result;
}

} // namespace moe::replay
