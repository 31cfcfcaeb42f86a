// Seconds of an op from measured calls of its family: a curve over work, or a formula and a surface of what calls near
// by take of it.
#include "simulator/cost/cost.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace moe {

namespace {

double on_curve(const std::vector<MeasuredCall>& calls, double work) {
    const MeasuredCall& last = calls.back();
    if (calls.size() == 1 || work >= last.work)
        return last.work > 0.0 ? last.seconds * std::max(work, 0.0) / last.work : last.seconds;
    // Below the first call its fixed part rules: keep the slope of the first two.
    auto upper =
        std::upper_bound(calls.begin(), calls.end(), work, [](double w, const MeasuredCall& c) { return w < c.work; });
    if (upper == calls.begin()) ++upper;
    const MeasuredCall &a = *(upper - 1), &b = *upper;
    if (work <= 0.0 || a.work <= 0.0 || a.seconds <= 0.0 || b.seconds <= 0.0 || b.work <= a.work) return a.seconds;
    const double slope = std::log(b.seconds / a.seconds) / std::log(b.work / a.work);
    return a.seconds * std::pow(work / a.work, slope);
}

constexpr std::size_t most_sides = 6, most_unknowns = most_sides + 2; // a constant, work and sides

// Symmetric positive definite system of the first n rows by Cholesky; only the lower triangle is read.
template <std::size_t N>
struct Normal {
    std::array<std::array<double, N>, N> a{};
    std::array<double, N> b{};

    void add(const std::array<double, N>& x, std::size_t n, double y, double weight) {
        for (std::size_t i = 0; i < n; ++i) {
            b[i] += weight * x[i] * y;
            for (std::size_t j = 0; j <= i; ++j) a[i][j] += weight * x[i] * x[j];
        }
    }
    void solve(std::size_t n) { // into b
        for (std::size_t i = 0; i < n; ++i) {
            for (std::size_t j = 0; j <= i; ++j) {
                double sum = a[i][j];
                for (std::size_t k = 0; k < j; ++k) sum -= a[i][k] * a[j][k];
                a[i][j] = i == j ? std::sqrt(std::max(sum, 1e-12)) : sum / a[j][j];
            }
            for (std::size_t k = 0; k < i; ++k) b[i] -= a[i][k] * b[k];
            b[i] /= a[i][i];
        }
        for (std::size_t i = n; i-- > 0;) {
            for (std::size_t k = i + 1; k < n; ++k) b[i] -= a[k][i] * b[k];
            b[i] /= a[i][i];
        }
    }
};

// Cycles of a grouped product on one kind of tile, every wave as long as a whole tile. Routed rows spread evenly over
// the groups: they are the rows of the result, where a group's last ones fill half a tile on average, or what a
// gradient contracts.
double cycles_on(const ProductTile& tile, bool gradient, const std::vector<double>& sides, int multiprocessors) {
    const double rows = sides[0], groups = sides[3];
    double m = sides[1], n = sides[2], depth = rows; // of a gradient
    if (!gradient) m = rows, n = sides[1], depth = sides[2];
    if (tile.swapped) std::swap(m, n);
    const double down = gradient ? std::ceil(m / tile.down) : std::max(1.0, m / tile.down + 0.5);
    const double tiles = groups * down * std::ceil(n / tile.across);
    const double at_once = std::max(1, multiprocessors / tile.multiprocessors);
    return std::ceil(tiles / at_once) * (std::ceil(depth / tile.depth) * tile.step_cycles + tile.tile_cycles);
}

// What a family's calls take of the tensor cores: the waves of the tiles that its kernels choose, where those are
// known, so that experts of 640 columns fill 5 of 6 tiles of 128. Other work is what it is.
class Work {
public:
    Work(const Hardware& hardware, const std::string& key) : multiprocessors_(hardware.sm_count) {
        const auto begins = [&](const char* with) { return key.rfind(with, 0) == 0; };
        gradient_ = begins("grouped_gemm.wgrad");
        to_inputs_ = begins("grouped_gemm.dgrad");
        const auto found = hardware.product_tiles.find(key);
        if (found != hardware.product_tiles.end()) tiles_ = &found->second;
    }
    double operator()(double work, std::vector<double> sides) const {
        if (tiles_ == nullptr || tiles_->empty() || sides.size() != 4) return work;
        if (to_inputs_) std::swap(sides[1], sides[2]);
        double best = std::numeric_limits<double>::infinity();
        for (const ProductTile& tile : *tiles_)
            best = std::min(best, cycles_on(tile, gradient_, sides, multiprocessors_));
        return best;
    }

private:
    int multiprocessors_;
    bool gradient_ = false, to_inputs_ = false;
    const std::vector<ProductTile>* tiles_ = nullptr;
};

// Seconds as a start, a rate of work and one of what lies beside it (beside_work()): of the three, or of those of them
// that a family has, the combination of no negative term that is nearest to all its calls by their relative errors.
class Formula {
public:
    Formula(const Hardware& hardware, const std::string& key, const std::vector<MeasuredCall>& calls)
        : key_(key), work_(hardware, key) {
        // Every term in the unit of the largest call's, so that the system's numbers are near to one.
        const MeasuredCall& last = calls.back();
        unit_ = {last.seconds, work_(last.work, last.sides) / last.seconds,
                 beside_work(key, last.sides) / last.seconds};
        Normal<3> all;
        for (const MeasuredCall& call : calls) all.add(scaled(call.work, call.sides, call.seconds), 3, 1.0, 1.0);
        double best = -1.0;
        for (unsigned chosen = 1; chosen < 8; ++chosen) {
            if ((chosen & 4u) != 0 && unit_[2] <= 0.0) continue;
            const Place share = solution(all, chosen);
            double explained = 0.0;
            for (std::size_t i = 0; i < 3; ++i) explained += share[i] * all.b[i];
            if (*std::min_element(share.begin(), share.end()) < 0.0 || explained <= best) continue;
            best = explained;
            share_ = share;
        }
    }

