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

using published::Coverage;
using published::LeftOutCoverage;
using published::NeighbourModel;
using published::Residual;
using ResidualRows = std::vector<Residual>;

constexpr double most = 0.35;                          // |log error| that a row counts as at most
constexpr double degrees = 4.0;                        // of freedom of Student's t
constexpr double usual = 0.5, usual_spread = 1.5;      // of a distance: prior of its logarithm, and its deviation
constexpr double usual_weight = 0.5;                   // of these priors, in rows
constexpr double nearest = 0.0025, furthest = 12.0;    // distances that are tried
constexpr double narrowest = 0.02, widest = 0.4;       // deviations that are tried
constexpr double first_step = 0.8, last_step = 0.1;    // of logarithms
constexpr std::size_t fewest_rows = 5;                 // of a system with a spread of its own
constexpr const char* releases = "system and release"; // the way that `new_release` goes by

// The rows by what `name` says of them.
std::vector<std::vector<int>> grouped(const ResidualRows& rows,
                                      const std::function<std::string(const Residual&)>& name) {
    std::map<std::string, std::vector<int>> groups;
    for (std::size_t i = 0; i < rows.size(); ++i) groups[name(rows[i])].push_back(static_cast<int>(i));
    std::vector<std::vector<int>> result;
    for (auto& [value, members] : groups) result.push_back(std::move(members));
    return result;
}

std::string system_and_release(const Residual& r) { return r.workload.hardware + " " + r.workload.stack; }

// True where no row of the row's system and release stays when the group leaves.
bool left(const ResidualRows& rows, const std::vector<int>& group, int row) {
    const std::string own = system_and_release(rows[static_cast<std::size_t>(row)]);
    const auto is_own = [&own](const Residual& r) { return system_and_release(r) == own; };
    const auto leaves = [&](int member) { return is_own(rows[static_cast<std::size_t>(member)]); };
    return std::count_if(rows.begin(), rows.end(), is_own) == std::count_if(group.begin(), group.end(), leaves);
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
        LeftOut result{name, target(value), {}, {}, {}, grouped(rows, group)};
        result.new_release.assign(rows.size(), true);
        for (const std::vector<int>& members : result.groups)
            for (const int row : members) result.new_release[static_cast<std::size_t>(row)] = left(rows, members, row);
        return result;
    };
    return {way("row", &Residual::fitted, [](const Residual& r) { return r.run_id; }),
            way("family", &Residual::family_left_out, [](const Residual& r) { return r.workload.family; }),
            way("system", &Residual::system_left_out, [](const Residual& r) { return r.workload.hardware; }),
            way("model", &Residual::family_left_out, [](const Residual& r) { return r.workload.model; }),
            way(releases, &Residual::release_left_out, system_and_release)};
}
constexpr std::size_t judged = 3; // of them: those that distances and spreads go by

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

double known_deviation(const NeighbourModel& model, const LeftOut& way, std::size_t row) {
    return published::remaining(model, way.deviation[row], way.new_release[row]);
}

// 0, and from 0.02 to 0.4 by fifths.
std::vector<double> tried_releases() {
    std::vector<double> result{0.0};
    for (double deviation = narrowest; deviation < widest; deviation *= 1.2) result.push_back(deviation);
    return result;
}

// What remains of a row, in units of the deviation that is known for it.
double remains(const NeighbourModel& model, const LeftOut& way, std::size_t row) {
    return (way.target[row] - way.mean[row]) / known_deviation(model, way, row);
}

// Minus the logarithm of the likelihood of what remains, whatever unit it has: of a Laplace distribution, whose tails
// are as long as the rows', at its best scale. Systems with a release count beside the ways that are judged.
double unlikelihood_of_rest(const NeighbourModel& model, const ResidualRows& rows, const std::vector<LeftOut>& ways) {
    double sum = 0.0, logs = 0.0, count = 0.0;
    for (std::size_t w = 0; w < ways.size(); ++w) {
        if (w >= judged && ways[w].name != releases) continue;
        for (std::size_t i = 0; i < rows.size(); ++i) {
            if (rows[i].tier == "C") continue;
            sum += std::abs(remains(model, ways[w], i));
            logs += std::log(known_deviation(model, ways[w], i));
            count += 1.0;
        }
    }
    return std::log(sum / count) + logs / count;
}

// `unseen` and `new_release` with which what remains of the rows is most likely.
void set_deviations(NeighbourModel& model, const ResidualRows& rows, const std::vector<LeftOut>& ways) {
    NeighbourModel tried = model;
    double least = INFINITY;
    for (tried.unseen = 0.5; tried.unseen < 20.0; tried.unseen *= 1.2)
        for (const double release : tried_releases()) {
            tried.new_release = release;
            const double value = unlikelihood_of_rest(tried, rows, ways);
            if (value >= least) continue;
            least = value;
            model.unseen = tried.unseen, model.new_release = tried.new_release;
        }
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
        published::Spread& own = model.systems[name] = model.all; // a few rows cannot say that they are known better
        for (std::size_t w = 0; w < judged; ++w) {
            const auto here = [&name = name](const Residual& r) { return r.workload.hardware == name ? 1.0 : 0.0; };
            const published::Spread one = quantiles(of(ways[w], here), tail);
            own.low = std::min(own.low, one.low);
            own.high = std::max(own.high, one.high);
        }
    }
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
            result.width[row] = std::expm1((spread.high - spread.low) * known_deviation(model, way, row));
        }
    }
    return result;
}

Coverage mean_of(const Covered& covered, const ResidualRows& rows, const std::string& system) {
    Coverage mean;
    double count = 0.0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
        if (rows[i].tier == "C" || (!system.empty() && rows[i].workload.hardware != system)) continue;
        mean.inside += covered.inside[i] ? 1.0 : 0.0;
        mean.width += covered.width[i];
        count += 1.0;
    }
    mean.inside /= count, mean.width /= count;
    return mean;
}

} // namespace

std::vector<LeftOut> leave_out(const NeighbourModel& model, const ResidualRows& rows) {
    std::vector<LeftOut> result = ways(rows);
    expect(model, rows, result.data(), result.data() + result.size());
    return result;
}

std::vector<LeftOutCoverage> coverage_of(const NeighbourModel& model, const ResidualRows& rows) {
    const std::vector<LeftOut> ways = leave_out(model, rows);
    std::vector<LeftOutCoverage> result;
    for (const LeftOut& way : ways) {
        const Covered of_way = covered(model, rows, ways, way);
        LeftOutCoverage& coverage = result.emplace_back(LeftOutCoverage{way.name, mean_of(of_way, rows, {}), {}});
        for (const auto& [name, spread] : model.systems) coverage.systems[name] = mean_of(of_way, rows, name);
    }
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
    set_deviations(model, rows, ways);
    set_spreads(model, rows, ways, std::vector<bool>(rows.size(), true));
    model.coverage = coverage_of(model, rows);
    return model;
}

} // namespace moe::tools
