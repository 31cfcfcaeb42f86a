// Fits the coefficients of the published stacks to the published runs, and reports how far unseen model families and
// systems are off.
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "simulator/published/ratios.hpp"
#include "tools/fit/ablation.hpp"
#include "tools/fit/accuracy.hpp"
#include "tools/fit/anchor_table.hpp"
#include "tools/fit/left_out.hpp"
#include "tools/fit/neighbours.hpp"
#include "tools/fit/problem.hpp"
#include "tools/print/console.hpp"

#include <CLI/CLI.hpp>

#include <cmath>
#include <string>

namespace moe::tools {
namespace {

// Every row predicted without what it has in this field; says how far each is off.
std::vector<published::Prediction> leave_out(Console& console, const FitProblem& problem, const Solution& all,
                                             const std::string published::Prediction::*field) {
    std::vector<published::Prediction> rows = left_out(problem, all, field);
    for (const auto& [name, summary] : published::summarize_by(rows, field))
        console.say("without {:24} MAPE of its rows {:5.1f} %", name, 100.0 * summary.mape);
    return rows;
}

void show(Console& console, const std::vector<published::Prediction>& rows) {
    for (const auto& [name, s] : published::summarize_by(rows, &published::Prediction::tier_and_kind))
        console.say("{:10} {:4} rows  MAPE {:5.1f} %  bias {:+5.1f} %  within 10 % {:3.0f} %  tau {:.2f}", name,
                    s.predicted, 100.0 * s.mape, 100.0 * s.bias, 100.0 * s.within_10_percent, s.kendall_tau);
}

// Residuals and tables from the stored coefficients; what was left out in turn stays as it was found.
void write_tables(const machine::Coefficients& coefficients, const CrossValidation& rows) {
    const std::string folder = profiles_folder() + "/runs";
    const std::string residuals = residuals_json(rows);
    const CrossValidation stored = stored_rows(rows.fitted, residuals, "residuals.json");
    write_file(folder + "/residuals.json", residuals);
    write_file(folder + "/ratios.json", published::ratio_errors_json(published::ratio_errors(stored.left_family)));
    write_file(folder + "/ACCURACY.md", accuracy_document(stored, coefficients));
}

// Fits what corrects predictions by runs nearby, to residuals.json as it stands.
void write_neighbours(Console& console) {
    const std::string folder = profiles_folder() + "/runs", path = folder + "/residuals.json";
    const std::vector<published::Residual> rows = published::residuals_from_json(read_file(path), path);
    const published::NeighbourModel fitted =
        fit_neighbours(rows, "fitted by fit-stacks --neighbours to residuals.json; tables in NEIGHBOURS.md");
    write_file(folder + "/neighbours.json", published::to_json(fitted));
    const published::NeighbourModel model =
        published::neighbour_model_from_json(published::to_json(fitted), "neighbours.json"); // with fewer digits
    write_file(folder + "/NEIGHBOURS.md", neighbours_document(model, rows));
    console.say("written: runs/neighbours.json and runs/NEIGHBOURS.md in {}", profiles_folder());
}

// only: the coefficients to fit while the others stay, with which what is stored of rows stays as well.
void fit(const std::vector<std::string>& only, bool dry) {
    Console console(OutputOptions{});
    FitProblem problem(only);
    LeastSquares squares = problem.squares(&published::Prediction::family, "");
    const Solution near = solve(squares, problem.stored(), nullptr);
    problem.choose(near.x);
    squares.iterations = 3; // plans that rows leave open have hardly changed
    const Solution all = solve(squares, near.x, nullptr);
    machine::Coefficients coefficients = problem.coefficients(all.x);
    for (std::size_t j = 0; j < problem.names().size(); ++j) {
        machine::Coefficient& c = coefficients[problem.names()[j]];
        c.error = all.error[j];
        console.say("{:28} prior {:9.3g}  value {:9.3g} +- {:4.1f} %  {:+.1f} spreads", problem.names()[j], c.prior,
                    c.value, 100.0 * c.error, all.x[j] / c.spread);
    }
    CrossValidation rows;
    rows.fitted = problem.predict(all.x);
    show(console, rows.fitted);
    if (dry) {
        for (const published::Prediction& p : rows.fitted)
            console.say("{:+6.1f} % {} {:60} {:7.1f} {:7.1f} {} {}", 100.0 * p.error, p.tier_and_kind, p.run_id,
                        p.published, p.predicted, p.stack, p.estimate.fits);
        return;
    }
    rows.left_family = leave_out(console, problem, all, &published::Prediction::family);
    rows.left_system = leave_out(console, problem, all, &published::Prediction::system);
    rows.left_release = leave_out(console, problem, all, &published::Prediction::system_and_stack);
    const std::string residuals = profiles_folder() + "/runs/residuals.json";
    if (!only.empty()) keep_stored(rows, read_file(residuals));
    machine::save_coefficients(coefficients, profiles_folder() + "/coefficients.json");
    rows.fitted = FitProblem().rows(); // by the coefficients as they are written, with fewer digits
    write_tables(machine::load_coefficients(), rows);
    write_neighbours(console);
    console.say("written: coefficients.json, runs/residuals.json, runs/ratios.json and runs/ACCURACY.md in {}",
                profiles_folder());
}

} // namespace
} // namespace moe::tools

