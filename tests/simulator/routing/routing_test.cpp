// Routing skew: loads that can be worked out by hand, steps against a played pipeline, figures of whole plans.
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/lower/lower.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/schedule.hpp"
#include "planner/program/program.hpp"
#include "simulator/cost/cost.hpp"
#include "simulator/pricing/skewed_estimator.hpp"
#include "tests/support/folder.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

namespace {

using namespace moe;

routing::LayerLoads drawn(const std::string& routing, int experts, int top_k, int ranks) {
    return routing::draw_layer_loads(plan::routing_from_string(routing), experts, top_k, ranks, {});
}

double mean(const std::vector<float>& values) {
    return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

plan::Plan skewed_plan(const std::string& routing) {
    plan::Plan plan;
    plan.model = std::make_shared<const model::Model>(families::load_model("Qwen3-30B-A3B"));
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("h100"));
    plan.stack = "bridge-26.08";
    plan.seq = 4096;
    plan.gbs = 64;
    plan.gpus = 16;
    plan.pp = 2;
    plan.dp = plan.ep = 8;
    plan.dispatcher = plan::Dispatcher::hybridep;
    plan.routing = routing;
    return plan;
}

stack::Stack stack_of(const plan::Plan& plan) { return stack::load_stack(plan.stack, *plan.hardware); }

// 1F1B with slots of the given lengths per rank (backward twice as long), messages for nothing.
double play(const std::vector<double>& forward, int micro_batches) {
    const int pp = static_cast<int>(forward.size());
    std::vector<std::vector<plan::Turn>> turns;
    for (int r = 0; r < pp; ++r) turns.push_back(plan::order(plan::ScheduleKind::one_f_one_b, pp, 1, micro_batches, r));
    std::vector<std::vector<double>> down(forward.size(),
                                          std::vector<double>(static_cast<std::size_t>(micro_batches), -1.0)),
        up = down;
    std::vector<std::size_t> next(forward.size(), 0);
    std::vector<double> free(forward.size(), 0.0);
    for (bool moved = true; moved;) {
        moved = false;
        for (std::size_t r = 0; r < forward.size(); ++r)
            while (next[r] < turns[r].size()) {
                const plan::Turn& t = turns[r][next[r]];
                const auto m = static_cast<std::size_t>(t.micro_batch);
                const double ready = t.forward() ? (r == 0 ? 0.0 : down[r - 1][m])
                                                 : (r + 1 == forward.size() ? down[r][m] : up[r + 1][m]);
                if (ready < 0.0) break;
                free[r] = std::max(free[r], ready) + (t.forward() ? 1.0 : 2.0) * forward[r];
                (t.forward() ? down : up)[r][m] = free[r];
                ++next[r];
                moved = true;
            }
    }
    return *std::max_element(free.begin(), free.end());
}

} // namespace

TEST_CASE("layer loads: balanced limits, one rank, all experts chosen") {
    for (const char* routing : {"zipf:0", "dirichlet:1000000"}) {
        const routing::LayerLoads loads = drawn(routing, 64, 8, 8);
        for (const float load : loads.hottest) CHECK(load == nearly(1.0).epsilon(0.01));
        CHECK(loads.spread < 0.01);
    }
    const routing::LayerLoads one = drawn("dirichlet:0.5", 16, 2, 1);
    for (const float load : one.hottest) CHECK(load == nearly(1.0));
    CHECK(one.spread > 0.5); // the experts of the rank still differ
    for (const float load : drawn("zipf:2", 8, 8, 4).hottest) CHECK(load == nearly(1.0));
}

