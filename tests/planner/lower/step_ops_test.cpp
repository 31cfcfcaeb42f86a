// The ops of a step's begin and finish and its reductions are sized from buckets alone; here, from their tensors.
#include "planner/lower/lower.hpp"
#include "planner/lower/passes/step_ops.hpp"
#include "planner/plan/plan_choices.hpp"
#include "tests/planner/plan/sample_plans.hpp"

#include <doctest/doctest.h>

#include <map>
#include <set>
#include <vector>

using namespace moe;

namespace {

double bytes(const Program& program, TensorId id) {
    return id == no_tensor ? 0.0 : program.tensors[static_cast<std::size_t>(id)].expected_bytes();
}

double bytes(const Program& program, const std::vector<TensorId>& ids) {
    double sum = 0.0;
    for (const TensorId id : ids) sum += bytes(program, id);
    return sum;
}

// What an op of the step reads and writes of its tensors; negative for kinds that this test does not size.
double touched(const Program& program, const Op& op) {
    switch (op.kind) {
    case OpKind::all_gather:
    case OpKind::zero:
        return bytes(program, op.out);
    case OpKind::reduce_scatter:
    case OpKind::all_reduce:
        return bytes(program, op.in);
    case OpKind::sum_squares:
        return bytes(program, op.in);
    case OpKind::copy_to_host:
        return bytes(program, op.in);
    case OpKind::copy_from_host:
        return bytes(program, op.out);
    case OpKind::cast:
        return bytes(program, op.in) + bytes(program, op.out);
    case OpKind::quantize:
        if (const auto* m = std::get_if<QuantizeAttr>(&op.attr))
            return bytes(program, op.in) + static_cast<double>(2 * m->groups * m->n * m->k + 8 * m->scales());
        return bytes(program, op.in) + bytes(program, op.out);
    case OpKind::adamw: // states are read and written
        return bytes(program, op.in[0]) + bytes(program, op.out[3]) +
               2.0 * (bytes(program, op.out[0]) + bytes(program, op.out[1]) + bytes(program, op.out[2]));
    default:
        return -1.0;
    }
}

std::vector<Plan> step_plans() {
    std::vector<Plan> plans = sample_plans();
    const Plan first = plans.front();
    const auto add = [&](const char* stack, std::vector<std::pair<const char*, const char*>> fields) {
        Plan plan = first;
        plan.stack = stack;
        for (const auto& [field, value] : fields) set_field(plan, field, value);
        plans.push_back(plan);
    };
    add("moe-plan", {{"precision", "fp8-blockwise"}});
    add("moe-plan", {{"offload", "optimizer"}, {"optimizer", "adamw+bf16_moments"}});
    add("moe-plan", {{"capacity", "1.5"}});
    add("bridge-26.08", {{"gradients", "bf16"}, {"precision", "fp8-tensor"}});
    add("bridge-26.08", {{"fsdp", "on"}});
    Plan alone = first; // a group of one rank quantizes its masters
    alone.stack = "moe-plan";
    alone.gpus = alone.dp = alone.ep = alone.edp = 1;
    alone.precision = Precision::fp8_blockwise;
    plans.push_back(alone);
    return plans;
}

} // namespace

TEST_CASE("what a step does with buckets moves the bytes of its tensors") {
    std::set<OpKind> seen;
    for (const Plan& plan : step_plans()) {
        CAPTURE(plan_to_json(plan));
        REQUIRE(check_plan(plan).message == "");
        for (const int rank : {0, plan.pp - 1}) {
            const Program program = lower(plan, rank);
            for (const Template& tmpl : program.templates)
                for (const Op& op : tmpl.ops) {
                    const double wanted = op.phase == Phase::step ? touched(program, op) : -1.0;
                    if (wanted < 0.0) continue;
                    seen.insert(op.kind);
                    if (op.bytes == wanted) continue;
                    CAPTURE(to_string(op.kind));
                    CHECK(op.bytes == wanted);
                }
        }
    }
    CHECK(seen.size() == 10); // every kind above
}

TEST_CASE("gathers come bucket by bucket, whole gradients are zeroed behind all of them, updates behind all fetches") {
    using Item = std::pair<std::size_t, StepWork>;
    std::vector<Item> begin, finish;
    each_begin_op(
        2, [](std::size_t b) { return b == 0; }, [&](std::size_t b, StepWork work) { begin.emplace_back(b, work); });
    CHECK(begin == std::vector<Item>{{0, StepWork::round},
                                     {0, StepWork::gather},
                                     {0, StepWork::quantize},
                                     {0, StepWork::zero},
                                     {1, StepWork::round},
                                     {1, StepWork::gather},
                                     {1, StepWork::quantize},
                                     {1, StepWork::zero}});
    begin.clear();
    each_begin_op(
        2, [](std::size_t b) { return b == 1; }, [&](std::size_t b, StepWork work) { begin.emplace_back(b, work); });
    CHECK(begin.back() == Item{0, StepWork::zero});
    each_op_behind_norm(2, [&](std::size_t b, StepWork work) { finish.emplace_back(b, work); });
    CHECK(finish == std::vector<Item>{{0, StepWork::fetch},
                                      {1, StepWork::fetch},
                                      {0, StepWork::update},
                                      {0, StepWork::store},
                                      {1, StepWork::update},
                                      {1, StepWork::store}});
}

TEST_CASE("what is recomputed holds the same as the tensor that it repeats") {
    Plan plan = sample_plans().front();
    plan.recompute = recompute::full;
    const Program program = lower(plan, 0);
    std::set<TensorId> written;
    for (const Op& op : program.templates[0].ops) written.insert(op.out.begin(), op.out.end());
    int repeated = 0;
    for (const Op& op : program.templates[1].ops) {
        if (op.phase != Phase::recompute) continue;
        for (const TensorId id : op.out) {
            if (id == no_tensor) continue;
            const Tensor& again = program.tensors[static_cast<std::size_t>(id)];
            REQUIRE(again.again_of != no_tensor);
            CHECK(written.count(again.again_of) == 1);
            CHECK(again.bytes() == program.tensors[static_cast<std::size_t>(again.again_of)].bytes());
            ++repeated;
        }
    }
    CHECK(repeated > 0);
}

TEST_CASE("segments name what their neighbours send") {
    const Plan plan = sample_plans().front();
    const Program layer = lower_segment(plan, SegmentKind::layer, 0);
    REQUIRE(layer.io.segment_message(0) != no_tensor);
    REQUIRE(layer.io.segment_message(1) != no_tensor);
    CHECK(layer.io.segment_message(0) != layer.io.segment_message(1));
    CHECK(lower_segment(plan, SegmentKind::embedding).io.segment_message(0) == no_tensor); // it reads token ids
    CHECK(lower_segment(plan, SegmentKind::head).io.segment_message(1) == no_tensor);      // it begins the backward
    CHECK(lower(plan, 0).io.segment_message(0) == no_tensor);
}
