// Slots of routed rows and parts of columns: every element where a plain count puts it, nothing else written.
#include "tests/kernels/case.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>

namespace moe::test {

namespace {

// The rows of a buffer by part, in the words of SlotShape, from one list of all rows that travel.
std::vector<std::int64_t> part_rows(const SlotShape& s, const Index& all_counts) {
    std::vector<std::int64_t> rows(static_cast<std::size_t>(s.count()));
    for (int from = 0; from < s.ep; ++from)
        for (int member = 0; member < s.etp; ++member)
            for (int e = 0; e < s.experts; ++e) {
                const int to = e / (s.experts / s.ep);
                const std::int32_t n = all_counts[static_cast<std::size_t>((from * s.etp + member) * s.experts + e)];
                int part = -1;
                if (s.parts == RowParts::sent && from == s.rank && member == s.member) part = to;
                if (s.parts == RowParts::arriving && to == s.rank && member == s.member) part = from;
                if (s.parts == RowParts::gathered && to == s.rank) part = member;
                if (part >= 0) rows[static_cast<std::size_t>(part)] += n;
            }
    return rows;
}

void check_slots(SlotShape s, std::int32_t most, Type type) {
    const std::string name =
        fmt::format("slots {} cols {} experts {} ep {} etp {} at {}.{} up to {} {}", static_cast<int>(s.parts), s.cols,
                    s.experts, s.ep, s.etp, s.rank, s.member, most, name_of(type));
    INFO(name);
    Random random(name);
    const Index all_counts = random.indices(std::int64_t{s.ep} * s.etp * s.experts, most + 1);
    const std::vector<std::int64_t> parts = part_rows(s, all_counts);
    std::int64_t rows = 0;
    for (const std::int64_t n : parts) rows += n;
    s.slot_rows = *std::max_element(parts.begin(), parts.end()) + 2;
    s.capacity = rows + 3;
    const Tensor buffer = random.tensor(type, s.capacity * s.cols);
    Tensor slots(type, s.count() * s.slot_rows * s.cols), back(type, s.capacity * s.cols);
    table().rows_to_slots(s, buffer.src(), all_counts.data(), slots.dst(), nullptr);
    table().slots_to_rows(s, slots.src(), all_counts.data(), back.dst(), nullptr);
    std::int64_t first = 0;
    for (std::size_t p = 0; p < parts.size(); ++p) {
        const std::int64_t slot = static_cast<std::int64_t>(p) * s.slot_rows * s.cols, used = parts[p] * s.cols;
        CHECK(slots.values(slot, used) == buffer.values(first * s.cols, used));
        CHECK(slots.untouched(slot + used, s.slot_rows * s.cols - used));
        first += parts[p];
    }
    CHECK(back.values(0, rows * s.cols) == buffer.values(0, rows * s.cols));
    CHECK(back.untouched(rows * s.cols, 3 * s.cols));
}

} // namespace

TEST_CASE("rows_to_slots and back: what is sent, what arrives, what members gather, and nothing") {
    for (const Type type : {Type::f32, Type::bf16})
        for (const RowParts parts : {RowParts::sent, RowParts::arriving, RowParts::gathered}) {
            SlotShape s;
            s.parts = parts;
            s.cols = 5, s.experts = 12, s.ep = 3, s.etp = 2, s.rank = 1, s.member = 1;
            check_slots(s, 7, type);
            check_slots(s, 0, type);
            s.cols = 64, s.experts = 40, s.ep = 8, s.etp = 1, s.rank = 7, s.member = 0;
            check_slots(s, 60, type);
            s.cols = 1, s.experts = 4, s.ep = 1, s.etp = 4, s.rank = 0, s.member = 2;
            check_slots(s, 9, type);
        }
}

TEST_CASE("rows_to_slots and back: counts beyond the slots or the capacity write nothing outside them") {
    SlotShape s;
    s.parts = RowParts::arriving;
    s.cols = 2, s.experts = 2, s.ep = 2, s.slot_rows = 2, s.capacity = 4;
    const Index all_counts{3, 0, 4, 0}; // three rows, then four, for four places
    Random random("beyond");
    const Tensor buffer = random.tensor(Type::f32, 8);
    Tensor slots(Type::f32, 8), back(Type::f32, 8);
    table().rows_to_slots(s, buffer.src(), all_counts.data(), slots.dst(), nullptr);
    CHECK(slots.values(0, 4) == buffer.values(0, 4));
    CHECK(slots.values(4, 2) == buffer.values(6, 2)); // the second part begins at row 3 and has room for one
    CHECK(slots.untouched(6, 2));
    table().slots_to_rows(s, slots.src(), all_counts.data(), back.dst(), nullptr);
    CHECK(back.values(0, 4) == buffer.values(0, 4));
    CHECK(back.untouched(4, 2));
    CHECK(back.values(6, 2) == buffer.values(6, 2));
}

TEST_CASE("split_columns and join_columns: every share of every piece") {
    for (const Type type : {Type::f32, Type::bf16})
        for (const PartsShape& s :
             {PartsShape{3, {8, 4, 4}, 4}, PartsShape{5, {6, 0, 0}, 2}, PartsShape{2, {64, 32, 32}, 2},
              PartsShape{1, {3, 3, 6}, 3}, PartsShape{0, {2, 0, 0}, 2}}) {
            Random random(fmt::format("parts {} {} {}", s.rows, s.parts, s.pieces[0]));
            const Tensor x = random.tensor(type, s.rows * s.cols());
            Tensor y(type, x.size()), back(type, x.size());
            table().split_columns(s, x.src(), y.dst(), nullptr);
            table().join_columns(s, y.src(), back.dst(), nullptr);
            std::int64_t at = 0;
            for (int part = 0; part < s.parts; ++part)
                for (std::int64_t row = 0; row < s.rows; ++row) {
                    std::int64_t piece_start = row * s.cols();
                    for (const std::int64_t piece : s.pieces) {
                        const std::int64_t share = piece / s.parts;
                        CHECK(y.values(at, share) == x.values(piece_start + part * share, share));
                        at += share;
                        piece_start += piece;
                    }
                }
            CHECK(back.values() == x.values());
        }
}

} // namespace moe::test
