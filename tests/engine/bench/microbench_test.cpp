// The microbenchmark covers every op kind that plans of this engine contain, with sorted positive times.
#include "engine/backends/backends.hpp"
#include "engine/bench/microbench.hpp"

#include "engine/bench/microbench_grid.hpp"
#include "engine/ops/backend.hpp"
#include "engine/run/executable.hpp"
#include "planner/base/error.hpp"
#include "planner/lower/lower.hpp"
#include "planner/memory/memory.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/measured.hpp"
#include "planner/program/program.hpp"
#include "planner/program/timeline.hpp"

#include <doctest/doctest.h>

#include <algorithm>

using namespace moe;

namespace {

// True where the op was measured in FP32, in any of its forms.
bool measured(const bench::Microbench& result, program::OpKind kind) {
    const std::string name = program::to_string(kind);
    return std::any_of(result.measured.begin(), result.measured.end(), [&](const auto& family) {
        const std::string& key = family.first;
        return (key == name || key.rfind(name + ".", 0) == 0) && key.find("bf16") == std::string::npos;
    });
}

} // namespace

TEST_CASE("a short microbenchmark measures every kind of op, in FP32 and in BF16 where operands differ") {
    bench::MicrobenchOptions options;
    options.most = 7; // all that the grid has of its smallest size
    options.seconds = 600.0;
    int lines = 0;
    options.progress = [&](const std::string&) { ++lines; };
    const bench::Microbench result = bench::run_microbench(options);
    CHECK(lines >= 1);
    for (const program::OpKind kind : {program::OpKind::embedding,
                                       program::OpKind::embedding_grad,
                                       program::OpKind::rmsnorm,
                                       program::OpKind::rmsnorm_grad,
                                       program::OpKind::add,
                                       program::OpKind::gemm,
                                       program::OpKind::rope,
                                       program::OpKind::rope_grad,
                                       program::OpKind::attention,
                                       program::OpKind::attention_grad,
                                       program::OpKind::activation,
                                       program::OpKind::activation_grad,
                                       program::OpKind::router,
                                       program::OpKind::router_grad,
                                       program::OpKind::permute_map,
                                       program::OpKind::permute,
                                       program::OpKind::unpermute,
                                       program::OpKind::expert_counts,
                                       program::OpKind::sort_rows,
                                       program::OpKind::unsort_rows,
                                       program::OpKind::grouped_gemm,
                                       program::OpKind::ce_max,
                                       program::OpKind::ce_sum,
                                       program::OpKind::ce_loss,
                                       program::OpKind::ce_grad,
                                       program::OpKind::cross_entropy,
                                       program::OpKind::zero,
                                       program::OpKind::sum_squares,
                                       program::OpKind::adamw,
                                       program::OpKind::all_gather,
                                       program::OpKind::reduce_scatter,
                                       program::OpKind::all_reduce,
                                       program::OpKind::all_to_all_rows,
                                       program::OpKind::send,
                                       program::OpKind::recv}) {
        INFO(std::string(program::to_string(kind)));
        CHECK(measured(result, kind));
    }
    for (const auto& [key, calls] : result.measured) {
        INFO(key);
        REQUIRE(!calls.empty());
        for (std::size_t i = 0; i < calls.size(); ++i) {
            CHECK(calls[i].seconds > 0.0);
            CHECK(calls[i].seconds < 1.0);
            if (i > 0) CHECK(calls[i].work > calls[i - 1].work);
        }
    }
    CHECK(result.fp32_flops > 1e8);
    CHECK(result.memory_bandwidth > 1e8);
    CHECK(result.launch_seconds == 0.0); // a CPU has no queue
    CHECK(result.event_overhead == 0.0);
    CHECK(!result.device.empty());
    options.seconds = 0.0;
    CHECK_THROWS_AS(bench::run_microbench(options), Error);
}

TEST_CASE("blockwise FP8 is measured by keys of its own") {
    bench::MicrobenchOptions options;
    options.most = 6; // three in FP32, one in BF16
    options.seconds = 60.0;
    const bench::Microbench result = bench::run_microbench(options);
    for (const char* key : {"gemm.nt.fp8-blockwise", "gemm.nn.fp8-blockwise", "grouped_gemm.forward.fp8-blockwise",
                            "gemm.tn+.fp8-blockwise", "gemm.tn.fp8-blockwise", "grouped_gemm.dgrad.fp8-blockwise",
                            "grouped_gemm.wgrad.fp8-blockwise", "quantize.bf16", "dequantize.fp8-blockwise",
                            "quantize.both.bf16", "quantize.columns.bf16", "quantize.columns.fp8-blockwise",
                            "activation.bf16.to-fp8", "cast", "quantize.weights.bf16"}) {
        INFO(key);
        CHECK(result.measured.count(key) == 1);
    }
    CHECK(result.fp8_flops > 0.0);
}

