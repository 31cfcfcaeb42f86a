// The plans that a refined search finds beside a search: plans as a replay shows them, offloaded, with split or delayed
// backwards.
#include "planner/base/files.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan_fields.hpp"
#include "planner/plan/schedule.hpp"
#include "planner/search/refined_search.hpp"
#include "planner/search/thrifty.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/pricing/fast_estimator.hpp"
#include "simulator/replay/simulate.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/support/draws.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <tuple>

using namespace moe;

namespace {

struct Asked {
    const char *model, *hardware, *stack;
    int gpus;
    std::int64_t gbs, seq;
};
using Pins = std::vector<std::pair<std::string, std::string>>;

class Searcher {
public:
    explicit Searcher(const Asked& asked)
        : hardware_(std::make_shared<const machine::Hardware>(machine::load_hardware(asked.hardware))),
          stack_(stack::load_stack(asked.stack, *hardware_)),
          estimator_(hardware_, stack_) {
        request_.base.model = std::make_shared<const model::Model>(families::load_model(asked.model));
        request_.base.hardware = hardware_;
        request_.base.stack = stack_.name;
        request_.base.gpus = asked.gpus;
        request_.base.gbs = asked.gbs;
        request_.base.seq = asked.seq;
    }
    search::SearchResult plain(Pins pins = {}) { return search::search(with(std::move(pins)), stack_, estimator_); }
    search::SearchResult refined(Pins pins = {}) {
        return search::refined_search(with(std::move(pins)), stack_, estimator_);
    }
    auto fewest() { return search::fewest_gpus(request_, stack_, estimator_, 1, 4096); }
    std::pair<plan::Plan, search::Estimate> best(Pins pins = {}) { return refined(std::move(pins)).plans.front(); }
    search::Estimate replayed(const plan::Plan& plan) const { return replay::simulate(plan, stack_, false).estimate; }
    search::SearchRequest& request() { return request_; }

private:
    search::SearchRequest with(Pins pins) const {
        search::SearchRequest request = request_;
        request.fixed = std::move(pins);
        return request;
    }
    std::shared_ptr<const machine::Hardware> hardware_;
    stack::Stack stack_;
    pricing::FastEstimator estimator_;
    search::SearchRequest request_;
};

} // namespace

TEST_CASE("offload takes the place of recomputation where the host's link has time for it") {
    Searcher searcher({"Llama3-8B", "h200", "moe-plan", 1, 8, 32768});
    const auto [plan, estimate] = searcher.best();
    const auto [kept, slower] = searcher.best({{"offload", "none"}});
    CHECK(plan.offload != 0);
    CHECK(kept.offload == 0);
    CHECK(kept.recompute != 0);
    CHECK(estimate.step_seconds < 0.95 * slower.step_seconds);
    CHECK(estimate.fits);
    CHECK(estimate.memory_bytes <= plan.hardware->memory_bytes);
    CHECK(estimate.host_bytes > 0.0);
    // The figures are those of a replay.
    CHECK(estimate.step_seconds == nearly(searcher.replayed(plan).step_seconds).epsilon(0.002));
    CHECK(slower.step_seconds == nearly(searcher.replayed(kept).step_seconds).epsilon(0.002));
}

TEST_CASE("a request that only offload brings into memory has plans, unless it is pinned off" *
          doctest::skip(sanitized())) {
    Searcher searcher({"GPT-OSS-20B", "h100", "bridge-26.08", 4, 16, 131072});
    const std::string refused = fault_of([&] { searcher.plain(); });
    CHECK(refused.find("no plan for 4 GPUs fits") != std::string::npos);
    const auto [plan, estimate] = searcher.best();
    CHECK(plan.offload != 0);
    CHECK(estimate.fits);
    CHECK(fault_of([&] {
              searcher.refined({{"offload", "none"}});
          }).find("no plan for 4 GPUs fits") != std::string::npos);
}

