// Ops of blockwise FP8 as kernel calls: quantization of rows and of weights, and products of what it left.
#include "engine/ops/operands.hpp"

namespace moe::ops {

namespace {

FilledRows rows_shape(const OpContext& c, const program::Tensor& rows) {
    return {rows.rows, rows.cols, groups_of(c, 1)};
}

void quantize(const OpContext& c) {
    if (const auto* w = std::get_if<program::QuantizeAttr>(&c.op.attr)) {
        const Fp8Weights to = fp8_weights(c.out[0], *w);
        c.kernels.quantize_weights({w->groups, w->n, w->k}, src(c, 0), to.plain.data, to.plain.scale,
                                   to.transposed.data, to.transposed.scale, c.stream);
        return;
    }
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
    c.kernels.scaled_gemm({1, s.n, s.k, s.m}, x.data + s.a_offset, x.scale + row * scale_blocks(s.k), b.data, b.scale,
                          nullptr, dst(c, 0) + s.c_offset, c.stream);
}

void fp8_grouped_gemm(const OpContext& c) {
    const program::GroupedGemmAttr& a = std::get<program::GroupedGemmAttr>(c.op.attr);
    const Fp8Weights w = fp8_weights(c.in[1], {a.groups, a.n, a.k});
    const bool forward = a.mode == program::GroupedMode::forward;
    const Fp8Rows x = fp8(c, 0), &b = forward ? w.plain : w.transposed;
    const ScaledShape shape{a.groups, forward ? a.n : a.k, forward ? a.k : a.n, a.capacity};
    c.kernels.scaled_gemm(shape, x.data, x.scale, b.data, b.scale, ints(c, 2), dst(c, 0), c.stream);
}

void add_fp8_kernels(Backend& backend) {
    if (backend.kernels->quantize_rows == nullptr) return; // The plan's precision is refused.
    backend.table[static_cast<std::size_t>(program::OpKind::quantize)] = quantize;
    backend.table[static_cast<std::size_t>(program::OpKind::dequantize)] = dequantize;
    backend.table[static_cast<std::size_t>(program::OpKind::cast)] = cast;
}

} // namespace moe::ops
