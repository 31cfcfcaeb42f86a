// Movement of routed rows: tokens to expert-major copies and back, and the re-sorting of rows that arrive by source.
#include "kernels/cpu/rows.hpp"

#include <Eigen/Core>

namespace moe::cpu {
namespace {

using In = Eigen::Map<const Eigen::ArrayXf>;
using Out = Eigen::Map<Eigen::ArrayXf>;

void permute_map(const std::int32_t* index, std::int32_t* counts, std::int32_t* row_of, std::int32_t* filled,
                 std::int64_t tokens, int top_k, int experts, std::int64_t padded, void*) {
    const std::int64_t copies = tokens * top_k;
    std::fill_n(counts, experts, 0);
    for (std::int64_t i = 0; i < copies; ++i)
        if (index[i] >= 0) ++counts[index[i]];
    std::int32_t* next = index_scratch(experts);
    std::int32_t start = 0;
    for (int e = 0; e < experts; ++e) {
        next[e] = start;
        start += padded > 0 ? static_cast<std::int32_t>(padded) : counts[e];
    }
    if (filled != nullptr) std::fill_n(filled, experts, static_cast<std::int32_t>(padded));
    for (std::int64_t i = 0; i < copies; ++i) row_of[i] = index[i] < 0 ? -1 : next[index[i]]++;
}

void permute(const PermuteShape& s, Src x, const std::int32_t* row_of, Dst rows, void*) {
    if (s.padded_rows > 0)
        std::memset(rows.data, 0, static_cast<std::size_t>(s.padded_rows * s.cols) * size_of(rows.type));
    for (std::int64_t t = 0; t < s.tokens; ++t) {
        for (int k = 0; k < s.top_k; ++k) {
            const std::int64_t copy = t * s.top_k + k;
            if (row_of[copy] >= 0) move(x, (s.per_copy ? copy : t) * s.cols, rows, row_of[copy] * s.cols, s.cols);
        }
    }
}

void unpermute(const PermuteShape& s, Src rows, const std::int32_t* row_of, Dst y, void*) {
    if (s.per_copy) {
        float* zeros = scratch(Slot::a, s.cols);
        std::fill_n(zeros, s.cols, 0.0f);
        for (std::int64_t i = 0; i < s.tokens * s.top_k; ++i) {
            if (row_of[i] >= 0)
                move(rows, row_of[i] * s.cols, y, i * s.cols, s.cols);
            else
                store(y, i * s.cols, s.cols, zeros);
        }
        return;
    }
    float* wide = scratch(Slot::a, s.cols);
    float* wide_y = scratch(Slot::b, s.cols);
    for (std::int64_t t = 0; t < s.tokens; ++t) {
        float* sum = target(y, t * s.cols, wide_y);
        bool any = false;
        for (int k = 0; k < s.top_k; ++k) {
            const std::int64_t row = row_of[t * s.top_k + k];
            if (row < 0) continue;
            if (any)
                Out(sum, s.cols) += In(read(rows, row * s.cols, s.cols, wide), s.cols);
            else
                load(rows, row * s.cols, s.cols, sum);
            any = true;
        }
        if (!any) std::fill_n(sum, s.cols, 0.0f); // All copies of the token were dropped.
        flush(y, t * s.cols, s.cols, sum);
    }
}

void expert_counts(const std::int32_t* all_counts, std::int32_t* counts, int sources, int experts, int first, int local,
                   void*) {
    std::fill_n(counts, local, 0);
    for (int g = 0; g < sources; ++g) {
        const std::int32_t* row = all_counts + static_cast<std::int64_t>(g) * experts + first;
        for (int e = 0; e < local; ++e) counts[e] += row[e];
    }
}

// Rows that the fullest buffer of an expert rank and ETP member lacks; 0 where none does.
std::int64_t excess_rows(const FitShape& s, const std::int32_t* counts) {
    const int local = s.experts / s.ep;
    std::int64_t most = 0;
    for (int p = 0; p < s.ep; ++p)
        for (int m = 0; m < s.etp; ++m) {
            std::int64_t rows = 0;
            for (int source = 0; source < s.ep; ++source) {
                const std::int32_t* row =
                    counts + static_cast<std::int64_t>(source * s.etp + m) * s.experts + p * local;
                for (int e = 0; e < local; ++e) rows += row[e];
            }
            most = std::max(most, rows - s.capacity);
        }
    return most;
}

void fit_rows(const FitShape& s, const std::int32_t* counts, const std::int32_t* row_of, std::int32_t* fitting,
              std::int32_t* fitting_row_of, float* overflow, void*) {
    const std::int64_t excess = excess_rows(s, counts), cells = static_cast<std::int64_t>(s.ep) * s.etp * s.experts;
    if (excess == 0) {
        std::copy_n(counts, cells, fitting);
        std::copy_n(row_of, s.copies, fitting_row_of);
    } else {
        std::fill_n(fitting, cells, 0);
        std::fill_n(fitting_row_of, s.copies, -1);
        *overflow += static_cast<float>(excess);
    }
}

// Calls run(arrival row, sorted row, length) for every run of rows of one source and expert, in arrival order, cut at
// the capacity on both sides.
template <class Run>
void for_each_run(const RowsShape& s, const std::int32_t* all_counts, Run run) {
    std::int32_t* next = index_scratch(s.local);
    expert_counts(all_counts, next, s.ep * s.etp, s.experts, s.first, s.local, nullptr);
    std::int32_t start = 0;
    for (int e = 0; e < s.local; ++e) {
        const std::int32_t rows = next[e];
        next[e] = start;
        start += rows;
    }
    std::int64_t arrival = 0;
    for (int m = 0; m < s.etp; ++m) {
        for (int p = 0; p < s.ep; ++p) {
            const std::int32_t* from = all_counts + static_cast<std::int64_t>(p * s.etp + m) * s.experts + s.first;
            for (int e = 0; e < s.local; ++e) {
                const std::int64_t fits = std::min(s.capacity - arrival, s.capacity - next[e]);
                const std::int64_t length = std::min<std::int64_t>(from[e], fits);
                if (length > 0) run(arrival, std::int64_t{next[e]}, length);
                arrival += from[e];
                next[e] += from[e];
            }
        }
    }
}

void sort_rows(const RowsShape& s, Src rows, const std::int32_t* all_counts, Dst sorted, void*) {
    for_each_run(s, all_counts, [&](std::int64_t arrival, std::int64_t place, std::int64_t length) {
        move(rows, arrival * s.cols, sorted, place * s.cols, length * s.cols);
    });
}

void unsort_rows(const RowsShape& s, Src sorted, const std::int32_t* all_counts, Dst rows, void*) {
    for_each_run(s, all_counts, [&](std::int64_t arrival, std::int64_t place, std::int64_t length) {
        move(sorted, place * s.cols, rows, arrival * s.cols, length * s.cols);
    });
}

} // namespace

void add_permute(Kernels& table) {
    table.permute_map = permute_map;
    table.permute = permute;
    table.unpermute = unpermute;
    table.expert_counts = expert_counts;
    table.fit_rows = fit_rows;
    table.sort_rows = sort_rows;
    table.unsort_rows = unsort_rows;
}

} // namespace moe::cpu