    double operator()(double work, const std::vector<double>& sides) const {
        const Place x = scaled(work, sides, 1.0);
        return share_[0] * x[0] + share_[1] * x[1] + share_[2] * x[2];
    }

private:
    using Place = std::array<double, 3>;

    Place scaled(double work, const std::vector<double>& sides, double seconds) const {
        const double beside = unit_[2] > 0.0 ? beside_work(key_, sides) / unit_[2] : 0.0;
        return {unit_[0] / seconds, work_(work, sides) / unit_[1] / seconds, beside / seconds};
    }
    static Place solution(const Normal<3>& all, unsigned chosen) {
        std::array<std::size_t, 3> term{};
        std::size_t n = 0;
        for (std::size_t i = 0; i < 3; ++i)
            if ((chosen & (1u << i)) != 0) term[n++] = i;
        Normal<3> some;
        for (std::size_t i = 0; i < n; ++i) {
            some.b[i] = all.b[term[i]];
            for (std::size_t j = 0; j <= i; ++j) some.a[i][j] = all.a[term[i]][term[j]];
        }
        some.solve(n);
        Place share{};
        for (std::size_t i = 0; i < n; ++i) share[term[i]] = some.b[i];
        return share;
    }

    const std::string& key_;
    Work work_;
    Place unit_{}, share_{};
};

using Place = std::array<double, most_unknowns>; // [1, log2 work, log2 sides..]

Place place_of(double work, const std::vector<double>& sides) {
    Place x{1.0, std::log2(work)};
    for (std::size_t i = 0; i < sides.size(); ++i) x[2 + i] = std::log2(sides[i]);
    return x;
}

double on_surface(const Hardware& hardware, const std::vector<MeasuredCall>& calls, const CostPoint& point) {
    // Octaves, and the weight of a slope of zero. Leaving single calls of an H200's calibration out, errors change by
    // less than a twentieth of themselves from 0.35 to 0.7 octaves and from 0.03 to 1.
    constexpr double least_reach = 0.35, slope_weight = 0.3;
    // What calls of this very shape took is more than what those around it say: within a twentieth of an octave a call
    // counts as thirty.
    constexpr double same_reach = 0.05, same_weight = 30.0;
    constexpr std::size_t near = 4;
    const std::size_t unknowns = point.sides.size() + 2;
    const Formula formula(hardware, point.key, calls);
    const Place at = place_of(point.work, point.sides);
    std::vector<double> distances(calls.size());
    for (std::size_t c = 0; c < calls.size(); ++c) {
        const Place x = place_of(calls[c].work, calls[c].sides);
        for (std::size_t i = 1; i < unknowns; ++i) distances[c] += (x[i] - at[i]) * (x[i] - at[i]);
    }
    std::vector<double> sorted = distances;
    const auto nth = sorted.begin() + static_cast<std::ptrdiff_t>(std::min(near, sorted.size() - 1));
    std::nth_element(sorted.begin(), nth, sorted.end());
    const double reach = std::max(least_reach * least_reach, *nth);
    Normal<most_unknowns> normal;
    double low = std::numeric_limits<double>::infinity(), high = -low;
    for (std::size_t c = 0; c < calls.size(); ++c) {
        const double weight =
            std::exp(-distances[c] / reach) + same_weight * std::exp(-distances[c] / (same_reach * same_reach));
        if (weight < 1e-4) continue;
        Place x = place_of(calls[c].work, calls[c].sides);
        for (std::size_t i = 1; i < unknowns; ++i) x[i] -= at[i];
        const double y = std::log(calls[c].seconds / formula(calls[c].work, calls[c].sides));
        normal.add(x, unknowns, y, weight);
        low = std::min(low, y);
        high = std::max(high, y);
    }
    for (std::size_t i = 1; i < unknowns; ++i) normal.a[i][i] += slope_weight;
    normal.solve(unknowns);
    const double margin = 0.25; // beyond what was seen nearby, a slope is believed no further than this
    return formula(point.work, point.sides) * std::exp(std::clamp(normal.b[0], low - margin, high + margin));
}

} // namespace

double measured_seconds(const Hardware& hardware, const std::vector<MeasuredCall>& calls, const CostPoint& at) {
    if (calls.empty()) return -1.0;
    const std::size_t known = calls.front().sides.size();
    if (known == 0 || known != at.sides.size() || known > most_sides || !(at.work > 0.0))
        return on_curve(calls, at.work);
    return on_surface(hardware, calls, at);
}

} // namespace moe
