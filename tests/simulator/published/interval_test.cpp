// Intervals: quantiles by hand, wider for what was never seen, and their coverage on the folds of the stored residuals.
#include "planner/model/families/load_model.hpp"
#include "simulator/published/interval.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/machine/hardware.hpp"
#include "simulator/published/run_plan.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>
#include <tuple>

namespace {

using namespace moe;

published::Residual row(const std::string& family, const std::string& system, double residual,
                        const std::string& kind = "MoE") {
    return {family + system, family, system, kind, "A", residual, residual};
}

std::vector<published::Residual> stored() {
    const std::string path = profiles_folder() + "/runs/residuals.json";
    return published::residuals_from_json(read_file(path), path);
}

struct Coverage {
    int rows = 0, inside = 0;
    double share() const { return static_cast<double>(inside) / rows; }
};

// Each group is left out in turn and its rows are held to the interval that the others give.
Coverage coverage(const std::string moe::published::Residual::*group, double moe::published::Residual::*value) {
    const std::vector<published::Residual> all = stored();
    std::set<std::string> names;
    for (const published::Residual& r : all) names.insert(r.*group);
    Coverage result;
    for (const std::string& left_out : names) {
        std::vector<published::Residual> others;
        std::copy_if(all.begin(), all.end(), std::back_inserter(others),
                     [&](const published::Residual& r) { return r.*group != left_out; });
        for (const published::Residual& r : all) {
            if (r.*group != left_out || r.tier == "C") continue;
            const auto range = published::residual_range(others, r.kind, r.family, r.system);
            if (!range) continue;
            ++result.rows;
            if (range->low <= r.*value && r.*value <= range->high) ++result.inside;
        }
    }
    return result;
}

plan::Plan plan_on(const std::string& model, const std::string& hardware) {
    plan::Plan plan;
    plan.model = std::make_shared<const model::Model>(families::load_model(model));
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware(hardware));
    plan.stack = plan.hardware->default_stack;
    return plan;
}

} // namespace

TEST_CASE("residual range: quantiles of the kind, tier C left out, wider for what is new") {
    std::vector<published::Residual> rows;
    for (int i = 1; i <= 10; ++i) rows.push_back(row("a", "x", 0.01 * i));
    rows.push_back(row("b", "y", -0.30));
    rows.push_back(row("dense", "x", 5.0, "dense"));
    rows.push_back(row("a", "x", 9.0));
    rows.back().tier = "C";
    const auto seen = published::residual_range(rows, "MoE", "a", "x");
    REQUIRE(seen);
    CHECK(seen->rows == 11);
    CHECK(seen->low == nearly(0.01)); // 10 % of 11 rows is within the second
    CHECK(seen->high == nearly(0.09));
    // A new family: a and b weigh the same, so b's row is half of all.
    const auto family = published::residual_range(rows, "MoE", "c", "x");
    CHECK(family->low == nearly(-0.30));
    CHECK(family->high >= seen->high);
    const auto system = published::residual_range(rows, "MoE", "a", "z");
    CHECK(system->low == nearly(-0.30));
    CHECK(!published::residual_range(rows, "linear", "a", "x"));
}

TEST_CASE("interval: a stack that no published run is of has that of an unseen family and system") {
    std::vector<published::Residual> rows;
    for (int i = -5; i <= 5; ++i) rows.push_back(row("Qwen3MoeForCausalLM", "H100", 0.02 * i));
    rows.push_back(row("DeepseekV3ForCausalLM", "GB200", 0.4));
    search::Estimate estimate;
    estimate.tflops_per_gpu = 100.0;
    plan::Plan plan = plan_on("Qwen3-30B-A3B", "h100");
    const auto known = published::interval_of(plan, estimate, rows, false).interval,
               unknown = published::interval_of(plan, estimate, rows, true).interval;
    REQUIRE(known);
    REQUIRE(unknown);
    CHECK(!known->new_stack);
    CHECK(unknown->new_stack);
    CHECK(!unknown->new_family);
    CHECK(unknown->low < known->low);
    CHECK(unknown->low == nearly(100.0 * std::exp(-0.4)));
    CHECK(unknown->high >= known->high);
    for (const auto& [name, is_new] : {std::pair{"bridge-26.08", false},
                                       {"bridge-26.08,no-fused_router", false},
                                       {"mlm-moe-recipes", false},
                                       {"bridge-26.10", true},
                                       {"bridge-26.10.01", true},
                                       {"moe-plan", false}}) {
        CAPTURE(name);
        plan.stack = name;
        CHECK(published::is_new_stack(plan) == is_new);
    }
}

