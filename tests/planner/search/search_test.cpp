// Search against brute force on small spaces with an analytic estimator: the best plans and every count.
#include "planner/base/error.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/planner/search/small_space.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <numeric>
#include <set>
#include <tuple>

namespace {

using namespace small_space;

bool divides(int part, int whole) { return whole % part == 0; }

std::vector<std::int64_t> micro_batches(const plan::Plan& plan) {
    if (plan.gbs % plan.dp != 0) return {1};
    std::vector<std::int64_t> result;
    for (const std::int64_t mbs : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 24, 32, 48, 64, 96, 128})
        if (plan.gbs / plan.dp % mbs == 0) result.push_back(mbs);
    return result;
}

// Calls visit(plan) for every point of the space, sound or not, by plain loops.
template <class Visit>
void every_plan(const search::SearchRequest& request, const stack::Stack& stack, const Visit& visit) {
    const int n = request.base.gpus;
    const int layers = static_cast<int>(request.base.model->layers.size());
    plan::Plan p = request.base;
    p.precision = machine::Precision::bf16;
    for (p.pp = 1; p.pp <= n; ++p.pp)
        for (p.tp = 1; p.tp <= n; ++p.tp)
            for (p.cp = 1; p.cp <= n; ++p.cp)
                for (p.etp = 1; p.etp <= n; ++p.etp)
                    for (p.ep = 1; p.ep <= n; ++p.ep) {
                        if (!divides(p.pp * p.tp * p.cp, n) || !divides(p.pp * p.etp * p.ep, n)) continue;
                        p.dp = n / (p.pp * p.tp * p.cp);
                        p.edp = n / (p.pp * p.etp * p.ep);
                        const auto largest = [&](int vpp) { return (layers + p.pp * vpp - 1) / (p.pp * vpp); };
                        for (p.vpp = 1; p.vpp <= std::max(1, p.pp == 1 ? 1 : layers / p.pp); ++p.vpp) {
                            if (p.vpp > 1 && largest(p.vpp) == largest(p.vpp - 1)) continue; // the fewest chunks
                            for (const std::int64_t mbs : micro_batches(p)) {
                                p.mbs = mbs;
                                p.schedule =
                                    p.vpp > 1 ? plan::ScheduleKind::interleaved : plan::ScheduleKind::one_f_one_b;
                                std::vector<std::string> layouts{""};
                                const int units = layers + static_cast<int>(p.model->mtp.size()) + 1;
                                if (p.pp * p.vpp > 1 && p.pp * p.vpp <= units) {
                                    plan::Plan even = p;
                                    even.layout.clear();
                                    const std::string text =
                                        plan::layout_to_string(plan::balanced_stages(*p.model, p.seq, p.pp * p.vpp));
                                    if (p.pp * p.vpp > layers || text != plan::layout_to_string(plan::stages(even)))
                                        layouts.push_back(text);
                                }
                                for (const std::string& layout : layouts)
                                    for (const unsigned set : stack.recompute_sets)
                                        for (const bool bf16 : {true, false}) {
                                            p.layout = layout;
                                            p.recompute = set;
                                            p.optimizer.moments = bf16 ? plan::Moments::bf16 : plan::Moments::fp32;
                                            visit(p);
                                        }
                            }
                        }
                    }
}

std::string text_of(const plan::Plan& p) {
    return fmt::format("pp{} vpp{} tp{} cp{} dp{} etp{} ep{} edp{} mbs{} rec{} {} {}", p.pp, p.vpp, p.tp, p.cp, p.dp,
                       p.etp, p.ep, p.edp, p.mbs, plan::recompute::to_string(p.recompute), p.optimizer.narrow(),
                       p.layout);
}

struct Priced {
    plan::Plan plan;
    double seconds;
};

