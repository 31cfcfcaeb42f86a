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

double bytes(const program::Program& program, program::TensorId id) {
    return id == program::no_tensor ? 0.0 : program.tensors[static_cast<std::size_t>(id)].expected_bytes();
}

double bytes(const program::Program& program, const program::Operands& ids) {
    double sum = 0.0;
    for (const program::TensorId id : ids) sum += bytes(program, id);
    return sum;
}

// The bytes that an op of the step reads and writes of its tensors; negative for kinds that this test does not size.
double touched(const program::Program& program, const program::Op& op) {
    switch (op.kind) {
    case program::OpKind::all_gather:
    case program::OpKind::zero:
        return bytes(program, op.out);
    case program::OpKind::reduce_scatter:
    case program::OpKind::all_reduce:
        return bytes(program, op.in);
    case program::OpKind::sum_squares:
        return bytes(program, op.in);
    case program::OpKind::copy_to_host:
        return bytes(program, op.in);
    case program::OpKind::copy_from_host:
        return bytes(program, op.out);
    case program::OpKind::cast:
        return bytes(program, op.in) + bytes(program, op.out);
    case program::OpKind::quantize:
        if (const auto* m = std::get_if<program::QuantizeAttr>(&op.attr))
            return bytes(program, op.in[0]) * (m->one_scale && m->slot < 0 ? 2.0 : 1.0) + // its largest comes first
                   static_cast<double>(2 * m->groups * m->n * m->k + 8 * m->scales());
        return bytes(program, op.in) + bytes(program, op.out);
    case program::OpKind::adamw: // states are read and written
    case program::OpKind::adamw_on_host:
        return bytes(program, op.in[0]) + bytes(program, op.out[3]) +
               2.0 * (bytes(program, op.out[0]) + bytes(program, op.out[1]) + bytes(program, op.out[2]));
    case program::OpKind::momentum: // gradient and moment are read and written
        return 2.0 * (bytes(program, op.in[0]) + bytes(program, op.out[0]));
    default:
        return -1.0;
    }
}

std::vector<plan::Plan> step_plans() {
    std::vector<plan::Plan> plans = sample_plans();
    const plan::Plan first = plans.front();
    const auto add = [&](const char* stack, std::vector<std::pair<const char*, const char*>> fields) {
        plan::Plan plan = first;
        plan.stack = stack;
        for (const auto& [field, value] : fields) plan::set_field(plan, field, value);
        plans.push_back(plan);
    };
    add("moe-plan", {{"precision", "fp8-blockwise"}});
    add("moe-plan", {{"precision", "fp8-tensor"}});
    add("moe-plan", {{"precision", "fp8-tensor"}, {"fp8_scaling", "delayed"}});
    add("moe-plan", {{"offload", "optimizer"}, {"optimizer", "adamw+bf16_moments"}});
    add("moe-plan", {{"offload", "optimizer"}, {"optimizer", "adamw+fp8_exp_avg"}});
    add("moe-plan", {{"offload", "optimizer_step"}, {"capacity", "1.5"}});
    add("moe-plan", {{"offload", "optimizer_step"}, {"optimizer", "adamw+fp8_exp_avg"}});
    add("moe-plan", {{"capacity", "1.5"}});
    add("moe-plan", {{"optimizer", "muon"}});
    add("moe-plan", {{"lora", "16:32:attention"}});
    add("bridge-26.08", {{"gradients", "bf16"}, {"precision", "fp8-tensor"}});
    add("bridge-26.08", {{"fsdp", "on"}});
    plan::Plan alone = first; // a group of one rank quantizes its masters
    alone.stack = "moe-plan";
    alone.gpus = alone.dp = alone.ep = alone.edp = 1;
    for (const machine::Precision precision : {machine::Precision::fp8_blockwise, machine::Precision::fp8_tensor}) {
        alone.precision = precision;
        plans.push_back(alone);
    }
    return plans;
}

} // namespace

