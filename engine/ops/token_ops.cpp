// The two ops by permutation, an exchange of rows and a sort, on the rank's own kernels: what peers' memory saves.
#include "engine/ops/token_ops.hpp"

#include "engine/ops/operands.hpp"

#include <vector>

namespace moe::ops {

namespace {

// Rows on their way; kept by the thread, which is a rank's.
char* scratch(int number, std::int64_t bytes) {
    thread_local std::vector<char> memory[2];
    std::vector<char>& at = memory[number];
    if (static_cast<std::int64_t>(at.size()) < bytes) at.resize(static_cast<std::size_t>(bytes));
    return at.data();
}

comm::TokenOperands operands_of(const OpContext& c) {
    const program::RowsAttr& attr = std::get<program::RowsAttr>(c.op.attr);
    const bool back = attr.combine;
    const program::Tensor& tokens = back ? c.output(0) : c.input(0);
    comm::TokenOperands t;
    t.tokens = tokens.rows;
    t.top_k = static_cast<int>(c.input(2).elements() / tokens.rows);
    t.dtype = c.input(0).dtype;
    t.in = c.in[0];
    t.all_counts = ints(c, 1);
    t.row_of = ints(c, 2);
    t.out = c.out[0];
    t.beside = c.merged || attr.beside;
    if (back) {
        t.places = ints(c, 3);
        t.values = floats(c, 4);
        t.parts = c.out[1];
        t.values_out = floats_out(c, 2);
    } else {
        t.values = floats(c, 3);
        t.values_out = floats_out(c, 1);
        t.places_out = t.values != nullptr ? ints_out(c, 2) : static_cast<std::int32_t*>(c.in[4]);
        if (is_fp8(c, 0)) t.in_scale = fp8(c, 0).scale, t.out_scale = fp8_out(c, 0).scale;
    }
    return t;
}

// One of what travels: rows of `cols`, or (per_copy) one value per copy.
void move_rows(const OpContext& c, const comm::TokenOperands& t, Src from, Dst to, std::int64_t cols, bool per_copy) {
    program::RowsAttr attr = std::get<program::RowsAttr>(c.op.attr);
    attr.cols = cols;
    const program::Dtype dtype = from.type == Type::bf16 ? program::Dtype::bf16 : program::Dtype::f32;
    const int local = attr.experts / attr.ep;
    const std::int64_t copies = t.tokens * t.top_k, row = program::bytes_of(dtype, attr.cols);
    const PermuteShape tokens{t.tokens, attr.cols, t.top_k, per_copy, 0};
    const RowsShape order{attr.cols, attr.capacity, attr.experts, attr.ep, attr.etp, first_expert(c, attr), local};
    const Dst sent{scratch(0, copies * row), from.type}, arrived{scratch(1, attr.capacity * row), from.type};
    if (attr.combine) {
        c.kernels.unsort_rows(order, from, t.all_counts, arrived, c.stream);
        c.communicator.all_to_all_rows(c.op.group, arrived.data, t.all_counts, sent.data, attr, dtype, attr.capacity,
                                       copies);
        c.kernels.unpermute(tokens, sent, t.row_of, to, c.stream);
    } else {
        c.kernels.permute(tokens, from, t.row_of, sent, c.stream);
        c.communicator.all_to_all_rows(c.op.group, sent.data, t.all_counts, arrived.data, attr, dtype, copies,
                                       attr.capacity);
        c.kernels.sort_rows(order, arrived, t.all_counts, to, c.stream);
    }
}

} // namespace

void exchange_tokens(const OpContext& c) {
    const comm::TokenOperands t = operands_of(c);
    if (c.communicator.exchange_tokens(c.op.group, std::get<program::RowsAttr>(c.op.attr), t)) return;
    const std::int64_t cols = std::get<program::RowsAttr>(c.op.attr).cols;
    if (t.in_scale != nullptr) { // One FP32 element carries four in E4M3.
        move_rows(c, t, {t.in, Type::f32}, {t.out, Type::f32}, cols / 4, false);
        move_rows(c, t, {t.in_scale, Type::f32}, {t.out_scale, Type::f32}, scale_blocks(cols), false);
    } else {
        const Type type = type_of(c.input(0));
        move_rows(c, t, {t.in, type}, {t.out, type}, cols, false);
    }
    if (t.values != nullptr) move_rows(c, t, {t.values, Type::f32}, {t.values_out, Type::f32}, 1, true);
}

} // namespace moe::ops
