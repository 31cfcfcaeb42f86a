// The order in which a merged forward and backward run: each in its own order, layer by layer, turn by turn.
#include "planner/lower/lower.hpp"
#include "planner/lower/passes/merge.hpp"
#include "tests/planner/plan/sample_plans.hpp"

#include <doctest/doctest.h>

#include <algorithm>

using namespace moe;

namespace {

plan::Plan overlapped() {
    plan::Plan plan = sample_plans()[4];
    plan.ep_overlap = true;
    REQUIRE(plan::check_plan(plan).message == "");
    return plan;
}

const program::Template& of(const program::Program& program, int index) {
    return program.templates[static_cast<std::size_t>(index)];
}

} // namespace

TEST_CASE("merged slots: all ops of both, each in its own order, and every other slot alone") {
    const plan::Plan plan = overlapped();
    for (const int rank : {0, plan.pp - 1}) {
        const program::Program program = lower::lower(plan, rank);
        REQUIRE(!program.merges.empty());
        for (const program::Merge& merge : program.merges) {
            const auto backward =
                static_cast<std::size_t>(std::count(merge.from_backward.begin(), merge.from_backward.end(), true));
            CHECK(of(program, merge.forward).kind == plan::SlotKind::forward);
            CHECK(of(program, merge.backward).kind == plan::SlotKind::backward);
            CHECK(backward == of(program, merge.backward).ops.size());
            CHECK(merge.from_backward.size() - backward == of(program, merge.forward).ops.size());
        }
        std::vector<std::size_t> next(program.slots.size(), 0); // op by slot
        std::size_t ops = 0;
        for (program::OpWalk walk(program); !walk.done(); walk.next(), ++ops) {
            REQUIRE(walk.index() == next[walk.slot_number()]);
            ++next[walk.slot_number()];
        }
        std::size_t listed = 0;
        for (std::size_t s = 0; s < program.slots.size(); ++s) {
            REQUIRE(next[s] == of(program, program.slots[s].index).ops.size());
            listed += next[s];
            if (program.slots[s].merge < 0) continue;
            const program::Merge& merge = program.merges[static_cast<std::size_t>(program.slots[s].merge)];
            CHECK(merge.forward == program.slots[s].index);
            CHECK(merge.backward == program.slots[s + 1].index);
        }
        CHECK(ops == listed);
    }
}

TEST_CASE("merged slots: behind an exchange the other side goes on, and a layer of the forward ends last") {
    const plan::Plan plan = overlapped();
    const program::Program program = lower::lower(plan, 1);
    const program::Merge& merge = program.merges.front();
    const std::vector<program::Op>&forward = of(program, merge.forward).ops,
          &backward = of(program, merge.backward).ops;
    const auto layers = [](const std::vector<program::Op>& ops) {
        std::vector<int> list;
        for (const program::Op& op : ops)
            if (op.layer >= 0 && (list.empty() || list.back() != op.layer)) list.push_back(op.layer);
        return list;
    };
    const std::vector<int> filled = layers(forward), emptied = layers(backward);
    REQUIRE(filled.size() == emptied.size());
    REQUIRE(filled.size() > 1);
    std::size_t f = 0, b = 0;
    int hidden = 0; // exchanges behind which the other side computes
    for (std::size_t i = 0; i < merge.from_backward.size(); ++i) {
        const bool from_backward = merge.from_backward[i];
        const program::Op& op = from_backward ? backward[b++] : forward[f++];
        if (i + 1 < merge.from_backward.size() && op.stream == program::Stream::expert &&
            merge.from_backward[i + 1] != from_backward)
            ++hidden;
        // A layer of the backward is through when the layer of the forward is that ran beside it.
        const bool ends = !from_backward && op.layer >= 0 && (f == forward.size() || forward[f].layer != op.layer);
        if (!ends) continue;
        const auto place = static_cast<std::size_t>(std::find(filled.begin(), filled.end(), op.layer) - filled.begin());
        CHECK(std::none_of(backward.begin() + static_cast<std::ptrdiff_t>(b), backward.end(),
                           [&](const program::Op& left) { return left.layer == emptied[place]; }));
    }
    // Dispatch and combine of either direction in every layer, as both have four.
    CHECK(hidden == 4 * static_cast<int>(filled.size()));
}

TEST_CASE("merged slots: the first two products behind a departure spare, the first alone where it is long") {
    const auto op = [](program::OpKind kind, double flops, double bytes) {
        program::Op result;
        result.kind = kind;
        result.flops = flops;
        result.bytes = bytes;
        return result;
    };
    const auto reserved_sms = [&](double flops) {
        passes::ReservedSms reserving;
        int count = reserving.next(op(program::OpKind::grouped_gemm, flops, 0.0)) ? 10 : 0; // no tokens have left
        for (const program::OpKind kind : {program::OpKind::dispatch_tokens, program::OpKind::combine_tokens}) {
            reserving.next(op(kind, 0.0, 1e6));
            reserving.next(op(program::OpKind::gemm, flops, 0.0));
            for (int i = 0; i < 3; ++i) count += reserving.next(op(program::OpKind::grouped_gemm, flops, 0.0)) ? 1 : 0;
        }
        return count;
    };
    CHECK(reserved_sms(1e9) == 4);
    CHECK(reserved_sms(1e10) == 2);
}
