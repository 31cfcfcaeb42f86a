// Left-out expectations from one inverse covariance (Rasmussen and Williams, section 5.4.2), and a compass search over
// the logarithms of the parameters.
#include "tools/fit/neighbours.hpp"

#include "planner/base/error.hpp"
#include "tools/calibrate/least_squares.hpp"
#include "tools/fit/problem.hpp"

#include <Eigen/Dense>

#include <algorithm>
#include <cmath>
#include <map>

namespace moe::tools {
namespace {

using published::NeighbourModel;
using published::Residual;
using ResidualRows = std::vector<Residual>;

constexpr double most = 0.35;                       // |log error| that a row counts as at most
constexpr double degrees = 4.0;                     // of freedom of Student's t
constexpr double usual = 0.5, usual_spread = 1.5;   // of a distance: prior of its logarithm, and its deviation
constexpr double usual_weight = 0.5;                // of these priors, in rows
constexpr double nearest = 0.0025, furthest = 12.0; // distances that are tried
constexpr double narrowest = 0.02, widest = 0.4;    // deviations that are tried
constexpr double first_step = 0.8, last_step = 0.1; // of logarithms
constexpr std::size_t fewest_rows = 5;              // of a system with a spread of its own

// The rows by what `name` says of them.
std::vector<std::vector<int>> grouped(const ResidualRows& rows,
                                      const std::function<std::string(const Residual&)>& name) {
    std::map<std::string, std::vector<int>> groups;
    for (std::size_t i = 0; i < rows.size(); ++i) groups[name(rows[i])].push_back(static_cast<int>(i));
    std::vector<std::vector<int>> result;
    for (auto& [value, members] : groups) result.push_back(std::move(members));
    return result;
}

// The ways to leave out, their expectations not yet filled in.
std::vector<LeftOut> ways(const ResidualRows& rows) {
    const auto target = [&rows](double Residual::*value) {
        std::vector<double> result;
        for (const Residual& r : rows) result.push_back(r.*value);
        return result;
    };
    const auto way = [&](const char* name, double Residual::*value,
                         const std::function<std::string(const Residual&)>& group) {
        return LeftOut{name, target(value), {}, {}, grouped(rows, group)};
    };
    return {way("row", &Residual::fitted, [](const Residual& r) { return r.run_id; }),
            way("family", &Residual::family_left_out, [](const Residual& r) { return r.workload.family; }),
            way("system", &Residual::system_left_out, [](const Residual& r) { return r.workload.hardware; }),
            way("model", &Residual::family_left_out, [](const Residual& r) { return r.workload.model; }),
            way("system and release", &Residual::release_left_out,
                [](const Residual& r) { return r.workload.hardware + " " + r.workload.stack; })};
}
constexpr std::size_t judged = 3; // of them: those that parameters and spreads go by

void expect(const NeighbourModel& model, const ResidualRows& rows, LeftOut* begin, LeftOut* end) {
    const auto n = static_cast<Eigen::Index>(rows.size());
    Eigen::MatrixXd covariance(n, n);
    Eigen::VectorXd errors(n), noise(n);
    for (Eigen::Index i = 0; i < n; ++i) {
        const Residual& row = rows[static_cast<std::size_t>(i)];
        for (Eigen::Index j = 0; j <= i; ++j)
            covariance(i, j) = covariance(j, i) =
                model.deviation * model.deviation *
                std::exp(-distance(model, row.workload, rows[static_cast<std::size_t>(j)].workload));
        noise(i) = std::pow(model.noise.at(row.tier), 2);
        covariance(i, i) += noise(i);
        errors(i) = std::clamp(row.fitted, -most, most);
    }
    const Eigen::MatrixXd inverse = covariance.llt().solve(Eigen::MatrixXd::Identity(n, n));
    const Eigen::VectorXd weights = inverse * errors;
    for (LeftOut* way = begin; way != end; ++way) {
        way->mean.assign(rows.size(), 0.0);
        way->deviation.assign(rows.size(), 0.0);
        for (const std::vector<int>& group : way->groups) {
            const Eigen::MatrixXd among = inverse(group, group).inverse(); // covariance given all others
            const Eigen::VectorXd mean = errors(group) - among * weights(group);
            for (std::size_t i = 0; i < group.size(); ++i) {
                const auto at = static_cast<Eigen::Index>(i), row = static_cast<Eigen::Index>(group[i]);
                way->mean[static_cast<std::size_t>(group[i])] = mean(at);
                way->deviation[static_cast<std::size_t>(group[i])] =
                    std::sqrt(std::max(0.0, among(at, at) - noise(row)));
            }
        }
    }
}

// Minus the logarithm of the likelihood of left-out rows, and of the priors.
double unlikelihood(const NeighbourModel& model, const ResidualRows& rows, std::vector<LeftOut>& ways) {
    expect(model, rows, ways.data(), ways.data() + judged);
    double sum = 0.0;
    for (std::size_t w = 0; w < judged; ++w)
        for (std::size_t i = 0; i < rows.size(); ++i) {
            const double noise = model.noise.at(rows[i].tier), off = ways[w].target[i] - ways[w].mean[i];
            const double variance = std::pow(ways[w].deviation[i], 2) + noise * noise;
            sum += tier_weight(rows[i].tier) *
                   (0.5 * (degrees + 1.0) * std::log1p(off * off / (degrees * variance)) + 0.5 * std::log(variance));
        }
    double prior = 0.0;
    for (const double d : model.distance) prior += std::pow(std::log(d / usual) / usual_spread, 2);
    return sum / judged + 0.5 * usual_weight * prior;
}

// Every parameter a step up and down: all neighbours of a model.
std::vector<NeighbourModel> steps_from(const NeighbourModel& model, double step) {
    std::vector<NeighbourModel> result;
    for (const double times : {std::exp(step), std::exp(-step)}) {
        for (std::size_t i = 0; i < model.distance.size(); ++i) {
            result.push_back(model);
            result.back().distance[i] = std::clamp(model.distance[i] * times, nearest, furthest);
        }
        result.push_back(model);
        result.back().deviation = std::clamp(model.deviation * times, narrowest, widest);
    }
    return result;
}

struct Weighted {
    double value, weight;
};

published::Spread quantiles(std::vector<Weighted> values, double tail) {
    std::sort(values.begin(), values.end(), [](const Weighted& a, const Weighted& b) { return a.value < b.value; });
    double all = 0.0;
    for (const Weighted& v : values) all += v.weight;
    const auto at = [&](double share) {
        double sum = 0.0;
        for (const Weighted& v : values) {
            sum += v.weight;
            if (sum >= share * all) return v.value;
        }
        return values.back().value;
    };
    return {at(tail), at(1.0 - tail)};
}

// What remains of a row, in units of the deviation that is known for it.
double remains(const NeighbourModel& model, const LeftOut& way, std::size_t row) {
    return (way.target[row] - way.mean[row]) / published::remaining(model, way.deviation[row]);
}

// `unseen` with which what remains of the rows is most likely, whatever unit it has.
double likeliest_unseen(NeighbourModel model, const ResidualRows& rows, const std::vector<LeftOut>& ways) {
    double best = 1.0, least = INFINITY;
    for (model.unseen = 0.5; model.unseen < 20.0; model.unseen *= 1.2) {
        double sum = 0.0, logs = 0.0, count = 0.0;
        for (std::size_t w = 0; w < judged; ++w)
            for (std::size_t i = 0; i < rows.size(); ++i) {
                if (rows[i].tier == "C") continue;
                sum += std::abs(remains(model, ways[w], i));
                logs += std::log(published::remaining(model, ways[w].deviation[i]));
                count += 1.0;
            }
        // Minus the logarithm of a Laplace likelihood, whose tails are as long as the rows', at its best scale.
        const double value = std::log(sum / count) + logs / count;
        if (value < least) {
            least = value;
            best = model.unseen;
        }
    }
    return best;
}

// The spreads of the rows that are marked, tier C aside.
void set_spreads(NeighbourModel& model, const ResidualRows& rows, const std::vector<LeftOut>& ways,
                 const std::vector<bool>& marked) {
    constexpr double tail = (1.0 - published::interval_coverage) / 2.0;
    constexpr double new_tail = tail / 4.0; // groups that were never seen: as in interval.cpp
    const auto of = [&](const LeftOut& way, const std::function<double(const Residual&)>& weight) {
        std::vector<Weighted> values;
        for (std::size_t i = 0; i < rows.size(); ++i) {
            if (!marked[i] || rows[i].tier == "C") continue;
            if (const double w = weight(rows[i]); w > 0.0) values.push_back({remains(model, way, i), w});
        }
        return values;
    };
    std::map<std::string, double> family, system;
    for (std::size_t i = 0; i < rows.size(); ++i)
        if (marked[i] && rows[i].tier != "C") ++family[rows[i].workload.family], ++system[rows[i].workload.hardware];
    std::vector<Weighted> all;
    for (std::size_t w = 0; w < judged; ++w)
        for (const Weighted& v : of(ways[w], [](const Residual&) { return 1.0; })) all.push_back(v);
    model.all = quantiles(std::move(all), tail);
    model.new_family =
        quantiles(of(ways[1], [&](const Residual& r) { return 1.0 / family.at(r.workload.family); }), new_tail);
    model.new_system =
        quantiles(of(ways[2], [&](const Residual& r) { return 1.0 / system.at(r.workload.hardware); }), new_tail);
    model.systems.clear();
    for (const auto& [name, count] : system) {
        if (count < static_cast<double>(fewest_rows)) continue;
        published::Spread& own = model.systems[name];
        for (std::size_t w = 0; w < judged; ++w) {
            const auto here = [&name = name](const Residual& r) { return r.workload.hardware == name ? 1.0 : 0.0; };
            const published::Spread one = quantiles(of(ways[w], here), tail);
            own.low = std::min(own.low, one.low);
            own.high = std::max(own.high, one.high);
        }
    }
}

} // namespace

std::vector<LeftOut> leave_out(const NeighbourModel& model, const ResidualRows& rows) {
    std::vector<LeftOut> result = ways(rows);
    expect(model, rows, result.data(), result.data() + result.size());
    return result;
}

NeighbourModel fit_neighbours(const ResidualRows& rows, const std::string& source) {
    NeighbourModel model;
    model.source = source;
    model.most = most;
    // ResidualRows of tier A that are left out are met best where open settings count as so much more noise.
    model.noise = {{"A", row_noise}, {"B", 2.0 * row_noise}, {"C", 4.0 * row_noise}};
    model.deviation = 0.1;
    model.distance.fill(usual);
    std::vector<LeftOut> scratch = ways(rows);
    double now = unlikelihood(model, rows, scratch);
    for (double step = first_step; step >= last_step;) {
        const std::vector<NeighbourModel> tried = steps_from(model, step);
        std::vector<double> values(tried.size());
        in_parallel(tried.size(), [&](std::size_t i) {
            std::vector<LeftOut> own = scratch;
            values[i] = unlikelihood(tried[i], rows, own);
        });
        const auto best = static_cast<std::size_t>(std::min_element(values.begin(), values.end()) - values.begin());
        if (values[best] < now - 0.01) {
            now = values[best];
            model = tried[best];
        } else {
            step *= 0.5;
        }
    }
    const std::vector<LeftOut> ways = leave_out(model, rows);
    model.unseen = likeliest_unseen(model, rows, ways);
    set_spreads(model, rows, ways, std::vector<bool>(rows.size(), true));
    return model;
}

namespace {

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

// Inside its interval, and the interval's high / low - 1. The spreads are those of the rows that did not leave.
struct Covered {
    std::vector<bool> inside;
    std::vector<double> width;
};
Covered covered(NeighbourModel model, const ResidualRows& rows, const std::vector<LeftOut>& ways, const LeftOut& way) {
    Covered result{std::vector<bool>(rows.size()), std::vector<double>(rows.size())};
    for (const std::vector<int>& group : way.groups) {
        std::vector<bool> others(rows.size(), true);
        for (const int row : group) others[static_cast<std::size_t>(row)] = false;
        set_spreads(model, rows, ways, others);
        const auto known = [&](std::string stack::Workload::*field, const std::string& value) {
            for (std::size_t i = 0; i < rows.size(); ++i)
                if (others[i] && rows[i].workload.*field == value) return true;
            return false;
        };
        for (const int index : group) {
            const auto row = static_cast<std::size_t>(index);
            const stack::Workload& w = rows[row].workload;
            published::Correction c;
            c.new_family = !known(&stack::Workload::family, w.family);
            c.new_system = !known(&stack::Workload::hardware, w.hardware);
            const published::Spread spread = published::spread_of(model, w, c.new_family, c.new_system);
            const double rest = remains(model, way, row);
            result.inside[row] = spread.low <= rest && rest <= spread.high;
            result.width[row] =
                std::expm1((spread.high - spread.low) * published::remaining(model, way.deviation[row]));
        }
    }
    return result;
}

std::string coverage(const Covered& covered, const ResidualRows& rows, const Column& column) {
    double inside = 0.0, width = 0.0;
    int count = 0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
        if (!column.holds(rows[i])) continue;
        inside += covered.inside[i] ? 1.0 : 0.0;
        width += covered.width[i];
        ++count;
    }
    return count == 0 ? "-" : fmt::format("{:.0f} %, {:.0f} %", 100.0 * inside / count, 100.0 * width / count);
}

} // namespace