TEST_CASE("the fewest GPUs have a plan, and fewer have none" * doctest::skip(sanitized())) {
    for (const Asked& asked : {Asked{"Mixtral-8x7B", "h100", "bridge-26.08", 1, 64, 4096},
                               Asked{"Qwen3-30B-A3B", "h200", "moe-plan", 1, 64, 4096}}) {
        CAPTURE(std::string(asked.model));
        Searcher searcher(asked);
        const auto fewest = searcher.fewest();
        REQUIRE(fewest.has_value());
        CHECK(fewest->first > 1);
        searcher.request().base.gpus = fewest->first;
        CHECK(searcher.best().first.gpus == fewest->first);
        searcher.request().base.gpus = fewest->first / 2;
        const std::string refused = fault_of([&] { searcher.refined(); });
        CAPTURE(refused);
        CHECK(refused.find(fmt::format("no plan for {} GPUs fits", fewest->first / 2)) != std::string::npos);
        CHECK(refused.find(fmt::format("use {} GPUs", fewest->first)) != std::string::npos);
    }
}

TEST_CASE("a refusal names the plan that needs least, with FSDP and offload" * doctest::skip(sanitized())) {
    Searcher searcher({"DeepSeek-V3", "h100", "bridge-26.08", 32, 1024, 4096});
    // With the degrees that need least of GPUs that keep their states, 249.4 GiB.
    const std::string kept = fault_of([&] {
        searcher.refined({{"pp", "1"}, {"ep", "32"}, {"tp", "1"}, {"offload", "none"}});
    });
    const std::string refused = fault_of([&] { searcher.refined(); });
    CAPTURE(refused);
    const auto needed = [](const std::string& line) { return std::stod(line.substr(line.find("best needs ") + 11)); };
    CHECK(needed(refused) <= needed(kept));
    CHECK(needed(kept) < 300.0);
    CHECK(refused.find("fsdp on") != std::string::npos);
    CHECK(refused.find("use 128 GPUs") != std::string::npos);
}

TEST_CASE("pinned offload that the host has no memory for is refused, with what it needs") {
    Searcher searcher({"Llama3-8B", "h200", "moe-plan", 1, 8, 32768});
    auto small = std::make_shared<machine::Hardware>(*searcher.request().base.hardware);
    small->host_memory_bytes = 1e9;
    searcher.request().base.hardware = small;
    const auto said = [&](const char* modules) {
        return fault_of([&] { searcher.refined({{"recompute", "mlp"}, {"offload", modules}}); });
    };
    CHECK(said("attn_norm+qkv_linear+core_attn+attn_proj").find("fail 'offload > host memory'") != std::string::npos);
    // 8.03 billion parameters with 8 bytes of masters and moments in BF16.
    searcher.request().base.seq = 2048;
    CHECK(said("optimizer").find("needs 59.8 GiB of the host's memory for each, of 0.9") != std::string::npos);
    CHECK(searcher.best().first.offload == 0);
}

TEST_CASE("the first plan does not depend on how many are asked for" * doctest::skip(sanitized())) {
    Searcher searcher({"Qwen3-30B-A3B", "h100", "moe-plan", 8, 64, 4096});
    const plan::Plan of_five = searcher.best().first;
    searcher.request().top = 1;
    const std::vector<std::pair<plan::Plan, search::Estimate>> alone = searcher.refined().plans;
    REQUIRE(alone.size() == 1);
    CHECK(plan::differences(alone.front().first, of_five).empty());
}

TEST_CASE("stacks that do not offload, and pinned fields, are left as they are") {
    Searcher before({"Llama2-7B", "h100", "bridge-25.11", 1, 8, 4096});
    CHECK(before.best().first.offload == 0);
    Searcher searcher({"Llama2-7B", "h100", "bridge-26.08", 1, 8, 4096});
    CHECK(searcher.best().first.offload != 0);
    CHECK(searcher.best({{"offload", "core_attn"}}).first.offload == plan::offload::core_attn);
    const auto [plan, estimate] = searcher.best({{"recompute", "full"}, {"delay_wgrad", "off"}});
    CHECK(plan.recompute == plan::recompute::full);
    CHECK_FALSE(plan.delay_wgrad);
}

