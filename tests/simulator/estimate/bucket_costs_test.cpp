// What the estimate takes a step's ops with a bucket to cost is the price of the ops that lowering emits.
#include "planner/lower/lower.hpp"
#include "simulator/estimate/bucket_costs.hpp"
#include "tests/planner/plan/sample_plans.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <optional>

using namespace moe;

namespace {

// The work that an op of begin, finish or the last backward does with a bucket, by its kind.
std::optional<StepWork> work_of(const Op& op) {
    if (op.phase != Phase::step) return std::nullopt;
    switch (op.kind) {
    case OpKind::cast:
        return StepWork::round;
    case OpKind::all_gather:
        return StepWork::gather;
    case OpKind::quantize:
        return StepWork::quantize;
    case OpKind::reduce_scatter:
        return StepWork::reduce;
    case OpKind::sum_squares:
        return StepWork::square;
    case OpKind::copy_from_host:
        return StepWork::fetch;
    case OpKind::copy_to_host:
        return StepWork::store;
    case OpKind::adamw:
        return StepWork::update;
    default:
        return std::nullopt;
    }
}

} // namespace

TEST_CASE("a step's ops with its buckets cost in the estimate what the lowered ones do") {
    std::vector<Plan> plans = sample_plans();
    for (const char* offloaded : {"none", "optimizer"}) {
        Plan plan = plans.front();
        plan.stack = "moe-plan";
        plan.precision = Precision::fp8_blockwise;
        set_field(plan, "offload", offloaded);
        plans.push_back(plan);
    }
    std::array<int, step_work_count> compared{};
    for (const Plan& plan : plans) {
        CAPTURE(plan_to_json(plan));
        const Stack stack = load_stack(plan.stack, *plan.hardware);
        const Machine machine(*plan.hardware);
        const CostModel model(plan, stack, machine);
        const Program program = lower(plan, 0);
        std::array<double, step_work_count> emitted{}, estimated{};
        for (const Template& tmpl : program.templates)
            for (const Op& op : tmpl.ops)
                if (const auto work = work_of(op)) {
                    emitted[static_cast<std::size_t>(*work)] += model(op, program).device;
                    ++compared[static_cast<std::size_t>(*work)];
                }
        for (const Bucket& bucket : program.buckets)
            for (std::size_t w = 0; w < step_work_count; ++w)
                estimated[w] += seconds_of(model, size_of(program, bucket), static_cast<StepWork>(w));
        for (std::size_t w = 0; w < step_work_count; ++w) {
            CAPTURE(w);
            // Matrices are of their mean size, and their scales are left out.
            const bool exact = static_cast<StepWork>(w) != StepWork::quantize;
            if (static_cast<StepWork>(w) != StepWork::zero)
                CHECK(estimated[w] == doctest::Approx(emitted[w]).epsilon(exact ? 1e-12 : 0.01));
        }
    }
    for (std::size_t w = 0; w < step_work_count; ++w)
        if (static_cast<StepWork>(w) != StepWork::zero) CHECK(compared[w] > 0);
}