// All plans that fit, fastest first; `total` counts all candidates.
std::vector<Priced> brute_force(const search::SearchRequest& request, const stack::Stack& stack, std::int64_t& total) {
    Analytic estimator;
    std::vector<Priced> result;
    total = 0;
    every_plan(request, stack, [&](const plan::Plan& plan) {
        ++total;
        if (plan::check_plan(plan) || stack::check_stack(plan, stack)) return;
        if (estimator.memory_bytes(plan) > plan.hardware->memory_bytes) return;
        result.push_back({plan, estimator.estimate(plan).step_seconds});
    });
    std::sort(result.begin(), result.end(), [](const Priced& a, const Priced& b) { return a.seconds < b.seconds; });
    return result;
}

// The best of each mapping.
std::vector<Priced> one_per_mapping(const std::vector<Priced>& all) {
    std::set<std::array<int, 6>> seen;
    std::vector<Priced> result;
    for (const Priced& p : all) {
        const plan::Plan& m = p.plan;
        if (seen.insert({m.tp, m.cp, m.dp, m.pp, m.ep, m.etp}).second) result.push_back(p);
    }
    return result;
}

std::int64_t sum(const std::map<std::string, std::int64_t>& pruned) {
    std::int64_t total = 0;
    for (const auto& [reason, count] : pruned) {
        CAPTURE(reason);
        CHECK(count > 0);
        total += count;
    }
    return total;
}

void check_same(const search::SearchResult& result, const std::vector<Priced>& expected, std::size_t top) {
    REQUIRE(result.plans.size() == std::min(top, expected.size()));
    for (std::size_t i = 0; i < result.plans.size(); ++i) {
        CHECK(result.plans[i].second.step_seconds == nearly(expected[i].seconds).epsilon(1e-12));
        // Either of two plans may stand here where both cost exactly the same.
        const bool tied = (i > 0 && expected[i - 1].seconds == expected[i].seconds) ||
                          (i + 1 < expected.size() && expected[i + 1].seconds == expected[i].seconds);
        if (!tied) CHECK(text_of(result.plans[i].first) == text_of(expected[i].plan));
    }
}

// Plans of one mapping that cost the same are many.
void check_same_times(const search::SearchResult& result, const std::vector<Priced>& expected, std::size_t top) {
    REQUIRE(result.plans.size() == std::min(top, expected.size()));
    for (std::size_t i = 0; i < result.plans.size(); ++i)
        CHECK(result.plans[i].second.step_seconds == nearly(expected[i].seconds).epsilon(1e-12));
}

std::vector<std::string> texts(const search::SearchResult& result) {
    std::vector<std::string> list;
    for (const auto& [plan, estimate] : result.plans)
        list.push_back(fmt::format("{} {:.17g}", text_of(plan), estimate.step_seconds));
    return list;
}

} // namespace

TEST_CASE("search: the exhaustive list equals brute force, and every candidate is counted once") {
    for (const auto& [gpus, gbs, memory] :
         {std::tuple(8, 32, 1.0), {8, 32, 0.45}, {6, 30, 0.6}, {12, 12, 1.0}, {1, 14, 4.0}}) {
        CAPTURE(gpus);
        CAPTURE(memory);
        search::SearchRequest request = small_request(gpus, gbs);
        request.base.hardware = small_hardware(memory * gib);
        request.exhaustive = request.similar = true;
        request.top = 20;
        const stack::Stack stack = small_stack();
        std::int64_t total = 0;
        const std::vector<Priced> expected = brute_force(request, stack, total);
        REQUIRE(!expected.empty());
        Analytic estimator;
        const search::SearchResult result = search::search(request, stack, estimator);
        check_same(result, expected, 20);
        CHECK(result.evaluated == static_cast<std::int64_t>(expected.size()));
        CHECK(result.evaluated == estimator.calls);
        CHECK(result.evaluated + sum(result.pruned) == total);
    }
}

