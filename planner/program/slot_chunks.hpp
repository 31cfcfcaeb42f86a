// How much of a slot two NVLink domains exchange, where kernels of the devices count its rows.
#pragma once

#include <algorithm>
#include <cstdint>

namespace moe::program {

// Rows of a chunk: 512 KiB of 2,048 columns in BF16, as much as a link or a NIC needs to reach its rate.
inline constexpr std::int64_t slot_chunk_rows = 128;
// Rows that move for a slot that holds `rows` of `slot_rows`.
constexpr std::int64_t rows_in_chunks(std::int64_t rows, std::int64_t slot_rows) {
    return std::min(slot_rows, (rows + slot_chunk_rows - 1) / slot_chunk_rows * slot_chunk_rows);
}
// Whether chunks are to carry slots of `slot_rows` that are expected to hold `rows`. On two H200 they took a quarter
// less than whole slots by messages at a fill of 0.5, 2 % more at 0.79, and up to 17 % more at 1: a line through these
// crosses at 0.77 (docs/notes/kernels-dispatch-combine.md).
constexpr bool chunks_gain(double rows, std::int64_t slot_rows) {
    constexpr double most_filled = 0.8;
    return rows <= most_filled * static_cast<double>(slot_rows);
}

} // namespace moe::program
