// Reads the timelines that execute left, and makes measured calls of their ops.
#include "tools/calibrate/profile_update.hpp"

#include "engine/bench/measured_calls.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json_object.hpp"
#include "planner/lower/lower.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/program.hpp"
#include "planner/program/timeline.hpp"

#include <filesystem>
#include <map>
#include <optional>
#include <utility>

namespace moe::tools {

namespace {

struct RecordedRun {
    plan::Plan plan;
    program::Timeline timeline;
    double clock_hz = 0.0; // that its devices held, 0 where it does not say
};

// The mean clock of a run's last steps, which its run.json has where the driver tells.
double clock_of(const std::filesystem::path& path) {
    std::error_code error;
    if (!std::filesystem::is_regular_file(path, error)) return 0.0;
    const JsonObject run = JsonObject::parse(read_file(path.string()), path.string(), long_json);
    constexpr double most_mhz = 1e5;
    return run.has("draw") ? 1e6 * run.object("draw").number("clock_mhz", 0.0, most_mhz) : 0.0;
}

RecordedRun recorded_run(const std::string& folder) {
    const std::string path = (std::filesystem::path(folder) / "measured.json").string();
    std::error_code error;
    if (!std::filesystem::is_regular_file(path, error))
        refuse("--runs {}: holds no measured.json: give folders of execute --run-dir", folder);
    RecordedRun run{{}, program::read_trace(path), clock_of(std::filesystem::path(folder) / "run.json")};
    if (run.timeline.predicted) refuse("--runs {}: its timeline is a predicted one", path);
    run.plan = plan::plan_from_json(run.timeline.plan_json, path);
    return run;
}

// Merged slots slow each other down, by as much as their plan has to hide.
bool merged(const program::Program& program, std::size_t slot) {
    return program.slots[slot].merge >= 0 || (slot > 0 && program.slots[slot - 1].merge >= 0);
}

// True for modules whose number of rows is up to the router.
bool is_routed(program::Module module) {
    return module == program::Module::dispatch || module == program::Module::experts ||
           module == program::Module::moe_act || module == program::Module::combine;
}

// Between GPUs it is in a message's time that others come later; ranks on cores leave it out.
bool tells(const plan::Plan& plan, const program::Program& program, const program::Op& op, std::size_t slot) {
    if ((program::is_communication(op.kind) && !plan.hardware->cpu) || merged(program, slot)) return false;
    return plan.router.forced || !is_routed(op.module);
}

void gather(const RecordedRun& run, const std::string& folder, bench::CallSamples& samples) {
    std::map<int, program::Program> programs; // programs by pipeline rank
    std::map<int, int> stage;                 // stages by rank
    for (std::size_t i = 0; i < run.timeline.ranks.size(); ++i)
        stage[run.timeline.ranks[i]] = run.timeline.pipeline_rank[i];
    for (const program::TimelineRow& row : run.timeline.rows) {
        const auto at = stage.find(row.rank);
        if (at == stage.end() || at->second < 0 || at->second >= run.plan.pp)
            refuse("--runs {}: rows of rank {}, which its list of ranks has no pipeline rank for", folder, row.rank);
        auto known = programs.find(at->second);
        if (known == programs.end()) known = programs.emplace(at->second, lower::lower(run.plan, at->second)).first;
        const program::Program& program = known->second;
        const program::Op* op = program::op_of(program, row);
        if (op == nullptr)
            refuse("--runs {}: slot {} op {} is no {} in its plan's program: execute it with this version of moe-plan",
                   folder, row.slot, row.op, program::to_string(row.kind));
        if (tells(run.plan, program, *op, static_cast<std::size_t>(row.slot)))
            bench::add_sample(samples, *op, program, row.busy, run.clock_hz);
    }
}

} // namespace

Feedback fed_back(const std::vector<std::string>& runs, const std::string& from) {
    Feedback result;
    std::optional<machine::Hardware> known;
    if (!from.empty()) known = machine::load_hardware(from);
    for (const std::string& folder : runs) {
        const RecordedRun run = recorded_run(folder);
        if (!known) known = *run.plan.hardware;
        if (known->measured.empty())
            refuse("{} holds no measurements that those of a run could join: moe-plan calibrate --backend {} measures "
                   "this machine",
                   known->name, known->cpu ? "cpu" : "cuda");
        if (run.plan.hardware->name != known->name || run.plan.hardware->cpu != known->cpu)
            refuse("--runs {}: its plan is for {}, and the profile for {}", folder, run.plan.hardware->name,
                   known->name);
        bench::CallSamples samples;
        gather(run, folder, samples);
        for (auto& [key, list] : samples) {
            result.ops += list.size();
            const std::vector<machine::MeasuredCall> calls = bench::calls_of(std::move(list), !known->cpu);
            std::vector<machine::MeasuredCall>& all = known->measured[key];
            all = bench::with_later(key, std::move(all), calls);
            std::vector<machine::MeasuredCall>& own = result.measured[key];
            own = bench::with_later(key, std::move(own), calls);
        }
    }
    result.hardware = std::move(*known);
    return result;
}

} // namespace moe::tools