TEST_CASE("layer loads: Zipf and Dirichlet by hand") {
    // Eight experts on eight ranks, one choice: the hottest takes 1 / H_8 = 0.36794 of the tokens, 8 times the mean's.
    for (const float load : drawn("zipf:1", 8, 1, 8).hottest) CHECK(load == nearly(8.0 * 0.367937).epsilon(1e-4));
    // Two choices: the first expert is full at 2 * 0.368 < 1, so shares only double and loads stay.
    for (const float load : drawn("zipf:1", 8, 2, 8).hottest) CHECK(load == nearly(8.0 * 0.367937).epsilon(1e-4));
    // Four choices: 4 * 0.368 > 1; a token takes an expert once, the hottest rank gets 1 of 4 choices, twice the mean.
    for (const float load : drawn("zipf:1", 8, 4, 8).hottest) CHECK(load == nearly(2.0).epsilon(1e-4));
    // Dirichlet(1, 1): the larger of two shares is uniform on [1/2, 1], 1.5 of the mean on average.
    CHECK(mean(drawn("dirichlet:1", 2, 1, 2).hottest) == nearly(1.5).epsilon(0.02));
    // The largest of n exponentials over their sum is H_n / n on average: 16 experts on 16 ranks, H_16 = 3.3807.
    CHECK(mean(drawn("dirichlet:1", 16, 1, 16).hottest) == nearly(3.3807).epsilon(0.03));
    // Every draw's loads average to one.
    const routing::LayerLoads loads = drawn("dirichlet:0.3", 64, 6, 16);
    for (std::size_t d = 0; d < loads.hottest.size(); ++d) {
        double sum = 0.0;
        for (std::size_t r = 0; r < 16; ++r) sum += loads.loads[d * 16 + r];
        CHECK(sum == nearly(16.0).epsilon(1e-4));
        CHECK(loads.hottest[d] <= 16.0f * 4.0f / 6.0f + 1e-3f); // at most all four of its experts by every token
    }
    // The numbers are the same each time.
    CHECK(drawn("dirichlet:0.3", 64, 6, 16).loads == loads.loads);
}

TEST_CASE("histograms: CSV and JSON, and what is wrong with them") {
    const Folder folder;
    const std::string csv = folder / "h.csv", json = folder / "h.json";
    write_file(csv, "expert 0,expert 1,expert 2,expert 3\n30,10,10,10\n10,10,10,30\n");
    write_file(json, R"({"counts": [[30, 10, 10, 10], [10, 10, 10, 30]]})");
    CHECK(routing::load_histogram(csv) == routing::load_histogram(json));
    // Two ranks: either the first or the second holds 40 of 60 tokens.
    plan::Routing routing = plan::routing_from_string(csv);
    for (const float load : routing::draw_layer_loads(routing, 4, 1, 2, routing::load_histogram(csv)).hottest)
        CHECK(load == nearly(80.0 / 60.0));
    CHECK_THROWS_WITH_AS(routing::draw_layer_loads(routing, 8, 1, 2, routing::load_histogram(csv)),
                         doctest::Contains("4 experts, but the model has 8"), Error);
    const auto refused = [&](const std::string& text, const char* words) {
        write_file(csv, text);
        CHECK_THROWS_WITH_AS(routing::load_histogram(csv), doctest::Contains(words), Error);
    };
    refused("1,2\n3\n", "line 2: has 1 experts, but the first layer has 2");
    refused("1,2\n3,x\n", "line 2");
    refused("a,b\n", "no token counts");
    refused("0,0\n", "line 1: all token counts are 0");
    refused("1,-2\n", "must be 0 or more");
    write_file(json, "{\"counts\": [[1, \"a\"]]}");
    CHECK_THROWS_WITH_AS(routing::load_histogram(json), doctest::Contains("no token count"), Error);
}

