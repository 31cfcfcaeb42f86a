// The fast estimate is held to the event-driven simulation on random plans, in time and in memory.
#include "planner/model/families/load_model.hpp"
#include "planner/plan/schedule.hpp"
#include "planner/search/search.hpp"
#include "simulator/pricing/fast_estimator.hpp"
#include "simulator/replay/simulate.hpp"
#include "tests/simulator/pricing/random_plans.hpp"
#include "tests/support/draws.hpp"
#include "tests/support/nearly.hpp"
#include "tests/support/published_plan.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <thread>

namespace {

double sum(const moe::search::Breakdown& b) {
    return b.compute + b.tensor + b.context + b.expert + b.pipeline + b.bubble + b.data + b.optimizer + b.recompute +
           b.host;
}

double least(const moe::search::Breakdown& b) {
    return std::min(
        {b.compute, b.tensor, b.context, b.expert, b.pipeline, b.bubble, b.data, b.optimizer, b.recompute, b.host});
}

} // namespace

TEST_CASE("fast and event-driven agree on 100 random plans: time within 3 %, memory within 1 %") {
    const std::uint64_t seed = seed_of_run();
    MESSAGE("seed ", seed, " (MOE_PLAN_SEED)");
    double worst = 0.0;
    for (const RandomPlan& drawn : random_plans(seed, draws(100))) {
        CAPTURE(seed);
        CAPTURE(drawn.text);
        moe::pricing::FastEstimator estimator(drawn.plan.hardware, drawn.stack);
        const moe::replay::Simulation full = moe::replay::simulate(drawn.plan, drawn.stack, false);
        const moe::search::Estimate fast = estimator.estimate(drawn.plan);
        const double error = fast.step_seconds / full.estimate.step_seconds - 1.0;
        worst = std::max(worst, std::abs(error));
        CHECK(std::abs(error) < 0.03);
        CHECK(std::abs(fast.memory_bytes / full.estimate.memory_bytes - 1.0) < 0.01);
        CHECK(estimator.memory_bytes(drawn.plan) == fast.memory_bytes);
        CHECK(sum(full.estimate.breakdown) == nearly(full.estimate.step_seconds).epsilon(1e-6));
        CHECK(sum(fast.breakdown) == nearly(fast.step_seconds).epsilon(1e-6));
        CHECK(least(full.estimate.breakdown) >= 0.0);
        CHECK(least(fast.breakdown) >= 0.0);
    }
    MESSAGE("worst step time: ", 100.0 * worst, " %");
}

TEST_CASE("fast and event-driven agree on random plans with adapters: time within 3 %, memory within 1 %") {
    const std::uint64_t seed = seed_of_run();
    MESSAGE("seed ", seed, " (MOE_PLAN_SEED)");
    std::size_t adapted = 0;
    double worst = 0.0;
    for (const RandomPlan& drawn : random_plans(seed + 1, draws(200))) {
        if (!drawn.stack.executable) continue;
        moe::plan::Plan plan = drawn.plan;
        plan.precision = moe::machine::Precision::bf16;
        plan.optimizer.muon = false;
        plan.lora = {};
        const moe::plan::Plan without = plan;
        plan.lora = moe::plan::lora_from_string(adapted % 2 == 0 ? "16" : "32:32:attention");
        if (moe::plan::check_plan(plan) || moe::stack::check_stack(plan, drawn.stack)) continue;
        ++adapted;
        CAPTURE(seed);
        CAPTURE(drawn.text);
        moe::pricing::FastEstimator estimator(plan.hardware, drawn.stack);
        const moe::search::Estimate full = moe::replay::simulate(plan, drawn.stack, false).estimate,
                                    fast = estimator.estimate(plan);
        worst = std::max(worst, std::abs(fast.step_seconds / full.step_seconds - 1.0));
        CHECK(std::abs(fast.step_seconds / full.step_seconds - 1.0) < 0.03);
        CHECK(std::abs(fast.memory_bytes / full.memory_bytes - 1.0) < 0.01);
        CHECK(moe::plan::flops_per_token(plan) < moe::plan::flops_per_token(without));
    }
    MESSAGE(adapted, " plans, worst step time: ", 100.0 * worst, " %");
    CHECK(adapted > 0);
}

