// Dispatch in two levels: which plans have it, its groups, and its ops with rows and bytes counted by hand.
#include "planner/lower/emit/builder.hpp"
#include "planner/lower/lower.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/plan_choices.hpp"
#include "planner/plan/routing.hpp"
#include "planner/program/communicators.hpp"
#include "planner/program/program.hpp"
#include "planner/program/slot_chunks.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

using namespace moe;

namespace {

// Qwen3-30B-A3B has 128 experts, 8 of them for each token, and is 2,048 wide.
plan::Plan qwen3(int gpus, int ep, const char* hardware = "h100") {
    plan::Plan plan;
    plan.model = std::make_shared<const model::Model>(families::load_model("Qwen3-30B-A3B"));
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware(hardware));
    plan.stack = "moe-plan";
    plan.dispatcher = plan::Dispatcher::hybridep;
    plan.seq = 4096;
    plan.gpus = plan.dp = gpus;
    plan.ep = ep;
    plan.edp = gpus / ep;
    plan.gbs = gpus;
    return plan;
}

std::vector<const program::Op*> ops_of(const program::Program& program, int tmpl, program::OpKind kind) {
    std::vector<const program::Op*> found;
    for (const program::Op& op : program.templates[static_cast<std::size_t>(tmpl)].ops)
        if (op.layer == 5 && op.kind == kind) found.push_back(&op);
    return found;
}

const program::Tensor& first(const program::Program& program, const program::Op* op) {
    return program.tensors[static_cast<std::size_t>(op->in[0])];
}

} // namespace

TEST_CASE(
    "two levels: a group has the ranks of its NVLink domain, at most eight, and those of its place in the others") {
    CHECK(plan::expert_inner(qwen3(32, 16)) == 8);
    CHECK(plan::expert_inner(qwen3(32, 8)) == 8);
    CHECK(plan::expert_inner(qwen3(64, 64, "gb200-nvl72")) == 8); // of one domain, where eight ranks share memory
    CHECK(plan::expert_inner(qwen3(16, 16, "gb200-nvl4")) == 4);
    CHECK(plan::expert_inner(qwen3(12, 4)) == 2); // a job of twelve has domains of six
    CHECK(plan::expert_inner(qwen3(8, 8, "l40s")) == 1);
    plan::Plan far = qwen3(32, 4);
    far.rank_order = "tp-cp-dp-ep-pp"; // neighbours of an EP group are eight ranks apart
    CHECK(plan::expert_inner(far) == 1);
    far.edp = 4, far.ep = 8;
    CHECK(plan::expert_inner(far) == 2);
    CHECK(plan::Mesh(far).members(emit::groups::expert_inner, 1) == std::vector<int>{1, 5});
    CHECK(plan::Mesh(far).members(emit::groups::expert_outer, 1) == std::vector<int>{1, 9, 17, 25});
    CHECK(plan::Mesh(far).coordinate(plan::Domain::expert, plan::axis::expert_outer, 22) == 2);

    for (const plan::Dispatcher dispatcher : {plan::Dispatcher::alltoall, plan::Dispatcher::allgather}) {
        plan::Plan plan = qwen3(32, 16);
        plan.dispatcher = dispatcher;
        CHECK(plan::expert_inner(plan) == 16);
    }
    plan::Plan published = qwen3(32, 16); // their software's own kernels, which are priced as one op
    published.stack = "bridge-26.04";
    CHECK(plan::expert_inner(published) == 16);

    const plan::Plan plan = qwen3(32, 16);
    CHECK(plan::check_executable(plan).message == "");
    CHECK(plan::group_size(plan, emit::groups::expert_inner) == 8);
    CHECK(plan::group_size(plan, emit::groups::expert_outer) == 2);
    CHECK(plan::to_string(emit::groups::expert_outer) == "ep_outer");
    const plan::Mesh mesh(plan);
    CHECK(mesh.members(emit::groups::expert_inner, 19) == std::vector<int>{16, 17, 18, 19, 20, 21, 22, 23});
    CHECK(mesh.members(emit::groups::expert_outer, 19) == std::vector<int>{19, 27});
    CHECK(mesh.index(emit::groups::expert, 27) == 11);
}