TEST_CASE("interval: the bounds are rates, and what was never measured has none") {
    std::vector<published::Residual> rows;
    for (int i = -5; i <= 5; ++i) rows.push_back(row("Qwen3MoeForCausalLM", "H100", 0.02 * i));
    search::Estimate estimate;
    estimate.tflops_per_gpu = 100.0;
    const published::IntervalResult here = published::interval_of(plan_on("Qwen3-30B-A3B", "h100"), estimate, rows);
    REQUIRE(here.interval);
    // The second-highest prediction was e^0.08 times the truth, the second-lowest e^-0.08 times.
    CHECK(here.interval->low == nearly(100.0 * std::exp(-0.08)));
    CHECK(here.interval->high == nearly(100.0 * std::exp(0.08)));
    CHECK(!here.interval->new_family);
    CHECK(!here.interval->new_system);
    CHECK(published::interval_of(plan_on("Mixtral-8x7B", "b200"), estimate, rows).interval->new_family);
    CHECK(published::interval_of(plan_on("Mixtral-8x7B", "b200"), estimate, rows).interval->new_system);
    const published::IntervalResult dense = published::interval_of(plan_on("Llama3-8B", "h100"), estimate, rows);
    CHECK(!dense.interval);
    CHECK(dense.reason == "no measured runs of dense models to compare with");
    CHECK(!published::interval_of(plan_on("Qwen3-30B-A3B", "h100"), estimate, {}).interval);
    CHECK_THROWS_WITH_AS(published::residuals_from_json("[{\"run_id\": 1}]", "r.json"),
                         doctest::Contains("r.json: row 1"), Error);
}

TEST_CASE("interval: each family, and each system, lies within the interval of the others as often as it says") {
    const Coverage family = coverage(&published::Residual::family, &published::Residual::family_left_out);
    const Coverage system = coverage(&published::Residual::system, &published::Residual::system_left_out);
    MESSAGE("families: ", family.inside, " of ", family.rows, "; systems: ", system.inside, " of ", system.rows);
    REQUIRE(family.rows > 250);
    REQUIRE(system.rows > 250);
    CHECK(family.share() >= published::interval_coverage - 0.1);
    CHECK(system.share() >= published::interval_coverage - 0.1);
}

TEST_CASE("interval: a kind of one family is left out by system") {
    std::vector<published::Residual> rows;
    for (int i = 0; i < 20; ++i)
        rows.push_back({std::to_string(i), "only", i % 2 == 0 ? "A" : "B", "hybrid", "A", 0.5, 0.01 * i});
    const auto range = published::residual_range(rows, "hybrid", "only", "A");
    REQUIRE(range.has_value());
    CHECK(range->low == nearly(0.01));
    CHECK(range->high == nearly(0.17));
    rows.push_back({"another", "second", "A", "hybrid", "A", 0.5, 0.0});
    CHECK(published::residual_range(rows, "hybrid", "only", "A")->low == nearly(0.5));
}

TEST_CASE("interval: stored residuals name systems that have profiles and families that have models") {
    std::set<std::string> families;
    for (const auto& entry : std::filesystem::directory_iterator(profiles_folder() + "/models")) {
        families.insert(families::load_model(entry.path().string()).architecture);
    }
    for (const published::Residual& r : stored()) {
        CHECK_MESSAGE(families.count(r.family) == 1, r.run_id);
        CHECK_MESSAGE(std::filesystem::exists(profiles_folder() + "/hardware/" +
                                              published::hardware_profile_of(r.system) + ".json"),
                      r.run_id);
    }
    search::Estimate estimate;
    estimate.tflops_per_gpu = 100.0;
    for (const auto& [model, hardware] : {std::pair{"DeepSeek-V3", "gb200-nvl72"},
                                          {"Qwen3-235B-A22B", "gb300-nvl72"},
                                          {"Llama3-70B", "h100"},
                                          {"Mixtral-8x7B", "h100"}}) {
        const plan::Plan plan = plan_on(model, hardware);
        const published::IntervalResult result =
            published::interval_of(plan, estimate, published::load_residuals(plan, false));
        REQUIRE(result.interval);
        CHECK(!result.interval->new_family);
        CHECK(!result.interval->new_system);
        CHECK(result.interval->low < 100.0);
        CHECK(result.interval->high > 60.0);
    }
    plan::Plan ours = plan_on("Qwen3-30B-A3B", "h100");
    CHECK(published::load_residuals(ours, true)
              .empty()); // the executable stack's GPU rates are not measured against plans
    // Calibrated GPUs: on one, and on as many as communication was measured among.
    for (const auto& [hardware, gpus, known] : {std::tuple{"h100-measured", 1, true},
                                                {"h100-measured", 2, false},
                                                {"h200-measured", 2, true},
                                                {"h200-measured", 64, false}}) {
        CAPTURE(hardware);
        CAPTURE(gpus);
        plan::Plan card = plan_on("Qwen3-30B-A3B", hardware);
        card.gpus = gpus;
        const std::vector<published::Residual> rows = published::load_residuals(card, true);
        CHECK(rows.empty() == !known);
        if (!known) continue;
        const published::IntervalResult result = published::interval_of(card, estimate, rows);
        REQUIRE(result.interval);
        CHECK(!result.interval->new_family);
        CHECK(!result.interval->new_system);
        CHECK(result.interval->low < 99.0);
        CHECK(result.interval->low > 90.0);
        CHECK(result.interval->high > 101.0);
        CHECK(result.interval->high < 110.0);
    }
    ours = plan_on("tiny-qwen3-moe", "cpu-local");
    machine::Hardware calibrated = *ours.hardware;
    CHECK(published::load_residuals(ours, true).empty());
    calibrated.measured["gemm"] = {{1e6, 1e-3}};
    ours.hardware = std::make_shared<const machine::Hardware>(calibrated);
    CHECK(published::load_residuals(ours, true).size() >= 7);
    const published::IntervalResult cpu = published::interval_of(ours, estimate, published::load_residuals(ours, true));
    REQUIRE(cpu.interval);
    CHECK(!cpu.interval->new_system);
}
