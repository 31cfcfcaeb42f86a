// Delayed weight gradients: the same ops in another order, behind the exchange and behind the message.
#include "planner/lower/lower.hpp"
#include "planner/program/program.hpp"
#include "tests/support/published_plan.hpp"

#include <doctest/doctest.h>

#include <map>
#include <string>

using namespace moe;

namespace {

Plan qwen(bool delayed) {
    Plan plan = published_plan("Qwen3-30B-A3B", "h100", "bridge-26.04");
    plan.gpus = 16;
    plan.dp = plan.ep = 8;
    plan.pp = 2;
    plan.gbs = 64;
    plan.dispatcher = Dispatcher::hybridep;
    plan.delay_wgrad = delayed;
    return plan;
}

std::map<std::string, double> totals(const Template& tmpl) {
    std::map<std::string, double> sum;
    for (const Op& op : tmpl.ops)
        sum[std::string(to_string(op.kind)) + to_string(op.phase)] += 1.0 + op.bytes + op.flops;
    return sum;
}

} // namespace

TEST_CASE("delay_wgrad changes the order of a backward and nothing else") {
    REQUIRE(check_plan(qwen(true)).message == "");
    const Program plain = lower(qwen(false), 1), delayed = lower(qwen(true), 1);
    CHECK(totals(plain.templates[1]) == totals(delayed.templates[1]));
    CHECK(totals(plain.templates[0]) == totals(delayed.templates[0]));
    // Stage 1 holds layers 24 to 47; its backward ends with layer 24.
    std::map<int, int> exchanged, early, late;
    int sent = 0, after_send = 0;
    for (const Op& op : delayed.templates[1].ops) {
        if (op.kind == OpKind::send) ++sent;
        if (op.kind == OpKind::all_to_all_rows && op.module == Module::dispatch) ++exchanged[op.layer];
        if (op.phase != Phase::wgrad) continue;
        if (op.kind == OpKind::grouped_gemm) ++(exchanged[op.layer] > 0 ? late : early)[op.layer];
        if (op.kind == OpKind::gemm && sent > 0) {
            ++after_send;
            CHECK(op.layer == 24);
        }
    }
    CHECK(early.empty());
    CHECK(late.size() == 24);
    CHECK(late[30] == 2); // FC2 and FC1
    CHECK(sent == 1);
    CHECK(after_send == 2); // attention's output and input projections
}

TEST_CASE("the first stage has no message to wait for") {
    const Program program = lower(qwen(true), 0);
    for (const Op& op : program.templates[1].ops) CHECK(op.kind != OpKind::send);
}
