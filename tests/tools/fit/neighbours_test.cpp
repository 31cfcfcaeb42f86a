// The stored neighbours: what they gain for rows that were left out, what they leave alone, and their intervals.
#include "tools/fit/neighbours.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

namespace {

using namespace moe;
using namespace moe::tools;

std::vector<published::Residual> rows() {
    const std::string path = profiles_folder() + "/runs/residuals.json";
    return published::residuals_from_json(read_file(path), path);
}

published::NeighbourModel stored() {
    const std::string path = profiles_folder() + "/runs/neighbours.json";
    return published::neighbour_model_from_json(read_file(path), path);
}

struct Gain {
    double before = 0.0, after = 0.0, moved = 0.0; // means of |error|, and of |correction|
};
Gain gain(const LeftOut& way, const std::vector<published::Residual>& rows) {
    Gain g;
    int count = 0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
        if (rows[i].tier == "C") continue;
        g.before += std::abs(std::expm1(way.target[i]));
        g.after += std::abs(std::expm1(way.target[i] - way.mean[i]));
        g.moved += std::abs(way.mean[i]);
        ++count;
    }
    g.before /= count, g.after /= count, g.moved /= count;
    return g;
}

} // namespace

TEST_CASE("neighbours: they gain near known runs and leave alone what is far") {
    const std::vector<published::Residual> all = rows();
    for (const LeftOut& way : leave_out(stored(), all)) {
        const Gain g = gain(way, all);
        CAPTURE(way.name);
        MESSAGE(way.name, ": ", g.before, " -> ", g.after, ", corrected by ", g.moved);
        CHECK(g.after < g.before + 0.005);
        if (way.name == "row") CHECK(g.after < 0.9 * g.before);
        if (way.name == "family" || way.name == "model") CHECK(g.moved < 0.03);
    }
}

TEST_CASE("neighbours: left-out means are those of the process without the rows") {
    const std::vector<published::Residual> all = rows();
    const published::NeighbourModel model = stored();
    const std::vector<LeftOut> ways = leave_out(model, all);
    const published::Neighbours known(model, published::measured_runs(model, all));
    for (const std::size_t i : {std::size_t{0}, all.size() / 2, all.size() - 1}) {
        const published::Correction without = known.of(all[i].workload, all[i].run_id);
        CHECK(ways.front().mean[i] == doctest::Approx(without.log_error).epsilon(1e-6));
        CHECK(published::remaining(model, ways.front().deviation[i], ways.front().new_release[i]) ==
              doctest::Approx(without.deviation).epsilon(1e-6));
    }
}

TEST_CASE("neighbours: what is left out together was left out of the fit as well, single rows aside") {
    std::vector<published::Residual> all = rows();
    const auto before = [&all] {
        std::map<std::string, std::vector<double>> targets;
        for (const LeftOut& way : leave_out(stored(), all)) targets[way.name] = way.target;
        return targets;
    };
    const std::map<std::string, std::vector<double>> as_stored = before();
    for (published::Residual& r : all) r.fitted += 0.01;
    for (const auto& [name, targets] : before()) {
        CAPTURE(name);
        CHECK((targets == as_stored.at(name)) == (name != "row"));
    }
}

TEST_CASE("neighbours: intervals hold seven of ten rows of each system, whatever was left out") {
    const std::vector<published::Residual> all = rows();
    std::map<std::string, int> count;
    for (const published::Residual& r : all) count[r.workload.hardware] += r.tier != "C" ? 1 : 0;
    const published::NeighbourModel model = stored();
    const std::vector<published::LeftOutCoverage> found = coverage_of(model, all);
    REQUIRE(found.size() == model.coverage.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
        CAPTURE(found[i].left_out);
        CHECK(found[i].left_out == model.coverage[i].left_out);
        CHECK(found[i].all.inside == doctest::Approx(model.coverage[i].all.inside).epsilon(1e-3));
        CHECK(found[i].all.width == doctest::Approx(model.coverage[i].all.width).epsilon(1e-3));
        for (const auto& [system, coverage] : found[i].systems) {
            CAPTURE(system);
            if (count.at(system) >= 10) CHECK(coverage.inside >= 0.7);
            CHECK(coverage.inside == doctest::Approx(model.coverage[i].systems.at(system).inside).epsilon(1e-3));
        }
    }
}

TEST_CASE("neighbours: no system's spread is narrower than that of all, and unknown releases are less certain") {
    const published::NeighbourModel model = stored();
    for (const auto& [system, spread] : model.systems) {
        CAPTURE(system);
        CHECK(spread.low <= model.all.low);
        CHECK(spread.high >= model.all.high);
    }
    CHECK(model.new_release > 0.0);
}

TEST_CASE("profiles/runs/NEIGHBOURS.md is what the stored neighbours and residuals say") {
    CHECK_MESSAGE(neighbours_document(stored(), rows()) == read_file(profiles_folder() + "/runs/NEIGHBOURS.md"),
                  "run build/tools/fit/fit-stacks --neighbours");
}

TEST_CASE("neighbours: a fit finds that rows of one model err alike and those of another machine do not") {
    std::vector<published::Residual> made;
    for (int i = 0; i < 40; ++i) {
        const std::string name = fmt::format("model {}", i % 10), hardware = i % 20 < 10 ? "h100" : "b200";
        const double error = 0.2 * std::sin(1.0 + 2.7 * (i % 20)) + 0.01 * std::cos(5.0 * i);
        made.push_back({fmt::format("{}", i),
                        name,
                        hardware,
                        "MoE",
                        "A",
                        error,
                        error,
                        error,
                        error,
                        {name, name, hardware, hardware, "bf16", "s", "s", 8.0, 4096.0}});
    }
    const published::NeighbourModel fitted = fit_neighbours(made, "made");
    const auto of = [&](published::Feature f) { return fitted.distance[static_cast<std::size_t>(f)]; };
    CHECK(of(published::Feature::hardware) + of(published::Feature::generation) > 1.0);
    CHECK(of(published::Feature::model) + of(published::Feature::family) > 1.0);
    CHECK(fitted.deviation > 0.08);
    const LeftOut row = leave_out(fitted, made).front();
    CHECK(gain(row, made).after < 0.5 * gain(row, made).before);
}
