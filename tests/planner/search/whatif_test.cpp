// Questions "what if" and the memory-time front: single changes only, every axis, nothing dominated, against brute
// force.
#include "planner/search/feasibility.hpp"
#include "planner/search/whatif.hpp"

#include "planner/machine/hardware.hpp"
#include "planner/stack/stack.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/planner/plan/sample_plans.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <set>

namespace {

using namespace moe;

// Time and memory as plain functions of the fields, so that the test can say what each change must give.
class Formula : public search::Estimator {
public:
    double memory_bytes(const plan::Plan& p) override {
        const double layers = 8.0 / p.pp, weights = layers * (4.0 / p.tp + 64.0 / (p.ep * p.etp));
        double saved = layers * static_cast<double>(p.mbs) * p.pp / (p.tp * p.cp) * 10.0;
        if ((p.recompute & plan::recompute::moe_act) != 0) saved *= 0.7;
        if ((p.recompute & plan::recompute::layernorm) != 0) saved *= 0.9;
        if (p.recompute == plan::recompute::full) saved *= 0.1;
        return weights * (p.optimizer.narrow() ? 2.0 : 3.0) + saved;
    }
    search::Estimate estimate(const plan::Plan& p) override {
        ++calls;
        if (p.ep == 8) refuse("ep 8: has no price here");
        search::Estimate e;
        double share = 1.0;
        if ((p.recompute & plan::recompute::moe_act) != 0) share += 0.02;
        if ((p.recompute & plan::recompute::layernorm) != 0) share += 0.01;
        if (p.recompute == plan::recompute::full) share += 0.3;
        e.step_seconds = share * (1.0 + 0.1 * p.tp + 0.2 * p.cp + 0.05 * p.ep + 0.3 * p.etp + 0.2 * (p.pp - 1) / p.vpp +
                                  0.5 / static_cast<double>(p.mbs));
        e.tflops_per_gpu = 100.0 / e.step_seconds;
        e.memory_bytes = memory_bytes(p);
        e.fits = e.memory_bytes <= p.hardware->memory_bytes;
        return e;
    }
    int calls = 0;
};

plan::Plan base_plan() {
    auto hardware = std::make_shared<machine::Hardware>();
    hardware->name = "box";
    hardware->peak_flops[static_cast<std::size_t>(machine::Precision::bf16)] = 2e12;
    hardware->memory_bytes = 200.0;
    plan::Plan plan;
    plan.model = small_moe_model(8);
    plan.hardware = hardware;
    plan.stack = "test";
    plan.seq = 1024;
    plan.gbs = 32;
    plan.gpus = 16;
    plan.tp = 2;
    plan.dp = 4;
    plan.pp = 2;
    plan.ep = 4;
    plan.edp = 2;
    plan.mbs = 2;
    return plan;
}

stack::Stack test_stack() {
    stack::Stack stack;
    stack.name = "test";
    stack.precisions = {machine::Precision::bf16};
    stack.dispatchers = {plan::Dispatcher::alltoall, plan::Dispatcher::deepep};
    stack.cuda_graphs = {plan::CudaGraph::none};
    stack.recompute_sets = {0, plan::recompute::moe_act, plan::recompute::layernorm | plan::recompute::moe_act,
                            plan::recompute::full};
    stack.recompute_modules = plan::recompute::full | plan::recompute::layernorm | plan::recompute::moe_act;
    stack.bf16_moments = true;
    return stack;
}

const search::WhatIf* find(const std::vector<search::WhatIf>& list, const std::string& field, const std::string& to) {
    const auto it = std::find_if(list.begin(), list.end(),
                                 [&](const search::WhatIf& w) { return w.change.field == field && w.change.to == to; });
    return it == list.end() ? nullptr : &*it;
}

std::string along(const search::WhatIf& w) {
    std::string text;
    for (const plan::FieldChange& c : w.along) text += c.field + " " + c.from + "->" + c.to + ";";
    return text;
}

} // namespace

