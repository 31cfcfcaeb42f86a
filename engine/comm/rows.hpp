// The places of the routed rows of each source and expert in the buffers that dispatch and combine move between.
#pragma once

#include "kernels/kernels.hpp"
#include "planner/base/error.hpp"
#include "planner/plan/group.hpp"
#include "planner/program/op_attr.hpp"
#include "planner/program/tensor.hpp"

#include <cstdint>

namespace moe::comm {

// Reads all_counts[ep * etp, experts] (ETP fastest) of one MoE layer. Rows are counted, not bytes.
class RowLayout {
public:
    RowLayout(const program::RowsAttr& attr, const std::int32_t* all_counts)
        : attr_(attr), counts_(all_counts), local_(attr.experts / attr.ep) {}

    // Rows that source (ep, etp) has for the experts of expert rank `to`.
    std::int64_t sent(int ep, int etp, int to) const { return sum(ep, etp, to * local_, (to + 1) * local_); }
    // First of those rows in the source's expert-major buffer.
    std::int64_t send_offset(int ep, int etp, int to) const { return sum(ep, etp, 0, to * local_); }
    // First row of source `from` in the arrival buffer of expert rank `to` (member etp).
    std::int64_t arrival_offset(int from, int etp, int to) const {
        std::int64_t rows = 0;
        for (int source = 0; source < from; ++source) rows += sent(source, etp, to);
        return rows;
    }
    // All rows that arrive at expert rank `to`, member etp.
    std::int64_t arrived(int to, int etp) const { return arrival_offset(attr_.ep, etp, to); }

private:
    std::int64_t sum(int ep, int etp, int first, int last) const {
        const std::int32_t* row = counts_ + static_cast<std::int64_t>(ep * attr_.etp + etp) * attr_.experts;
        std::int64_t rows = 0;
        for (int expert = first; expert < last; ++expert) rows += row[expert];
        return rows;
    }

    const program::RowsAttr& attr_;
    const std::int32_t* counts_;
    int local_;
};

// Rows that member `from` sends to member `to` in all_to_all_slots.
inline std::int64_t rows_in_slot(const program::RowsAttr& attr, const std::int32_t* counts, int from, int to) {
    const std::int64_t rows = attr.combine ? counts[to * attr.ep + from] : counts[from * attr.ep + to];
    if (rows < 0 || rows > attr.capacity)
        fail("all_to_all_slots: {} rows from member {} to {}, a slot has {}", rows, from, to, attr.capacity);
    return rows;
}

// The type that sums over ranks are made of. Throws Error (failure) for other types.
inline Type storage_of_sum(program::Dtype dtype) {
    if (dtype == program::Dtype::f32) return Type::f32;
    if (dtype == program::Dtype::bf16) return Type::bf16;
    fail("a sum of {} values over ranks is not defined: use f32 or bf16", program::to_string(dtype));
}

inline void check_row_capacity(const char* what, std::int64_t rows, std::int64_t capacity) {
    if (rows > capacity)
        fail("{}: {} routed rows do not fit a buffer of {}; plan with capacity 0 (worst case)", what, rows, capacity);
}

// all_to_all between member `tokens`, which holds a part of the sequence, and member `heads`, which holds a part of the
// columns of all of it: visit(offset where all columns of some tokens lie, offset where some columns of all tokens lie,
// count), in elements.
template <class Visit>
void each_exchanged_run(const program::AllToAllAttr& attr, int tokens, int heads, Visit visit) {
    const std::int64_t rows = attr.to_heads ? attr.rows : attr.rows / attr.parts; // rows of one member's tokens
    const std::int64_t wide = attr.to_heads ? attr.cols : attr.cols * attr.parts, narrow = wide / attr.parts;
    for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t run = 2 * r / rows, first = plan::run_start(tokens, static_cast<int>(run), attr.parts, rows);
        std::int64_t at = r * wide, part_at = (first + r - run * (rows / 2)) * narrow;
        for (const std::int64_t piece : attr.pieces) {
            const std::int64_t part = piece / attr.parts;
            visit(at + heads * part, part_at, part);
            at += piece;
            part_at += part;
        }
    }
}

} // namespace moe::comm