TEST_CASE("search: bounds and dominance lose no plan of the list and leave most candidates unpriced") {
    for (const auto& [gpus, gbs, memory] :
         {std::tuple(8, 32, 1.0), {8, 32, 0.45}, {8, 96, 0.6}, {6, 30, 0.6}, {16, 80, 0.3}}) {
        CAPTURE(gpus);
        CAPTURE(memory);
        search::SearchRequest request = small_request(gpus, gbs);
        request.base.hardware = small_hardware(memory * gib);
        request.top = 5;
        const stack::Stack stack = small_stack();
        std::int64_t total = 0;
        const std::vector<Priced> all = brute_force(request, stack, total);
        REQUIRE(!all.empty());
        Analytic estimator;
        const search::SearchResult result = search::search(request, stack, estimator);
        check_same_times(result, one_per_mapping(all), 5);
        CHECK(result.evaluated + sum(result.pruned) == total);
        CHECK(result.evaluated < static_cast<std::int64_t>(all.size()) / 2);
        CHECK(result.priced < static_cast<std::int64_t>(all.size()) / 10);
        CHECK(result.pruned.count("dominated") == 1);
    }
}

TEST_CASE("search: the result does not depend on the number of threads") {
    search::SearchRequest request = small_request(16, 96);
    request.base.hardware = small_hardware(0.4 * gib);
    request.top = 7;
    Analytic estimator;
    const search::SearchResult one = search::search(request, small_stack(), estimator);
    for (const int threads : {2, 5, 0}) {
        request.threads = threads;
        const search::SearchResult several = search::search(request, small_stack(), estimator);
        CHECK(texts(several) == texts(one));
        CHECK(several.evaluated == one.evaluated);
        CHECK(several.pruned == one.pruned);
    }
}

TEST_CASE("search: pinned fields hold in every plan and shrink the space") {
    const std::vector<std::pair<std::string, std::string>> pins{
        {"tp", "2"},           {"pp", "2"},          {"vpp", "2"},
        {"ep", "4"},           {"etp", "1"},         {"cp", "1"},
        {"mbs", "2"},          {"schedule", "1f1b"}, {"recompute", "core_attn"},
        {"precision", "fp32"}, {"dp", "4"},          {"layout", "Ett|ttt|ttmL|"},
        {"optimizer", "adamw"}};
    Analytic estimator;
    search::SearchRequest free = small_request();
    const search::SearchResult open = search::search(free, small_stack(), estimator);
    const std::int64_t whole = open.evaluated + sum(open.pruned);
    for (const auto& [field, value] : pins) {
        if (field == "layout") continue; // below: the string must fit
        CAPTURE(field);
        search::SearchRequest request = small_request();
        request.fixed = {{field, value}};
        const search::SearchResult result = search::search(request, small_stack(), estimator);
        REQUIRE(!result.plans.empty());
        for (const auto& [plan, estimate] : result.plans) {
            plan::Plan same = plan;
            plan::set_field(same, field, value);
            CHECK(text_of(same) == text_of(plan));
            CHECK(same.precision == plan.precision);
            CHECK(same.schedule == plan.schedule);
        }
        // Cuts that are no use unless asked for are not in the open space.
        if (field != "precision" && field != "vpp") CHECK(result.evaluated + sum(result.pruned) < whole);
    }
    search::SearchRequest request = small_request();
    request.fixed = {{"layout", "Ett|tt|tt|tmL"}};
    const search::SearchResult result = search::search(request, small_stack(), estimator);
    for (const auto& [plan, estimate] : result.plans) {
        CHECK(plan.pp * plan.vpp == 4);
        CHECK(plan.layout == "Ett|tt|tt|tmL");
    }
}