TEST_CASE(
    "two levels: a token goes once to each domain, then by the dispatch of one domain, and its sums come back so") {
    const plan::Plan plan = qwen3(32, 16);
    const program::Program program = lower::lower(plan, 0);
    const double to_a_domain = plan::distinct_destinations(128, 8, 2, plan.model->kinds.back().moe->router) / 2.0;
    // Forward: choices, tokens and weights go, sums come back. Backward: gradients go, and with theirs those of
    // weights.
    for (const int tmpl : {0, 1}) {
        CAPTURE(tmpl);
        const auto slots = ops_of(program, tmpl, program::OpKind::all_to_all_slots);
        REQUIRE(slots.size() == (tmpl == 0 ? 4 : 3));
        int wide = 0, back = 0;
        for (const program::Op* op : slots) {
            CHECK(op->group == emit::groups::expert_outer);
            const auto& attr = std::get<program::RowsAttr>(op->attr);
            const program::Tensor& x = first(program, op);
            CHECK(attr.capacity == 4096);
            CHECK(attr.ep == 2);
            CHECK(x.rows == 2 * 4096);
            if (x.cols == 2048) CHECK(x.dtype == program::Dtype::bf16);
            if (x.cols == 2048) CHECK(op->bytes == 2.0 * 4096 * 2048 * 2);
            if (!attr.combine) CHECK(x.expected_rows == nearly(2.0 * 4096 * to_a_domain));
            wide += x.cols == 2048 ? 1 : 0;
            back += attr.combine ? 1 : 0;
        }
        CHECK(wide == 2);
        CHECK(back == (tmpl == 0 ? 1 : 2));
        for (const program::OpKind kind : {program::OpKind::dispatch_tokens, program::OpKind::combine_tokens}) {
            const auto tokens = ops_of(program, tmpl, kind);
            REQUIRE(tokens.size() == 1);
            CHECK(tokens[0]->group == emit::groups::expert_inner);
            const auto& attr = std::get<program::RowsAttr>(tokens[0]->attr);
            CHECK(attr.experts == 64);
            CHECK(attr.ep == 8);
            CHECK(tokens[0]->bytes == nearly(4096.0 * 8 * 2048 * 2));
        }
    }
    // An exchange of rows between all 16 would take slots of all copies for each of them.
    plan::Plan rows = plan;
    rows.dispatcher = plan::Dispatcher::alltoall;
    const program::Program one_level = lower::lower(rows, 0);
    const auto moved = ops_of(one_level, 0, program::OpKind::all_to_all_rows);
    REQUIRE_FALSE(moved.empty());
    std::int64_t widest = 0;
    for (const program::Op* op : moved) widest = std::max(widest, program::slots_of(one_level, *op));
    CHECK(widest == std::int64_t{2} * 16 * (4096 * 8) * 2048 * 2); // both sides of them

    const program::Program inside = lower::lower(qwen3(32, 8), 0);
    CHECK(ops_of(inside, 0, program::OpKind::all_to_all_slots).empty());
    REQUIRE(ops_of(inside, 0, program::OpKind::dispatch_tokens).size() == 1);
    CHECK(ops_of(inside, 0, program::OpKind::dispatch_tokens)[0]->group == emit::groups::dispatch);
}

TEST_CASE("two levels: a planned capacity plans slots, in whole 128 rows") {
    plan::Plan plan = qwen3(64, 64); // 8 domains, of which a token goes to 5.3 in the mean
    plan.capacity = 1.25;
    const program::Program program = lower::lower(plan, 0);
    const double each = 4096.0 * plan::distinct_destinations(128, 8, 8, plan.model->kinds.back().moe->router) / 8.0;
    for (const program::Op* op : ops_of(program, 0, program::OpKind::all_to_all_slots)) {
        const std::int64_t rows = std::get<program::RowsAttr>(op->attr).capacity;
        CHECK(rows % 128 == 0);
        CHECK(rows == nearly(1.25 * each).epsilon(128.0 / 3000.0));
        CHECK(rows < 4096);
    }
    // Those too many are counted, as rows without a place are.
    const auto chosen = ops_of(program, 0, program::OpKind::token_domains);
    REQUIRE(chosen.size() == 1);
    CHECK(chosen[0]->out[2] == program.io.overflow);
}

TEST_CASE("two levels: where every GPU is a domain, tokens are rows of their experts as they come") {
    const program::Program program = lower::lower(qwen3(4, 4, "l40s"), 0);
    CHECK(ops_of(program, 0, program::OpKind::dispatch_tokens).empty());
    CHECK(ops_of(program, 0, program::OpKind::all_to_all_slots).size() == 4);
    const program::Communicators all = program::communicators_of(program, plan::Mesh(qwen3(4, 4, "l40s")));
    CHECK(all.pairwise == std::vector<int>{4});
    CHECK(program::windows_of(lower::lower(qwen3(32, 8), 0)) == 0);
}

// Four GPUs of one host, each a domain, of which `fill` have some of a token's experts.
TEST_CASE("two levels: slots of one host travel in chunks where few of their rows are filled, else whole") {
    struct Case {
        const char* model;
        double fill, capacity;
        bool chunks;
    };
    // 128 experts of which a token has 8, and 8 of which it has 2: not in three quarters of them.
    const double many = 1.0 - 96.0 / 128 * 95 / 127 * 94 / 126 * 93 / 125 * 92 / 124 * 91 / 123 * 90 / 122 * 89 / 121,
                 few = 1.0 - 6.0 / 8 * 5 / 7;
    for (const Case& c : {Case{"Qwen3-30B-A3B", many, 0.0, false}, Case{"Mixtral-8x7B", few, 0.0, true},
                          Case{"Mixtral-8x7B", few, 1.125, false}, Case{"Mixtral-8x7B", few, 1.5, true}}) {
        CAPTURE(c.model);
        CAPTURE(c.capacity);
        plan::Plan plan = qwen3(4, 4, "l40s");
        plan.model = std::make_shared<const model::Model>(families::load_model(c.model));
        plan.capacity = c.capacity;
        const program::Program program = lower::lower(plan, 0);
        const auto slots = ops_of(program, 0, program::OpKind::all_to_all_slots);
        REQUIRE(slots.size() == 4);
        std::int64_t largest = 0;
        for (const program::Op* op : slots) {
            const program::Tensor& x = first(program, op);
            const std::int64_t slot = std::get<program::RowsAttr>(op->attr).capacity;
            const auto filled = static_cast<std::int64_t>(std::ceil(4096.0 * c.fill));
            const std::int64_t rows = c.chunks ? program::rows_in_chunks(filled, slot) : slot;
            CHECK(program::chunks_gain(4096.0 * c.fill, slot) == c.chunks);
            CHECK(op->bytes == static_cast<double>(4 * rows * program::bytes_of(x.dtype, x.cols)));
            if (c.chunks) CHECK(op->bytes < static_cast<double>(x.bytes()));
            largest = std::max(largest, x.bytes());
        }
        // What the engine asks, and the memory that its windows take.
        CHECK(program::sends_chunks(program) == c.chunks);
        CHECK(program::windows_of(program) == (c.chunks ? 2 * largest : 0));
        CHECK(program::communicators_of(program, plan::Mesh(plan)).window_bytes == program::windows_of(program));
    }
}
