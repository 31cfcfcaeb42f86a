// E4M3 with a scale per block, of activations by rows and of weights in squares, and back; columns of E5M2.
#include "kernels/cpu/rows.hpp"
#include "kernels/rounding.hpp"

#include <bit>

namespace moe::cpu {
namespace {

// The largest magnitude, compared by bits, where NaN lies above all numbers.
float largest_of(const float* x, std::int64_t n) {
    std::uint32_t largest = 0;
    for (std::int64_t i = 0; i < n; ++i) largest = std::max(largest, std::bit_cast<std::uint32_t>(x[i]) & 0x7fffffffu);
    return std::bit_cast<float>(largest);
}

// One block's values to q, and its scale.
float quantize_block(const float* values, std::int64_t n, std::uint8_t* q, bool e5m2 = false) {
    const float largest = largest_of(values, n), scale = e5m2 ? e5m2_scale(largest) : fp8_scale(largest),
                inverse = 1.0f / scale;
    for (std::int64_t i = 0; i < n; ++i) q[i] = (e5m2 ? e5m2_of_float : e4m3_of_float)(values[i] * inverse);
    return scale;
}

std::int64_t filled(const FilledRows& s, const std::int32_t* counts) {
    return counts == nullptr ? s.rows : routed_rows(counts, s.groups, s.rows);
}

void quantize_rows(const FilledRows& s, Src x, const std::int32_t* counts, std::uint8_t* q, float* scale, void*) {
    float* wide = scratch(Slot::a, scale_block);
    const std::int64_t rows = filled(s, counts);
    for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t from = 0; from < s.cols; from += scale_block, ++scale) {
            const std::int64_t n = std::min<std::int64_t>(scale_block, s.cols - from), at = row * s.cols + from;
            *scale = quantize_block(read(x, at, n, wide), n, q + at);
        }
    }
}

void dequantize_rows(const FilledRows& s, const std::uint8_t* q, const float* scale, const std::int32_t* counts, Dst y,
                     void*) {
    float* buffer = scratch(Slot::a, scale_block);
    const std::int64_t rows = filled(s, counts);
    for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t from = 0; from < s.cols; from += scale_block, ++scale) {
            const std::int64_t n = std::min<std::int64_t>(scale_block, s.cols - from), at = row * s.cols + from;
            float* wide = target(y, at, buffer);
            for (std::int64_t i = 0; i < n; ++i) wide[i] = float_of_e4m3(q[at + i]) * *scale;
            flush(y, at, n, wide);
        }
    }
}

// Block by block of all groups' rows, read(first, rows, x) brings its rows in FP32.
template <class Read>
void each_block(const FilledRows& s, const std::int32_t* counts, Fp8Columns columns, const Read& read_block) {
    float* x = scratch(Slot::b, scale_block * s.cols);
    for_each_block(s, counts, columns, [&](std::int64_t first, std::int64_t rows, Fp8Columns to) {
        read_block(first, rows, x);
        put_columns(x, rows, s.cols, s.e5m2, to);
    });
}

void quantize_columns(const FilledRows& s, Src x, const std::int32_t* counts, Fp8Rows q, Fp8Columns columns, void*) {
    const std::int64_t across = scale_blocks(s.cols);
    each_block(s, counts, columns, [&](std::int64_t first, std::int64_t rows, float* wide) {
        load(x, first * s.cols, rows * s.cols, wide);
        for (std::int64_t i = 0; i < rows * s.cols; ++i) wide[i] = float_of_bf16(bf16_of_float(wide[i]));
        for (std::int64_t r = 0; q.data != nullptr && r < rows; ++r)
            quantize_part(wide + r * s.cols, s.cols, q, (first + r) * s.cols, (first + r) * across);
    });
}

// What row `row` of q stands for, in BF16.
void widen_row(const FilledRows& s, Fp8Rows q, std::int64_t row, float* wide) {
    const float* const scale = q.scale + row * scale_blocks(s.cols);
    for (std::int64_t col = 0; col < s.cols; ++col) {
        const float value = (s.e5m2 ? float_of_e5m2 : float_of_e4m3)(q.data[row * s.cols + col]);
        wide[col] = float_of_bf16(bf16_of_float(value * scale[col / scale_block]));
    }
}

void requantize_columns(const FilledRows& s, Fp8Rows q, const std::int32_t* counts, Fp8Columns columns, void*) {
    each_block(s, counts, columns, [&](std::int64_t first, std::int64_t rows, float* wide) {
        for (std::int64_t r = 0; r < rows; ++r) widen_row(s, q, first + r, wide + r * s.cols);
    });
}

