// Ops of low precisions as kernel calls: quantization of rows and of weights, products of what it left, and rounding to
// the values of a format.
#include "engine/ops/operands.hpp"

#include <utility>

namespace moe::ops {

namespace {

FilledRows rows_shape(const OpContext& c, const program::Tensor& rows) {
    return {rows.rows, rows.cols, groups_of(c, 1)};
}

// `rows` rows further on.
Fp8Rows further(Fp8Rows x, std::int64_t rows, std::int64_t cols) {
    return x.data == nullptr ? x : Fp8Rows{x.data + rows * cols, x.scale + rows * scale_blocks(cols)};
}
// So many blocks further on.
Fp8Columns further(Fp8Columns x, std::int64_t blocks, std::int64_t cols) {
    return {x.data + blocks * cols * scale_block, x.scale + blocks * cols};
}

// Columns of BF16 or of quantized rows, piece by piece.
void quantize_columns(const OpContext& c) {
    const auto& [pieces, e5m2] = std::get<program::ColumnBlocksAttr>(c.op.attr);
    FilledRows shape = rows_shape(c, c.input(0));
    shape.rows /= pieces;
    shape.e5m2 = e5m2;
    const std::int64_t blocks = c.output(1).rows / scale_block / pieces;
    for (int piece = 0; piece < pieces; ++piece) {
        const std::int64_t row = piece * shape.rows;
        const Fp8Columns to = further(fp8_columns_out(c, 1), piece * blocks, shape.cols);
        if (is_fp8(c, 0))
            c.kernels.requantize_columns(shape, further(fp8(c, 0), row, shape.cols), ints(c, 1), to, c.stream);
        else
            c.kernels.quantize_columns(shape, src(c, 0) + row * shape.cols, ints(c, 1),
                                       further(fp8_out(c, 0), row, shape.cols), to, c.stream);
    }
}

RoundFormat round_format(const program::RoundAttr& a) {
    const bool gradient = a.role == program::RoundAttr::Role::gradient;
    switch (a.format) {
    case machine::Precision::mxfp8:
        return RoundFormat::mxfp8;
    case machine::Precision::nvfp4:
        return RoundFormat::nvfp4;
    default:
        return gradient ? RoundFormat::e5m2 : RoundFormat::e4m3;
    }
}

void round(const OpContext& c) {
    const program::RoundAttr& a = std::get<program::RoundAttr>(c.op.attr);
    const program::Tensor& x = c.input(0);
    const bool fp4 = a.format == machine::Precision::nvfp4, weight = a.role == program::RoundAttr::Role::weight;
    RoundShape s;
    s.rows = x.rows, s.cols = x.cols, s.groups = groups_of(c, 1), s.run = a.run;
    s.format = round_format(a);
    s.square = fp4 && weight;
    s.transform = fp4 && !weight;
    s.stochastic = fp4 && a.role == program::RoundAttr::Role::gradient;
    s.batch = a.batch, s.tensor = a.tensor;
    if (s.stochastic) {
        if (a.ring > 1) s.first = (c.position.tensor + a.ring - a.step) % a.ring * s.rows;
        if (a.own_columns) s.first_col = c.position.tensor * s.cols;
        s.first_group = std::int64_t{c.position.expert} * s.groups;
    }
    float* largest = floats_out(c, 2);
    if (a.slot >= 0) {
        s.window = floats(c, 4) + a.slot;
        if (largest != nullptr) largest += a.slot;
    }
    Dst by_row = dst(c, 0), by_column = dst(c, 1);
    if (c.has_output(0) && c.output(0).dtype == program::Dtype::fp8_block)
        s.codes = fp8_out(c, 0), by_row = std::exchange(by_column, Dst{});
    c.kernels.round_operand(s, src(c, 0), ints(c, 1), ints(c, 2), ints(c, 3), largest, by_row, by_column, c.stream);
}

void quantize_matrices(const OpContext& c, const program::QuantizeAttr& w) {
    QuantizedWeights s{w.groups, w.n, w.k, w.one_scale, nullptr, floats_out(c, 1)};
    if (w.slot >= 0) {
        s.window = floats(c, 1) + w.slot;
        if (s.largest != nullptr) s.largest += w.slot;
    }
    const Fp8Weights to = fp8_weights(c.out[0], w);
    c.kernels.quantize_weights(s, src(c, 0), to.plain.data, to.plain.scale, to.transposed.data, to.transposed.scale,
                               c.stream);
}

void quantize(const OpContext& c) {
    if (std::holds_alternative<program::RoundAttr>(c.op.attr)) return round(c);
    if (const auto* w = std::get_if<program::QuantizeAttr>(&c.op.attr)) return quantize_matrices(c, *w);
    if (std::holds_alternative<program::ColumnBlocksAttr>(c.op.attr)) return quantize_columns(c);
    const Fp8Rows to = fp8_out(c, 0);
    c.kernels.quantize_rows(rows_shape(c, c.output(0)), src(c, 0), ints(c, 1), to.data, to.scale, c.stream);
}

void dequantize(const OpContext& c) {
    const Fp8Rows from = fp8(c, 0);
    c.kernels.dequantize_rows(rows_shape(c, c.input(0)), from.data, from.scale, ints(c, 1), dst(c, 0), c.stream);
}

void cast(const OpContext& c) { c.kernels.cast(src(c, 0), dst(c, 0), c.output(0).elements(), c.stream); }

} // namespace

// y = x W^T reads the weights as they are; dx = dy W those that are stored transposed, with n and k exchanged.
void fp8_gemm(const OpContext& c, const GemmShape& s) {
    const Fp8Weights w =
        fp8_weights(c.in[1], s.transpose_b ? program::QuantizeAttr{1, s.n, s.k} : program::QuantizeAttr{1, s.k, s.n});
    const Fp8Rows x = fp8(c, 0), &b = s.transpose_b ? w.plain : w.transposed;
    const std::int64_t row = s.a_offset / s.k;
    const bool e5m2 = std::get<program::GemmAttr>(c.op.attr).e5m2;
    c.kernels.scaled_gemm({1, s.n, s.k, s.m, e5m2}, x.data + s.a_offset, x.scale + row * scale_blocks(s.k), b.data,
                          b.scale, nullptr, dst(c, 0) + s.c_offset, c.stream);
}

void fp8_grouped_gemm(const OpContext& c) {
    const program::GroupedGemmAttr& a = std::get<program::GroupedGemmAttr>(c.op.attr);
    const Fp8Weights w = fp8_weights(c.in[1], {a.groups, a.n, a.k});
    const bool forward = a.mode == program::GroupedMode::forward;
    const Fp8Rows x = fp8(c, 0), &b = forward ? w.plain : w.transposed;
    const ScaledShape shape{a.groups, forward ? a.n : a.k, forward ? a.k : a.n, a.capacity, a.e5m2};
    c.kernels.scaled_gemm(shape, x.data, x.scale, b.data, b.scale, ints(c, 2), dst(c, 0), c.stream);
}

// dW (+)= dy^T x of columns; with pieces, of those that one of them has.
void fp8_wgrad(const OpContext& c, std::size_t dy, std::int64_t piece, GemmShape s) {
    const Fp8Columns x = further(fp8_columns(c, 1), piece * scale_blocks(s.k), s.n);
    const bool e5m2 = std::get<program::GemmAttr>(c.op.attr).e5m2;
    c.kernels.scaled_wgrad({1, s.m, s.n, s.k, s.accumulate, 0, e5m2}, fp8_columns(c, dy), x, nullptr, dst(c, 0),
                           c.stream);
}

void fp8_grouped_wgrad(const OpContext& c) {
    const program::GroupedGemmAttr& a = std::get<program::GroupedGemmAttr>(c.op.attr);
    c.kernels.scaled_wgrad({a.groups, a.n, a.k, a.capacity, a.accumulate, a.reserved_sms, a.e5m2}, fp8_columns(c, 0),
                           fp8_columns(c, 1), ints(c, 2), dst(c, 0), c.stream);
}

void add_fp8_kernels(Backend& backend) {
    if (backend.kernels->quantize_rows == nullptr) return; // The plan's precision is refused.
    backend.table[static_cast<std::size_t>(program::OpKind::quantize)] = quantize;
    backend.table[static_cast<std::size_t>(program::OpKind::dequantize)] = dequantize;
    backend.table[static_cast<std::size_t>(program::OpKind::cast)] = cast;
}

} // namespace moe::ops
