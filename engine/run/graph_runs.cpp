// Cuts a step's work where it changes streams, waits for others or is waited for, or leaves the scopes of the plan.
#include "engine/run/graph_runs.hpp"

#include "planner/plan/plan.hpp"
#include "planner/program/graph_scope.hpp"

#include <cstdint>
#include <map>

namespace moe::run {

namespace {

constexpr std::size_t fewest = 2; // A graph of one op saves no launch.

// All that two runs must have in common to be one record: ops, what they are told of the walk, and addresses.
using Key = std::vector<std::uintptr_t>;

void add_to(Key& key, const program::OpWalk& at, const device::Arena& arena) {
    const program::Op& op = at.op();
    key.push_back(reinterpret_cast<std::uintptr_t>(&op));
    key.push_back(static_cast<std::uintptr_t>(at.reserved_sms()) * 2 + (at.merged() ? 1 : 0));
    for (const program::Operands* ids : {&op.in, &op.out})
        for (const program::TensorId id : *ids)
            key.push_back(
                id == program::no_tensor ? 0 : reinterpret_cast<std::uintptr_t>(arena.at(id, at.slot().micro_batch)));
}

} // namespace

std::vector<GraphRun> graph_runs(const program::Program& program, const plan::Plan& plan,
                                 const device::StreamOrder& order, const device::Arena& arena) {
    std::vector<GraphRun> runs;
    std::map<Key, std::size_t> records;
    std::size_t count = 0;
    program::OpWalk walk(program);
    int number = 0;
    GraphRun run{0, 0, walk};
    Key key;
    const auto close = [&](std::size_t end) {
        run.end = end;
        if (run.end - run.begin >= fewest) {
            const auto [at, fresh] = records.try_emplace(key, count);
            if (fresh) ++count;
            run.plain = at->second;
            run.stamped = count++;
            runs.push_back(run);
        }
        key.clear();
    };
    for (std::size_t w = 0; w < order.size(); ++w) {
        const device::StreamOrder::Work work = order[w];
        for (; number < work.op; ++number) walk.next();
        const bool held = work.stream == 0 && !work.boxes && !program::is_communication(walk.op().kind) &&
                          program::in_graph(plan, walk.op());
        if (!key.empty() && (!held || !work.waits.empty())) close(w);
        if (!held) continue;
        if (key.empty()) run = {w, w, walk, number};
        add_to(key, walk, arena);
        if (work.signal >= 0) close(w + 1);
    }
    if (!key.empty()) close(order.size());
    return runs;
}

} // namespace moe::run