TEST_CASE("what-ifs: each degree in both directions, the other axis of its factoring takes up the difference") {
    Formula formula;
    const plan::Plan plan = base_plan();
    const stack::Stack stack = test_stack();
    REQUIRE(!plan::check_plan(plan));
    const std::vector<search::WhatIf> list = search::what_ifs(plan, stack, formula);
    const auto expect = [&](const char* field, const char* to, const char* moved) {
        const search::WhatIf* w = find(list, field, to);
        REQUIRE_MESSAGE(w != nullptr, field << " " << to);
        CHECK(w->impossible.empty());
        CHECK_MESSAGE(along(*w) == moved, field << " " << to);
    };
    expect("tp", "1", "dp 4->8;");
    expect("tp", "4", "dp 4->2;");
    expect("cp", "2", "dp 4->2;");
    expect("pp", "1", "dp 4->8;edp 2->4;");
    expect("pp", "4", "dp 4->2;edp 2->1;");
    expect("ep", "2", "edp 2->4;");
    expect("etp", "2", "edp 2->1;");
    expect("vpp", "2", "schedule 1f1b->interleaved;");
    expect("mbs", "1", "");
    expect("mbs", "4", "");
    expect("recompute", "moe_act", "");
    expect("recompute", "full", "");
    expect("optimizer", "adamw+bf16_moments", "");
    // The estimator refuses EP 8: the reason stands in the list instead of a number.
    const search::WhatIf* refused = find(list, "ep", "8");
    REQUIRE(refused != nullptr);
    CHECK(refused->impossible == "ep 8: has no price here");
    // A dispatcher that changes neither time nor memory tells nothing.
    CHECK(find(list, "dispatcher", "deepep") == nullptr);
}

TEST_CASE("what-ifs: a precision that the stack emulates is not proposed, for linears, experts or the head") {
    class Faster : public Formula { // in whatever is narrower
    public:
        search::Estimate estimate(const plan::Plan& p) override {
            search::Estimate e = Formula::estimate(p);
            for (const machine::Precision precision : {p.precision, p.experts(), p.head()})
                if (precision > machine::Precision::bf16) e.step_seconds /= 1.5;
            return e;
        }
    };
    plan::Plan plan = base_plan();
    auto hardware = std::make_shared<machine::Hardware>(*plan.hardware);
    hardware->peak_flops.fill(2e12);
    plan.hardware = hardware;
    stack::Stack stack = test_stack();
    stack.precisions = {machine::Precision::bf16, machine::Precision::fp8_blockwise, machine::Precision::mxfp8};
    for (const bool own : {false, true}) {
        CAPTURE(own);
        stack.name = plan.stack = own ? "moe-plan" : "test";
        Faster faster;
        const std::vector<search::WhatIf> list = search::what_ifs(plan, stack, faster);
        for (const char* field : {"precision", "expert_precision", "head_precision"}) {
            CHECK(find(list, field, "fp8-blockwise") != nullptr);
            CHECK((find(list, field, "mxfp8") == nullptr) == own);
        }
    }
}

TEST_CASE("what-ifs: figures, order and soundness") {
    Formula formula;
    plan::Plan plan = base_plan();
    plan.recompute = plan::recompute::moe_act;
    const stack::Stack stack = test_stack();
    const search::Estimate base = formula.estimate(plan);
    const std::vector<search::WhatIf> list = search::what_ifs(plan, stack, formula);
    std::set<std::string> seen;
    for (std::size_t i = 0; i < list.size(); ++i) {
        const search::WhatIf& w = list[i];
        CHECK(seen.insert(w.change.field + w.change.to).second);
        if (!w.impossible.empty()) continue;
        CHECK(!plan::check_plan(w.plan));
        CHECK(!stack::check_stack(w.plan, stack));
        CHECK(plan::field_text(w.plan, w.change.field) == w.change.to);
        CHECK(plan::field_text(plan, w.change.field) == w.change.from);
        CHECK(w.estimate.step_seconds == formula.estimate(w.plan).step_seconds);
        CHECK(w.gain == nearly(w.estimate.tflops_per_gpu / base.tflops_per_gpu - 1.0));
        CHECK(plan::differences(plan, w.plan).size() == w.along.size() + 1);
        if (i == 0 || !list[i - 1].impossible.empty()) continue;
        const search::WhatIf& before = list[i - 1];
        CHECK((before.estimate.fits > w.estimate.fits ||
               (before.estimate.fits == w.estimate.fits && before.gain >= w.gain)));
    }
    // One member of the set more or less, never another set.
    CHECK(find(list, "recompute", "none") != nullptr);
    CHECK(find(list, "recompute", "layernorm+moe_act") != nullptr);
    CHECK(find(list, "recompute", "layernorm") == nullptr);
}

