// Operands of an op as kernels take them.
#pragma once

#include "engine/ops/backend.hpp"
#include "engine/ops/op_context.hpp"

namespace moe::ops {

inline Type type_of(const program::Tensor& tensor) {
    return tensor.dtype == program::Dtype::bf16 ? Type::bf16 : Type::f32;
}

inline Src src(const OpContext& c, std::size_t i) {
    if (!c.has_input(i)) return {};
    return {c.in[i], type_of(c.input(i))};
}
inline Dst dst(const OpContext& c, std::size_t i) {
    if (!c.has_output(i)) return {};
    return {c.out[i], type_of(c.output(i))};
}
inline const float* floats(const OpContext& c, std::size_t i) {
    return c.has_input(i) ? static_cast<const float*>(c.in[i]) : nullptr;
}
inline float* floats_out(const OpContext& c, std::size_t i) {
    return c.has_output(i) ? static_cast<float*>(c.out[i]) : nullptr;
}
inline const std::int32_t* ints(const OpContext& c, std::size_t i) {
    return c.has_input(i) ? static_cast<const std::int32_t*>(c.in[i]) : nullptr;
}
inline std::int32_t* ints_out(const OpContext& c, std::size_t i) {
    return c.has_output(i) ? static_cast<std::int32_t*>(c.out[i]) : nullptr;
}

// The first of this rank's experts as RowsAttr counts them: those of its domain where dispatch has two levels.
inline int first_expert(const OpContext& c, const program::RowsAttr& attr) {
    return c.position.expert % attr.ep * (attr.experts / attr.ep);
}

// A quantized operand: its elements and, behind them, its scales.
inline Fp8Rows fp8_at(void* data, std::int64_t scales) {
    auto* bytes = static_cast<std::uint8_t*>(data);
    return {bytes, reinterpret_cast<float*>(bytes + scales)};
}
inline Fp8Rows fp8(const OpContext& c, std::size_t i) { return fp8_at(c.in[i], c.input(i).scale_offset()); }
inline Fp8Rows fp8_out(const OpContext& c, std::size_t i) {
    return c.has_output(i) ? fp8_at(c.out[i], c.output(i).scale_offset()) : Fp8Rows{};
}

inline Fp8Columns fp8_columns_at(void* data, const program::Tensor& x) {
    const Fp8Rows at = fp8_at(data, x.scale_offset());
    return {at.data, at.scale};
}
inline Fp8Columns fp8_columns(const OpContext& c, std::size_t i) { return fp8_columns_at(c.in[i], c.input(i)); }
inline Fp8Columns fp8_columns_out(const OpContext& c, std::size_t i) { return fp8_columns_at(c.out[i], c.output(i)); }

// Weights in both forms, as QuantizeAttr lays them out.
struct Fp8Weights {
    Fp8Rows plain, transposed;
};
inline Fp8Weights fp8_weights(void* data, const program::QuantizeAttr& w) {
    const std::int64_t elements = w.groups * w.n * w.k;
    const Fp8Rows plain = fp8_at(data, 2 * elements);
    return {plain, {plain.data + elements, plain.scale + w.scales()}};
}
inline bool is_fp8(const OpContext& c, std::size_t i) {
    return c.has_input(i) && c.input(i).dtype == program::Dtype::fp8_block;
}
inline bool is_columns(const OpContext& c, std::size_t i) {
    return c.has_input(i) && c.input(i).dtype == program::Dtype::fp8_columns;
}

// The parts of an optimizer's shard that move, one after the other.
template <class Visit>
void each_moving_part(const OpContext& c, std::int64_t elements, Visit visit) {
    if (c.parts.empty()) return visit(ShardPart{0, elements});
    for (const ShardPart& part : c.parts)
        if (!part.frozen) visit(part);
}

// Rows of [rows, cols] whatever leading shape the tensor was declared with.
inline std::int64_t rows_of(const program::Tensor& tensor, std::int64_t cols) { return tensor.elements() / cols; }

inline int groups_of(const OpContext& c, std::size_t counts) {
    return c.has_input(counts) ? static_cast<int>(c.input(counts).elements()) : 0;
}

// Quantization, and products of quantized operands.
void add_fp8_kernels(Backend& backend);
void fp8_gemm(const OpContext& context, const GemmShape& shape);
void fp8_grouped_gemm(const OpContext& context);
// Of columns: the part of operand `dy` whose rows are piece `piece` of the other operand's, shape.k in each.
void fp8_wgrad(const OpContext& context, std::size_t dy, std::int64_t piece, GemmShape shape);
void fp8_grouped_wgrad(const OpContext& context);

// Momentum and Newton-Schulz; add_kernels() calls it.
void add_muon_kernels(Backend& backend);

// The ops of routed tokens, from the router to the experts; add_kernels() calls it.
void add_routed_kernels(Backend& backend);
// Those of sparse attention, of a back end that has their kernels; add_kernels() calls it.
void add_sparse_kernels(Backend& backend);
// What the ops `attention` and `attention_grad` are over picked keys.
void attention_picked(const OpContext& context);
void attention_picked_grad(const OpContext& context);
MlaRopeShape mla_shape(const OpContext& context);
// Those of layers with a state; add_kernels() calls it.
void add_state_kernels(Backend& backend);

} // namespace moe::ops
