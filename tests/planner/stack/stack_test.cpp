// Refusals by field of what a stack does not offer, and by place of bad stack files.
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/stack/stack.hpp"
#include "tests/planner/base/fault_of.hpp"

#include <doctest/doctest.h>

#include <functional>
#include <memory>
#include <string>

namespace {

moe::plan::Plan plan_on(const char* model, const char* hardware, const char* stack) {
    moe::plan::Plan plan;
    plan.model = std::make_shared<const moe::model::Model>(moe::families::load_model(model));
    plan.hardware = std::make_shared<const moe::machine::Hardware>(moe::machine::load_hardware(hardware));
    plan.stack = stack;
    plan.seq = 4096;
    plan.gbs = 64;
    return plan;
}

struct Check {
    moe::plan::Plan plan;
    moe::stack::Stack stack;
    std::string operator()(const std::function<void(moe::plan::Plan&)>& edit) const {
        moe::plan::Plan edited = plan;
        edit(edited);
        const moe::plan::PlanFault fault = moe::stack::check_stack(edited, stack);
        CAPTURE(fault.message);
        if (fault) CHECK(fault.message.size() > 20);
        return fault.counter;
    }
};

} // namespace

TEST_CASE("moe-plan offers what execute runs, and refuses the rest by field") {
    Check check{plan_on("Qwen3-30B-A3B", "cpu-local", "moe-plan"), {}};
    check.plan.precision = moe::machine::Precision::fp32;
    check.stack = moe::stack::load_stack("", *check.plan.hardware);
    CHECK(check.stack.name == "moe-plan");
    CHECK(check.stack.executable);
    CHECK(check([](moe::plan::Plan&) {}).empty());
    CHECK(check([](moe::plan::Plan& p) { p.tp = p.etp = 2, p.ep = 4, p.pp = 2, p.vpp = 2; }).empty());
    CHECK(check([](moe::plan::Plan& p) { p.precision = moe::machine::Precision::bf16; }).empty());
    CHECK(check([](moe::plan::Plan& p) { p.recompute = moe::plan::recompute::full; }).empty());
    CHECK(check([](moe::plan::Plan& p) { p.cp = 2; }).empty());
    CHECK(check([](moe::plan::Plan& p) { p.cp = 2, p.cp_comm = moe::plan::ContextComm::alltoall; }).empty());
    CHECK(check([](moe::plan::Plan& p) { p.precision = moe::machine::Precision::mxfp8; }) == "stack: precision");
    CHECK(check([](moe::plan::Plan& p) { p.ep = 2, p.dispatcher = moe::plan::Dispatcher::deepep; }) ==
          "stack: dispatcher");
    CHECK(check([](moe::plan::Plan& p) { p.ep = 2, p.dispatcher = moe::plan::Dispatcher::hybridep; }).empty());
    CHECK(check([](moe::plan::Plan& p) { p.ep = p.etp = 2, p.dispatcher = moe::plan::Dispatcher::hybridep; }) ==
          "stack: dispatcher");
    CHECK(check([](moe::plan::Plan& p) { p.cuda_graph = moe::plan::CudaGraph::full; }) == "stack: cuda_graph");
    CHECK(check([](moe::plan::Plan& p) { p.ep = 2, p.ep_overlap = true; }).empty());
    CHECK(check([](moe::plan::Plan& p) { p.optimizer.bf16_moments = true; }).empty());
    CHECK(check([](moe::plan::Plan& p) { p.fsdp = true; }) == "stack: fsdp");
    CHECK(check([](moe::plan::Plan& p) {
              p.offload = moe::plan::offload::optimizer | moe::plan::offload::moe_act;
          }).empty());
    CHECK(check([](moe::plan::Plan& p) { p.gradients = moe::machine::Precision::bf16; }) == "stack: gradients");
    CHECK(check([](moe::plan::Plan& p) { p.tp = 2, p.tp_overlap = true; }).empty());
    CHECK(check([](moe::plan::Plan& p) { p.capacity = 1.5, p.paged_stash = true; }) == "stack: paged_stash");
    CHECK(check([](moe::plan::Plan& p) { p.memory_efficient_permutation = false; }).empty());
    CHECK(check([](moe::plan::Plan& p) { p.pp = 2, p.delay_wgrad = true; }).empty());
    CHECK(check([](moe::plan::Plan& p) { p.pp = 2, p.schedule = moe::plan::ScheduleKind::zero_bubble; }) == "");
    CHECK(check([](moe::plan::Plan& p) { p.fp8_scaling = moe::plan::Fp8Scaling::delayed; }) == "stack: fp8_scaling");
    CHECK(check([](moe::plan::Plan& p) { p.head_precision = moe::machine::Precision::mxfp8; }) ==
          "stack: head_precision");
    const Check other{plan_on("Qwen3-Next-80B-A3B", "cpu-local", "moe-plan"), check.stack};
    CHECK(other([](moe::plan::Plan& p) { p.precision = moe::machine::Precision::fp32; }) == "stack: model");
    CHECK(moe::stack::check_stack(other.plan, check.stack).message.find(other.plan.model->not_executable) !=
          std::string::npos);
}