TEST_CASE("fast and event-driven agree on random plans with delayed scaling, which computes for less time than current "
          "scaling") {
    const std::uint64_t seed = seed_of_run();
    MESSAGE("seed ", seed, " (MOE_PLAN_SEED)");
    std::size_t delayed = 0;
    double worst = 0.0;
    for (const RandomPlan& drawn : random_plans(seed + 2, draws(30))) {
        if (!drawn.stack.executable) continue;
        moe::plan::Plan plan = drawn.plan;
        plan.precision = moe::machine::Precision::fp8_tensor;
        plan.fp8_wgrad = false;
        const moe::plan::Plan current = plan;
        plan.fp8_scaling = moe::plan::Fp8Scaling::delayed;
        if (moe::plan::check_plan(plan) || moe::stack::check_stack(plan, drawn.stack)) continue;
        ++delayed;
        CAPTURE(seed);
        CAPTURE(drawn.text);
        moe::pricing::FastEstimator estimator(plan.hardware, drawn.stack);
        const moe::search::Estimate full = moe::replay::simulate(plan, drawn.stack, false).estimate,
                                    fast = estimator.estimate(plan);
        worst = std::max(worst, std::abs(fast.step_seconds / full.step_seconds - 1.0));
        CHECK(std::abs(fast.step_seconds / full.step_seconds - 1.0) < 0.03);
        CHECK(std::abs(fast.memory_bytes / full.memory_bytes - 1.0) < 0.01);
        // A step may wait for gradients longer than it saves, and then for the reduction of magnitudes too.
        CHECK(full.breakdown.compute < moe::replay::simulate(current, drawn.stack, false).estimate.breakdown.compute);
    }
    CHECK(delayed > draws(30) / 6); // the others are of stacks that run nothing, or refused
    MESSAGE(delayed, " plans, worst step time: ", 100.0 * worst, " %");
}

TEST_CASE("fast and event-driven agree where the host catches up only after some micro-batches") {
    // Weights take 4 s to be gathered, in which the host issues three micro-batches of 1.4 s; devices need 0.4 s for
    // each.
    moe::plan::Plan plan = published_plan("DeepSeek-V3", "h200", "bridge-26.04", 2048);
    for (const auto& [field, value] :
         {std::pair{"tp", "4"}, std::pair{"cp", "4"}, std::pair{"ep", "8"}, std::pair{"etp", "2"},
          std::pair{"precision", "fp8-tensor"}, std::pair{"dispatcher", "hybridep"}, std::pair{"capacity", "1.5"},
          std::pair{"ep_overlap", "on"}, std::pair{"delay_wgrad", "on"}, std::pair{"cuda_graph", "none"}})
        moe::plan::set_field(plan, field, value);
    plan.gpus = 256;
    plan.dp = plan.edp = 16;
    const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
    for (const int micro_batches : {4, 8, 40}) {
        CAPTURE(micro_batches);
        plan.gbs = plan.dp * micro_batches;
        REQUIRE(moe::plan::check_plan(plan).message == "");
        moe::pricing::FastEstimator estimator(plan.hardware, stack);
        const moe::replay::Simulation full = moe::replay::simulate(plan, stack, false);
        CHECK(full.host_seconds > 0.5 * full.estimate.step_seconds);
        CHECK(estimator.estimate(plan).step_seconds == nearly(full.estimate.step_seconds).epsilon(1e-3));
    }
}