TEST_CASE("step load: equal loads are kept, the formula follows a pipeline that is played") {
    CHECK(routing::pipeline_load({0.6, 0.6}, {2, 2}, 0.2) == nearly(1.3));
    CHECK(routing::pipeline_load({0.6, 0.3}, {2, 1}, 0.0) == nearly(1.3)); // half the layers, half the work
    CHECK(routing::pipeline_load({0.0, 0.0}, {0, 0}, 0.2) == 1.0);
    std::mt19937 random(1);
    std::uniform_real_distribution<double> load(1.0, 2.5);
    for (const int pp : {2, 4, 8})
        for (const int times : {1, 4, 16}) {
            const int micro_batches = times * pp;
            for (int draw = 0; draw < 20; ++draw) {
                std::vector<double> slots, beyond;
                for (int rank = 0; rank < pp; ++rank) {
                    double sum = 0.0;
                    for (int layer = 0; layer < 4; ++layer) sum += load(random) - 1.0;
                    beyond.push_back(sum);
                    slots.push_back(4.0 + 0.5 * sum); // half of a layer is routed
                }
                const std::vector<int> layers(slots.size(), 4);
                const double x = routing::pipeline_load(beyond, layers, pp / (micro_batches + pp - 1.0));
                const double predicted = play(std::vector<double>(slots.size(), 4.0 * (0.5 + 0.5 * x)), micro_batches);
                const double ratio = predicted / play(slots, micro_batches);
                CHECK(ratio > 1.0 - 1e-9);
                CHECK(ratio < (times == 1 ? 1.1 : 1.04));
            }
        }
}

TEST_CASE("a given load: routed rows and their ops scale, the rest stays") {
    const plan::Plan balanced = skewed_plan("balanced"), hot = skewed_plan("load:1.5");
    const program::Program a = lower::lower(balanced, 0), b = lower::lower(hot, 0);
    REQUIRE(a.templates.size() == b.templates.size());
    int grouped = 0, others = 0;
    for (std::size_t t = 0; t < a.templates.size(); ++t)
        for (std::size_t i = 0; i < a.templates[t].ops.size(); ++i) {
            const program::Op &x = a.templates[t].ops[i], &y = b.templates[t].ops[i];
            REQUIRE(x.kind == y.kind);
            if (x.kind == program::OpKind::grouped_gemm) {
                CHECK(y.flops == nearly(1.5 * x.flops));
                ++grouped;
            } else if (x.kind == program::OpKind::gemm || x.kind == program::OpKind::attention) {
                CHECK(y.flops == x.flops);
                CHECK(y.bytes == x.bytes);
                ++others;
            } else if (x.kind == program::OpKind::all_to_all_rows) {
                CHECK(y.bytes == nearly(1.5 * x.bytes));
            }
        }
    CHECK(grouped > 0);
    CHECK(others > 0);
    // A planned capacity bounds what is computed: rows beyond it have no place.
    plan::Plan bounded = hot;
    bounded.capacity = 1.25;
    const program::Program c = lower::lower(bounded, 0);
    for (std::size_t t = 0; t < a.templates.size(); ++t)
        for (std::size_t i = 0; i < a.templates[t].ops.size(); ++i)
            if (a.templates[t].ops[i].kind == program::OpKind::grouped_gemm)
                CHECK(c.templates[t].ops[i].flops == nearly(1.25 * a.templates[t].ops[i].flops));
}

TEST_CASE("skew: more of it is slower, p99 above p50, both tiers agree") {
    const stack::Stack stack = stack_of(skewed_plan("balanced"));
    double before = 0.0;
    for (const char* routing : {"balanced", "dirichlet:20", "dirichlet:4", "dirichlet:1", "dirichlet:0.3"}) {
        const plan::Plan plan = skewed_plan(routing);
        REQUIRE(!plan::check_plan(plan));
        const replay::Simulation mean = replay::simulate(plan, stack, false);
        const pricing::Skew skew = pricing::skew_of(plan, stack, mean);
        CHECK(mean.estimate.step_seconds > before);
        before = mean.estimate.step_seconds;
        if (std::string(routing) == "balanced") continue;
        CHECK(skew.step_seconds.mean == mean.estimate.step_seconds);
        CHECK(skew.step_seconds.p99 > skew.step_seconds.p50);
        CHECK(skew.tflops_per_gpu.p99 < skew.tflops_per_gpu.p50);
        CHECK(skew.memory_bytes.p99 >= skew.memory_bytes.p50);
        for (const routing::SkewPoint point : {routing::SkewPoint::mean, routing::SkewPoint::p99}) {
            pricing::SkewedEstimator fast(plan.hardware, stack, point);
            const search::Estimate quick = fast.estimate(plan),
                                   slow = replay::simulate(plan, stack, false, point).estimate;
            CHECK(quick.step_seconds == nearly(slow.step_seconds).epsilon(0.03));
            CHECK(quick.memory_bytes == nearly(slow.memory_bytes).epsilon(0.01));
        }
    }
}

