// The closed form of memory is held to planned places on plans whose fullest moment is not where two small ones say.
#include "planner/lower/lower.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/plan/overflow_retry.hpp"
#include "planner/program/program.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/pricing/fast_estimator.hpp"
#include "simulator/replay/simulate.hpp"
#include "tests/support/nearly.hpp"
#include "tests/support/published_plan.hpp"

#include <doctest/doctest.h>

#include <string>
#include <utility>
#include <vector>

namespace {

using Fields = std::vector<std::pair<const char*, const char*>>;

} // namespace

TEST_CASE("memory of the closed form is that of planned places") {
    struct Case {
        const char *what, *model, *hardware, *stack;
        int gpus, seq;
        Fields fields;
    };
    const std::vector<Case> cases{
        {"the fullest op of a larger micro-batch is another one",
         "GPT-OSS-20B",
         "gb200-nvl72",
         "moe-plan",
         384,
         2048,
         {{"tp", "2"},
          {"cp", "4"},
          {"pp", "3"},
          {"ep", "8"},
          {"mbs", "4"},
          {"precision", "nvfp4"},
          {"recompute", "full"},
          {"dispatcher", "hybridep"}}},
        {"the step in place of one that overflows exchanges more rows",
         "Qwen3-30B-A3B",
         "h100",
         "moe-plan",
         256,
         4096,
         {{"tp", "2"},
          {"cp", "4"},
          {"pp", "8"},
          {"ep", "8"},
          {"etp", "4"},
          {"dispatcher", "alltoall"},
          {"capacity", "1.5"}}},
        {"layers of two precisions offload tensors of two shapes",
         "Qwen3-30B-A3B",
         "gb200-nvl72",
         "mcore-2603.07685",
         32,
         4096,
         {{"etp", "4"},
          {"mbs", "2"},
          {"precision", "mxfp8"},
          {"bf16_layers", "1+6"},
          {"gradients", "bf16"},
          {"recompute", "layernorm+moe_act"},
          {"offload", "expert_fc1+moe_act"},
          {"dispatcher", "alltoall"}}},
        {"two depths of MTP add to the embedding's gradient one behind the other",
         "Nemotron-3-Super",
         "b200",
         "bridge-26.04",
         256,
         4096,
         {{"tp", "2"},
          {"cp", "4"},
          {"ep", "16"},
          {"etp", "2"},
          {"mbs", "4"},
          {"precision", "bf16"},
          {"fsdp", "on"},
          {"recompute", "layernorm+moe_act"},
          {"offload", "expert_fc1+optimizer"},
          {"dispatcher", "deepep"}}},
        {"a dense group and one of experts have as many ranks, but not the same",
         "GPT-OSS-20B",
         "h200",
         "moe-plan",
         128,
         2048,
         {{"tp", "4"},
          {"cp", "4"},
          {"pp", "4"},
          {"ep", "4"},
          {"etp", "4"},
          {"mbs", "2"},
          {"precision", "bf16"},
          {"lora", "16"},
          {"recompute", "full"},
          {"dispatcher", "allgather"}}},
        {"a pair's forward takes layers while its backward is between MTP and the model's",
         "Nemotron-3-Super",
         "h200",
         "moe-plan",
         128,
         4096,
         {{"ep", "32"}, {"precision", "bf16"}, {"dispatcher", "alltoall"}, {"ep_overlap", "on"}}},
        {"Muon collects gradients before it works on them",
         "GPT-OSS-20B",
         "b200",
         "moe-plan",
         256,
         4096,
         {{"tp", "8"},
          {"cp", "4"},
          {"pp", "8"},
          {"ep", "2"},
          {"etp", "4"},
          {"mbs", "4"},
          {"precision", "mxfp8"},
          {"recompute", "full"},
          {"optimizer", "muon"},
          {"dispatcher", "allgather"}}},
    };
    for (const Case& c : cases) {
        CAPTURE(std::string(c.what));
        moe::plan::Plan plan = published_plan(c.model, c.hardware, c.stack, c.seq);
        plan.gpus = c.gpus;
        for (const auto& [field, value] : c.fields) moe::plan::set_field(plan, field, value);
        plan.dp = plan.gpus / (plan.tp * plan.cp * plan.pp);
        plan.edp = plan.gpus / (plan.ep * plan.etp * plan.pp);
        plan.gbs = plan.dp * plan.mbs * 4 * plan.pp;
        CHECK(moe::plan::check_plan(plan).message == "");
        const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
        moe::pricing::FastEstimator estimator(plan.hardware, stack);
        CHECK(estimator.memory_bytes(plan) ==
              nearly(moe::replay::simulate(plan, stack, false).estimate.memory_bytes).epsilon(0.004));
    }
}

TEST_CASE("replay has room for the rows that the step in place of one that overflows exchanges") {
    moe::plan::Plan plan = published_plan("Qwen3-30B-A3B", "h100", "moe-plan");
    plan.gpus = plan.dp = 32;
    plan.ep = 8;
    plan.etp = 4;
    plan.gbs = 64;
    plan.precision = moe::machine::Precision::bf16;
    plan.dispatcher = moe::plan::Dispatcher::alltoall;
    plan.capacity = 1.5;
    REQUIRE(moe::plan::check_plan(plan).message == "");
    const moe::plan::Plan again = moe::plan::overflow_retry_plan(plan).value();
    const moe::replay::Simulation full =
        moe::replay::simulate(plan, moe::stack::load_stack(plan.stack, *plan.hardware), false);
    CHECK(full.memory_bytes.front() ==
          moe::replay::rank_memory_bytes(again, moe::lower::lower(again, 0), full.memory.front().arena_bytes));
}
