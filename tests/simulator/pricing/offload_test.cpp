// Offload on the clock: hidden copies cost nothing, a narrow host link sets the pace, optimizer states go and come
// once.
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/replay/simulate.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

namespace {

moe::plan::Plan plan_of(const char* model) {
    moe::plan::Plan plan;
    plan.model = std::make_shared<const moe::model::Model>(moe::families::load_model(model));
    plan.hardware = std::make_shared<const moe::machine::Hardware>(moe::machine::load_hardware("gb200-nvl72"));
    plan.stack = "bridge-26.08";
    plan.seq = 4096;
    plan.dispatcher = moe::plan::Dispatcher::hybridep;
    plan.cuda_graph = moe::plan::CudaGraph::full;
    return plan;
}

double step(const moe::plan::Plan& plan) {
    REQUIRE(moe::plan::check_plan(plan).message == "");
    return moe::replay::simulate(plan, moe::stack::load_stack(plan.stack, *plan.hardware), false).estimate.step_seconds;
}

} // namespace

TEST_CASE("activations: hidden on a wide host link, a micro-batch's copies out and back on a narrow one") {
    moe::plan::Plan plan = plan_of("Qwen3-30B-A3B");
    plan.gpus = plan.dp = plan.ep = 8;
    plan.gbs = 32;
    const double without = step(plan);
    plan.offload = moe::plan::offload::attn_proj; // 4096 tokens x 4096 columns in BF16, 48 layers
    CHECK(step(plan) == nearly(without).epsilon(0.01));
    auto narrow = std::make_shared<moe::machine::Hardware>(*plan.hardware);
    narrow->host.bandwidth = 2e9;
    plan.hardware = narrow;
    const double four = step(plan);
    plan.gbs = 24;
    const double copies = 2.0 * 48 * 4096 * 4096 * 2 / 2e9;
    CHECK(four - step(plan) == nearly(copies).epsilon(0.03));
}

// arXiv 2603.07685 section 4.1.6: 0.1 to 0.2 s per iteration for DeepSeek-V3 on GB200.
TEST_CASE("optimizer states: both ways over the host link once per step") {
    moe::plan::Plan plan = plan_of("DeepSeek-V3");
    plan.precision = moe::machine::Precision::mxfp8;
    plan.gpus = 256;
    plan.dp = plan.ep = 64;
    plan.pp = plan.vpp = 4;
    plan.schedule = moe::plan::ScheduleKind::interleaved;
    plan.layout = "Et*4|(tttt|)*14tmL";
    plan.gbs = 64 * 8;
    plan.optimizer.moments = moe::plan::Moments::bf16;
    const double without = step(plan);
    plan.offload = moe::plan::offload::optimizer;
    const double cost = step(plan) - without;
    CHECK(cost > 0.1);
    CHECK(cost < 0.2);
    // 8 bytes of each parameter of the largest stage: 16 layers of 4 experts of 44 M on each of 64 ranks, and 1/64 of
    // their 187 M dense weights each. The update itself, a few per cent of it, now runs beside the copies.
    const double states = 8.0 * 16 * (4 * 3.0 * 7168 * 2048 + 187e6 / 64);
    const double copies = 2.0 * states / 225e9;
    CHECK(cost < copies);
    CHECK(cost > 0.9 * copies);
}

TEST_CASE("what is offloaded has to fit into the host's memory") {
    moe::plan::Plan plan = plan_of("Qwen3-30B-A3B");
    plan.gpus = plan.dp = plan.ep = 8;
    plan.gbs = 32;
    plan.offload = moe::plan::offload::attn_proj;
    const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
    // One copy of every layer's rows: the host's are as many as the micro-batches under way.
    const double bytes = 48.0 * 4096 * 4096 * 2;
    const moe::search::Estimate e = moe::replay::simulate(plan, stack, false).estimate;
    CHECK(e.host_bytes == nearly(bytes).epsilon(0.001));
    CHECK(e.fits);
    auto small = std::make_shared<moe::machine::Hardware>(*plan.hardware);
    small->host_memory_bytes = 0.9 * bytes;
    plan.hardware = small;
    CHECK_FALSE(moe::replay::simulate(plan, stack, false).estimate.fits);
    small->host_memory_bytes = 0.0; // not known
    CHECK(moe::replay::simulate(plan, stack, false).estimate.fits);
}
