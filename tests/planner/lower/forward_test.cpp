// Forward passes alone: every micro-batch once, states where a step has them, and no more memory than a step.
#include "planner/lower/lower.hpp"
#include "planner/memory/memory.hpp"
#include "planner/memory/retry_memory.hpp"
#include "planner/model/model.hpp"
#include "tests/planner/plan/sample_plans.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <set>

using namespace moe;

namespace {

template <class Visit>
void for_each_op(const program::Program& program, Visit visit) {
    for (const program::Template& ops : program.templates)
        for (const program::Op& op : ops.ops) visit(op);
}

} // namespace

TEST_CASE("a forward alone takes every micro-batch through every chunk once, in the step's order, and keeps nothing") {
    for (const plan::Plan& plan : sample_plans()) {
        for (int rank = 0; rank < plan.pp; ++rank) {
            CAPTURE(plan::plan_to_json(plan));
            const program::Program step = lower::lower(plan, rank), forward = lower::lower_forward(plan, rank);
            std::vector<std::pair<int, int>> turns, of_step;
            const auto list = [](const program::Program& program, std::vector<std::pair<int, int>>& to) {
                for (const program::Slot& slot : program.slots) {
                    const program::Template& ops = program.templates[static_cast<std::size_t>(slot.index)];
                    if (ops.kind == plan::SlotKind::forward) to.emplace_back(ops.chunk, slot.micro_batch);
                }
            };
            list(step, of_step);
            list(forward, turns);
            CHECK(turns == of_step);
            CHECK(static_cast<int>(turns.size()) == plan.vpp * plan.micro_batches());
            CHECK(forward.slots.size() == turns.size() + 2);
            for_each_op(forward, [&](const program::Op& op) {
                CHECK((op.phase == program::Phase::forward || op.phase == program::Phase::step));
                for (const program::TensorId id : op.out) {
                    if (id == program::no_tensor) continue;
                    const program::Tensor& tensor = forward.tensors[static_cast<std::size_t>(id)];
                    CHECK(tensor.storage != program::Storage::optimizer);
                    CHECK(tensor.storage != program::Storage::host);
                }
            });
            const memory::MemoryPlan of_forward = memory::plan_memory(forward), whole = memory::plan_memory(step);
            CHECK(memory::same_states(step, whole, forward, of_forward));
            CHECK(of_forward.arena_bytes <= whole.arena_bytes);
            CHECK(of_forward.class_bytes[static_cast<std::size_t>(memory::MemoryClass::saved)] == 0);
        }
    }
}

TEST_CASE("without a step in the same arena, gradients and moments have no room") {
    plan::Plan plan = sample_plans().front();
    plan.precision = machine::Precision::bf16;
    const program::Program beside = lower::lower_forward(plan, 0), alone = lower::lower_forward(plan, 0, {true, 0});
    const memory::MemoryPlan with = memory::plan_memory(beside), without = memory::plan_memory(alone);
    const auto bytes = [](const memory::MemoryPlan& plan_of, memory::MemoryClass kind) {
        return plan_of.class_bytes[static_cast<std::size_t>(kind)];
    };
    CHECK(bytes(without, memory::MemoryClass::gradients) == 0);
    CHECK(bytes(without, memory::MemoryClass::optimizer) * 3 == bytes(with, memory::MemoryClass::optimizer));
    CHECK(bytes(without, memory::MemoryClass::weights) == bytes(with, memory::MemoryClass::weights));
}

TEST_CASE("generation keeps keys and values of its own for every layer, and leaves logits") {
    plan::Plan plan = sample_plans().front();
    plan.gpus = plan.tp = plan.cp = plan.dp = plan.pp = plan.vpp = plan.ep = plan.etp = plan.edp = 1;
    plan.seq = plan.gbs = plan.mbs = 1;
    plan.layout.clear();
    plan.precision = machine::Precision::bf16;
    constexpr std::int64_t keys = 100;
    const program::Program program = lower::lower_forward(plan, 0, {true, keys});
    std::set<program::TensorId> caches;
    std::size_t calls = 0;
    for_each_op(program, [&](const program::Op& op) {
        CHECK(op.kind != program::OpKind::attention);
        CHECK(op.kind != program::OpKind::cross_entropy);
        CHECK(op.kind != program::OpKind::ce_loss);
        if (op.kind != program::OpKind::attention_cached) return;
        ++calls;
        const auto& attr = std::get<program::AttentionAttr>(op.attr);
        CHECK(attr.seq_k == keys);
        for (const int cache : {1, 2}) {
            const program::TensorId id = op.out[static_cast<std::size_t>(cache)];
            caches.insert(id);
            const program::Tensor& tensor = program.tensors[static_cast<std::size_t>(id)];
            CHECK(tensor.storage == program::Storage::optimizer);
            CHECK(tensor.elements() == keys * attr.kv_heads * (cache == 1 ? attr.qk_dim : attr.v_dim));
        }
    });
    CHECK(calls == plan.model->layers.size());
    CHECK(caches.size() == 2 * calls);
    REQUIRE(program.io.logits != program::no_tensor);
    CHECK(program.tensors[static_cast<std::size_t>(program.io.logits)].elements() == plan.model->padded_vocab(1));
}
