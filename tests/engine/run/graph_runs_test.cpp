// The parts of a step that are CUDA graphs: which work they hold, and that they wait for nothing that ops would not.
#include "engine/run/graph_runs.hpp"

#include "engine/comm/check_streams.hpp"
#include "planner/lower/lower.hpp"
#include "planner/memory/memory.hpp"
#include "planner/program/graph_scope.hpp"
#include "tests/engine/train/samples.hpp"

#include <doctest/doctest.h>

#include <set>

using namespace moe;

namespace {

struct RunsFound {
    std::size_t runs = 0, works = 0, held = 0, plain = 0; // held: works that a graph may hold; plain: records
};

RunsFound check_runs(const plan::Plan& plan) {
    const plan::Mesh mesh(plan);
    const program::Program program = lower::lower(plan, 0);
    const std::unique_ptr<device::Device> nowhere = comm::open_nowhere();
    const device::Arena arena(program, memory::plan_memory(program, plan.micro_batches()), mesh, 0, *nowhere);
    const device::StreamOrder order(program, arena, plan.pp);
    std::vector<const program::Op*> ops;
    for (program::OpWalk walk(program); !walk.done(); walk.next()) ops.push_back(&walk.op());
    const auto op = [&](std::size_t w) -> const program::Op& { return *ops[static_cast<std::size_t>(order[w].op)]; };
    RunsFound found;
    std::set<std::size_t> plain, stamped;
    std::size_t end = 0;
    for (const run::GraphRun& run : run::graph_runs(program, plan, order, arena)) {
        CHECK(run.begin >= end);
        CHECK(run.end >= run.begin + 2);
        end = run.end;
        CHECK(run.op == order[run.begin].op);
        CHECK(&run.walk.op() == &op(run.begin));
        for (std::size_t w = run.begin; w < run.end; ++w) {
            CHECK(order[w].stream == 0);
            CHECK(program::in_graph(plan, op(w)));
            CHECK_FALSE(program::is_communication(op(w).kind));
            if (w > run.begin) CHECK(order[w].waits.empty());
            if (w + 1 < run.end) CHECK(order[w].signal < 0);
        }
        ++found.runs;
        found.works += run.end - run.begin;
        plain.insert(run.plain);
        CHECK(stamped.insert(run.stamped).second);
    }
    for (std::size_t w = 0; w < order.size(); ++w)
        found.held += order[w].stream == 0 && !program::is_communication(op(w).kind) && program::in_graph(plan, op(w));
    found.plain = plain.size();
    for (const std::size_t record : plain) CHECK(stamped.count(record) == 0);
    return found;
}

} // namespace

TEST_CASE("parts of a step that are graphs hold the ops of their scopes, and micro-batches share them") {
    const RunsFound attention = check_runs(small_plan("qwen3", 1, {{"cuda_graph", "attn"}})),
                    all = check_runs(small_plan("qwen3", 1, {{"cuda_graph", "partial"}})),
                    planned = check_runs(small_plan("qwen3", 1, {{"cuda_graph", "attn"}, {"capacity", "2"}}));
    CHECK(attention.runs > 0);
    CHECK(10 * attention.works > 9 * attention.held); // Few ops are alone among those of other scopes.
    CHECK(attention.plain < attention.runs);          // Micro-batches have the same memory in turn.
    CHECK(attention.held < all.held);
    CHECK(all.held < planned.held); // Rows that are planned bring the experts in.
    CHECK(check_runs(small_plan("qwen3", 1, {})).runs == 0);
    for (const Fields& fields : {Fields{{"tp", "2"}}, Fields{{"ep", "2"}, {"ep_overlap", "on"}}, Fields{{"fsdp", "on"}},
                                 Fields{{"pp", "2"}}, Fields{{"tp", "2"}, {"offload", "attn_norm"}}}) {
        Fields scoped = fields;
        scoped.emplace_back("cuda_graph", "partial");
        const RunsFound found = check_runs(small_plan("qwen3", 2, scoped));
        INFO(fields.front().first, ": ", found.runs, " runs of ", found.works, " of ", found.held, " ops");
        CHECK(2 * found.works > found.held);
    }
}

TEST_CASE("graphs of parts hold communication of the scopes in published stacks, and none in ours") {
    plan::Plan plan = small_plan("qwen3", 2, {{"tp", "2"}, {"cuda_graph", "attn"}});
    const program::Program program = lower::lower(plan, 0);
    const auto held = [&] {
        int count = 0;
        for (program::OpWalk walk(program); !walk.done(); walk.next())
            count += program::is_communication(walk.op().kind) && program::in_graph(plan, walk.op());
        return count;
    };
    CHECK(held() == 0);
    plan.stack = "bridge-26.08";
    CHECK(held() > 0);
    plan.cuda_graph = plan::CudaGraph::full;
    plan.stack = "moe-plan";
    CHECK(held() > 0);
}
