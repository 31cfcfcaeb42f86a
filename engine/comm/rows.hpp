// Where the routed rows of each source and expert lie in the buffers that dispatch and combine move between.
#pragma once

#include "planner/program.hpp"

#include <cstdint>

namespace moe {

// Reads all_counts[ep * etp, experts] (ETP fastest) of one MoE layer. Rows are counted, not bytes.
class RowLayout {
public:
    RowLayout(const RowsAttr& attr, const std::int32_t* all_counts)
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

    const RowsAttr& attr_;
    const std::int32_t* counts_;
    int local_;
};

} // namespace moe
