// Planned capacity of routed rows: a step that overflows changes nothing, is run again with room for the worst case,
// and training goes on as if it had always had that room, to the bit.
#include "planner/lower/lower.hpp"
#include "planner/memory/retry_memory.hpp"
#include "planner/plan/overflow_retry.hpp"
#include "tests/engine/train/parity.hpp"
#include "tests/support/draws.hpp"

#include <doctest/doctest.h>

#include <algorithm>

using namespace moe;

namespace {

// 128 tokens on a rank and 2 copies of each: buffers of 256 rows are the balanced load exactly.
plan::Plan wide_plan(const std::string& model, int ranks, Fields fields, const std::string& capacity) {
    fields.emplace_back("capacity", capacity);
    return small_plan(small_model(model), ranks, fields, {128, 16});
}

double sum(const std::vector<double>& values) {
    double total = 0.0;
    for (const double value : values) total += value;
    return total;
}

void check_training(const Trained& got, const Trained& want) {
    check_bits(got, want);
    CHECK(got.routed == want.routed);
}

struct Overflowing {
    std::string model;
    int ranks;
    Fields fields;
};

void check_overflowing(const Overflowing& overflowing) {
    const auto& [model, ranks, fields] = overflowing;
    std::string text = model;
    for (const auto& [field, value] : fields) text += " " + field + "=" + value;
    INFO(text);
    const Trained got = train_three(wide_plan(model, ranks, fields, "1")),
                  want = train_three(wide_plan(model, ranks, fields, "none"));
    CHECK(sum(got.overflow) > 0.0);
    CHECK(sum(want.overflow) == 0.0);
    check_training(got, want);
}

} // namespace

TEST_CASE("capacity: steps that overflow are run again, to the bits of worst-case buffers") {
    const std::vector<Overflowing> all{
        {"qwen3", 4, {{"ep", "4"}}},
        {"qwen3", 4, {{"ep", "4"}, {"dispatcher", "allgather"}}},
        {"qwen3", 4, {{"ep", "4"}, {"dispatcher", "hybridep"}}},
        {"qwen3", 4, {{"ep", "4"}, {"dispatcher", "hybridep"}, {"domain", "2"}}},
        {"qwen3", 4, {{"ep", "4"}, {"dispatcher", "hybridep"}, {"domain", "1"}, {"mbs", "2"}}}, // slots overflow, too
        {"qwen3", 8, {{"ep", "4"}, {"etp", "2"}}},
        {"qwen3", 8, {{"ep", "4"}, {"etp", "2"}, {"dispatcher", "allgather"}}},
        {"deepseek3", 8, {{"ep", "4"}, {"pp", "2"}}},
        {"mixtral", 8, {{"ep", "4"}, {"pp", "2"}, {"schedule", "zb-v"}, {"vpp", "2"}}},
        {"qwen2", 8, {{"ep", "8"}, {"tp", "2"}, {"mbs", "2"}, {"recompute", "moe"}}},
        {"qwen2", 4, {{"ep", "4"}, {"recompute", "full"}}},
        {"deepseek2", 8, {{"ep", "4"}, {"cp", "2"}, {"mbs", "2"}}},
        {"qwen3", 4, {{"ep", "4"}, {"ep_overlap", "on"}}},
        {"qwen3", 8, {{"ep", "4"}, {"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}, {"ep_overlap", "on"}}},
        {"qwen3", 8, {{"ep", "4"}, {"tp", "2"}, {"tp_overlap", "on"}}},
    };
    for (const Overflowing& one : thinned(all)) check_overflowing(one);
}

TEST_CASE("capacity: a step that overflows leaves no trace in what outlives a step") {
    const std::vector<Overflowing> all{
        {"qwen3", 4, {{"ep", "4"}, {"offload", "optimizer"}, {"optimizer", "adamw+bf16_moments"}}},
        {"qwen3", 8, {{"ep", "4"}, {"pp", "2"}, {"offload", "optimizer+moe_act"}}},
        {"qwen3", 8, {{"ep", "4"}, {"pp", "2"}, {"offload", "optimizer_step+moe_act"}}},
        {"deepseek3", 4, {{"ep", "4"}, {"bias_update", "0.01"}}},
        {"qwen3", 4, {{"ep", "4"}, {"aux_loss", "0.1"}, {"load_balancing", "global_aux_loss"}}},
        {"deepseek3-mtp", 4, {{"ep", "4"}}},
    };
    for (const Overflowing& one : thinned(all)) check_overflowing(one);
}

TEST_CASE("capacity: a balanced load fits, and steps are run once") {
    const Fields fields{{"ep", "4"}, {"balance", "forced"}};
    const Trained got = train_three(wide_plan("qwen3", 4, fields, "1")),
                  want = train_three(wide_plan("qwen3", 4, fields, "none"));
    CHECK(sum(got.overflow) == 0.0);
    check_training(got, want);
}

TEST_CASE("capacity: the arena holds both Programs, to the byte, and less than worst-case buffers") {
    for (const Fields& fields : {Fields{{"ep", "4"}, {"pp", "2"}}, Fields{{"ep", "8"}, {"mbs", "2"}}}) {
        const plan::Plan plan = wide_plan("qwen3", 8, fields, "1"), worst = wide_plan("qwen3", 8, fields, "none");
        std::int64_t planned = 0, once = 0, again = 0, most = 0;
        for (int stage = 0; stage < plan.pp; ++stage) {
            const program::Program program = lower::lower(plan, stage);
            planned = std::max(planned, memory::plan_memory_with_retry(plan, program).arena_bytes);
            once = std::max(once, memory::plan_memory(program).arena_bytes);
            again =
                std::max(again, memory::plan_memory(lower::lower(*plan::overflow_retry_plan(plan), stage)).arena_bytes);
            most = std::max(most, memory::plan_memory(lower::lower(worst, stage)).arena_bytes);
        }
        CHECK(planned == std::max(once, again));
        CHECK(planned < most);
        CHECK(train::Trainer(plan, {}).memory_gib() == static_cast<double>(planned) / (1 << 30));
    }
    CHECK_FALSE(plan::overflow_retry_plan(wide_plan("qwen3", 4, {}, "1"))); // without EP every copy has its place
    CHECK_FALSE(plan::overflow_retry_plan(wide_plan("qwen3", 4, {{"ep", "4"}}, "0"))); // the worst case is planned
}