TEST_CASE("published stacks: combinations that their engines exclude, and what Hopper has not") {
    Check check{plan_on("DeepSeek-V3", "gb200-nvl72", "bridge-26.08"), {}};
    check.stack = moe::stack::load_stack("", *check.plan.hardware);
    CHECK(check.stack.name == "bridge-26.08");
    CHECK_FALSE(check.stack.executable);
    const auto base = [](moe::plan::Plan& p) {
        p.precision = moe::machine::Precision::mxfp8, p.ep = 64, p.dispatcher = moe::plan::Dispatcher::hybridep;
        p.cuda_graph = moe::plan::CudaGraph::full, p.pp = p.vpp = 4, p.ep_overlap = true;
        p.capacity = 1.5;
    };
    CHECK(check(base).empty());
    CHECK(check([&](moe::plan::Plan& p) { base(p), p.vpp = 1; }) == "megatron-core: ep_overlap: vpp");
    CHECK(check([&](moe::plan::Plan& p) { base(p), p.recompute = moe::plan::recompute::full; }) ==
          "megatron-core: ep_overlap: recompute full");
    CHECK(check([&](moe::plan::Plan& p) { base(p), p.dispatcher = moe::plan::Dispatcher::alltoall; }) ==
          "megatron-core: capacity: dispatcher");
    CHECK(check([&](moe::plan::Plan& p) { base(p), p.capacity = 0.0; }) == "megatron-core: cuda_graph full: capacity");
    CHECK(check([&](moe::plan::Plan& p) { base(p), p.ep_overlap = false, p.delay_wgrad = true; }) ==
          "megatron-core: delay_wgrad: ep_overlap");
    CHECK(check([&](moe::plan::Plan& p) {
              base(p), p.ep_overlap = false, p.cuda_graph = moe::plan::CudaGraph::partial,
                       p.recompute = moe::plan::recompute::full;
          }) == "megatron-core: cuda_graph partial: recompute full");
    CHECK(check([&](moe::plan::Plan& p) { base(p), p.offload = moe::plan::offload::moe_act; }) ==
          "megatron-core: capacity: offload");
    CHECK(check([&](moe::plan::Plan& p) { base(p), p.offload = moe::plan::offload::core_attn; }).empty());
    CHECK(check([&](moe::plan::Plan& p) { base(p), p.offload = moe::plan::offload::mlp_norm; }) ==
          "megatron-core: offload: norms at a graph's edge");
    CHECK(check([](moe::plan::Plan& p) {
              p.precision = moe::machine::Precision::bf16,
              p.cuda_graph = moe::plan::CudaGraph::attn | moe::plan::CudaGraph::moe_router;
          }).empty());
    Check hopper{plan_on("DeepSeek-V3", "h100", "bridge-26.08"), {}};
    hopper.stack = moe::stack::load_stack("bridge-26.08", *hopper.plan.hardware);
    CHECK(hopper([](moe::plan::Plan& p) { p.precision = moe::machine::Precision::fp8_blockwise; }).empty());
    CHECK(hopper([](moe::plan::Plan& p) { p.precision = moe::machine::Precision::mxfp8; }) == "stack: precision");
    CHECK(hopper([](moe::plan::Plan& p) {
              p.precision = moe::machine::Precision::bf16, p.cuda_graph = moe::plan::CudaGraph::full;
          }) == "stack: cuda_graph");
    CHECK(hopper.stack.costs.gemm != check.stack.costs.gemm);
    // Triton kernels, which do not grow with Blackwell's bandwidth.
    CHECK(hopper.stack.costs.scan > check.stack.costs.scan);
}