TEST_CASE("fast and event-driven agree where MTP lies behind the embedding's stage, or before the loss's") {
    struct Case {
        const char *model, *hardware, *stack, *layout;
        int pp, dp, ep;
    };
    for (const Case& c : {Case{"DeepSeek-V3", "gb200-nvl72", "bridge-26.08", "Et*3|(tt|)*29m|L", 8, 32, 32},
                          Case{"DeepSeek-V3", "gb200-nvl72", "moe-plan", "Et*3|(tt|)*29m|L", 8, 32, 32},
                          Case{"GLM-4.5-Air", "gb300-nvl72", "bridge-26.08", "Et*6|(t*6|)*5t*10m|L", 4, 16, 8},
                          Case{"GLM-4.5-Air", "gb200-nvl72", "moe-plan", "Et*6|(t*6|)*5t*10m|L", 4, 16, 8},
                          Case{"GLM-4.5-Air", "gb300-nvl72", "bridge-26.08", "Et*23|t*22|tm|L", 2, 32, 8},
                          Case{"GLM-4.5-Air", "gb200-nvl72", "moe-plan", "Et*23|t*22|tm|L", 2, 32, 16},
                          // Copies of the embedding table add their gradients over the network: a shard each.
                          Case{"GLM-4.5-Air", "b200", "moe-plan", "Ettt|(tt|)*20ttt|m|L", 4, 128, 2},
                          Case{"GLM-4.5-Air", "b200", "moe-plan", "Ett|(tt|)*22mL", 4, 128, 2}}) {
        CAPTURE(std::string(c.model));
        CAPTURE(std::string(c.stack));
        CAPTURE(std::string(c.layout));
        moe::plan::Plan plan;
        plan.model = std::make_shared<const moe::model::Model>(moe::families::load_model(c.model));
        plan.hardware = std::make_shared<const moe::machine::Hardware>(moe::machine::load_hardware(c.hardware));
        const moe::stack::Stack stack = moe::stack::load_stack(c.stack, *plan.hardware);
        plan.stack = stack.name;
        plan.gpus = c.pp * c.dp;
        plan.pp = c.pp;
        plan.dp = c.dp;
        plan.ep = c.ep;
        plan.edp = c.dp / c.ep;
        plan.layout = c.layout;
        plan.vpp = moe::plan::layout_stage_count(plan) / c.pp;
        plan.schedule = moe::plan::ScheduleKind::interleaved;
        plan.seq = 4096;
        plan.gbs = 8 * c.dp;
        plan.precision = moe::machine::Precision::bf16;
        plan.dispatcher = stack.usual_dispatcher;
        plan.recompute = moe::plan::recompute::moe_act;
        moe::pricing::FastEstimator estimator(plan.hardware, stack);
        const moe::search::Estimate fast = estimator.estimate(plan),
                                    full = moe::replay::simulate(plan, stack, false).estimate;
        CHECK(fast.step_seconds == nearly(full.step_seconds).epsilon(0.005));
        CHECK(fast.memory_bytes == nearly(full.memory_bytes).epsilon(0.03));
        const std::unique_ptr<moe::search::BoundModel> bound_model = estimator.bound_model();
        const moe::search::LowerBound bound =
            bound_model->bound(bound_model->layer_costs(plan), bound_model->stage_split(plan));
        CHECK(bound.step_seconds <= fast.step_seconds * (1.0 + moe::search::bound_time_margin));
        CHECK(bound.memory_bytes <= fast.memory_bytes * (1.0 + moe::search::bound_memory_margin));
    }
}

TEST_CASE("fast and event-driven agree where hosts wait for counts in the merged slots of a pipeline") {
    moe::plan::Plan plan = published_plan("Qwen3-235B-A22B", "h100", "bridge-26.04", 2048);
    const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
    plan.tp = plan.etp = 4;
    plan.dp = plan.ep = 8;
    plan.vpp = plan.mbs = 2;
    plan.schedule = moe::plan::ScheduleKind::interleaved;
    plan.precision = moe::machine::Precision::bf16;
    plan.dispatcher = moe::plan::Dispatcher::alltoall;
    plan.cuda_graph = moe::plan::CudaGraph::partial;
    plan.ep_overlap = true;
    for (const int pp : {2, 3, 4}) {
        plan.pp = pp;
        plan.gpus = 32 * pp;
        plan.gbs = plan.dp * plan.mbs * 12 * pp;
        const double fast = moe::pricing::FastEstimator(plan.hardware, stack).estimate(plan).step_seconds;
        CHECK(fast == nearly(moe::replay::simulate(plan, stack, false).estimate.step_seconds).epsilon(0.01));
    }
}

TEST_CASE("fast and event-driven agree where a pipeline's merged slots are unlike each other") {
    struct Case {
        const char *model, *hardware, *stack;
        int seq, pp, vpp, ep, mbs;
        moe::plan::Dispatcher dispatcher;
        moe::plan::CudaGraph graph;
    };
    for (const Case& c : {// The host waits for counts in pairs of chunks with and without the loss.
                          Case{"GPT-OSS-20B", "b200", "mcore-2603.07685", 8192, 2, 2, 4, 4,
                               moe::plan::Dispatcher::hybridep, moe::plan::CudaGraph::partial},
                          // A pair begins with its backward's message, and sends first what is there first.
                          Case{"Nemotron-3-Nano", "h200", "moe-plan", 8192, 4, 4, 8, 1, moe::plan::Dispatcher::alltoall,
                               moe::plan::CudaGraph::full},
                          // The backward begins with MTP, which lies between the loss and the model's layers.
                          Case{"DeepSeek-V3", "h200", "bridge-26.04", 4096, 2, 1, 32, 1,
                               moe::plan::Dispatcher::alltoall, moe::plan::CudaGraph::partial}}) {
        CAPTURE(std::string(c.model));
        moe::plan::Plan plan = published_plan(c.model, c.hardware, c.stack, c.seq);
        plan.pp = c.pp;
        plan.vpp = c.vpp;
        plan.schedule = c.vpp > 1 ? moe::plan::ScheduleKind::interleaved : moe::plan::ScheduleKind::one_f_one_b;
        plan.dp = plan.ep = c.ep;
        plan.gpus = plan.pp * plan.dp;
        plan.mbs = c.mbs;
        plan.gbs = plan.dp * plan.mbs * 4 * c.pp;
        plan.precision = moe::machine::Precision::bf16;
        plan.dispatcher = c.dispatcher;
        plan.cuda_graph = c.graph;
        plan.ep_overlap = true;
        REQUIRE(moe::plan::check_plan(plan).message == "");
        const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
        const double fast = moe::pricing::FastEstimator(plan.hardware, stack).estimate(plan).step_seconds;
        CHECK(fast == nearly(moe::replay::simulate(plan, stack, false).estimate.step_seconds).epsilon(0.004));
    }
}

