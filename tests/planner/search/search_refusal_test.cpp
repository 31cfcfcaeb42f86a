// Searches that end without a plan, and estimators that refuse or fail.
#include "planner/base/error.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/planner/search/small_space.hpp"

#include <doctest/doctest.h>

namespace {

using namespace small_space;

// Has no price for context parallelism, and fails outright when told to.
class Partial : public Analytic {
public:
    bool broken = false;
    search::Estimate estimate(const plan::Plan& plan) override {
        if (broken) fail("the disk is full");
        if (plan.cp > 1) refuse("cp {}: cannot be priced", plan.cp);
        return Analytic::estimate(plan);
    }
};

} // namespace

TEST_CASE("search: what the estimator refuses is counted, what it fails at is passed on") {
    search::SearchRequest request = small_request();
    request.exhaustive = true;
    Partial estimator;
    const search::SearchResult result = search::search(request, small_stack(), estimator);
    CHECK(result.pruned.at("not priced") > 0);
    for (const auto& [plan, estimate] : result.plans) CHECK(plan.cp == 1);
    estimator.broken = true;
    for (const int threads : {1, 3}) {
        request.threads = threads;
        CHECK(fault_of([&] { search::search(request, small_stack(), estimator); }) == "1: the disk is full");
    }
}

TEST_CASE("search: requests without a plan are refused in one line that names reason, numbers and remedy") {
    const std::string bad_input = "2: ";
    const auto refusal = [&](const search::SearchRequest& request, const std::string& status = "3: ") {
        Analytic estimator;
        std::string line = fault_of([&] { search::search(request, small_stack(), estimator); });
        CHECK(line.substr(0, 3) == status);
        CHECK(line.find('\n') == std::string::npos);
        CHECK(line.size() < 640);
        return line;
    };
    const auto holds = [](const std::string& line, const std::string& words) {
        CAPTURE(line);
        CHECK(line.find(words) != std::string::npos);
    };
    search::SearchRequest request = small_request();
    request.base.hardware = small_hardware(0.12 * gib);
    const std::string memory = refusal(request);
    holds(memory, "no plan for 8 GPUs fits");
    holds(memory, "fail 'memory' (best needs ");
    holds(memory, "GiB of 0.1: tp ");
    holds(memory, "use ");
    holds(memory, " GPUs, or shorten --seq");

    // 11 ranks: TP, EP and CP cannot take a factor of 11, PP has more stages than layers, DP does not divide the batch.
    const std::string prime = refusal(small_request(11, 32));
    holds(prime, "no plan for 11 GPUs");
    holds(prime, "10 GPUs would do");

    request = small_request();
    request.fixed = {{"tp", "3"}};
    holds(refusal(request), "tp = 3 is fixed, which does not divide 8");
    request.fixed = {{"tp", "4"}, {"cp", "4"}};
    holds(refusal(request), "the fixed degrees (cp, tp) cannot all be part of");
    request.base.stack = "torchtitan"; // holds each key/value head on one rank alone
    request.fixed = {{"tp", "8"}};
    holds(refusal(request), "num_key_value_heads = 4 is not divisible by tp = 8");
    // 12 GPUs: tp 3 fails more candidates, but the fixed ep is what nothing can get around.
    request = small_request(12, 48);
    request.fixed = {{"ep", "12"}};
    holds(refusal(request), "experts % ep");
    request = small_request();
    request.fixed = {{"layout", "Ett|L"}};
    holds(refusal(request), "holds 2 decoder layers (t), the model has 7");
    request.fixed = {{"layout", "Ett|q"}};
    holds(refusal(request, bad_input), "unknown symbol 'q'");
    request.fixed = {{"recompute", "mla_up_proj"}};
    holds(refusal(request, bad_input), "has no latent attention: change --fix recompute");
    request.fixed = {{"tq", "8"}};
    holds(refusal(request, bad_input), "unknown plan field 'tq'");
    request.fixed = {{"precision", "mxfp8"}};
    holds(refusal(request), "mxfp8: box cannot run it");
    request = small_request();
    request.top = 0;
    holds(refusal(request, bad_input), "top 0");
    // Whatever else excludes candidates, a model that the stack does not train is the reason.
    request = small_request(12, 48);
    auto untrained = std::make_shared<model::Model>(*request.base.model);
    untrained->not_executable = "some_field = 3";
    request.base.model = untrained;
    holds(refusal(request), "stack test offers only what execute runs: some_field = 3");
    request = small_request();
    request.base.gbs = 0;
    holds(refusal(request, bad_input), "gbs 0");
}