TEST_CASE("what a step does with buckets moves the bytes of its tensors") {
    std::set<program::OpKind> seen;
    for (const plan::Plan& plan : step_plans()) {
        CAPTURE(plan::plan_to_json(plan));
        REQUIRE(plan::check_plan(plan).message == "");
        for (const int rank : {0, plan.pp - 1}) {
            const program::Program program = lower::lower(plan, rank);
            for (const program::Template& tmpl : program.templates)
                for (const program::Op& op : tmpl.ops) {
                    const double wanted = op.phase == program::Phase::step ? touched(program, op) : -1.0;
                    if (wanted < 0.0) continue;
                    seen.insert(op.kind);
                    if (op.bytes == wanted) continue;
                    CAPTURE(program::to_string(op.kind));
                    CHECK(op.bytes == wanted);
                }
        }
    }
    CHECK(seen.size() == 12); // every kind above
}

TEST_CASE("gathers come bucket by bucket, whole gradients are zeroed behind all of them, updates behind all fetches") {
    using Item = std::pair<std::size_t, passes::StepWork>;
    std::vector<Item> begin, finish;
    passes::each_begin_op(
        2, [](std::size_t b) { return b == 0; },
        [&](std::size_t b, passes::StepWork work) { begin.emplace_back(b, work); });
    CHECK(begin == std::vector<Item>{{0, passes::StepWork::round},
                                     {0, passes::StepWork::gather},
                                     {0, passes::StepWork::quantize},
                                     {0, passes::StepWork::zero},
                                     {1, passes::StepWork::round},
                                     {1, passes::StepWork::gather},
                                     {1, passes::StepWork::quantize},
                                     {1, passes::StepWork::zero}});
    begin.clear();
    passes::each_begin_op(
        2, [](std::size_t b) { return b == 1; },
        [&](std::size_t b, passes::StepWork work) { begin.emplace_back(b, work); });
    CHECK(begin.back() == Item{0, passes::StepWork::zero});
    passes::each_op_behind_norm(
        2, [](std::size_t) { return false; },
        [&](std::size_t b, passes::StepWork work) { finish.emplace_back(b, work); });
    CHECK(finish == std::vector<Item>{{0, passes::StepWork::fetch},
                                      {1, passes::StepWork::fetch},
                                      {0, passes::StepWork::update},
                                      {0, passes::StepWork::store},
                                      {1, passes::StepWork::update},
                                      {1, passes::StepWork::store}});
}

TEST_CASE("what is recomputed holds the same as the tensor that it repeats") {
    plan::Plan plan = sample_plans().front();
    plan.recompute = plan::recompute::full;
    const program::Program program = lower::lower(plan, 0);
    std::set<program::TensorId> written;
    for (const program::Op& op : program.templates[0].ops) written.insert(op.out.begin(), op.out.end());
    int repeated = 0;
    for (const program::Op& op : program.templates[1].ops) {
        if (op.phase != program::Phase::recompute) continue;
        for (const program::TensorId id : op.out) {
            if (id == program::no_tensor) continue;
            const program::Tensor& again = program.tensors[static_cast<std::size_t>(id)];
            REQUIRE(again.again_of != program::no_tensor);
            CHECK(written.count(again.again_of) == 1);
            CHECK(again.bytes() == program.tensors[static_cast<std::size_t>(again.again_of)].bytes());
            ++repeated;
        }
    }
    CHECK(repeated > 0);
}

TEST_CASE("segments name what their neighbours send") {
    const plan::Plan plan = sample_plans().front();
    const program::Program layer = lower::lower_segment(plan, lower::SegmentKind::layer, 0);
    REQUIRE(layer.io.segment_message(0) != program::no_tensor);
    REQUIRE(layer.io.segment_message(1) != program::no_tensor);
    CHECK(layer.io.segment_message(0) != layer.io.segment_message(1));
    CHECK(lower::lower_segment(plan, lower::SegmentKind::embedding).io.segment_message(0) ==
          program::no_tensor); // it reads token ids
    CHECK(lower::lower_segment(plan, lower::SegmentKind::head).io.segment_message(1) ==
          program::no_tensor); // it begins the backward
    CHECK(lower::lower(plan, 0).io.segment_message(0) == program::no_tensor);
}
