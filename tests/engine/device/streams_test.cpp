// Streams side by side: ops that touch the same bytes are in order, and no rank's streams wait for another's for ever.
#include "engine/comm/check_streams.hpp"
#include "planner/lower/lower.hpp"
#include "planner/memory/retry_memory.hpp"
#include "tests/engine/train/random_cases.hpp"
#include "tests/support/draws.hpp"

#include <doctest/doctest.h>

using namespace moe;

namespace {

struct Lowered {
    std::vector<program::Program> programs;
    std::vector<memory::MemoryPlan> memory;
};

Lowered lowered(const plan::Plan& plan) {
    Lowered all;
    for (int stage = 0; stage < plan.pp; ++stage) {
        all.programs.push_back(lower::lower(plan, stage));
        all.memory.push_back(memory::plan_memory_with_retry(plan, all.programs.back()));
    }
    return all;
}

struct Touch {
    const char* begin;
    std::int64_t bytes;
    bool writes;
};

// Pairs of ops that touch the same bytes, one of them writing, of which none is known to end before the other begins.
int races(const program::Program& program, const memory::MemoryPlan& memory, const plan::Mesh& mesh, int rank) {
    const std::unique_ptr<device::Device> nowhere = comm::open_nowhere();
    const device::Arena arena(program, memory, mesh, rank, *nowhere);
    const device::StreamOrder order(program, arena, mesh.group_size({plan::Domain::dense, plan::axis::pipeline}));
    std::vector<std::vector<Touch>> touches; // by work
    int number = 0;
    for (program::OpWalk walk(program); !walk.done(); walk.next(), ++number) {
        const auto add = [&](const program::Operands& ids, bool writes) {
            for (const program::TensorId id : ids)
                if (id != program::no_tensor)
                    touches.back().push_back({static_cast<const char*>(arena.at(id, walk.slot().micro_batch)),
                                              program.tensors[static_cast<std::size_t>(id)].bytes(), writes});
        };
        for (bool first = true; touches.size() < order.size() && order[touches.size()].op == number; first = false) {
            touches.emplace_back();
            if (walk.op().kind != program::OpKind::send || first) add(walk.op().in, false);
            add(walk.op().out, true);
        }
    }
    REQUIRE(order.size() == touches.size());
    const auto conflict = [&](std::size_t a, std::size_t b) {
        for (const Touch& x : touches[a])
            for (const Touch& y : touches[b])
                if ((x.writes || y.writes) && x.begin < y.begin + y.bytes && y.begin < x.begin + x.bytes) return true;
        return false;
    };
    int count = 0;
    std::vector<std::vector<bool>> before; // [op][earlier op]: has ended when op begins
    for (std::size_t n = 0; n < touches.size(); ++n) {
        std::vector<bool> known(n);
        const auto follow = [&](int other) {
            const auto o = static_cast<std::size_t>(other);
            known[o] = true;
            for (std::size_t i = 0; i < o; ++i) known[i] = known[i] || before[o][i];
        };
        if (order[n].before >= 0) follow(order[n].before);
        for (const int other : order[n].waits) follow(other);
        for (std::size_t i = 0; i < n; ++i) count += !known[i] && conflict(i, n);
        before.push_back(std::move(known));
    }
    return count;
}

} // namespace

TEST_CASE("streams: ops that touch the same bytes are in order, whatever lies between them") {
    const Fields cases[] = {{{"tp", "2"}, {"ep", "2"}},
                            {{"pp", "2"}, {"ep", "2"}, {"offload", "moe_act+core_attn+optimizer"}},
                            {{"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}},
                            {{"pp", "2"}, {"vpp", "2"}, {"schedule", "zb-v"}, {"ep", "2"}},
                            {{"tp", "2"}, {"ep", "4"}, {"ep_overlap", "on"}, {"recompute", "moe_act+layernorm"}},
                            {{"cp", "2"}, {"ep", "4"}, {"etp", "1"}},
                            {{"fsdp", "on"}, {"ep", "2"}, {"precision", "bf16"}, {"gradients", "bf16"}}};
    for (const Fields& fields : cases) {
        const plan::Plan plan = small_plan("qwen3", 4, fields);
        const plan::Mesh mesh(plan);
        const Lowered all = lowered(plan);
        for (int rank = 0; rank < plan.gpus; rank += plan.gpus / plan.pp) {
            const auto stage =
                static_cast<std::size_t>(mesh.coordinate(plan::Domain::dense, plan::axis::pipeline, rank));
            INFO(fields.front().first, " ", fields.back().first, " rank ", rank);
            CHECK(races(all.programs[stage], all.memory[stage], mesh, rank) == 0);
        }
    }
}

TEST_CASE("streams: no random plan's streams wait for each other for ever") {
    for (const RandomCase& c :
         random_cases(environment("MOE_PLAN_SEED", 1), environment("MOE_PLAN_PLANS", draws(500)), 20)) {
        const plan::Plan plan = plan_of(c);
        const Lowered all = lowered(plan);
        try {
            comm::check_streams(all.programs, all.memory, plan::Mesh(plan));
        } catch (const Error& error) {
            const std::string why = error.what();
            FAIL_CHECK(c.text(), "\n", why);
        }
    }
}
