// The costs that the estimate takes for a step's ops with a bucket are the prices of the ops that lowering emits.
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
std::optional<passes::StepWork> work_of(const program::Op& op) {
    if (op.phase != program::Phase::step) return std::nullopt;
    switch (op.kind) {
    case program::OpKind::cast:
        return passes::StepWork::round;
    case program::OpKind::all_gather:
        if (op.module != program::Module::optimizer) return passes::StepWork::gather;
        return op.stream == program::Stream::data ? passes::StepWork::spread : passes::StepWork::join;
    case program::OpKind::collect:
        return passes::StepWork::collect;
    case program::OpKind::newton_schulz:
        return passes::StepWork::orthogonalize;
    case program::OpKind::quantize:
        return passes::StepWork::quantize;
    case program::OpKind::reduce_scatter:
        return passes::StepWork::reduce;
    case program::OpKind::sum_squares:
        return passes::StepWork::square;
    case program::OpKind::copy_from_host:
        return passes::StepWork::fetch;
    case program::OpKind::copy_to_host:
        return passes::StepWork::store;
    case program::OpKind::adamw:
    case program::OpKind::momentum:
        return passes::StepWork::update;
    default:
        return std::nullopt;
    }
}

} // namespace

TEST_CASE("a step's ops with its buckets cost in the estimate what the lowered ones do") {
    std::vector<plan::Plan> plans = sample_plans();
    for (const char* offloaded : {"none", "optimizer"}) {
        plan::Plan plan = plans.front();
        plan.stack = "moe-plan";
        plan.precision = machine::Precision::fp8_blockwise;
        plan::set_field(plan, "offload", offloaded);
        plans.push_back(plan);
    }
    plans.push_back(plans.back());
    for (const auto& [field, value] : {std::pair{"optimizer", "muon"}, {"tp", "2"}, {"offload", "none"}})
        plan::set_field(plans.back(), field, value);
    plans.back().dp /= 2;
    REQUIRE(plan::check_plan(plans.back()).message == "");
    std::array<int, passes::step_work_count> compared{};
    for (const plan::Plan& plan : plans) {
        CAPTURE(plan::plan_to_json(plan));
        const stack::Stack stack = stack::load_stack(plan.stack, *plan.hardware);
        const cost::Machine machine(*plan.hardware);
        const cost::CostModel model(plan, stack, machine);
        const program::Program program = lower::lower(plan, 0);
        std::array<double, passes::step_work_count> emitted{}, estimated{};
        for (const program::Template& tmpl : program.templates)
            for (const program::Op& op : tmpl.ops)
                if (const auto work = work_of(op)) {
                    emitted[static_cast<std::size_t>(*work)] += model(op, program).device;
                    ++compared[static_cast<std::size_t>(*work)];
                }
        for (const program::Bucket& bucket : program.buckets)
            for (std::size_t w = 0; w < passes::step_work_count; ++w)
                estimated[w] +=
                    estimate::seconds_of(model, passes::size_of(program, bucket), static_cast<passes::StepWork>(w));
        for (std::size_t w = 0; w < passes::step_work_count; ++w) {
            CAPTURE(w);
            // Matrices are of their mean size, and their scales are left out.
            const bool exact = static_cast<passes::StepWork>(w) != passes::StepWork::quantize;
            if (static_cast<passes::StepWork>(w) != passes::StepWork::zero)
                CHECK(estimated[w] == doctest::Approx(emitted[w]).epsilon(exact ? 1e-12 : 0.01));
        }
    }
    for (std::size_t w = 0; w < passes::step_work_count; ++w)
        if (static_cast<passes::StepWork>(w) != passes::StepWork::zero) CHECK(compared[w] > 0);
}
