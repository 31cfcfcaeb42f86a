// Anchors: the posterior by hand, and a stack's file that is written, loaded and refused.
#include "tools/calibrate/anchors.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/model/model.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/pricing/fast_estimator.hpp"
#include "tests/support/nearly.hpp"
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>

namespace {

using namespace moe;
using namespace moe::tools;

published::Neighbours empty() {
    published::NeighbourModel m;
    m.deviation = 0.08;
    m.distance.fill(0.5);
    m.noise = {{"A", 0.05}};
    m.most = 0.35;
    return {m, {}};
}

plan::Plan sample() {
    plan::Plan plan;
    plan.model = std::make_shared<const model::Model>(families::load_model("Qwen3-30B-A3B"));
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("h100"));
    plan.stack = "bridge-26.08";
    plan.gpus = plan.dp = 16, plan.ep = 8, plan.edp = 2, plan.gbs = 64, plan.seq = 4096;
    return plan;
}

double predicted(const plan::Plan& plan, const std::string& stack) {
    pricing::FastEstimator estimator(plan.hardware, stack::load_stack(stack, *plan.hardware));
    return estimator.estimate(plan).tflops_per_gpu;
}

} // namespace

TEST_CASE("anchors: one run moves a coefficient by its share of the variance") {
    // log error 0.1 + 2 x, x +- 0.03: variances 0.0036 of the coefficient, 0.0064 of g, 0.0025 of the run.
    const AnchorProblem problem{[](const std::vector<double>& x) { return std::vector<double>{0.1 + 2.0 * x[0]}; },
                                {0.03},
                                {stack::Workload{}}};
    const Solution solution = anchored(problem, empty());
    CHECK(solution.x[0] == nearly(-2.0 * 0.0009 / 0.0125 * 0.1).epsilon(1e-6));
    CHECK(solution.error[0] == nearly(std::sqrt(0.0009 * (1.0 - 0.0036 / 0.0125))).epsilon(1e-6));
    // A run that is off by far counts less than its share.
    AnchorProblem wrong = problem;
    wrong.log_errors = [](const std::vector<double>& x) { return std::vector<double>{1.0 + 2.0 * x[0]}; };
    CHECK(std::abs(anchored(wrong, empty()).x[0]) < 5.0 * std::abs(solution.x[0]));
}

TEST_CASE("anchors: a stack that has seen a run predicts it, and others of the cluster, nearer to it") {
    const plan::Plan plan = sample();
    plan::Plan other = plan;
    other.mbs = 2;
    const double rate = predicted(plan, plan.stack);
    const Anchoring anchoring = anchor(plan.stack, {{"mine", plan, 0.85 * rate}}, "test");
    REQUIRE(anchoring.runs.size() == 1);
    const Anchoring::Run& run = anchoring.runs.front();
    CHECK(run.measured == nearly(0.85 * rate));
    CHECK(run.after < run.before);
    CHECK(std::abs(std::log(run.after / run.measured)) < 0.7 * std::abs(std::log(run.before / run.measured)));
    CHECK(run.interval_after.high / run.interval_after.low < run.interval_before.high / run.interval_before.low);
    for (const Anchoring::Moved& m : anchoring.coefficients) {
        CHECK(m.error_after <= m.error_before * 1.0001);
        CHECK(std::abs(std::log(m.after / m.before)) < 3.0 * m.error_before);
    }
    const test::Folder folder;
    folder.write("mine.json", stack::to_json(anchoring.stack));
    const std::string file = folder.file("mine.json");
    const stack::Stack stack = stack::load_stack(file, *plan.hardware);
    CHECK(stack.name == "bridge-26.08," + std::filesystem::absolute(file).lexically_normal().string());
    REQUIRE(stack.anchors.size() == 1);
    CHECK(stack::load_stack(stack.name, *plan.hardware).name == stack.name);
    CHECK(predicted(plan, file) < rate);
    CHECK(predicted(other, file) < predicted(other, plan.stack));
    CHECK(published::load_neighbours(stack)->of(published::workload_of(other, stack)).log_error >
          published::load_neighbours(stack::load_stack(plan.stack, *plan.hardware))
              ->of(published::workload_of(other, stack))
              .log_error);
    CHECK_THROWS_WITH_AS(anchor(file, {{"mine", plan, rate}}, "test"), doctest::Contains("has anchors already"), Error);
    CHECK_THROWS_WITH_AS(anchor("moe-plan", {{"mine", plan, rate}}, "test"),
                         doctest::Contains("anchors are for stacks that published runs"), Error);
}

TEST_CASE("anchors: files that are no such stack are refused by file and field") {
    const test::Folder folder;
    const machine::Hardware h100 = machine::load_hardware("h100");
    const auto refused = [&](const std::string& text, const char* words) {
        folder.write("s.json", text);
        CHECK_THROWS_WITH_AS(stack::load_stack(folder.file("s.json"), h100), doctest::Contains(words), Error);
    };
    const std::string rest = R"("source": "s", "coefficients": {}, "runs": [])";
    refused("{", "s.json: not valid JSON");
    refused(R"({"base": "nothing", )" + rest + "}", "unknown stack 'nothing'");
    refused(R"({"base": "other.json", )" + rest + "}", "must be the name of a stack");
    refused(R"({"schema": "moe-plan/plan/1", "base": "bridge-26.08", )" + rest + "}", "schema");
    refused(R"({"base": "bridge-26.08", "source": "s", "coefficients": {"nothing": 1}, "runs": []})",
            "has no \"nothing\"");
    refused(R"({"base": "bridge-26.08", "source": "s", "coefficients": {}, "runs": [{"run_id": "r"}]})",
            "row 1: field \"model\" is missing");
    folder.write("s.json", R"({"base": "bridge-26.08", )" + rest + "}");
    CHECK_THROWS_WITH_AS(stack::load_stack("bridge-26.04," + folder.file("s.json"), h100),
                         doctest::Contains("based on bridge-26.08"), Error);
    CHECK_THROWS_WITH_AS(stack::load_stack(folder.file("none.json"), h100), doctest::Contains("none.json"), Error);
}
