// Search with the simulator's bounds against pricing every plan, on small spaces of real models and machines.
#include "planner/base/files.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/schedule.hpp"
#include "planner/search/search.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/pricing/fast_estimator.hpp"
#include "tests/support/draws.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

using namespace moe;

namespace {

struct Space {
    const char* model;
    const char* hardware;
    int gpus;
    std::int64_t gbs, seq;
    machine::Precision precision;
    std::vector<std::pair<std::string, std::string>> fixed;
};

search::SearchRequest asked(const char* model, const char* hardware, int gpus, std::int64_t gbs, std::int64_t seq) {
    search::SearchRequest request;
    request.base.model = std::make_shared<const model::Model>(families::load_model(model));
    request.base.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware(hardware));
    request.base.gpus = gpus;
    request.base.gbs = gbs;
    request.base.seq = seq;
    return request;
}

search::SearchResult searched(search::SearchRequest request, const char* name) {
    const stack::Stack stack = stack::load_stack(name, *request.base.hardware);
    request.base.stack = stack.name;
    pricing::FastEstimator estimator(request.base.hardware, stack);
    return search::search(request, stack, estimator);
}

} // namespace

TEST_CASE("pruning loses none of the true top ten on small spaces") {
    const std::vector<std::pair<std::string, std::string>> few{
        {"cuda_graph", "none"}, {"dispatcher", "alltoall"}, {"tp_overlap", "off"}, {"optimizer", "adamw"}};
    const auto with = [&](std::vector<std::pair<std::string, std::string>> more) {
        more.insert(more.end(), few.begin(), few.end());
        return more;
    };
    const std::vector<Space> spaces{
        {"Qwen3-30B-A3B", "h100", 16, 64, 4096, machine::Precision::bf16,
         with({{"cp", "1"}, {"etp", "1"}, {"fsdp", "off"}, {"mbs", "1"}, {"ep_overlap", "off"}})},
        {"Mixtral-8x7B", "h200", 8, 32, 4096, machine::Precision::bf16,
         with({{"cp", "1"}, {"fsdp", "off"}, {"mbs", "1"}})},
        {"DeepSeek-V2-Lite", "gb200-nvl72", 8, 32, 4096, machine::Precision::mxfp8,
         with({{"cp", "1"}, {"etp", "1"}, {"fsdp", "off"}, {"mbs", "2"}, {"ep_overlap", "off"}})},
        {"Mixtral-8x7B", "h100", 16, 32, 4096, machine::Precision::bf16,
         with({{"cp", "1"}, {"etp", "1"}, {"fsdp", "off"}, {"mbs", "1"}})},
        {"Mixtral-8x7B", "h200", 8, 32, 4096, machine::Precision::bf16,
         with({{"cp", "1"},
               {"etp", "1"},
               {"fsdp", "off"},
               {"mbs", "1"},
               {"ep_overlap", "off"},
               {"offload", "optimizer"}})},
        {"Llama3-8B", "h100", 8, 32, 8192, machine::Precision::bf16, with({{"fsdp", "off"}, {"cp_comm", "alltoall"}})},
        {"Qwen3-30B-A3B", "h200", 8, 32, 4096, machine::Precision::bf16,
         with({{"pp", "1"}, {"etp", "1"}, {"tp", "1"}, {"cp", "1"}, {"fsdp", "on"}, {"ep_overlap", "off"}})},
    };
    for (const Space& space : thinned(spaces)) {
        CAPTURE(std::string(space.model));
        search::SearchRequest request = asked(space.model, space.hardware, space.gpus, space.gbs, space.seq);
        request.precisions = {space.precision};
        request.fixed = space.fixed;
        request.top = 10;
        const search::SearchResult pruned = searched(request, "");
        request.exhaustive = true;
        const search::SearchResult all = searched(request, "");
        MESSAGE(std::string(space.model), ": ", pruned.priced, " of ", all.priced, " plans priced, ", pruned.seconds,
                " of ", all.seconds, " s");
        REQUIRE(pruned.plans.size() == all.plans.size());
        REQUIRE(!all.plans.empty());
        for (std::size_t i = 0; i < all.plans.size(); ++i) {
            CAPTURE(i);
            CHECK(pruned.plans[i].second.step_seconds == nearly(all.plans[i].second.step_seconds).epsilon(1e-9));
        }
        CHECK(pruned.priced < all.priced);
        std::int64_t weighed[2] = {pruned.evaluated, all.evaluated};
        for (const auto& [reason, count] : pruned.pruned) weighed[0] += count;
        for (const auto& [reason, count] : all.pruned) weighed[1] += count;
        CHECK(weighed[0] == weighed[1]);
    }
}

TEST_CASE("a pipeline of more stages than layers: MTP and the loss are stages of their own") {
    search::SearchRequest request = asked("GLM-4.5-Air", "gb200-nvl72", 96, 1536, 4096);
    request.fixed = {{"pp", "48"}, {"tp", "1"}, {"cp", "1"}, {"etp", "1"}};
    for (const char* name : {"moe-plan", "bridge-26.08"}) { // the former's ranks share the embedding table
        CAPTURE(std::string(name));
        const search::SearchResult result = searched(request, name);
        REQUIRE(!result.plans.empty());
        CHECK(plan::stages(result.plans.front().first).size() == 48);
    }
}

TEST_CASE("a pipeline of far more stages than layers is counted, not an error") {
    search::SearchRequest request = asked("Qwen3-30B-A3B", "h200", 64, 256, 4096);
    request.fixed = {{"schedule", "dualpipe-v"}, {"tp", "1"}, {"cp", "1"}, {"etp", "1"}, {"recompute", "none"}};
    const search::SearchResult result = searched(request, "moe-plan");
    CHECK(!result.plans.empty());
    CHECK(result.pruned.count("pp*vpp > layers") == 1); // pp 32 and 64, two chunks each, for 48 layers
}