TEST_CASE("what-ifs: a degree that cannot move says why") {
    Formula formula;
    plan::Plan plan = base_plan();
    plan.stack = "torchtitan"; // holds each key/value head, of 4, on one rank alone
    plan.tp = 4;
    plan.dp = 2;
    const std::vector<search::WhatIf> list = search::what_ifs(plan, test_stack(), formula);
    const search::WhatIf* w = find(list, "tp", "8");
    REQUIRE(w != nullptr);
    CHECK(w->impossible.find("num_key_value_heads = 4") != std::string::npos);
}

TEST_CASE("what-ifs: another pipeline is cut anew and the faster cut counts") {
    Formula formula;
    plan::Plan plan = base_plan();
    plan.layout = "Ettttt|tttL";
    REQUIRE(!plan::check_plan(plan));
    const std::vector<search::WhatIf> list = search::what_ifs(plan, test_stack(), formula);
    const search::WhatIf* w = find(list, "pp", "4");
    REQUIRE(w != nullptr);
    CHECK(w->plan.layout != plan.layout);
    CHECK(!plan::check_plan(w->plan));
    CHECK(find(list, "mbs", "1")->plan.layout == plan.layout);
}

TEST_CASE("memory front: nothing on it is beaten, nothing beats it") {
    Formula formula;
    const plan::Plan plan = base_plan();
    const stack::Stack stack = test_stack();
    const std::vector<search::FrontPoint> front = search::memory_front(plan, stack, formula);
    REQUIRE(front.size() >= 3);
    for (std::size_t i = 1; i < front.size(); ++i) {
        CHECK(front[i].estimate.memory_bytes > front[i - 1].estimate.memory_bytes);
        CHECK(front[i].estimate.step_seconds < front[i - 1].estimate.step_seconds);
    }
    int candidates = 0;
    for (const unsigned set : stack.recompute_sets)
        for (const std::int64_t mbs : {1, 2, 4, 8})
            for (const bool moments : {false, true}) {
                plan::Plan other = plan;
                other.recompute = set;
                other.mbs = mbs;
                other.optimizer.moments = moments ? plan::Moments::bf16 : plan::Moments::fp32;
                if (plan::check_plan(other)) continue;
                ++candidates;
                const search::Estimate e = formula.estimate(other);
                const bool covered = std::any_of(front.begin(), front.end(), [&](const search::FrontPoint& p) {
                    return p.estimate.memory_bytes <= e.memory_bytes && p.estimate.step_seconds <= e.step_seconds;
                });
                CHECK(covered);
            }
    CHECK(candidates >= 24);
    for (const search::FrontPoint& p : front)
        for (const plan::FieldChange& c : p.changes)
            CHECK((c.field == "recompute" || c.field == "mbs" || c.field == "optimizer"));
}

TEST_CASE("fields: text reads back as it was set, differences are named in order") {
    plan::Plan plan = base_plan();
    for (const std::string& field : plan::field_names()) {
        plan::Plan other = plan;
        plan::set_field(other, field, plan::field_text(plan, field));
        CHECK_MESSAGE(plan::differences(plan, other).empty(), field);
    }
    plan::Plan other = plan;
    other.seq = 2048;
    other.ep = 2;
    other.edp = 4;
    other.attention_precision = machine::Precision::bf16;
    std::string text;
    for (const plan::FieldChange& c : plan::differences(plan, other))
        text += c.field + " " + c.from + "->" + c.to + ";";
    CHECK(text == "seq 1024->2048;ep 4->2;edp 2->4;attention_precision default->bf16;");
    CHECK(fault_of([&] { plan::field_text(plan, "tpp"); }).find("did you mean tp?") != std::string::npos);
}

