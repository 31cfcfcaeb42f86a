// One table says which coefficients can be left out; the fits share derivatives that are taken once.
#include "tools/fit/ablation.hpp"

#include "planner/base/error.hpp"
#include "tools/fit/left_out.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

namespace moe::tools {
namespace {

struct Term {
    std::string_view coefficient;
    double neutral;
};

constexpr std::array<Term, 26> terms_of_costs{{
    {"attention.2024", 1.0},
    {"attention.pytorch", 1.0},
    {"clock.b200", 1.0},
    {"clock.h100-hbm2e", 1.0},
    {"clock.ultra", 1.0},
    {"exchange.start", 0.0},
    {"fsdp.sm_share", 0.0},
    {"grouped.blackwell", 1.0},
    {"grouped.hopper", 1.0},
    {"grouped.start", 0.0},
    {"host.2025", 1.0},
    {"host.grace", 1.0},
    {"host.grace.2025", 1.0},
    {"host.hopper", 1.0},
    {"host.mlm", 1.0},
    {"hybridep.row", 0.0},
    {"kernel", 0.0},
    {"launch", 0.0},
    {"launch.expert", 0.0},
    {"launch.overlap", 1.0},
    {"launch.routed", 1.0},
    {"overlap.sm_share", 0.0},
    {"quantize.fused", 1.0},
    {"scan.blackwell", 1.0},
    {"sync", 0.0},
    {"tile", 0.0},
}};

Jacobian without_column(Jacobian jacobian, std::size_t column) {
    for (std::vector<double>& row : jacobian) row.erase(row.begin() + static_cast<std::ptrdiff_t>(column));
    return jacobian;
}

std::string cells(const FitProblem& problem, const Solution& solution) {
    using Rows = std::vector<published::Prediction>;
    const std::array<Rows, 3> ways{problem.predict(solution.x),
                                   left_out(problem, solution, &published::Prediction::family),
                                   left_out(problem, solution, &published::Prediction::system)};
    const auto of = [&](auto&& counts) {
        std::string text;
        for (const Rows& rows : ways) {
            Rows kept;
            std::copy_if(rows.begin(), rows.end(), std::back_inserter(kept), counts);
            text += fmt::format("{}{:.1f}", text.empty() ? "" : "; ", 100.0 * published::summarize(kept).mape);
        }
        return text;
    };
    const auto a_and_b = [](const published::Prediction& p) { return p.tier != "C"; };
    return fmt::format(
        "{} | {} | {} | {} | {}", of([](const published::Prediction& p) { return p.tier == "A" && p.kind == "MoE"; }),
        of([&](const published::Prediction& p) { return a_and_b(p) && p.kind == "MoE"; }),
        of([&](const published::Prediction& p) { return a_and_b(p) && p.kind == "dense"; }),
        of([](const published::Prediction& p) { return p.tier == "A" && p.kind == "hybrid"; }), of(a_and_b));
}

// One line, as soon as it is known: a run that is cut keeps those before.
void print_line(const std::string& name, const std::string& value, const std::string& cells) {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    fmt::print("| {} | {} | {} |\n", name, value, cells);
    std::fflush(stdout);
}

std::vector<std::string> chosen(const std::vector<std::string>& terms, const machine::Coefficients& coefficients) {
    std::vector<std::string> names = terms;
    if (terms == std::vector<std::string>{"all"}) {
        names.clear();
        for (const auto& [name, c] : coefficients)
            if (neutral(name)) names.push_back(name);
    }
    for (const std::string& name : names) {
        if (coefficients.count(name) == 0 || coefficients.at(name).spread <= 0.0)
            refuse("--ablate {}: no coefficient with a spread in profiles/coefficients.json", name);
        if (!neutral(name)) refuse("--ablate {}: steps cannot be priced without it", name);
    }
    return names;
}

} // namespace

std::optional<double> neutral(const std::string& coefficient) {
    for (const Term& term : terms_of_costs)
        if (term.coefficient == coefficient) return term.neutral;
    return std::nullopt;
}

void print_ablation(const std::vector<std::string>& terms, int steps) {
    const std::vector<std::string> names = chosen(terms, machine::load_coefficients());
    const FitProblem all;
    const LeastSquares squares = all.squares(&published::Prediction::family, "");
    const std::vector<double> stored = all.stored();
    const Jacobian jacobian = differences(squares, stored, squares.residuals(stored));
    fmt::print("Mean errors in %: fitted; family left out; system left out.\n\n"
               "| without | held at | A MoE | A and B MoE | A and B dense | A hybrid | A and B |\n"
               "|---|---|---|---|---|---|---|\n");
    in_parallel(names.size() + 1, [&](std::size_t i) {
        const auto fitted = [&](const FitProblem& problem, const std::vector<double>& start, const Jacobian& kept) {
            LeastSquares rest = problem.squares(&published::Prediction::family, "");
            rest.iterations = steps;
            Solution solution = solve(rest, start, &kept);
            solution.jacobian = kept;
            return cells(problem, solution);
        };
        if (i == 0) {
            print_line("nothing", "", fitted(all, stored, jacobian));
            return;
        }
        const std::string& name = names[i - 1];
        const double value = *neutral(name);
        const FitProblem problem({}, {{name, value}});
        const auto column =
            static_cast<std::size_t>(std::find(all.names().begin(), all.names().end(), name) - all.names().begin());
        const auto found = [&]() -> std::string {
            try {
                return fitted(problem, problem.stored(), without_column(jacobian, column));
            } catch (const Error& error) { // without the term another coefficient leaves the range of what is possible
                return fmt::format("not possible: {} | | | |", error.what());
            }
        };
        print_line(name, fmt::format("{:g}", value), found());
    });
}

} // namespace moe::tools
