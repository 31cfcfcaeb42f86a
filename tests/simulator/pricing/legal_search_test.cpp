// Searches on published stacks: every plan keeps the rules of its engine, and what they exclude is counted by name.
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/search/refined_search.hpp"
#include "planner/search/search_branch.hpp"
#include "planner/search/search_space.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/pricing/fast_estimator.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/support/draws.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <utility>

using namespace moe;

namespace {

struct Asked {
    search::SearchRequest request;
    stack::Stack stack;

    Asked(const char* model, const char* machine, int gpus, std::int64_t gbs, machine::Precision precision,
          const char* software = "") {
        plan::Plan& base = request.base;
        base.model = std::make_shared<const model::Model>(families::load_model(model));
        base.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware(machine));
        stack = stack::load_stack(software, *base.hardware);
        base.stack = stack.name;
        base.gpus = gpus, base.gbs = gbs, base.seq = 4096;
        request.precisions = {precision};
        request.threads = 2;
    }
    search::SearchResult found() {
        pricing::FastEstimator estimator(request.base.hardware, stack);
        return search::refined_search(request, stack, estimator);
    }
};

} // namespace

TEST_CASE("found plans break no rule of their engine, and rejections are counted under the rules' names") {
    std::vector<Asked> requests =
        thinned(std::vector<Asked>{{"Qwen3-30B-A3B", "gb200-nvl72", 16, 256, machine::Precision::mxfp8},
                                   {"Mixtral-8x7B", "h100", 32, 128, machine::Precision::bf16},
                                   {"DeepSeek-V2-Lite", "h100", 16, 64, machine::Precision::fp8_blockwise}});
    for (Asked& asked : requests) {
        const search::SearchResult result = asked.found();
        CAPTURE(asked.request.base.model->name);
        CHECK(result.plans.size() >= 3);
        for (const auto& [plan, estimate] : result.plans) CHECK(stack::check_stack(plan, asked.stack).message == "");
        CHECK(std::any_of(result.pruned.begin(), result.pruned.end(),
                          [](const auto& reason) { return reason.first.rfind("megatron-core: ", 0) == 0; }));
    }
}

TEST_CASE("the rules that are left of a root exclude the plans that all rules do" * doctest::skip(sanitized())) {
    using Fixed = std::vector<std::pair<std::string, std::string>>;
    const auto megatron = [](const Fixed& fixed) {
        Asked asked{"DeepSeek-V3", "gb200-nvl72", 64, 1024, machine::Precision::mxfp8};
        asked.request.fixed = fixed;
        return asked;
    };
    const auto other = [](const char* model, const char* software, const Fixed& fixed) {
        Asked asked{model, "h100", 64, 1024, machine::Precision::bf16, software};
        asked.request.fixed = fixed;
        return asked;
    };
    for (const Asked& asked : {megatron({{"aux_loss", "0.001"}}), megatron({{"expert_capacity", "1.25"}}),
                               megatron({{"cuda_graph", "moe_router"}}), other("Qwen3-30B-A3B", "automodel", {}),
                               other("MiniMax-M2", "automodel", {{"fsdp", "on"}}),
                               other("Qwen3-30B-A3B", "torchtitan", {}), other("Llama3-8B", "torchtitan", {})}) {
        CAPTURE(asked.stack.name);
        const search::SearchSpace space(asked.request, asked.stack);
        std::mt19937 draw(17);
        const auto one_of = [&draw](const auto& list) -> const auto& { return list[draw() % list.size()]; };
        int broken = 0, sound = 0;
        for (std::size_t i = 0; i < draws(3000); ++i) {
            const search::LayerOptions& family = one_of(space.layer_options());
            const search::ParallelConfig& mapping = one_of(family.parallel_configs);
            const std::vector<plan::Plan>& roots = space.roots(family.tp, family.cp, family.ep, family.etp, mapping.pp);
            search::Candidate c;
            c.mbs = one_of(space.micro_batch_sizes(mapping.dp));
            c.layer_options = &family;
            const int vpp = one_of(space.chunk_counts(mapping.pp));
            c.shape = {&mapping, &one_of(space.stage_splits(mapping.pp, vpp)), vpp};
            c.root = static_cast<std::uint16_t>(draw() % roots.size());
            c.set = static_cast<std::uint16_t>(draw() % space.recompute_sets().size());
            c.optimizer = static_cast<std::uint16_t>(draw() % space.optimizers().size());
            const plan::Plan plan = search::plan_of(space, c);
            const plan::PlanFault all = space.fault_of(plan), left = space.fault_of(plan, c.root);
            CAPTURE(plan::plan_to_json(plan));
            REQUIRE(left.counter == all.counter);
            REQUIRE(left.message == all.message);
            (all ? broken : sound) += 1;
        }
        CHECK(broken > 10);
        CHECK(sound > 10);
    }
}

TEST_CASE("a graph of the whole step with experts comes with the stack's capacity and pages, or not at all" *
          doctest::skip(sanitized())) {
    Asked asked{"Qwen3-30B-A3B", "gb200-nvl72", 16, 256, machine::Precision::mxfp8};
    asked.request.fixed = {{"cuda_graph", "full"}};
    CHECK(asked.stack.usual_capacity == 1.5);
    for (const auto& [plan, estimate] : asked.found().plans) {
        CHECK(plan.capacity == 1.5);
        CHECK(plan.dispatcher == plan::Dispatcher::hybridep);
    }
    asked.request.fixed = {{"cuda_graph", "full"}, {"capacity", "1.2"}, {"paged_stash", "off"}};
    for (const auto& [plan, estimate] : asked.found().plans) {
        CHECK(plan.capacity == 1.2);
        CHECK_FALSE(plan.paged_stash);
    }
    asked.request.fixed = {{"cuda_graph", "full"}, {"capacity", "none"}};
    CHECK(fault_of([&asked] { asked.found(); }).find("cuda_graph full") != std::string::npos);
    // Models without experts have no such sizes to know.
    Asked dense{"Llama3-8B", "gb200-nvl72", 8, 128, machine::Precision::mxfp8};
    dense.request.fixed = {{"cuda_graph", "full"}};
    for (const auto& [plan, estimate] : dense.found().plans) CHECK(plan.capacity == 0.0);
}