namespace {

search::SearchRequest tight_request(int gpus, double memory) {
    search::SearchRequest request;
    request.base = base_plan();
    machine::Hardware hardware = *request.base.hardware;
    hardware.memory_bytes = memory;
    request.base.hardware = std::make_shared<const machine::Hardware>(hardware);
    request.base.gpus = gpus;
    request.threads = 1;
    return request;
}

const search::Remedy* remedy(const search::Infeasibility& why, const std::string& what) {
    const auto it =
        std::find_if(why.remedies.begin(), why.remedies.end(), [&](const search::Remedy& r) { return r.what == what; });
    return it == why.remedies.end() ? nullptr : &*it;
}

} // namespace

TEST_CASE("an infeasible request: memory kills every mapping, more GPUs help") {
    Formula formula;
    const stack::Stack stack = test_stack();
    const search::SearchRequest request = tight_request(4, 80.0);
    REQUIRE(fault_of([&] { search::search(request, stack, formula); }).find("'memory'") != std::string::npos);
    CHECK(search::has_plan(request, stack));
    CHECK(!search::fitting_plan(request, stack, formula));
    const search::Infeasibility why = search::explain_request(request, stack, formula);
    REQUIRE(!why.obstacles.empty());
    CHECK(why.obstacles.front().constraint == "memory");
    REQUIRE(!why.closest.empty());
    for (std::size_t i = 0; i < why.closest.size(); ++i) {
        CHECK(why.closest[i].memory_bytes > 80.0);
        CHECK(why.closest[i].memory_bytes == formula.memory_bytes(why.closest[i].plan));
        if (i > 0) CHECK(why.closest[i].memory_bytes >= why.closest[i - 1].memory_bytes);
    }
    const search::Remedy* gpus = remedy(why, "gpus");
    REQUIRE(gpus != nullptr);
    CHECK(gpus->from == "4");
    CHECK(std::stoi(gpus->to) > 4);
    CHECK(gpus->memory_bytes <= 80.0);
    CHECK(!plan::check_plan(gpus->plan));
    CHECK(gpus->plan.gpus == std::stoi(gpus->to));
    CHECK(!search::fitting_plan(search::with_gpus(request, std::stoi(gpus->to) / 2), stack,
                                formula)); // the smallest power that does
}

TEST_CASE("an infeasible request: a fixed field is named, and opening it is the remedy") {
    Formula formula;
    const stack::Stack stack = test_stack();
    search::SearchRequest request = tight_request(16, 1e9);
    request.base.stack = "torchtitan"; // holds each key/value head, of 4, on one rank alone
    request.fixed = {{"tp", "8"}, {"mbs", "1"}};
    REQUIRE(!fault_of([&] { search::search(request, stack, formula); }).empty());
    const search::Infeasibility why = search::explain_request(request, stack, formula);
    REQUIRE(!why.obstacles.empty());
    CHECK(why.obstacles.front().constraint == "kv_heads % tp");
    CHECK(why.closest.empty());
    const search::Remedy* open = remedy(why, "fix tp");
    REQUIRE(open != nullptr);
    CHECK(open->from == "8");
    CHECK(open->plan.tp != 8);
    CHECK(remedy(why, "fix mbs") == nullptr); // does not help
    // A batch that no plan divides: the nearest one that does.
    request.fixed = {{"tp", "1"}, {"cp", "1"}, {"pp", "1"}};
    request.base.gbs = 30;
    const search::Infeasibility batch = search::explain_request(request, stack, formula);
    const search::Remedy* gbs = remedy(batch, "gbs");
    REQUIRE(gbs != nullptr);
    CHECK(gbs->to == "32");
}