TEST_CASE("fast and event-driven agree in memory of pairs, of the model's ends and of messages") {
    struct Case {
        const char *model, *hardware, *stack;
        int tp, pp, dp, ep, etp, micro_batches;
        bool overlap;
        unsigned recompute;
    };
    for (const Case& c :
         {// Micro-batches too few for merged slots, which have two workspaces.
          Case{"Qwen2-57B-A14B", "h100", "moe-plan", 2, 4, 32, 32, 2, 2, true, 0},
          // A pair's backward begins with the loss, its forward with the embedding or a message.
          Case{"Mixtral-8x7B", "gb300-nvl72", "bridge-26.04", 1, 1, 32, 2, 1, 32, true, moe::plan::recompute::moe_act},
          // Ranks at the ends of a pipeline have one neighbour to send to and receive from.
          Case{"GPT-OSS-20B", "h200", "moe-plan", 4, 3, 16, 8, 2, 32, false, 0},
          // A copy of the embedding table's gradient comes to the stage of MTP, which recomputes everything.
          Case{"DeepSeek-V3", "gb300-nvl72", "bridge-26.08", 2, 8, 32, 32, 1, 2, false, moe::plan::recompute::full}}) {
        CAPTURE(std::string(c.model));
        moe::plan::Plan plan = published_plan(c.model, c.hardware, c.stack, 2048);
        const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
        plan.tp = c.tp;
        plan.pp = c.pp;
        plan.dp = c.dp;
        plan.ep = c.ep;
        plan.etp = c.etp;
        plan.gpus = c.tp * c.pp * c.dp;
        plan.edp = plan.gpus / (c.pp * c.ep * c.etp);
        plan.gbs = static_cast<std::int64_t>(c.micro_batches) * c.dp;
        plan.precision = moe::machine::Precision::bf16;
        plan.dispatcher = moe::plan::Dispatcher::alltoall;
        plan.ep_overlap = c.overlap;
        plan.recompute = c.recompute;
        REQUIRE(!moe::plan::check_plan(plan));
        const double fast = moe::pricing::FastEstimator(plan.hardware, stack).memory_bytes(plan);
        CHECK(fast == nearly(moe::replay::simulate(plan, stack, false).estimate.memory_bytes).epsilon(0.002));
    }
}

TEST_CASE("fast and event-driven agree where both ends of the model share a bucket that no layer's matrices enter") {
    // 1,024 ranks cut buckets at a billion elements: embedding and head are one of them, gathered first and reduced
    // last.
    moe::plan::Plan plan = published_plan("Llama3-8B", "h800", "bridge-26.08", 8192);
    const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
    plan.gpus = plan.gbs = plan.dp = plan.edp = 1024;
    plan.precision = moe::machine::Precision::bf16;
    plan.dispatcher = stack.usual_dispatcher;
    for (const int tp : {1, 2}) {
        plan.tp = tp;
        plan.dp = 1024 / tp;
        const double fast = moe::pricing::FastEstimator(plan.hardware, stack).estimate(plan).step_seconds;
        CHECK(fast == nearly(moe::replay::simulate(plan, stack, false).estimate.step_seconds).epsilon(0.002));
    }
}