TEST_CASE("skew: both tiers see a load fill tiles in steps") {
    plan::Plan plan = skewed_plan("zipf:0.5");
    plan.model = std::make_shared<const model::Model>(families::load_model("Kimi-K2"));
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("gb200-nvl72"));
    plan.stack = "moe-plan";
    plan.gpus = plan.gbs = 128;
    plan.tp = plan.ep = 4;
    plan.pp = 1;
    plan.dp = plan.edp = 32;
    plan.precision = machine::Precision::fp32;
    plan.dispatcher = plan::Dispatcher::allgather;
    plan.recompute = plan::recompute::full;
    REQUIRE(!plan::check_plan(plan));
    const stack::Stack stack = stack_of(plan);
    pricing::SkewedEstimator quick(plan.hardware, stack);
    const double seconds = quick.estimate(plan).step_seconds;
    CHECK(seconds == nearly(replay::simulate(plan, stack, false).estimate.step_seconds).epsilon(0.005));
    const std::unique_ptr<search::BoundModel> bound_model = quick.bound_model();
    CHECK(bound_model->bound(bound_model->layer_costs(plan), bound_model->stage_split(plan)).step_seconds <=
          seconds * (1.0 + search::bound_time_margin));
}

TEST_CASE("skew: smaller expert groups are hit less, capacities overflow") {
    routing::LoadTables tables;
    plan::Plan plan = skewed_plan("dirichlet:2");
    const routing::StepLoads wide = tables.of(plan);
    plan.ep = 4;
    plan.edp = 2;
    const routing::StepLoads narrow = tables.of(plan);
    CHECK(narrow.time.mean < wide.time.mean);
    CHECK(narrow.memory.mean < wide.memory.mean);
    CHECK(wide.memory.mean < wide.time.mean); // the hottest rank changes from layer to layer
    CHECK(wide.overflow == 0.0);
    double before = 1.1;
    for (const double capacity : {1.0, 1.3, 1.6, 2.0, 4.0}) {
        plan = skewed_plan("dirichlet:2");
        plan.capacity = capacity;
        const double overflow = tables.of(plan).overflow;
        CHECK(overflow <= before);
        before = overflow;
        if (capacity == 1.0) CHECK(overflow == 1.0);
    }
    CHECK(before < 0.05);
}

TEST_CASE("grouped products: rows that differ by expert fill more tiles") {
    const machine::Hardware hardware = machine::load_hardware("h100");
    stack::Stack stack = stack::load_stack("bridge-26.08", hardware);
    const cost::Rates rates{&hardware, &stack.costs};
    const auto seconds = [&](double rows, double spread) {
        return cost::gemm_seconds(rates, 8e14, 64.0, rows, 1536.0, 2048.0, 0.0, spread);
    };
    CHECK(seconds(256.0, 0.8) > 1.05 * seconds(256.0, 0.0));   // full tiles only where rows are equal
    CHECK(seconds(8192.0, 0.8) < 1.03 * seconds(8192.0, 0.0)); // of many tiles the last one matters little
    CHECK(seconds(256.0, 0.01) <= 2.0 * seconds(256.0, 0.0));
}
