// Fits the formula of a family to its measured calls.
#include "simulator/cost/formula.hpp"

#include "planner/program/measured.hpp"

#include <limits>
#include <utility>

namespace moe::cost {

namespace {

// Cycles of a grouped product on one kind of tile, every wave as long as a whole tile. Routed rows spread evenly over
// the groups: they are the rows of the result, where a group's last ones fill half a tile on average, or what a
// gradient contracts.
double cycles_on(const machine::ProductTile& tile, bool gradient, const std::vector<double>& sides,
                 int multiprocessors) {
    const double rows = sides[0], groups = sides[3];
    double m = sides[1], n = sides[2], depth = rows; // of a gradient
    if (!gradient) m = rows, n = sides[1], depth = sides[2];
    if (tile.swapped) std::swap(m, n);
    const double down = gradient ? std::ceil(m / tile.down) : std::max(1.0, m / tile.down + 0.5);
    const double tiles = groups * down * std::ceil(n / tile.across);
    const double at_once = std::max(1, multiprocessors / tile.multiprocessors);
    return std::ceil(tiles / at_once) * (std::ceil(depth / tile.depth) * tile.step_cycles + tile.tile_cycles);
}

std::array<double, 3> solution(const Normal<3>& all, unsigned chosen) {
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
    std::array<double, 3> share{};
    for (std::size_t i = 0; i < n; ++i) share[term[i]] = some.b[i];
    return share;
}

} // namespace

TensorWork::TensorWork(const machine::Hardware& hardware, const std::string& key)
    : multiprocessors_(hardware.sm_count) {
    const auto begins = [&](const char* with) { return key.rfind(with, 0) == 0; };
    gradient_ = begins("grouped_gemm.wgrad");
    to_inputs_ = begins("grouped_gemm.dgrad");
    const auto found = hardware.product_tiles.find(key);
    if (found != hardware.product_tiles.end()) tiles_ = found->second;
}

double TensorWork::operator()(double work, std::vector<double> sides) const {
    if (tiles_.empty() || sides.size() != 4) return work;
    if (to_inputs_) std::swap(sides[1], sides[2]);
    double best = std::numeric_limits<double>::infinity();
    for (const machine::ProductTile& tile : tiles_)
        best = std::min(best, cycles_on(tile, gradient_, sides, multiprocessors_));
    return best;
}

Formula::Formula(const machine::Hardware& hardware, const std::string& key,
                 const std::vector<machine::MeasuredCall>& calls)
    : key_(key), work_(hardware, key), overlaps_(key.find("gemm") != std::string::npos) {
    // Every term in the unit of the largest call's, so that the system's numbers are near to one.
    const machine::MeasuredCall& last = calls.back();
    unit_ = {last.seconds, work_(last.work, last.sides) / last.seconds,
             program::beside_work(key, last.sides) / last.seconds};
    std::vector<Terms> terms;
    for (const machine::MeasuredCall& call : calls) terms.push_back(scaled(call.work, call.sides, call.seconds));
    // Gauss-Newton: the root is linear in both terms, with their shares of it as factors.
    constexpr int most_steps = 12;
    for (int step = 0; step < (overlaps_ && unit_[2] > 0.0 ? most_steps : 1); ++step) {
        Normal<3> all;
        for (const Terms& x : terms) all.add(step > 0 ? linear(x) : x, 3, 1.0, 1.0);
        share_ = nearest(all);
    }
}

double Formula::operator()(double work, const std::vector<double>& sides) const {
    const Terms x = scaled(work, sides, 1.0);
    const double first = share_[1] * x[1], second = share_[2] * x[2];
    return share_[0] * x[0] + (overlaps_ ? std::hypot(first, second) : first + second);
}

Formula::Terms Formula::scaled(double work, const std::vector<double>& sides, double seconds) const {
    const double beside = unit_[2] > 0.0 ? program::beside_work(key_, sides) / unit_[2] : 0.0;
    return {unit_[0] / seconds, work_(work, sides) / unit_[1] / seconds, beside / seconds};
}

Formula::Terms Formula::linear(Terms x) const {
    const double first = share_[1] * x[1], second = share_[2] * x[2], root = std::hypot(first, second);
    if (root > 0.0) x[1] *= first / root, x[2] *= second / root;
    return x;
}

Formula::Terms Formula::nearest(const Normal<3>& all) const {
    Terms found{};
    double best = -1.0;
    for (unsigned chosen = 1; chosen < 8; ++chosen) {
        if ((chosen & 4u) != 0 && unit_[2] <= 0.0) continue;
        const Terms share = solution(all, chosen);
        double explained = 0.0;
        for (std::size_t i = 0; i < 3; ++i) explained += share[i] * all.b[i];
        if (*std::min_element(share.begin(), share.end()) < 0.0 || explained <= best) continue;
        best = explained;
        found = share;
    }
    return found;
}

} // namespace moe::cost
