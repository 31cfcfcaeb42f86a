// Tables of what runs nearby gain for rows that were left out, and of how many rows their intervals hold.
#include "planner/base/error.hpp"
#include "tools/fit/neighbours.hpp"

#include <cmath>
#include <functional>

namespace moe::tools {
namespace {

using published::NeighbourModel;
using published::Residual;
using ResidualRows = std::vector<Residual>;

struct Column { // rows of tiers A and B that a figure is of
    const char* name;
    std::function<bool(const Residual&)> holds;
};

std::string percent(double share) { return fmt::format("{:.1f} %", 100.0 * share); }

// Mean |error| of the rows before and after they are corrected.
std::string gain(const LeftOut& way, const ResidualRows& rows, const Column& column) {
    double before = 0.0, after = 0.0;
    int count = 0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
        if (!column.holds(rows[i])) continue;
        before += std::abs(std::expm1(way.target[i]));
        after += std::abs(std::expm1(way.target[i] - way.mean[i]));
        ++count;
    }
    return count == 0 ? "-" : fmt::format("{} -> {}", percent(before / count), percent(after / count));
}

std::string cell_of(const published::Coverage& c) {
    return fmt::format("{:.0f} %, {:.0f} %", 100.0 * c.inside, 100.0 * c.width);
}

} // namespace

std::string neighbours_document(const NeighbourModel& model, const ResidualRows& rows) {
    const auto ab = [](const Residual& r) { return r.tier != "C"; };
    const std::vector<Column> kinds{{"A and B", ab},
                                    {"A MoE", [](const Residual& r) { return r.tier == "A" && r.kind == "MoE"; }},
                                    {"A and B MoE", [&](const Residual& r) { return ab(r) && r.kind == "MoE"; }},
                                    {"A and B dense", [&](const Residual& r) { return ab(r) && r.kind == "dense"; }},
                                    {"A and B hybrid", [&](const Residual& r) { return ab(r) && r.kind == "hybrid"; }}};
    std::string gains = "| left out |", line = "\n|---|";
    for (const Column& c : kinds) gains += fmt::format(" {} |", c.name), line += "---|";
    gains += line + "\n";
    for (const LeftOut& way : leave_out(model, rows)) {
        gains += fmt::format("| {} |", way.name);
        for (const Column& c : kinds) gains += fmt::format(" {} |", gain(way, rows, c));
        gains += "\n";
    }
    std::string coverages = "| left out | all |";
    line = "\n|---|---|";
    for (const auto& [name, spread] : model.systems) coverages += fmt::format(" {} |", name), line += "---|";
    coverages += line + "\n";
    for (const published::LeftOutCoverage& way : model.coverage) {
        coverages += fmt::format("| {} | {} |", way.left_out, cell_of(way.all));
        for (const auto& [name, coverage] : way.systems) coverages += fmt::format(" {} |", cell_of(coverage));
        coverages += "\n";
    }
    std::string distances = "| feature | distance |\n|---|---|\n";
    for (std::size_t i = 0; i < model.distance.size(); ++i)
        distances += fmt::format("| {} | {:.2g} |\n", published::to_string(static_cast<published::Feature>(i)),
                                 model.distance[i]);
    return fmt::format("# What runs nearby do for predictions\n"
                       "\n"
                       "`build/tools/fit/fit-stacks --neighbours` writes this file.\n"
                       "[docs/notes/intervals.md](../../docs/notes/intervals.md) says what it means.\n"
                       "\n"
                       "## Mean error before and after the correction\n\n{}\n"
                       "## Coverage and mean width (high / low - 1) of the {:.0f} % intervals\n"
                       "\n"
                       "The spreads are those of the rows that were not left out.\n\n{}\n"
                       "## Distances\n"
                       "\n"
                       "The deviation is {:.3g}; `gpus` and `seq` count for each doubling.\n\n{}",
                       gains, 100.0 * published::interval_coverage, coverages, model.deviation, distances);
}

} // namespace moe::tools
