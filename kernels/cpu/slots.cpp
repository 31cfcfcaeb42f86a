// Routed rows into slots of a fixed size and back, and columns into parts: what exchanges between devices are packed
// by.
#include "kernels/cpu/rows.hpp"

namespace moe::cpu {

namespace {

// Rows that source (from, member) sends to expert rank `to`.
std::int64_t sent(const SlotShape& s, const std::int32_t* all_counts, int from, int member, int to) {
    const int local = s.experts / s.ep;
    const std::int32_t* counts = all_counts + static_cast<std::int64_t>(from * s.etp + member) * s.experts + to * local;
    std::int64_t rows = 0;
    for (int e = 0; e < local; ++e) rows += std::max(0, counts[e]);
    return rows;
}

std::int64_t rows_of_part(const SlotShape& s, const std::int32_t* all_counts, int part) {
    if (s.parts == RowParts::sent) return sent(s, all_counts, s.rank, s.member, part);
    if (s.parts == RowParts::arriving) return sent(s, all_counts, part, s.member, s.rank);
    std::int64_t rows = 0;
    for (int from = 0; from < s.ep; ++from) rows += sent(s, all_counts, from, part, s.rank);
    return rows;
}

// Calls run(first row of the buffer, first row of the slots, length) for every part.
template <class Run>
void for_each_part(const SlotShape& s, const std::int32_t* all_counts, Run run) {
    std::int64_t first = 0;
    for (int part = 0; part < s.count(); ++part) {
        const std::int64_t rows = rows_of_part(s, all_counts, part);
        run(first, part * s.slot_rows, std::min({rows, s.slot_rows, s.capacity - first}));
        first += rows;
    }
}

void rows_to_slots(const SlotShape& s, Src rows, const std::int32_t* all_counts, Dst slots, void*) {
    for_each_part(s, all_counts, [&](std::int64_t row, std::int64_t slot, std::int64_t length) {
        move(rows, row * s.cols, slots, slot * s.cols, length * s.cols);
    });
}

void slots_to_rows(const SlotShape& s, Src slots, const std::int32_t* all_counts, Dst rows, void*) {
    for_each_part(s, all_counts, [&](std::int64_t row, std::int64_t slot, std::int64_t length) {
        move(slots, slot * s.cols, rows, row * s.cols, length * s.cols);
    });
}

// Calls run(offset in [rows, cols], offset in [parts, rows, cols / parts], length).
template <class Run>
void for_each_share(const PartsShape& s, Run run) {
    std::int64_t packed = 0;
    for (int part = 0; part < s.parts; ++part)
        for (std::int64_t row = 0; row < s.rows; ++row) {
            std::int64_t at = row * s.cols();
            for (const std::int64_t piece : s.pieces) {
                const std::int64_t share = piece / s.parts;
                run(at + part * share, packed, share);
                at += piece;
                packed += share;
            }
        }
}

void split_columns(const PartsShape& s, Src x, Dst y, void*) {
    for_each_share(s, [&](std::int64_t wide, std::int64_t packed, std::int64_t n) { move(x, wide, y, packed, n); });
}

void join_columns(const PartsShape& s, Src x, Dst y, void*) {
    for_each_share(s, [&](std::int64_t wide, std::int64_t packed, std::int64_t n) { move(x, packed, y, wide, n); });
}

} // namespace

void add_slots(Kernels& table) {
    table.rows_to_slots = rows_to_slots;
    table.slots_to_rows = slots_to_rows;
    table.split_columns = split_columns;
    table.join_columns = join_columns;
}

} // namespace moe::cpu
