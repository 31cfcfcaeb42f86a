// The event-driven simulation: rows that could have happened, pipelines with known bubbles, cores that are shared.
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/lower/lower.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/program/program.hpp"
#include "simulator/replay/ranks.hpp"
#include "simulator/replay/simulate.hpp"
#include "tests/simulator/pricing/random_plans.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <set>
#include <tuple>

namespace {

moe::plan::Plan plan_of(const char* model, const char* hardware, int gpus) {
    moe::plan::Plan plan;
    plan.model = std::make_shared<const moe::model::Model>(moe::families::load_model(model));
    plan.hardware = std::make_shared<const moe::machine::Hardware>(moe::machine::load_hardware(hardware));
    plan.gpus = gpus;
    plan.seq = 4096;
    return plan;
}

// A small executable model on cores that are shared: 8 experts, 4 layers.
moe::plan::Plan cpu_plan(int ranks, int cores) {
    const std::string config = R"({"architectures":["Qwen3MoeForCausalLM"],"hidden_size":64,"num_hidden_layers":4,
        "num_attention_heads":4,"num_key_value_heads":4,"head_dim":16,"intermediate_size":128,"moe_intermediate_size":32,
        "num_experts":8,"num_experts_per_tok":2,"norm_topk_prob":true,"vocab_size":256,"rms_norm_eps":1e-6,
        "rope_theta":10000.0,"tie_word_embeddings":false})";
    moe::plan::Plan plan;
    plan.model = std::make_shared<const moe::model::Model>(moe::families::model_from_json(config, "test"));
    moe::machine::Hardware hardware = moe::machine::load_hardware("cpu-local");
    hardware.cores = cores;
    plan.hardware = std::make_shared<const moe::machine::Hardware>(hardware);
    plan.stack = "moe-plan";
    plan.precision = moe::machine::Precision::fp32;
    plan.gpus = ranks;
    plan.seq = 64;
    plan.gbs = 8;
    return plan;
}

double work(const moe::replay::Simulation& s) {
    double busy = 0.0;
    for (const moe::program::TimelineRow& row : s.timeline.rows) busy += row.busy;
    return busy;
}

// Whole and fitting: every op of every slot once; on a stream nothing overlaps; nothing is busier than it is long.
void check_rows(const moe::plan::Plan& plan, const moe::replay::Simulation& s) {
    std::map<std::pair<int, int>, double> free; // (rank, stream) -> end of the last row
    std::map<int, std::set<std::pair<int, int>>> seen;
    for (const moe::program::TimelineRow& row : s.timeline.rows) {
        double& last = free[{row.rank, static_cast<int>(row.stream)}];
        CHECK(row.start >= last - 1e-12);
        CHECK(row.end >= row.start);
        CHECK(row.busy <= row.end - row.start + 1e-12);
        last = row.end;
        CHECK(seen[row.rank].insert({row.slot, row.op}).second);
    }
    for (std::size_t i = 0; i < s.timeline.ranks.size(); ++i) {
        const moe::program::Program program = moe::lower::lower(plan, s.timeline.pipeline_rank[i]);
        std::size_t ops = 0;
        for (const moe::program::Slot& slot : program.slots)
            ops += program.templates[static_cast<std::size_t>(slot.index)].ops.size();
        CHECK(seen[s.timeline.ranks[i]].size() == ops);
    }
}

} // namespace

TEST_CASE("rows of random plans are whole and could have happened") {
    for (const RandomPlan& drawn : random_plans(11, 8)) {
        CAPTURE(drawn.text);
        const moe::replay::Simulation s = moe::replay::simulate(drawn.plan, drawn.stack);
        check_rows(drawn.plan, s);
        CHECK(static_cast<std::int64_t>(s.timeline.rows.size()) == s.ops);
        CHECK(s.ranks == drawn.plan.gpus);
        // A gradient arrives only after it was sent, an activation after the stage before has computed it.
        std::map<std::tuple<int, int, int>, double> sent;
        const auto each = [&](moe::program::OpKind kind, auto visit) {
            for (const moe::program::TimelineRow& row : s.timeline.rows) {
                if (row.kind != kind) continue;
                const auto rank =
                    std::find(s.timeline.ranks.begin(), s.timeline.ranks.end(), row.rank) - s.timeline.ranks.begin();
                const moe::program::Program p =
                    moe::lower::lower(drawn.plan, s.timeline.pipeline_rank[static_cast<std::size_t>(rank)]);
                const auto& slot = p.slots[static_cast<std::size_t>(row.slot)];
                const auto& peer = std::get<moe::program::PeerAttr>(
                    p.templates[static_cast<std::size_t>(slot.index)].ops[static_cast<std::size_t>(row.op)].attr);
                visit(row, std::tuple(peer.stage, peer.tag, slot.micro_batch));
            }
        };
        if (s.timeline.rows.size() > 20000) continue; // lowering again for every message is slow
        each(moe::program::OpKind::send, [&](const moe::program::TimelineRow& row, auto key) { sent[key] = row.end; });
        each(moe::program::OpKind::recv, [&](const moe::program::TimelineRow& row, auto key) {
            REQUIRE(sent.count(key) == 1);
            CHECK(row.end >= sent[key] - 1e-12);
        });
    }
}

