// Seconds of ops from measured calls of their families, whatever their size: what is fitted to a family once.
#pragma once

#include "planner/program/measured.hpp"
#include "simulator/cost/formula.hpp"

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace moe::cost {

// The time of a family from its measured calls. Where calls have no sides: log-log between neighbours of like work,
// beyond the last at its rate. Else the Formula of the family, times what calls near by take of that: its logarithm
// over those of work and sides, locally linear with weights that fall with distance (Cleveland, JASA 74, 1979) and
// slopes drawn to zero, so that where neighbours say nothing the nearest one's share holds.
class MeasuredFamily {
public:
    // `key`: of Hardware::measured. At least one call, sorted by work; they must outlive the family.
    MeasuredFamily(const machine::Hardware& hardware, const std::string& key,
                   const std::vector<machine::MeasuredCall>& calls);
    double seconds(double work, const std::vector<double>& sides) const;
    // The clock, Hz, at which the device would take so long: of the calls near by, as their times are weighted; 0 where
    // none of them has one, and where calls have no sides.
    double clock_hz(double work, const std::vector<double>& sides) const;

private:
    static constexpr std::size_t most_sides = 6, most_unknowns = most_sides + 2; // a constant, work and sides
    using Place = std::array<double, most_unknowns>;                             // [1, log2 work, log2 sides..]
    static Place place_of(double work, const std::vector<double>& sides);
    double on_curve(double work) const;
    double on_surface(double work, const std::vector<double>& sides) const;
    bool has_sides(double work, const std::vector<double>& sides) const {
        return formula_ && sides.size() == sides_ && work > 0.0;
    }
    // Weights of the calls at a place, by their distance from it; 0 for those that are too far.
    std::vector<double> weights_at(const Place& at) const;

    const std::vector<machine::MeasuredCall>& calls_;
    std::size_t sides_; // number of sides of every call
    std::optional<Formula> formula_;
    std::vector<Place> places_;  // places by call
    std::vector<double> shares_; // logarithm of each call's seconds over the formula's
};

// The families of one machine, which must outlive them; each is fitted when it is first asked for. Thread-safe.
class MeasuredFamilies {
public:
    explicit MeasuredFamilies(const machine::Hardware& hardware) : hardware_(hardware) {}
    const MeasuredFamily* find(const std::string& key) const; // nullptr: no call was measured
    const MeasuredFamily*
    find(const program::CostPoint& at) const; // of its key, or of the next longer that was measured

private:
    const machine::Hardware& hardware_;
    mutable std::mutex mutex_;
    mutable std::map<std::string, std::unique_ptr<const MeasuredFamily>> fitted_;
};

} // namespace moe::cost
