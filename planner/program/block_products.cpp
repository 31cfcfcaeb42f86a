// Follows the operands of products back to the ops that rounded them.
#include "planner/program/block_products.hpp"

#include "planner/program/program.hpp"

#include <algorithm>

namespace moe::program {

namespace {

// How a tensor was rounded; format bf16: it was not.
struct Form {
    machine::Precision format = machine::Precision::bf16;
    bool along_rows = false, along_columns = false; // the index within a block: columns of a row, rows of a column
    std::int64_t run = 0;                           // rows at which blocks of a column begin anew
};

constexpr int most_copies = 4; // from the rounding op to the product; states that travel to and fro have no end

Form form_of(TensorId id, const Program& program, int copies = 0);

Form written_by(const Op& op, std::size_t out, const Program& program, int copies) {
    switch (op.kind) {
    case OpKind::quantize: {
        const auto* round = std::get_if<RoundAttr>(&op.attr);
        const bool blocks = round != nullptr &&
                            (round->format == machine::Precision::mxfp8 || round->format == machine::Precision::nvfp4);
        const bool routed = op.in.size() > 1 && op.in[1] != no_tensor;
        if (!blocks || routed || out > 1) return {};
        const bool squares =
            round->format == machine::Precision::nvfp4 && round->role == RoundAttr::Role::weight; // one form is both
        return {round->format, out == 0, out == 1 || squares, round->run};
    }
    case OpKind::all_gather: {
        const Form own = form_of(op.in.front(), program, copies + 1);
        return own.format == machine::Precision::mxfp8 ? own : Form{};
    }
    case OpKind::copy_to_host:
    case OpKind::copy_from_host:
        return form_of(op.in[op.in.size() - op.out.size() + out], program, copies + 1);
    default:
        return {};
    }
}

Form form_of(TensorId id, const Program& program, int copies) {
    if (copies > most_copies) return {};
    for (const Template& part : program.templates)
        for (const Op& op : part.ops) {
            const auto found = std::find(op.out.begin(), op.out.end(), id);
            if (found != op.out.end())
                return written_by(op, static_cast<std::size_t>(found - op.out.begin()), program, copies);
        }
    return {};
}

bool whole(std::int64_t n) { return n % block_product_step == 0; }

// Whether blocks of an operand, stored with the contracted index in its rows or in its columns, are whole ones of it.
bool fits(const Form& form, bool in_rows, std::int64_t offset, std::int64_t k) {
    if (in_rows) return form.along_columns && (whole(form.run) || form.run >= k);
    return form.along_rows && whole(offset);
}

} // namespace

machine::Precision block_format(const Op& op, const Program& program) {
    const auto* g = std::get_if<GemmAttr>(&op.attr);
    if (op.kind != OpKind::gemm || g == nullptr || op.in.size() != 2 || g->batch != 1 || g->runs != 1)
        return machine::Precision::bf16;
    if (!whole(g->m) || !whole(g->n) || !whole(g->k)) return machine::Precision::bf16;
    const Form b = form_of(op.in[1], program);
    if (b.format == machine::Precision::bf16) return b.format;
    const Form a = form_of(op.in[0], program);
    const bool both = a.format == b.format && fits(a, g->transpose_a, g->a_offset, g->k) &&
                      fits(b, !g->transpose_b, g->b_offset, g->k);
    return both ? b.format : machine::Precision::bf16;
}

BlockProducts::BlockProducts(const Program& program) {
    for (const Template& part : program.templates)
        for (const Op& op : part.ops)
            if (const machine::Precision format = block_format(op, program); format != machine::Precision::bf16)
                formats_.emplace(&op, format);
}

} // namespace moe::program