TEST_CASE("costs of every shipped stack are fractions and seconds of a sensible size") {
    for (const std::string& name : moe::stack::stack_names())
        for (const char* machine : {"h100", "b200", "gb200-nvl72", "gb300-nvl72"}) {
            CAPTURE(name);
            CAPTURE(machine);
            const moe::stack::Stack s = moe::stack::load_stack(name, moe::machine::load_hardware(machine));
            for (const moe::machine::Precision p : s.precisions) {
                const double dense = s.costs.gemm[static_cast<std::size_t>(p)];
                const double grouped = s.costs.grouped_gemm[static_cast<std::size_t>(p)];
                CHECK(dense > 0.0);
                CHECK(dense < 1.0);
                CHECK(grouped > 0.0);
                CHECK(grouped < 1.0);
                // Our stack is priced at what its plain kernels measured on an H100; the published ones are tuned.
                if (s.executable) continue;
                CHECK(grouped > 0.2);
                CHECK(dense >= grouped);
            }
            for (const moe::plan::Dispatcher d : s.dispatchers)
                CHECK(s.costs.dispatcher.count(moe::plan::to_string(d)) == 1);
            CHECK(s.costs.graph_launch_seconds <= s.costs.launch_seconds);
            CHECK(s.costs.launch_seconds < 1e-3);
        }
}

TEST_CASE("a machine of a name of its own has the figures of the machine that it is like") {
    moe::machine::Hardware h100 = moe::machine::load_hardware("h100"),
                           gb200 = moe::machine::load_hardware("gb200-nvl72");
    for (const char* stack : {"bridge-26.08", "moe-plan", "mcore-2603.07685"}) {
        CAPTURE(stack);
        const auto alike = [&](const moe::machine::Hardware& renamed, const moe::machine::Hardware& known) {
            const moe::stack::Stack a = moe::stack::load_stack(stack, renamed),
                                    b = moe::stack::load_stack(stack, known);
            CHECK(a.figures_of == known.name);
            CHECK(b.figures_of.empty());
            CHECK(a.costs.gemm == b.costs.gemm);
            CHECK(a.costs.clock == b.costs.clock);
            CHECK(a.cuda_graphs == b.cuda_graphs);
        };
        moe::machine::Hardware mine = h100;
        mine.name = "my-h100";
        alike(mine, h100); // no MXFP8: Hopper's
        mine.like = "gb200-nvl72";
        alike(mine, gb200);
        mine = gb200;
        mine.name = "mine";
        alike(mine, gb200);
        mine.nvlink_domain = mine.nvlink_domain_used = 8;
        alike(mine, moe::machine::load_hardware("b200"));
        mine.like = "h1000";
        const std::string line = fault_of([&] { moe::stack::load_stack(stack, mine); });
        CHECK(line.find("like = \"h1000\"") != std::string::npos);
        CHECK(line.find("h100") != std::string::npos);
    }
    moe::machine::Hardware here = moe::machine::load_hardware("cpu-local");
    here.name = "here";
    CHECK(moe::stack::load_stack("moe-plan", here).figures_of.empty());
}

TEST_CASE("unknown stacks are refused with the known ones") {
    const moe::machine::Hardware hardware = moe::machine::load_hardware("h100");
    CHECK(fault_of([&] { moe::stack::load_stack("bridge-99", hardware); }).find("bridge-26.08") != std::string::npos);
    CHECK(fault_of([&] { moe::stack::load_stack("../hardware/h100", hardware); }).rfind("2: ", 0) == 0);
    moe::machine::Hardware homeless = hardware;
    homeless.default_stack.clear();
    CHECK(fault_of([&] { moe::stack::load_stack("", homeless); }).find("default_stack") != std::string::npos);
}