std::string neighbours_document(const NeighbourModel& model, const ResidualRows& rows) {
    const auto ab = [](const Residual& r) { return r.tier != "C"; };
    const std::vector<Column> kinds{{"A and B", ab},
                                    {"A MoE", [](const Residual& r) { return r.tier == "A" && r.kind == "MoE"; }},
                                    {"A and B MoE", [&](const Residual& r) { return ab(r) && r.kind == "MoE"; }},
                                    {"A and B dense", [&](const Residual& r) { return ab(r) && r.kind == "dense"; }},
                                    {"A and B hybrid", [&](const Residual& r) { return ab(r) && r.kind == "hybrid"; }}};
    std::vector<Column> systems{{"all", ab}};
    for (const auto& [name, spread] : model.systems)
        systems.push_back(
            {name.c_str(), [&, name = name](const Residual& r) { return ab(r) && r.workload.hardware == name; }});
    const std::vector<LeftOut> ways = leave_out(model, rows);
    const auto table = [&](const std::vector<Column>& columns, const auto& cell) {
        std::string head = "| left out |", line = "|---|", body;
        for (const Column& c : columns) head += fmt::format(" {} |", c.name), line += "---|";
        for (const LeftOut& way : ways) {
            body += fmt::format("| {} |", way.name);
            for (const std::string& text : cell(way)) body += fmt::format(" {} |", text);
            body += "\n";
        }
        return head + "\n" + line + "\n" + body;
    };
    const std::string gains = table(kinds, [&](const LeftOut& way) {
        std::vector<std::string> cells;
        for (const Column& c : kinds) cells.push_back(gain(way, rows, c));
        return cells;
    });
    const std::string coverages = table(systems, [&](const LeftOut& way) {
        const Covered inside = covered(model, rows, ways, way);
        std::vector<std::string> cells;
        for (const Column& c : systems) cells.push_back(coverage(inside, rows, c));
        return cells;
    });
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