TEST_CASE("a pipeline's bubble is near (pp-1)/m, and interleaving divides it") {
    const moe::machine::Hardware hardware = moe::machine::load_hardware("gb200-nvl72");
    moe::stack::Stack stack = moe::stack::load_stack("bridge-26.08", hardware);
    stack.costs.step_seconds = 0.0;
    const auto bubble = [&](int vpp, int micro_batches) {
        moe::plan::Plan plan = plan_of("Llama3-70B", "gb200-nvl72", 4);
        plan.pp = 4;
        plan.vpp = vpp;
        plan.schedule = vpp > 1 ? moe::plan::ScheduleKind::interleaved : moe::plan::ScheduleKind::one_f_one_b;
        plan.gbs = micro_batches;
        plan.cuda_graph = moe::plan::CudaGraph::full;
        plan.stack = stack.name;
        REQUIRE(!moe::plan::check_plan(plan));
        const moe::replay::Simulation s = moe::replay::simulate(plan, stack);
        double busiest = 0.0; // of any stage: the unequal ends of the model are not the pipeline's fault
        std::map<int, double> busy;
        for (const moe::program::TimelineRow& row : s.timeline.rows)
            if (row.stream == moe::program::Stream::compute) busiest = std::max(busiest, busy[row.rank] += row.busy);
        return s.estimate.step_seconds / busiest - 1.0;
    };
    const double plain = bubble(1, 16), deep = bubble(1, 32), interleaved = bubble(4, 16);
    CHECK(plain == nearly(3.0 / 16).epsilon(0.25));
    CHECK(deep == nearly(3.0 / 32).epsilon(0.3));
    CHECK(interleaved < 0.45 * plain);
}

TEST_CASE("EP overlap hides dispatch behind the other micro-batch") {
    moe::plan::Plan plan = plan_of("DeepSeek-V3", "gb200-nvl72", 64);
    plan.pp = 2;
    plan.vpp = 4;
    plan.schedule = moe::plan::ScheduleKind::interleaved;
    plan.dp = plan.ep = 32;
    plan.gbs = 32 * 32;
    plan.precision = moe::machine::Precision::mxfp8;
    plan.dispatcher = moe::plan::Dispatcher::hybridep;
    plan.cuda_graph = moe::plan::CudaGraph::full;
    plan.stack = "bridge-26.08";
    moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
    stack.costs.overlap_sm_share = 0.0;
    const moe::replay::Simulation apart = moe::replay::simulate(plan, stack, false);
    plan.ep_overlap = true;
    const moe::replay::Simulation merged = moe::replay::simulate(plan, stack, false);
    CHECK(merged.estimate.breakdown.expert < 0.4 * apart.estimate.breakdown.expert);
    CHECK(merged.estimate.step_seconds < apart.estimate.step_seconds);
    CHECK(merged.estimate.breakdown.compute == nearly(apart.estimate.breakdown.compute).epsilon(0.01));
}

TEST_CASE("recomputation and slower links cost time, never memory") {
    moe::plan::Plan plan = plan_of("Qwen3-30B-A3B", "h100", 16);
    plan.dp = plan.ep = 16;
    plan.gbs = 64;
    plan.dispatcher = moe::plan::Dispatcher::hybridep;
    plan.stack = "bridge-26.08";
    const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
    const moe::replay::Simulation keep = moe::replay::simulate(plan, stack, false);
    plan.recompute = moe::plan::recompute::full;
    const moe::replay::Simulation again = moe::replay::simulate(plan, stack, false);
    CHECK(again.estimate.step_seconds > keep.estimate.step_seconds);
    CHECK(again.estimate.memory_bytes < keep.estimate.memory_bytes);
    CHECK(again.estimate.breakdown.recompute > 0.0);
    CHECK(keep.estimate.breakdown.recompute == 0.0);
    moe::machine::Hardware slow = *plan.hardware;
    slow.nic.bandwidth /= 4;
    plan.recompute = 0;
    plan.hardware = std::make_shared<const moe::machine::Hardware>(slow);
    CHECK(moe::replay::simulate(plan, stack, false).estimate.breakdown.expert > 2.0 * keep.estimate.breakdown.expert);
}