TEST_CASE("fast and event-driven agree where one micro-batch sets gradients and has them reduced") {
    moe::plan::Plan plan = published_plan("GPT-OSS-120B", "h200-measured", "moe-plan");
    const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
    plan.gpus = plan.gbs = plan.dp = 8;
    plan.ep = 2;
    plan.edp = 4;
    plan.precision = moe::machine::Precision::fp32; // whose products take far longer where they add to gradients
    plan.recompute = moe::plan::recompute::full;
    plan.cuda_graph = moe::plan::CudaGraph::full;
    const double fast = moe::pricing::FastEstimator(plan.hardware, stack).estimate(plan).step_seconds;
    CHECK(fast == nearly(moe::replay::simulate(plan, stack, false).estimate.step_seconds).epsilon(0.005));
}

TEST_CASE("fast and event-driven agree where a step begins with weights that are quantized") {
    const auto check = [](moe::plan::Plan plan) {
        plan.gbs = 4 * plan.dp;
        plan.cuda_graph = moe::plan::CudaGraph::full;
        REQUIRE(moe::plan::check_plan(plan).message == "");
        const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
        const double fast = moe::pricing::FastEstimator(plan.hardware, stack).estimate(plan).step_seconds;
        CHECK(fast == nearly(moe::replay::simulate(plan, stack, false).estimate.step_seconds).epsilon(0.004));
    };
    // Under delayed scaling the first forward reports magnitudes where all weights have reported theirs.
    moe::plan::Plan plan = published_plan("Llama3-8B", "h200", "moe-plan");
    plan.gpus = plan.edp = 16;
    plan.tp = plan.dp = 4;
    plan.precision = moe::machine::Precision::fp8_tensor;
    for (const auto scaling : {moe::plan::Fp8Scaling::current, moe::plan::Fp8Scaling::delayed}) {
        plan.fp8_scaling = scaling;
        check(plan);
    }
    // Experts that one rank alone has are quantized before it, not beside it.
    plan = published_plan("Qwen3-30B-A3B", "h200", "moe-plan");
    plan.gpus = plan.cp = plan.ep = 4;
    plan.precision = moe::machine::Precision::fp8_blockwise;
    plan.fp8_wgrad = true;
    check(plan);
}

TEST_CASE("fast and event-driven agree where ops are priced by measured calls of their shape") {
    const auto hardware = std::make_shared<const moe::machine::Hardware>(moe::machine::load_hardware("h200-measured"));
    const moe::stack::Stack stack = moe::stack::load_stack("", *hardware);
    moe::plan::Plan plan;
    plan.model = std::make_shared<const moe::model::Model>(moe::families::load_model("Qwen3-30B-A3B"));
    plan.hardware = hardware;
    plan.stack = stack.name;
    plan.seq = 4096;
    plan.gbs = 8;
    plan.cuda_graph = moe::plan::CudaGraph::full;
    for (const std::int64_t mbs : {1, 4})
        for (const bool bf16_moments : {false, true}) {
            plan.mbs = mbs;
            plan.optimizer.moments = bf16_moments ? moe::plan::Moments::bf16 : moe::plan::Moments::fp32;
            const double fast = moe::pricing::FastEstimator(hardware, stack).estimate(plan).step_seconds;
            CHECK(fast == nearly(moe::replay::simulate(plan, stack, false).estimate.step_seconds).epsilon(0.005));
        }
}

TEST_CASE("an estimate does not depend on what was estimated before, nor on threads") {
    const std::vector<RandomPlan> drawn = random_plans(7, draws(40));
    std::vector<const RandomPlan*> same; // of one machine and stack, since an estimator serves one of each
    for (const RandomPlan& d : drawn)
        if (d.plan.hardware == drawn.front().plan.hardware && d.stack.name == drawn.front().stack.name)
            same.push_back(&d);
    REQUIRE(!same.empty());
    moe::pricing::FastEstimator shared(drawn.front().plan.hardware, drawn.front().stack);
    std::vector<double> a(same.size()), b(same.size());
    const auto run = [&](std::vector<double>& out) {
        for (std::size_t i = 0; i < same.size(); ++i) out[i] = shared.estimate(same[i]->plan).step_seconds;
    };
    std::thread first(run, std::ref(a)), second(run, std::ref(b));
    first.join();
    second.join();
    for (std::size_t i = 0; i < same.size(); ++i) {
        CAPTURE(same[i]->text);
        moe::pricing::FastEstimator fresh(same[i]->plan.hardware, same[i]->stack);
        CHECK(a[i] == b[i]);
        CHECK(fresh.estimate(same[i]->plan).step_seconds == a[i]);
    }
}
