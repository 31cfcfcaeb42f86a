// What a ranking says of its plans: ties, the simplest of them, what trains otherwise, and the table's columns.
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan.hpp"
#include "tools/report/ranking_text.hpp"

#include <doctest/doctest.h>

#include <algorithm>

namespace {

using namespace moe;

plan::Plan sample() {
    plan::Plan plan;
    plan.model = std::make_shared<const model::Model>(families::load_model("Qwen3-30B-A3B"));
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("h100"));
    plan.stack = "bridge-26.08";
    plan.gpus = plan.dp = plan.edp = 16, plan.gbs = 64, plan.seq = 4096;
    return plan;
}

search::Estimate at(double tflops) {
    search::Estimate e;
    e.tflops_per_gpu = tflops;
    e.step_seconds = 1000.0 / tflops;
    e.fits = true;
    return e;
}

// The first plan recomputes and pipelines; the second is plainer and 0.5 % slower; the third takes twice as long.
search::SearchResult result() {
    plan::Plan first = sample(), second = sample(), third = sample();
    first.recompute = plan::recompute::layernorm;
    third.tp = 4, third.mbs = 4, third.recompute = plan::recompute::full;
    search::SearchResult r;
    r.plans = {{first, at(400.0)}, {second, at(398.0)}, {third, at(200.0)}};
    return r;
}

published::Corrector& none() {
    static published::Corrector corrector(stack::Stack{}, false);
    return corrector;
}

bool holds(const std::string& text, const std::string& words) { return text.find(words) != std::string::npos; }

} // namespace

TEST_CASE("ranking: plans that cannot be told from the first are marked, and the simplest is named") {
    const search::SearchResult plans = result();
    const tools::Ranking ranking = tools::rank_notes(plans, false, 2, none());
    REQUIRE(ranking.plans.size() == 3);
    CHECK(ranking.plans[0].equal_to_first);
    CHECK_FALSE(ranking.plans[0].certainty);
    CHECK(ranking.plans[1].equal_to_first);
    CHECK_FALSE(ranking.plans[2].equal_to_first);
    CHECK(*ranking.plans[1].certainty < *ranking.plans[2].certainty);
    CHECK(ranking.simplest == 1);
    CHECK(ranking.plans[0].interval.interval);
    CHECK(ranking.plans[0].nearest.size() == 2);
    const std::string table = tools::ranking_table(plans, ranking).text();
    CHECK(holds(table, "\n2= "));
    CHECK_FALSE(holds(table, "\n3= "));
    const std::vector<std::string> lines = tools::ranking_lines(plans, ranking);
    REQUIRE(lines.size() == 1);
    CHECK(holds(lines[0], "the simplest of these plans is 2"));
    CHECK(holds(tools::nearest_table(ranking).text(), ranking.plans[0].nearest[0].run_id));
}

TEST_CASE("ranking: of the executable stack no published pair speaks") {
    search::SearchResult plans = result();
    for (auto& [plan, estimate] : plans.plans) plan.stack = "moe-plan";
    const tools::Ranking ranking = tools::rank_notes(plans, true, 2, none());
    CHECK(ranking.plans[0].equal_to_first);
    CHECK_FALSE(ranking.plans[1].equal_to_first);
    CHECK_FALSE(ranking.plans[1].certainty);
    CHECK(ranking.plans[1].nearest.empty());
    CHECK(tools::ranking_lines(plans, ranking).empty());
}

TEST_CASE("ranking: choices have a column where plans differ in them alone") {
    search::SearchResult plans = result();
    const auto table = [&plans] {
        return tools::ranking_table(plans, tools::rank_notes(plans, false, 0, none())).text();
    };
    for (const char* heading : {"offload", "graph", "EP overlap", "dispatcher", "FSDP", "capacity"})
        CHECK_FALSE(holds(table(), heading));
    plans.plans[2].first.fsdp = true;
    plans.plans[1].first.cuda_graph = plan::CudaGraph::partial;
    CHECK(holds(table(), "FSDP"));
    CHECK(holds(table(), "graph"));
    CHECK_FALSE(holds(table(), "dispatcher"));
    for (auto& [plan, estimate] : plans.plans) plan.offload = plan::offload::core_attn;
    CHECK(holds(table(), "offload"));
}

TEST_CASE("ranking: settings by which losses depend on the plan") {
    const auto told = [](auto edit) {
        plan::Plan plan = sample();
        edit(plan);
        return tools::differences_of_training(plan);
    };
    CHECK(told([](plan::Plan&) {}).empty());
    CHECK(holds(told([](plan::Plan& p) { p.capacity = 1.5; }).at(0), "capacity 1.5"));
    CHECK(told([](plan::Plan& p) { p.capacity = 1.5, p.stack = "moe-plan"; }).empty()); // runs such steps again
    CHECK(holds(told([](plan::Plan& p) { p.router.expert_capacity = 1.0; }).at(0), "expert_capacity 1"));
    const auto dropping = [&told](plan::DropScope scope) {
        return told([scope](plan::Plan& p) { p.router.expert_capacity = 1.0, p.router.drop_scope = scope; }).at(0);
    };
    CHECK(holds(dropping(plan::DropScope::sub_sequence), "depends on mbs, tp and cp"));
    CHECK(holds(dropping(plan::DropScope::full_sequence), "of each whole sequence"));
    const auto balanced = [&told](plan::LoadBalancing over) {
        return told([over](plan::Plan& p) { p.router.aux_loss = 0.01, p.router.load_balancing = over; });
    };
    CHECK(balanced(plan::LoadBalancing::sequence).empty());
    CHECK(balanced(plan::LoadBalancing::micro_batch).size() == 1);
    CHECK(
        holds(told([](plan::Plan& p) { p.router.load_balancing = plan::LoadBalancing::sinkhorn; }).at(0), "sinkhorn"));
    CHECK(told([](plan::Plan& p) {
              p.head_precision = p.attention_precision = machine::Precision::fp8_tensor;
          }).size() == 2);
    search::SearchResult plans = result();
    plans.plans[2].first.capacity = 1.5;
    const tools::Ranking ranking = tools::rank_notes(plans, false, 0, none());
    CHECK(holds(tools::ranking_table(plans, ranking).text(), "\n3* "));
    CHECK(holds(tools::ranking_lines(plans, ranking).back(), "* plan 3 trains differently: capacity 1.5"));
}
