// How the rows of products begin, and what it costs.
#include "simulator/cost/alignment.hpp"

#include "planner/program/program.hpp"
#include "planner/stack/stack.hpp"

#include <algorithm>
#include <initializer_list>
#include <numeric>

namespace moe::cost {
namespace {

constexpr std::int64_t whole_bytes = 16, least_side = 8;

struct Rows {
    std::int64_t width = 0;            // elements of the first rows that are not whole
    std::int64_t starts = whole_bytes; // bytes that all rows begin at multiples of, at most 16
};

// Of its elements alone, without scales.
std::int64_t row_bytes(program::Dtype dtype, std::int64_t elements) {
    switch (dtype) {
    case program::Dtype::f32:
    case program::Dtype::i32:
        return 4 * elements;
    case program::Dtype::bf16:
        return 2 * elements;
    case program::Dtype::fp8_tensor:
    case program::Dtype::fp8_block:
    case program::Dtype::fp8_columns:
    case program::Dtype::mxfp8:
        return elements;
    case program::Dtype::nvfp4:
        return elements / 2;
    }
    return elements;
}

// One operand or the result: elements of a row, and those by which it begins behind its tensor's start.
struct Matrix {
    program::TensorId tensor;
    std::int64_t width, offset = 0;
};

Rows rows_of(const program::Program& program, std::initializer_list<Matrix> matrices) {
    Rows rows;
    for (const Matrix& m : matrices) {
        if (m.tensor == program::no_tensor) continue;
        const program::Dtype dtype = program.tensors[static_cast<std::size_t>(m.tensor)].dtype;
        const std::int64_t starts =
            std::gcd(std::gcd(row_bytes(dtype, m.width), whole_bytes), row_bytes(dtype, m.offset));
        if (starts < whole_bytes && rows.width == 0) rows.width = m.width;
        rows.starts = std::min(rows.starts, starts);
    }
    return rows;
}

Rows rows_of(const program::Op& op, const program::Program& program) {
    if (op.in.size() < 2 || op.out.empty()) return {};
    const auto stride = [](std::int64_t stated, std::int64_t columns) { return stated > 0 ? stated : columns; };
    if (const auto* g = std::get_if<program::GemmAttr>(&op.attr)) {
        if (std::min({g->m, g->n, g->k}) < least_side) return {};
        return rows_of(program, {{op.in[0], stride(g->lda, g->transpose_a ? g->m : g->k), g->a_offset},
                                 {op.in[1], stride(g->ldb, g->transpose_b ? g->k : g->n), g->b_offset},
                                 {op.out[0], stride(g->ldc, g->n), g->c_offset}});
    }
    if (const auto* g = std::get_if<program::GroupedGemmAttr>(&op.attr)) {
        if (std::min(g->n, g->k) < least_side) return {};
        const bool forward = g->mode == program::GroupedMode::forward;
        return rows_of(program,
                       {{op.in[0], forward ? g->k : g->n}, {op.in[1], g->k}, {op.out[0], forward ? g->n : g->k}});
    }
    return {};
}

} // namespace

std::int64_t unaligned_width(const program::Op& op, const program::Program& program) {
    return rows_of(op, program).width;
}

double alignment_slowdown(const stack::StackCosts& costs, const program::Op& op, const program::Program& program) {
    const Rows rows = rows_of(op, program);
    if (rows.width == 0) return 1.0;
    if (std::holds_alternative<program::GroupedGemmAttr>(op.attr)) return 1.0 / costs.unaligned_experts;
    return 1.0 / (rows.starts >= 4 ? costs.unaligned : costs.unaligned_odd);
}

} // namespace moe::cost
