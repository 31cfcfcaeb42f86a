// The cheapest plans over several numbers of GPUs: their order, the deadline, and remedies that hold when they are
// followed.
#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/search/refined_search.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/goodput/cheapest.hpp"
#include "simulator/pricing/fast_estimator.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/support/draws.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>

using namespace moe;

namespace {

// Few plans, whose efficiency falls as more GPUs share the batch.
struct Asked {
    search::SearchRequest request;
    stack::Stack stack;
    goodput::Terms terms;

    Asked() {
        plan::Plan& base = request.base;
        base.model = std::make_shared<const model::Model>(families::load_model("Qwen3-30B-A3B"));
        base.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("h100"));
        stack = stack::load_stack("", *base.hardware);
        base.stack = stack.name;
        base.gbs = 128, base.seq = 4096;
        request.threads = 2;
        for (const char* field : {"tp", "cp", "pp", "etp", "mbs"}) request.fixed.emplace_back(field, "1");
        request.fixed.emplace_back("ep", "8");
        terms.price = 2.0;
        terms.mtbf_hours = 50000.0;
    }
    goodput::Offers offers(const std::vector<int>& gpus) {
        pricing::FastEstimator estimator(request.base.hardware, stack);
        return goodput::cheapest(request, stack, estimator, gpus, terms);
    }
    goodput::Offers by_deadline(int most) {
        pricing::FastEstimator estimator(request.base.hardware, stack);
        return goodput::cheapest_by_deadline(request, stack, estimator, most, terms);
    }
};

// The number behind `words` in a message.
double number_behind(const std::string& text, const std::string& words) {
    const std::size_t at = text.find(words);
    REQUIRE_MESSAGE(at != std::string::npos, text);
    return std::stod(text.substr(at + words.size()));
}

} // namespace

TEST_CASE("several numbers of GPUs: each is searched, GPU-hours rank") {
    Asked asked;
    const goodput::Offers offers = asked.offers({16, 32, 64});
    REQUIRE(offers.counts.size() == 3);
    REQUIRE(!offers.found.plans.empty());
    for (std::size_t i = 0; i < offers.outlooks.size(); ++i) {
        const auto& [plan, estimate] = offers.found.plans[i];
        CHECK(offers.outlooks[i].gpu_hours == nearly(plan.gpus * offers.outlooks[i].hours));
        CHECK(*offers.outlooks[i].dollars == nearly(2.0 * offers.outlooks[i].gpu_hours));
        if (i > 0) CHECK(offers.outlooks[i].gpu_hours >= offers.outlooks[i - 1].gpu_hours);
    }
    double cheapest = 1e300;
    for (const goodput::Count& count : offers.counts) {
        CAPTURE(count.gpus);
        REQUIRE(count.best);
        // As a search of that number alone, and more GPUs end sooner.
        pricing::FastEstimator estimator(asked.request.base.hardware, asked.stack);
        search::SearchRequest alone = asked.request;
        alone.base.gpus = count.gpus;
        const auto found = search::refined_search(alone, asked.stack, estimator);
        CHECK(count.estimate.step_seconds == nearly(found.plans.front().second.step_seconds));
        cheapest = std::min(cheapest, count.best->gpu_hours);
    }
    CHECK(offers.outlooks.front().gpu_hours == cheapest);
    CHECK(offers.counts[2].best->hours < offers.counts[0].best->hours);
    // More GPUs fail more often, and each writes less.
    CHECK(offers.counts[2].best->job_mtbf_hours < offers.counts[0].best->job_mtbf_hours);
    CHECK(offers.counts[2].best->write_seconds < offers.counts[0].best->write_seconds);
}

TEST_CASE("numbers of GPUs without a plan are named; an error of one alone stays what it is") {
    Asked asked;
    const goodput::Offers offers = asked.offers({2, 16});
    REQUIRE(offers.counts.size() == 2);
    CHECK(offers.counts[0].no_plan.find("no plan for 2 GPUs") != std::string::npos);
    CHECK(offers.counts[1].no_plan.empty());
    CHECK(fault_of([&] { asked.offers({2}); }).rfind("3: no plan for 2 GPUs", 0) == 0);
    CHECK(fault_of([&] { asked.offers({2, 4}); }).find("3: no plan with any of these numbers of GPUs") == 0);
    asked.terms.mtbf_hours = 1e-3;
    CHECK(fault_of([&] { asked.offers({16}); }).find("3: --mtbf 0.001: a job of 16 GPUs fails every 0.225 s") == 0);
}

TEST_CASE("a deadline leaves out what ends behind it, and remedies hold" * doctest::skip(sanitized())) {
    Asked asked;
    const auto free = asked.offers({16, 32, 64});
    const double slow = free.counts[0].best->hours, fast = free.counts[2].best->hours;
    asked.terms.tokens = 1e12;
    asked.terms.deadline_hours = 0.5 * (free.counts[1].best->hours + fast);
    const auto timely = asked.offers({16, 32, 64});
    for (std::size_t i = 0; i < timely.outlooks.size(); ++i) {
        CHECK(timely.outlooks[i].hours <= *asked.terms.deadline_hours);
        CHECK(timely.found.plans[i].first.gpus == 64);
    }
    CHECK(timely.counts.size() == 3);
    // Not even a plan that is followed to the letter ends by then.
    asked.terms.deadline_hours = 0.5 * slow;
    try {
        asked.offers({16});
        FAIL("no plan of 16 GPUs takes half of its time");
    } catch (const Error& error) {
        const std::string line = error.what();
        CHECK(error.fault() == Fault::no_plan);
        CHECK(number_behind(line, "the nearest takes ") == nearly(slow).epsilon(0.001));
        const auto gpus = static_cast<int>(number_behind(line, "use "));
        CHECK(gpus > 16);
        CHECK(asked.offers({gpus}).outlooks.front().hours <= *asked.terms.deadline_hours);
        Asked later = asked;
        later.terms.deadline_hours = number_behind(line, "or --deadline ");
        CHECK(later.offers({16}).outlooks.front().hours <= *later.terms.deadline_hours);
        CHECK(*later.terms.deadline_hours < 1.02 * slow);
        Asked fewer = asked;
        fewer.terms.tokens = 1e9 * number_behind(line, "or --tokens ");
        CHECK(fewer.offers({16}).outlooks.front().hours <= *fewer.terms.deadline_hours);
        CHECK(*fewer.terms.tokens > 0.98 * 0.5e12);
    }
}

TEST_CASE("numbers of GPUs by the deadline: the cheapest that is found ends in time" * doctest::skip(sanitized())) {
    Asked asked;
    asked.terms.tokens = 1e12;
    const double hours = asked.offers({32}).outlooks.front().hours;
    asked.terms.deadline_hours = 1.01 * hours;
    const goodput::Offers offers = asked.by_deadline(256);
    CHECK(offers.outlooks.front().hours <= *asked.terms.deadline_hours);
    // 32 GPUs do it, so that nothing dearer than they is first.
    CHECK(offers.outlooks.front().gpu_hours <= 32.0 * hours * 1.0001);
    for (const goodput::Count& count : offers.counts) CHECK(count.gpus <= 128);
    asked.terms.deadline_hours = 0.01;
    CHECK(fault_of([&] { asked.by_deadline(64); }).find("3: --deadline 0.01: no plan trains 1T tokens by then") == 0);
}