TEST_CASE("weight gradients are delayed where that is faster") {
    Searcher searcher({"GPT-OSS-20B", "h100", "moe-plan", 16, 64, 8192});
    const Pins few{{"pp", "2"}, {"tp", "1"}, {"cp", "1"}, {"etp", "1"}, {"offload", "none"}};
    const auto [plan, estimate] = searcher.best(few);
    Pins prompted = few;
    prompted.emplace_back("delay_wgrad", "off");
    const auto [prompt, slower] = searcher.best(std::move(prompted));
    CHECK(plan.delay_wgrad);
    CHECK_FALSE(prompt.delay_wgrad);
    CHECK(estimate.step_seconds < slower.step_seconds);
}

TEST_CASE("backwards in two slots are tried on the plans found, where the stack offers them and nothing is pinned") {
    const auto best = [](const char* stack, Pins pins) {
        pins.emplace_back("pp", "8");
        return Searcher({"Mixtral-8x7B", "b200", stack, 16, 16, 4096}).best(std::move(pins));
    };
    const auto [split, estimate] = best("moe-plan", {});
    CHECK(plan::splits_backward(split.schedule));
    CHECK(estimate.fits);
    const auto whole = best("moe-plan", {{"schedule", "1f1b"}});
    CHECK(whole.first.schedule == plan::ScheduleKind::one_f_one_b);
    CHECK(estimate.step_seconds < whole.second.step_seconds);
    CHECK(best("moe-plan", {{"vpp", "1"}}).first.vpp == 1);
    // A plan that was found is found again under its own chunks and cut.
    for (const char* field : {"vpp", "layout", "schedule"})
        CHECK(best("moe-plan", {{field, plan::field_text(split, field)}}).second.step_seconds <
              1.003 * estimate.step_seconds);
    CHECK_FALSE(plan::splits_backward(best("bridge-26.08", {}).first.schedule));
}

TEST_CASE("the list is sorted, one plan for each mapping, and the same on one thread and on three") {
    Searcher searcher({"Mixtral-8x7B", "h100", "moe-plan", 8, 16, 4096});
    const Pins few{{"cp", "1"}, {"etp", "1"}, {"mbs", "1"}, {"ep_overlap", "off"}, {"cuda_graph", "full"}};
    searcher.request().threads = 1;
    const search::SearchResult one = searcher.refined(few);
    searcher.request().threads = 3;
    const search::SearchResult three = searcher.refined(few);
    REQUIRE(one.plans.size() == three.plans.size());
    REQUIRE(one.plans.size() > 1);
    CHECK(one.evaluated == three.evaluated);
    for (std::size_t i = 0; i < one.plans.size(); ++i) {
        const auto& [plan, estimate] = one.plans[i];
        CHECK(plan::differences(plan, three.plans[i].first).empty());
        CHECK(estimate.step_seconds == three.plans[i].second.step_seconds);
        CHECK(stack::sound(plan, stack::load_stack("moe-plan", *plan.hardware)));
        for (std::size_t j = 0; j < i; ++j) {
            CHECK(one.plans[j].second.step_seconds <= estimate.step_seconds);
            const plan::Plan& other = one.plans[j].first;
            CHECK(std::tie(plan.tp, plan.cp, plan.dp, plan.pp, plan.ep, plan.etp) !=
                  std::tie(other.tp, other.cp, other.dp, other.pp, other.ep, other.etp));
        }
    }
}

TEST_CASE("on CPUs a refined search is a search") {
    Searcher searcher({"tiny-qwen3-moe", "cpu-local", "moe-plan", 4, 16, 256});
    const search::SearchResult plain = searcher.plain(), refined = searcher.refined();
    REQUIRE(plain.plans.size() == refined.plans.size());
    for (std::size_t i = 0; i < plain.plans.size(); ++i)
        CHECK(plain.plans[i].second.step_seconds == refined.plans[i].second.step_seconds);
}
