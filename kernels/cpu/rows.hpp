// The tools that the CPU kernels share: scratch per thread, rows between storage precision and FP32, the table's
// families.
#pragma once

#include "kernels/bf16.hpp"
#include "kernels/kernels.hpp"

#include <algorithm>
#include <cstring>

namespace moe::cpu {

// Elements that a loop over a long row handles at a time, so that widened copies stay in the L1 cache.
inline constexpr std::int64_t chunk = 2048;

// Buffers that a thread keeps between calls. Each grows to the largest request and is freed when the thread ends, so a
// step allocates nothing once every shape was seen. A kernel uses each slot for one purpose only.
enum class Slot : int { a, b, c, d, e, f, g, h, i, j, count };
float* scratch(Slot slot, std::int64_t elements);
// A buffer for row cursors and indices, kept like those of scratch(): one per thread.
std::int32_t* index_scratch(std::int64_t elements);

inline void widen(const std::uint16_t* x, float* y, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) y[i] = float_of_bf16(x[i]);
}
inline void narrow(const float* x, std::uint16_t* y, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) y[i] = bf16_of_float(x[i]);
}

inline const float* f32(Src x, std::int64_t offset) { return static_cast<const float*>(x.data) + offset; }
inline const std::uint16_t* b16(Src x, std::int64_t offset) {
    return static_cast<const std::uint16_t*>(x.data) + offset;
}
inline float* f32(Dst x, std::int64_t offset) { return static_cast<float*>(x.data) + offset; }
inline std::uint16_t* b16(Dst x, std::int64_t offset) { return static_cast<std::uint16_t*>(x.data) + offset; }

inline float value(Src x, std::int64_t i) { return x.type == Type::f32 ? *f32(x, i) : float_of_bf16(*b16(x, i)); }
inline void put(Dst x, std::int64_t i, float v) {
    if (x.type == Type::f32) {
        *f32(x, i) = v;
    } else {
        *b16(x, i) = bf16_of_float(v);
    }
}

// Copies n elements into FP32.
inline void load(Src x, std::int64_t offset, std::int64_t n, float* y) {
    if (n <= 0) return;
    if (x.type == Type::f32) {
        std::memcpy(y, f32(x, offset), static_cast<std::size_t>(n) * sizeof(float));
    } else {
        widen(b16(x, offset), y, n);
    }
}
// Returns n elements as FP32: in place where they are FP32, otherwise widened into `buffer`.
inline const float* read(Src x, std::int64_t offset, std::int64_t n, float* buffer) {
    if (x.type == Type::f32) return f32(x, offset);
    widen(b16(x, offset), buffer, n);
    return buffer;
}
// The place to write FP32 results for y[offset...]: y itself or `buffer`; flush() then narrows the buffer.
inline float* target(Dst y, std::int64_t offset, float* buffer) {
    return y.type == Type::f32 ? f32(y, offset) : buffer;
}
inline void flush(Dst y, std::int64_t offset, std::int64_t n, const float* written) {
    if (y.type == Type::bf16) narrow(written, b16(y, offset), n);
}
inline void store(Dst y, std::int64_t offset, std::int64_t n, const float* x) {
    if (n <= 0) return;
    if (y.type == Type::f32) {
        if (f32(y, offset) == x) return;
        std::memcpy(f32(y, offset), x, static_cast<std::size_t>(n) * sizeof(float));
    } else {
        narrow(x, b16(y, offset), n);
    }
}
// Moves n elements between storages without rounding where the types agree.
inline void move(Src x, std::int64_t from, Dst y, std::int64_t to, std::int64_t n) {
    if (n <= 0) return;
    if (x.type == Type::bf16 && y.type == Type::bf16) {
        std::memcpy(b16(y, to), b16(x, from), static_cast<std::size_t>(n) * sizeof(std::uint16_t));
    } else if (x.type == Type::f32) {
        store(y, to, n, f32(x, from));
    } else {
        load(x, from, n, f32(y, to));
    }
}

// Rows of group e, cut at what is left of the capacity; `used` counts the rows of the groups before.
inline std::int64_t rows_of(const std::int32_t* counts, int e, std::int64_t used, std::int64_t capacity) {
    return std::clamp<std::int64_t>(counts[e], 0, capacity - used);
}
inline std::int64_t routed_rows(const std::int32_t* counts, int groups, std::int64_t capacity) {
    std::int64_t rows = 0;
    for (int e = 0; e < groups; ++e) rows += rows_of(counts, e, rows, capacity);
    return rows;
}

// n values of a row, from a column that begins a block, as quantize_rows leaves what BF16 makes of them: elements from
// `at` on and scales from `block` on. They are rounded to BF16 in place.
void quantize_part(float* values, std::int64_t n, Fp8Rows q, std::int64_t at, std::int64_t block);

// Calls visit(first row, rows, its columns) for each block of rows that Fp8Columns has: those of all groups, or without
// counts of the one that all rows are.
template <class Visit>
void for_each_block(const FilledRows& s, const std::int32_t* counts, Fp8Columns to, const Visit& visit) {
    std::int64_t first = 0;
    for (int e = 0; e < (counts == nullptr ? 1 : s.groups); ++e) {
        const std::int64_t end = first + (counts == nullptr ? s.rows : rows_of(counts, e, first, s.rows));
        for (; first < end; first = std::min(end, first + scale_block)) {
            visit(first, std::min<std::int64_t>(scale_block, end - first), to);
            to.data += s.cols * scale_block, to.scale += s.cols;
        }
    }
}
// Columns of a block of `rows` rows of BF16's values, which are in FP32 one behind the other.
void put_columns(const float* x, std::int64_t rows, std::int64_t cols, bool e5m2, Fp8Columns to);

// C (+)= op(A) op(B), the body of gemm and grouped_gemm.
void multiply(const GemmShape& shape, Src a, Src b, Dst c);

// Each family of kernels enters itself into the table.
void add_activation(Kernels& table);
void add_attention(Kernels& table);
void add_attention_cached(Kernels& table);
void add_balance(Kernels& table);
void add_delta_conv(Kernels& table);
void add_delta_rule(Kernels& table);
void add_deviate(Kernels& table);
void add_domains(Kernels& table);
void add_embedding(Kernels& table);
void add_gemm(Kernels& table);
void add_layer_norm(Kernels& table);
void add_loss(Kernels& table);
void add_muon(Kernels& table);
void add_norm(Kernels& table);
void add_optimizer(Kernels& table);
void add_permute(Kernels& table);
void add_quantize(Kernels& table);
void add_rope(Kernels& table);
void add_round(Kernels& table);
void add_router(Kernels& table);
void add_scaled_gemm(Kernels& table);
void add_scaled_wgrad(Kernels& table);
void add_sinkhorn(Kernels& table);
void add_slots(Kernels& table);
void add_sparse(Kernels& table);
void add_ssd(Kernels& table);

} // namespace moe::cpu