TEST_CASE("DeepSeek-V3 on 256 GB200 is played in seconds, and its trace comes back row by row") {
    moe::plan::Plan plan = plan_of("DeepSeek-V3", "gb200-nvl72", 256);
    plan.pp = plan.vpp = 4;
    plan.schedule = moe::plan::ScheduleKind::interleaved;
    plan.dp = plan.ep = 64;
    plan.gbs = 4096;
    plan.precision = moe::machine::Precision::mxfp8;
    plan.dispatcher = moe::plan::Dispatcher::hybridep;
    plan.cuda_graph = moe::plan::CudaGraph::full;
    plan.ep_overlap = true;
    plan.layout = "Et*4|(tttt|)*14tmL";
    plan.recompute = moe::plan::recompute::mla_up_proj;
    plan.stack = "bridge-26.08";
    const moe::stack::Stack stack = moe::stack::load_stack(plan.stack, *plan.hardware);
    const auto begin = std::chrono::steady_clock::now();
    const moe::replay::Simulation s = moe::replay::simulate(plan, stack);
    const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - begin;
    MESSAGE(s.ops, " ops in ", wall.count(), " s, ", s.estimate.tflops_per_gpu, " TFLOPS/GPU");
    CHECK(s.ops > 200000);
    CHECK(s.timeline.ranks == std::vector<int>{0, 64, 128, 192});
    CHECK(s.timeline.represents == std::vector<int>{64, 64, 64, 64});
    // Megatron-Bridge 26.08 publishes 1277 for this plan.
    CHECK(s.estimate.tflops_per_gpu == nearly(1277.0).epsilon(0.2));
    const std::string path = "simulate_test_trace.json";
    moe::program::write_trace(s.timeline, path);
    const moe::program::Timeline back = moe::program::read_trace(path);
    std::remove(path.c_str());
    REQUIRE(back.rows.size() == s.timeline.rows.size());
    CHECK(back.plan_json == s.timeline.plan_json);
    for (std::size_t i = 0; i < back.rows.size(); i += 997) {
        CHECK(back.rows[i].kind == s.timeline.rows[i].kind);
        CHECK(back.rows[i].slot == s.timeline.rows[i].slot);
        CHECK(back.rows[i].start == nearly(s.timeline.rows[i].start).epsilon(1e-6));
    }
}

TEST_CASE("cores: with one for all ranks the work adds up, with one each it runs side by side") {
    const moe::stack::Stack stack = moe::stack::load_stack("moe-plan", *cpu_plan(4, 1).hardware);
    moe::plan::Plan shared = cpu_plan(4, 1), own = cpu_plan(4, 4);
    for (moe::plan::Plan* plan : {&shared, &own}) plan->dp = plan->ep = 4;
    const moe::replay::Simulation one = moe::replay::simulate(shared, stack), four = moe::replay::simulate(own, stack);
    check_rows(shared, one);
    check_rows(own, four);
    CHECK(one.timeline.ranks == std::vector<int>{0, 1, 2, 3});
    CHECK(one.estimate.step_seconds == nearly(work(one)).epsilon(1e-6));
    CHECK(four.estimate.step_seconds == nearly(work(four) / 4).epsilon(1e-6));
}

TEST_CASE("cores: pipelines with fewer cores than ranks end, and no sooner than the work allows") {
    const moe::stack::Stack stack = moe::stack::load_stack("moe-plan", *cpu_plan(8, 2).hardware);
    for (const int cores : {1, 2, 3, 8}) {
        moe::plan::Plan plan = cpu_plan(8, cores);
        plan.pp = 2;
        plan.tp = 2;
        plan.dp = 2;
        plan.ep = 4;
        plan.edp = 1;
        REQUIRE(!moe::plan::check_plan(plan));
        const moe::replay::Simulation s = moe::replay::simulate(plan, stack);
        check_rows(plan, s);
        CHECK(s.estimate.step_seconds >= work(s) / cores - 1e-12);
        CHECK(s.estimate.step_seconds <= work(s) + 1e-12);
        CHECK(s.ranks == 8);
    }
}
