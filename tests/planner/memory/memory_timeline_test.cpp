// Memory in use over a hand-made step: what rises and falls when, and how far below the plan it stays.
#include "planner/memory/memory_timeline.hpp"

#include "planner/lower/lower.hpp"
#include "planner/program/program.hpp"
#include "planner/program/timeline.hpp"
#include "tests/planner/plan/sample_plans.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <numeric>

namespace {

using namespace moe;

double at(const memory::MemoryUse& use, memory::MemoryClass c) { return use.bytes[static_cast<std::size_t>(c)]; }

// Ops of all slots one after another, one second each.
program::Timeline one_second_each(const program::Program& program) {
    program::Timeline timeline;
    timeline.ranks = {0};
    double now = 0.0;
    for (std::size_t s = 0; s < program.slots.size(); ++s) {
        const program::Template& t = program.templates[static_cast<std::size_t>(program.slots[s].index)];
        for (std::size_t i = 0; i < t.ops.size(); ++i) {
            program::TimelineRow row;
            row.slot = static_cast<std::int32_t>(s);
            row.op = static_cast<std::int32_t>(i);
            row.start = now;
            row.end = now += 1.0;
            timeline.rows.push_back(row);
        }
    }
    timeline.step_seconds = now;
    return timeline;
}

// Two ops forward and one backward over a saved tensor of 4 KiB and a workspace of 2 KiB; two micro-batches.
program::Program hand_made() {
    program::Program program;
    const auto tensor = [&](program::Storage storage, std::int64_t rows) {
        program::Tensor t;
        t.storage = storage;
        t.rows = rows;
        t.chunk = 0;
        t.expected_rows = static_cast<double>(rows);
        program.tensors.push_back(t);
        return static_cast<program::TensorId>(program.tensors.size() - 1);
    };
    const program::TensorId weights = tensor(program::Storage::parameter, 256),
                            kept = tensor(program::Storage::activation, 1024),
                            work = tensor(program::Storage::activation, 512);
    const auto op = [](std::vector<program::TensorId> in, std::vector<program::TensorId> out) {
        program::Op o;
        o.kind = program::OpKind::add;
        o.in = std::move(in);
        o.out = std::move(out);
        return o;
    };
    program.templates.push_back({plan::SlotKind::forward, 0, {op({weights}, {work}), op({work}, {kept})}});
    program.templates.push_back({plan::SlotKind::backward, 0, {op({kept}, {})}});
    program.slots = {{0, 0}, {0, 1}, {1, 0}, {1, 1}};
    program.chunks.resize(1);
    program.in_flight = {2};
    return program;
}

} // namespace

TEST_CASE("memory over time: saved from first write to last read, workspace inside its slot") {
    const program::Program program = hand_made();
    const memory::MemoryPlan memory = memory::plan_memory(program);
    const std::vector<memory::MemoryUse> uses =
        memory::memory_over_time(program, memory, one_second_each(program), 0, 6);
    REQUIRE(uses.size() == 6); // one interval per op
    const double kib = 1024.0;
    const std::vector<double> saved{0.0, 4 * kib, 4 * kib, 8 * kib, 8 * kib, 4 * kib};
    const std::vector<double> work{2 * kib, 2 * kib, 2 * kib, 2 * kib, 0.0, 0.0};
    for (std::size_t i = 0; i < uses.size(); ++i) {
        INFO("interval ", i);
        CHECK(at(uses[i], memory::MemoryClass::weights) == kib);
        CHECK(at(uses[i], memory::MemoryClass::saved) == saved[i]);
        CHECK(at(uses[i], memory::MemoryClass::transient) == work[i]);
        CHECK(uses[i].from == nearly(static_cast<double>(i)));
    }
}

TEST_CASE("memory over time: one op at a time, real programs stay within their arenas and come close") {
    for (const plan::Plan& plan : sample_plans()) {
        plan::Plan small = plan;
        small.gbs = std::min(plan.gbs, plan.dp * plan.mbs * plan.pp * 2);
        if (plan::check_plan(small)) continue;
        const program::Program program = lower::lower(small, 0);
        const memory::MemoryPlan memory = memory::plan_memory(program);
        double most = 0.0;
        for (const memory::MemoryUse& use : memory::memory_over_time(program, memory, one_second_each(program), 0, 200))
            most = std::max(most, std::accumulate(use.bytes.begin(), use.bytes.end(), 0.0));
        CHECK(most <= static_cast<double>(memory.arena_bytes));
        CHECK(most >= 0.7 * static_cast<double>(memory.arena_bytes));
    }
}
