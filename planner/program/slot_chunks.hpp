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

} // namespace moe::program
