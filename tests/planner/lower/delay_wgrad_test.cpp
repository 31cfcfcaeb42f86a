// Delayed weight gradients: the same ops in another order, behind the exchange and behind the message.
#include "planner/lower/lower.hpp"
#include "planner/program/program.hpp"
#include "tests/support/published_plan.hpp"

#include <doctest/doctest.h>

#include <map>
#include <string>

using namespace moe;

namespace {

plan::Plan qwen(bool delayed) {
    plan::Plan plan = published_plan("Qwen3-30B-A3B", "h100", "bridge-26.04");
    plan.gpus = 16;
    plan.dp = plan.ep = 8;
    plan.pp = 2;
    plan.gbs = 64;
    plan.dispatcher = plan::Dispatcher::hybridep;
    plan.delay_wgrad = delayed;
    return plan;
}

std::map<std::string, double> totals(const program::Template& tmpl) {
    std::map<std::string, double> sum;
    for (const program::Op& op : tmpl.ops)
        sum[std::string(program::to_string(op.kind)) + program::to_string(op.phase)] += 1.0 + op.bytes + op.flops;
    return sum;
}

} // namespace

TEST_CASE("delay_wgrad changes the order of a backward and nothing else") {
    REQUIRE(plan::check_plan(qwen(true)).message == "");
    const program::Program plain = lower::lower(qwen(false), 1), delayed = lower::lower(qwen(true), 1);
    CHECK(totals(plain.templates[1]) == totals(delayed.templates[1]));
    CHECK(totals(plain.templates[0]) == totals(delayed.templates[0]));
    // Stage 1 holds layers 24 to 47; its backward ends with layer 24.
    std::map<int, int> exchanged, early, late;
    int sent = 0, after_send = 0;
    for (const program::Op& op : delayed.templates[1].ops) {
        if (op.kind == program::OpKind::send) ++sent;
        if (op.kind == program::OpKind::all_to_all_rows && op.module == program::Module::dispatch)
            ++exchanged[op.layer];
        if (op.phase != program::Phase::wgrad) continue;
        if (op.kind == program::OpKind::grouped_gemm) ++(exchanged[op.layer] > 0 ? late : early)[op.layer];
        if (op.kind == program::OpKind::gemm && sent > 0) {
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
    const program::Program program = lower::lower(qwen(true), 0);
    for (const program::Op& op : program.templates[1].ops) CHECK(op.kind != program::OpKind::send);
}