void permute_columns(const PermuteShape& p, const FilledRows& s, Fp8Rows tokens, const std::int32_t* row_of,
                     const std::int32_t* counts, std::int32_t* token_of, Fp8Columns columns, void*) {
    for (std::int64_t copy = 0; copy < p.tokens * p.top_k; ++copy)
        if (row_of[copy] >= 0) token_of[row_of[copy]] = static_cast<std::int32_t>(copy / p.top_k);
    each_block(s, counts, columns, [&](std::int64_t first, std::int64_t rows, float* wide) {
        for (std::int64_t row = first; row < first + rows; ++row)
            widen_row(s, tokens, token_of[row], wide + (row - first) * s.cols);
    });
}

// One block, whose first element is `at` of one matrix [n, k]; `back` is its place in the transposed one.
struct Square {
    std::int64_t rows, cols, at, back;
};

// Elements of a row as BF16 has them.
void load_rounded(Src w, std::int64_t at, std::int64_t n, float* x) {
    load(w, at, n, x);
    for (std::int64_t i = 0; i < n; ++i) x[i] = float_of_bf16(bf16_of_float(x[i]));
}

// `of`: the largest magnitude that the scale is of, or null: the square's own.
float quantize_square(const QuantizedWeights& s, const Square& square, Src w, const float* of, std::uint8_t* q,
                      std::uint8_t* qt) {
    float* block = scratch(Slot::a, std::int64_t{scale_block} * scale_block);
    for (std::int64_t r = 0; r < square.rows; ++r)
        load_rounded(w, square.at + r * s.k, square.cols, block + r * square.cols);
    const float scale = of == nullptr                        ? fp8_scale(largest_of(block, square.rows * square.cols))
                        : s.window != nullptr && *of == 0.0f ? 1.0f
                                                             : fp8_scale(*of);
    const float inverse = 1.0f / scale;
    for (std::int64_t r = 0; r < square.rows; ++r) {
        for (std::int64_t c = 0; c < square.cols; ++c) {
            const std::uint8_t value = e4m3_of_float(block[r * square.cols + c] * inverse);
            q[square.at + r * s.k + c] = value;
            qt[square.back + c * s.n + r] = value;
        }
    }
    return scale;
}

// The largest magnitude of all weights.
float largest_weight(const QuantizedWeights& s, Src w) {
    float largest = 0.0f, *const row = scratch(Slot::a, s.k);
    for (std::int64_t r = 0; r < s.groups * s.n; ++r) {
        load_rounded(w, r * s.k, s.k, row);
        const float of_row[] = {largest, largest_of(row, s.k)};
        largest = largest_of(of_row, 2);
    }
    return largest;
}

void quantize_weights(const QuantizedWeights& s, Src w, std::uint8_t* q, float* scale, std::uint8_t* qt,
                      float* qt_scale, void*) {
    if (s.one_scale && s.largest != nullptr) {
        const float found[] = {largest_weight(s, w), s.window == nullptr ? 0.0f : *s.largest};
        *s.largest = largest_of(found, 2);
    }
    const float* const of = !s.one_scale ? nullptr : s.window != nullptr ? s.window : s.largest;
    const std::int64_t down = scale_blocks(s.n), across = scale_blocks(s.k);
    for (std::int64_t g = 0; g < s.groups; ++g) {
        for (std::int64_t i = 0; i < down; ++i) {
            for (std::int64_t j = 0; j < across; ++j) {
                const std::int64_t row = i * scale_block, col = j * scale_block;
                const Square square{std::min<std::int64_t>(scale_block, s.n - row),
                                    std::min<std::int64_t>(scale_block, s.k - col), (g * s.n + row) * s.k + col,
                                    (g * s.k + col) * s.n + row};
                const float found = quantize_square(s, square, w, of, q, qt);
                scale[(g * down + i) * across + j] = qt_scale[(g * across + j) * down + i] = found;
            }
        }
    }
}

} // namespace

void put_columns(const float* x, std::int64_t rows, std::int64_t cols, bool e5m2, Fp8Columns to) {
    float* column = scratch(Slot::c, scale_block);
    for (std::int64_t c = 0; c < cols; ++c) {
        for (std::int64_t r = 0; r < rows; ++r) column[r] = x[r * cols + c];
        std::uint8_t* q = to.data + c * scale_block;
        to.scale[c] = quantize_block(column, rows, q, e5m2);
        std::fill(q + rows, q + scale_block, std::uint8_t{0});
    }
}

void quantize_part(float* values, std::int64_t n, Fp8Rows q, std::int64_t at, std::int64_t block) {
    for (std::int64_t i = 0; i < n; ++i) values[i] = float_of_bf16(bf16_of_float(values[i]));
    for (std::int64_t from = 0; from < n; from += scale_block, ++block)
        q.scale[block] =
            quantize_block(values + from, std::min<std::int64_t>(scale_block, n - from), q.data + at + from);
}

void add_quantize(Kernels& table) {
    table.quantize_rows = quantize_rows;
    table.quantize_columns = quantize_columns;
    table.requantize_columns = requantize_columns;
    table.permute_columns = permute_columns;
    table.dequantize_rows = dequantize_rows;
    table.quantize_weights = quantize_weights;
}

} // namespace moe::cpu