int main(int argc, char** argv) { // NOLINT(bugprone-exception-escape): definitions of options alone may throw
    CLI::App app("Fit the coefficients in profiles/coefficients.json to profiles/runs/*.csv, refit without each model "
                 "family, each system, and each system with each stack in turn, and write coefficients, "
                 "residuals.json, ratios.json and the tables of "
                 "profiles/runs/ACCURACY.md");
    bool dry = false;
    app.add_flag("--dry", dry, "fit and show, without the refits and without writing");
    bool tables = false;
    std::vector<std::string> only;
    app.add_option("--only", only, "fit these coefficients alone; what residuals.json holds of rows stays")
        ->delimiter(',');
    app.add_flag("--tables", tables, "no fit: write the tables anew from the stored coefficients and residuals");
    bool neighbours = false, anchors = false;
    app.add_flag("--neighbours", neighbours, "fit the distances by which runs correct others nearby, and nothing else");
    app.add_flag("--anchors", anchors,
                 "anchor on one row of each model and system, and print the errors of the others");
    std::vector<std::string> ablate;
    app.add_option("--ablate", ablate, "fit without each of these terms, or without each that can be left out (all)")
        ->delimiter(',');
    int steps = moe::tools::ablation_steps;
    app.add_option("--steps", steps, "steps of each of these fits")->check(CLI::Range(1, 100));
    CLI11_PARSE(app, argc, argv);
    try {
        moe::tools::Console console(moe::tools::OutputOptions{});
        if (neighbours) {
            moe::tools::write_neighbours(console);
            return 0;
        }
        if (anchors) {
            const std::string path = moe::profiles_folder() + "/runs/neighbours.json";
            fmt::print("{}", moe::tools::anchored_table(moe::tools::anchored_groups(
                                 moe::tools::FitProblem(),
                                 moe::published::neighbour_model_from_json(moe::read_file(path), path))));
            return 0;
        }
        if (!ablate.empty()) {
            moe::tools::print_ablation(ablate, steps);
            return 0;
        }
        if (tables) {
            const moe::tools::FitProblem problem;
            const std::string path = moe::profiles_folder() + "/runs/residuals.json";
            moe::tools::write_tables(moe::machine::load_coefficients(),
                                     moe::tools::stored_rows(problem.rows(), moe::read_file(path), path));
            moe::tools::write_neighbours(console);
            return 0;
        }
        moe::tools::fit(only, dry);
    } catch (const moe::Error& error) {
        fmt::print(stderr, "fit-stacks: {}\n", error.what());
        return static_cast<int>(error.fault());
    } catch (const std::exception& error) {
        fmt::print(stderr, "fit-stacks: {}\n", error.what());
        return 1;
    }
    return 0;
}
