// Lists of operands: they hold what a vector would, within an op and beyond the room there.
#include "planner/program/operands.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

using moe::program::Operands;
using moe::program::TensorId;

namespace {

std::vector<TensorId> ids(const Operands& operands) { return {operands.begin(), operands.end()}; }

} // namespace

TEST_CASE("operands are copied, moved and lengthened as a vector is, of any length") {
    std::vector<TensorId> expected;
    Operands grown;
    for (TensorId id = 0; id < 40; ++id) {
        CHECK(ids(grown) == expected);
        CHECK(grown == Operands(expected));
        Operands copy = grown, moved = std::move(copy);
        CHECK(ids(moved) == expected);
        CHECK(copy.empty()); // NOLINT(bugprone-use-after-move): nothing is left
        Operands other{7, 8, 9};
        other = moved;
        CHECK(ids(other) == expected);
        Operands longer(std::vector<TensorId>(20, 1));
        longer = std::move(other);
        CHECK(ids(longer) == expected);
        longer = *&longer;
        CHECK(ids(longer) == expected);
        grown.push_back(id);
        expected.push_back(id);
        CHECK(grown.front() == 0);
        CHECK(grown.back() == id);
    }
    grown.append({40, 41});
    expected.insert(expected.end(), {40, 41});
    CHECK(ids(grown) == expected);
    grown.resize(3, -1);
    CHECK(ids(grown) == std::vector<TensorId>{0, 1, 2});
    grown.resize(9, -1);
    CHECK(ids(grown) == std::vector<TensorId>{0, 1, 2, -1, -1, -1, -1, -1, -1});
    grown[8] = 5;
    CHECK(grown.at(8) == 5);
    CHECK_THROWS_AS(grown.at(9), std::out_of_range);
    CHECK_FALSE(grown == Operands{0, 1, 2});
}