TEST_CASE("search: a pinned field that needs a searched one finds the plans that have both") {
    Analytic estimator;
    stack::Stack stack = small_stack();
    stack.dispatchers = {plan::Dispatcher::allgather, plan::Dispatcher::alltoall};
    stack.usual_dispatcher = plan::Dispatcher::allgather;
    const auto found = [&](std::vector<std::pair<std::string, std::string>> fixed) {
        search::SearchRequest request = small_request();
        request.fixed = std::move(fixed);
        return search::search(request, stack, estimator);
    };
    // Weight gradients are delayed beside communication, which neither EP nor PP of 1 has.
    for (const auto& [plan, estimate] : found({{"delay_wgrad", "on"}}).plans) CHECK((plan.ep > 1 || plan.pp > 1));
    CHECK(found({{"delay_wgrad", "on"}, {"ep", "1"}}).plans.front().first.pp > 1);
    // Only all-to-all moves rows whose number is known, and it is not the usual dispatcher.
    const search::SearchResult padded = found({{"expert_capacity", "1"}, {"pad_to_capacity", "on"}});
    for (const auto& [plan, estimate] : padded.plans) CHECK(plan.dispatcher == plan::Dispatcher::alltoall);
    CHECK(padded.plans.size() == 5);
    // What no value of the others satisfies is refused, under the name of what was pinned.
    CHECK(fault_of([&] {
              found({{"delay_wgrad", "on"}, {"ep", "1"}, {"pp", "1"}});
          }).find("fail 'delay_wgrad' (delay_wgrad = on needs communication to fill") != std::string::npos);
    CHECK(fault_of([&] { found({{"pad_to_capacity", "on"}}); }).find("fail 'pad_to_capacity'") != std::string::npos);
}

TEST_CASE("search: several precisions are all explored") {
    search::SearchRequest request = small_request(4, 8); // small: every plan of it has a place
    request.precisions = {machine::Precision::fp32, machine::Precision::bf16};
    request.exhaustive = request.similar = true;
    request.top = 100000;
    Analytic estimator;
    std::set<machine::Precision> seen;
    const search::SearchResult result = search::search(request, small_stack(), estimator);
    for (const auto& [plan, estimate] : result.plans) seen.insert(plan.precision);
    CHECK(seen.size() == 2);
    CHECK(result.plans.front().first.precision == machine::Precision::bf16);
}

TEST_CASE("search: a rule of recomputation in one precision holds in the plans of that precision alone") {
    search::SearchRequest request = small_request(4, 8);
    request.precisions = {machine::Precision::fp32, machine::Precision::bf16};
    request.exhaustive = request.similar = true;
    request.top = 100000;
    const nlohmann::json rule = {{"name", "recompute: fp32"},
                                 {"when", {{"recompute", {"+layernorm", "+moe_act"}}}},
                                 {"excludes", {{"precision", "fp32"}}},
                                 {"kind", "conflict"},
                                 {"asserted_by", "class"},
                                 {"message", "not in FP32"},
                                 {"source", "this test"}};
    stack::Stack stack = small_stack();
    stack.rules = std::make_shared<stack::RuleList>(std::vector<stack::Rule>{stack::read_rule(rule, "test")});
    Analytic estimator;
    const search::SearchResult result = search::search(request, stack, estimator);
    std::set<std::pair<machine::Precision, bool>> seen; // and whether one of the rule's modules is recomputed
    for (const auto& [plan, estimate] : result.plans) {
        CHECK(!stack::check_stack(plan, stack));
        const unsigned ruled = plan::recompute::layernorm | plan::recompute::moe_act;
        seen.emplace(plan.precision, (plan.recompute & ruled) != 0);
    }
    CHECK(!seen.contains({machine::Precision::fp32, true}));
    CHECK(seen.size() == 3);
    CHECK(sum(result.pruned) > 0);
}

TEST_CASE("search: progress is reported from counts that never fall") {
    search::SearchRequest request = small_request(16, 96);
    request.exhaustive = true;
    std::int64_t last = 0;
    int calls = 0;
    request.progress = [&](std::int64_t evaluated, std::int64_t pruned) {
        CHECK(evaluated + pruned >= last);
        last = evaluated + pruned;
        ++calls;
    };
    Analytic estimator;
    const search::SearchResult result = search::search(request, small_stack(), estimator);
    CHECK(last <= result.evaluated + sum(result.pruned));
    CHECK(calls <= 1 + static_cast<int>(result.seconds * 10.0));
}