TEST_CASE("one rank is measured without communication, at larger sizes") {
    bench::MicrobenchOptions options;
    options.seconds = 1.0;
    options.one_rank = true;
    const bench::Microbench result = bench::run_microbench(options);
    for (const program::OpKind kind :
         {program::OpKind::gemm, program::OpKind::grouped_gemm, program::OpKind::attention,
          program::OpKind::attention_grad, program::OpKind::permute, program::OpKind::adamw, program::OpKind::zero}) {
        INFO(std::string(program::to_string(kind)));
        CHECK(measured(result, kind));
    }
    for (const auto& [key, calls] : result.measured) CHECK_MESSAGE(key.find("all_") == std::string::npos, key);
    CHECK(result.measured.at("gemm.nt").back().work >= 2.0 * 256 * 256 * 256);
    for (const machine::MeasuredCall& call : result.measured.at("gemm.nt")) {
        REQUIRE(call.sides.size() == 3);
        CHECK(2.0 * call.sides[0] * call.sides[1] * call.sides[2] == call.work);
    }
}

TEST_CASE("runs in processes of their own measure the same calls, and say why they cannot") {
    bench::MicrobenchOptions options;
    options.seconds = 60.0;
    options.one_rank = true;
    options.most = 2;
    const bench::Microbench here = bench::run_microbench(options);
    options.in_subprocess = true;
    const bench::Microbench there = bench::run_microbench(options);
    CHECK(there.device == here.device);
    REQUIRE(there.measured.size() == here.measured.size());
    for (const auto& [key, calls] : here.measured) {
        INFO(key);
        const std::vector<machine::MeasuredCall>& others = there.measured.at(key);
        REQUIRE(others.size() == calls.size());
        for (std::size_t i = 0; i < calls.size(); ++i) {
            CHECK(others[i].work == calls[i].work);
            CHECK(others[i].sides == calls[i].sides);
            CHECK(others[i].seconds > 0.0);
        }
    }
    options.backend = "abacus";
    CHECK_THROWS_AS(bench::run_microbench(options), Error);
}

TEST_CASE("every model of the grids is a sound plan, and those of GPUs fit one of 80 GB") {
    const std::string name = "cpu";
    const ops::Backend& cpu = backends::backend_named(name);
    for (const bool gpus : {false, true})
        for (const bench::Point& point : gpus ? bench::grid_of_gpus() : bench::grid_of_cores()) {
            INFO(point.family);
            INFO(point.hidden);
            INFO(point.seq);
            INFO(std::string(machine::to_string(point.precision)));
            const plan::Plan plan = bench::plan_of(point, cpu);
            const plan::PlanFault wrong = plan::check_plan(plan);
            CHECK_MESSAGE(!wrong, wrong.message);
            std::vector<program::Program> programs;
            for (int stage = 0; stage < plan.pp; ++stage) programs.push_back(lower::lower(plan, stage));
            CHECK_NOTHROW(run::check_executable(plan, programs, cpu));
            if (gpus) CHECK(memory::plan_memory(programs.front()).arena_bytes < 80e9);
        }
}

TEST_CASE("a point that offloads measures copies, by their bytes alone") {
    bench::Point point{"gptoss", 64, 4, 2, 16, 64, 8, 2, 0, 128, 64, 1};
    point.offload = plan::offload::core_attn | plan::offload::moe_act;
    const plan::Plan plan = bench::plan_of(point, backends::backend_named("cpu"));
    const program::Program program = lower::lower(plan, 0);
    std::int64_t copies = 0;
    for (const program::Template& tmpl : program.templates)
        for (const program::Op& op : tmpl.ops) {
            if (op.kind != program::OpKind::copy_to_host) continue;
            ++copies;
            CHECK(program::measured_key(op, program) == "copy_to_host");
        }
    CHECK(copies > 0);
    std::int64_t out = 0, back = 0;
    const std::vector<std::vector<program::TimelineRow>> ranks = bench::record_training(plan, "cpu");
    for (const program::TimelineRow& row : ranks.front()) {
        out += row.kind == program::OpKind::copy_to_host ? 1 : 0;
        back += row.kind == program::OpKind::copy_from_host ? 1 : 0;
        CHECK(row.busy >= 0.0);
    }
    CHECK(out == copies * plan.micro_batches());
    CHECK(back == out);
    const std::vector<bench::Point> points = bench::grid_of_gpus();
    CHECK(std::any_of(points.begin(), points.end(), [](const bench::Point& p) { return p.offload != 0; }));
}

TEST_CASE("the grid of GPUs measures every kind of layer with a state, and sparse attention") {
    std::vector<std::string> keys;
    for (const bench::Point& point : bench::grid_of_gpus()) {
        const plan::Plan plan = bench::plan_of(point, backends::backend_named("cpu"));
        const program::Program program = lower::lower(plan, 0);
        for (const program::Template& tmpl : program.templates)
            for (const program::Op& op : tmpl.ops) keys.push_back(program::measured_key(op, program));
    }
    for (const char* key : {"delta_rule", "delta_rule_grad", "ssd", "ssd_grad", "short_conv", "short_conv_grad",
                            "gated_norm", "gated_norm_grad", "pick_keys", "pick_keys_grad.picked", "attention.picked",
                            "attention_grad.picked", "activation.plain", "activation_grad.plain"}) {
        INFO(std::string(key));
        CHECK(std::count_if(keys.begin(), keys.end(),
                            [&](const std::string& k) { return k == key || k == key + std::string(".bf16"); }) >= 4);
    }
}
