// Linear layers: quantization, products, and the two ways in which tensor parallelism joins them.
//
// With tp_overlap a column-parallel product takes the sequence as a ring brings it, its own tokens first, and a
// row-parallel one hands its output to the reduction in pieces (Transformer Engine's user buffers; arXiv 2603.07685
// Table 14). In the backward of a column-parallel weight the gather runs beside dgrad and the reduction beside wgrad
// with or without it.
#include "planner/lower/emit/linear.hpp"

#include "planner/lower/emit/rounding.hpp"

#include <algorithm>
#include <vector>

namespace moe::emit {

namespace {

constexpr std::int64_t reduction_pieces = 4; // Megatron-Bridge's num_splits of a product before a reduce-scatter

// The tensor that a product reads and saves of its input.
program::TensorId operand_of(Builder& b, Linear& linear, program::TensorId x) {
    linear.saved = x;
    if (!b.quantized() || !linear.quantize || (!b.rounds() && b.at(x).dtype == b.quantized_dtype())) return x;
    const Quantized q = quantize(b, x, linear.name + ".in", linear.name, true, !linear.shared_input && !b.by_rows());
    if (!linear.shared_input) linear.saved = b.by_rows() ? q.row : q.column;
    return q.row;
}

double bytes_of_rows(const Builder& b, program::TensorId id, std::int64_t rows) {
    return b.at(id).expected_bytes() * static_cast<double>(rows) / static_cast<double>(b.at(id).rows);
}

// One weight of a linear layer: its columns of y, `stride` 0 where these are all.
struct ColumnsOf {
    const Weight& weight;
    std::int64_t from = 0, stride = 0;
    double share = 1.0; // of y
};

template <class Visit>
void each_weight(const Linear& linear, Visit visit) {
    if (!linear.beside) return visit(ColumnsOf{linear.weight});
    const std::int64_t width = linear.width();
    const double share = static_cast<double>(linear.weight.n) / static_cast<double>(width);
    visit(ColumnsOf{linear.weight, 0, width, share});
    visit(ColumnsOf{*linear.beside, linear.weight.n, width, 1.0 - share});
}

// Computes attr.m rows of y from as many of x; attr says which.
void forward_rows(Builder& b, const Linear& linear, program::TensorId x, program::TensorId y, program::GemmAttr attr) {
    each_weight(linear, [&](const ColumnsOf& part) {
        attr.n = part.weight.n;
        attr.k = part.weight.k;
        attr.transpose_b = true;
        attr.ldc = part.stride;
        attr.c_offset = part.from;
        b.gemm(x, part.weight.value, y, attr).bytes = bytes_of_rows(b, x, attr.m) +
                                                      b.at(part.weight.value).expected_bytes() +
                                                      part.share * bytes_of_rows(b, y, attr.m);
    });
}

void dgrad_rows(Builder& b, const Linear& linear, program::TensorId dy, program::TensorId dx, program::GemmAttr attr) {
    each_weight(linear, [&](const ColumnsOf& part) {
        attr.n = part.weight.k;
        attr.k = part.weight.n;
        attr.lda = part.stride;
        attr.a_offset = part.from;
        attr.accumulate = part.from > 0;
        attr.e5m2 = b.one_scale();
        b.gemm(dy, part.weight.value, dx, attr).bytes = part.share * bytes_of_rows(b, dy, attr.m) +
                                                        b.at(part.weight.value).expected_bytes() +
                                                        (attr.accumulate ? 2.0 : 1.0) * bytes_of_rows(b, dx, attr.m);
    });
}

// The layer with weights as products multiply them: itself, or `low` where they are rounded.
const Linear& with_multiplied(Builder& b, const Linear& linear, bool forward, Linear& low) {
    if (!linear.quantize || !(b.rounds() || b.one_scale())) return linear;
    low = linear;
    low.weight.value = multiplied(b, linear.weight, linear.name, 1, forward);
    if (low.beside) low.beside->value = multiplied(b, *linear.beside, linear.name, 1, forward, ".beside");
    return low;
}

program::GemmAttr rows_of(std::int64_t rows) {
    program::GemmAttr attr;
    attr.m = rows;
    return attr;
}

// The rows that step `step` of the ring over TP has brought.
program::GemmAttr ring_rows(const Builder& b, std::int64_t rows, int step) {
    program::GemmAttr attr = rows_of(rows);
    attr.ring = b.plan().tp;
    attr.step = step;
    return attr;
}

// dW += dy^T x; `dy` in one piece, or in those that a ring over TP brings.
void wgrad(Builder& b, const Linear& linear, const std::vector<program::TensorId>& dy, program::TensorId x) {
    b.phase = program::Phase::wgrad;
    each_weight(linear, [&](const ColumnsOf& part) {
        program::GemmAttr attr;
        attr.m = part.weight.n;
        attr.n = part.weight.k;
        attr.k = linear.rows;
        attr.transpose_a = true;
        attr.lda = part.stride;
        attr.a_offset = part.from;
        attr.accumulate =
            b.at(part.weight.gradient).storage == program::Storage::gradient; // FSDP's are new in every backward
        attr.e5m2 = b.one_scale();
        program::Op& op = b.gemm(dy.front(), x, part.weight.gradient, attr);
        op.bytes -= (1.0 - part.share) * b.at(dy.front()).expected_bytes();
        for (std::size_t i = 1; i < dy.size(); ++i) {
            op.in.push_back(dy[i]);
            op.bytes += b.at(dy[i]).expected_bytes();
        }
    });
    b.phase = program::Phase::dgrad;
}

// y + alpha / rank * (x A^T) B^T. Where the input is gathered over TP, x A^T is made of a rank's own tokens and
// gathered in its place: it is narrower by k / rank. Where k is sharded, it is a partial sum, and so is what B makes of
// it.
program::TensorId with_adapter(Builder& b, Linear& linear, program::TensorId x, program::TensorId y) {
    if (!linear.adapter) return y;
    Adapter& adapter = *linear.adapter;
    const std::string name = linear.name + ".lora";
    const Linear a{adapter.a, name + "_a"};
    Linear up{adapter.b, name + "_b"};
    up.beside = adapter.beside;
    const program::TensorId low = b.activation(a.name, b.at(x).rows, adapter.a.n);
    forward_rows(b, a, x, low, rows_of(b.at(x).rows));
    adapter.low = b.scale(low, b.plan().lora.scale(), name + "_scaled");
    if (linear.gather) adapter.low = b.gather_tokens(adapter.low, name + "_full");
    const program::TensorId delta = b.tensor(up.name, b.at(y).dtype, b.at(y).rows, up.width());
    forward_rows(b, up, adapter.low, delta, rows_of(b.at(y).rows));
    return b.add(y, delta, name);
}

// The adapter's wgrads, and dx with its share; dx is of local tokens where the input was gathered.
program::TensorId adapter_backward(Builder& b, const Linear& linear, program::TensorId dy, program::TensorId dx) {
    if (!linear.adapter) return dx;
    const Adapter& adapter = *linear.adapter;
    const std::string name = linear.name + ".lora";
    Linear a{adapter.a, name + "_a"}, up{adapter.b, name + "_b"};
    a.saved = linear.saved, a.rows = b.at(linear.saved).rows;
    up.saved = adapter.low, up.rows = b.at(adapter.low).rows;
    up.beside = adapter.beside;
    program::TensorId dlow = b.activation(up.name + ".din", up.rows, adapter.b.k);
    dgrad_rows(b, up, dy, dlow, rows_of(up.rows));
    if (linear.gather) dlow = b.scatter_tokens(dlow, up.name + ".din_local");
    wgrad(b, up, {dy}, up.saved);
    dlow = b.scale(dlow, b.plan().lora.scale(), name + "_dscaled");
    const program::TensorId share = b.activation(a.name + ".din", a.rows, adapter.a.k);
    dgrad_rows(b, a, dlow, share, rows_of(a.rows));
    wgrad(b, a, {dlow}, a.saved);
    return b.add(dx, share, name + ".din");
}

// The saved input, before any gather.
program::TensorId saved_of(Builder& b, const Linear& linear) {
    const bool blocks = b.by_rows() && !b.one_scale();
    if (!b.quantized() || !linear.quantize || !linear.shared_input || blocks) return linear.saved;
    if (b.one_scale())
        return round_operand(b, linear.saved, linear.name + ".in_again", linear.name, true, false, program::no_tensor,
                             program::RoundAttr::Role::activation)
            .row;
    if (b.rounds())
        return round_operand(b, linear.saved, linear.name + ".in_again", linear.name, false, true, program::no_tensor,
                             program::RoundAttr::Role::activation)
            .column;
    return quantize(b, linear.saved, linear.name + ".in_again", linear.name, false, true).column;
}

// The tensor that `saved_of` has given, gathered, as wgrad multiplies it, in as many pieces as dy comes in.
program::TensorId factor_of(Builder& b, const Linear& linear, program::TensorId x, int pieces = 1) {
    if (!b.by_rows() || !linear.quantize || (linear.shared_input && !b.fp8_wgrad() && !b.one_scale())) return x;
    b.phase = program::Phase::wgrad;
    if (!b.fp8_wgrad()) return dequantize(b, x, linear.name + ".in_wide");
    return columns(b, x, linear.name + ".in", false, program::no_tensor, pieces);
}

// The gradient of y for dgrad, where asked for, and for wgrad; its rows may be those that step `step` of a ring over TP
// has brought.
Quantized quantize_gradient(Builder& b, const Linear& linear, program::TensorId dy, bool row, int step = 0) {
    const Quantized q = quantize(b, dy, linear.name + ".grad", linear.name, row, true);
    if (!b.rounds()) return q;
    auto& attr = std::get<program::RoundAttr>(b.current().ops.back().attr);
    attr.step = step;
    attr.own_columns = linear.gather;
    return q;
}

} // namespace

Quantized quantize(Builder& b, program::TensorId x, const std::string& name, const std::string& linear, bool row,
                   bool column, program::TensorId counts) {
    if (b.rounds()) {
        const bool forward = b.phase == program::Phase::forward;
        return round_operand(b, x, name, linear, row, column && b.with_backward, counts,
                             forward ? program::RoundAttr::Role::activation : program::RoundAttr::Role::gradient);
    }
    if (b.one_scale()) {
        const bool forward = b.phase == program::Phase::forward;
        const auto role = forward ? program::RoundAttr::Role::activation : program::RoundAttr::Role::gradient;
        const Quantized q = round_operand(b, x, name, linear, true, column && !forward && !b.fp8_wgrad(), counts, role);
        if (!column || forward) return {q.row, q.row};
        return {q.row, b.fp8_wgrad() ? columns(b, q.row, name, true, counts) : q.column};
    }
    const program::Tensor shape = b.at(x);
    if (b.by_rows()) {
        const program::TensorId low =
            row ? b.tensor(name + ".row", b.quantized_dtype(), shape.rows, shape.cols, shape.expected_rows)
                : program::no_tensor;
        if (!column || !b.fp8_wgrad()) {
            if (row) b.emit(program::OpKind::quantize, {x, counts}, {low});
            return {low, x};
        }
        const program::TensorId turned = column_tensor(b, shape, name, counts);
        b.emit(program::OpKind::quantize, {x, counts}, {low, turned}, program::ColumnBlocksAttr{});
        return {low, turned};
    }
    const auto make = [&](bool wanted, const char* suffix) {
        return wanted ? b.tensor(name + suffix, b.quantized_dtype(), shape.rows, shape.cols, shape.expected_rows)
                      : program::no_tensor;
    };
    const Quantized q{make(row, ".row"), make(column, ".column")};
    program::Op& op = b.emit(program::OpKind::quantize, {x}, {q.row, q.column});
    // The scale of a whole tensor is its largest value: current scaling reads everything once before it converts.
    if (b.quantized_dtype() == program::Dtype::fp8_tensor && b.plan().fp8_scaling == plan::Fp8Scaling::current)
        op.bytes += shape.expected_bytes();
    return q;
}

bool quantizes_as_written(const Builder& b, std::int64_t width, int widths) {
    return b.by_rows() && !b.one_scale() && (widths == 1 || width % program::fp8_block_size == 0);
}

program::TensorId dequantize(Builder& b, program::TensorId x, const std::string& name, program::TensorId counts) {
    const program::Tensor shape = b.at(x);
    const program::TensorId wide = b.activation(name, shape.rows, shape.cols, shape.expected_rows);
    b.emit(program::OpKind::dequantize, {x, counts}, {wide});
    return wide;
}

program::TensorId column_tensor(Builder& b, const program::Tensor& shape, const std::string& name,
                                program::TensorId counts, int pieces) {
    const std::int64_t groups = counts == program::no_tensor ? 1 : b.at(counts).rows, cols = shape.cols;
    const std::int64_t rows = pieces * program::rows_in_blocks(shape.rows / pieces, groups);
    const double expected = pieces * program::expected_in_blocks(shape.expected_rows / pieces, groups);
    return b.tensor(name + ".column", program::Dtype::fp8_columns, rows, cols,
                    std::min(expected, static_cast<double>(rows)));
}

program::TensorId columns(Builder& b, program::TensorId x, const std::string& name, bool e5m2, program::TensorId counts,
                          int pieces) {
    const program::TensorId turned = column_tensor(b, b.at(x), name, counts, pieces);
    b.emit(program::OpKind::quantize, {x, counts}, {program::no_tensor, turned},
           program::ColumnBlocksAttr{pieces, e5m2});
    return turned;
}

std::optional<Adapter> adapter_of(Builder& b, const std::string& key, std::int64_t n, std::int64_t k, int copies) {
    if (!b.parameters().has(key + ".lora_a")) return std::nullopt;
    const std::int64_t rank = b.plan().lora.rank;
    return Adapter{b.weight(key + ".lora_a", copies * rank, k), b.weight(key + ".lora_b", n, rank)};
}

void bind(Builder& b, Linear& linear, const std::string& key, std::int64_t n, std::int64_t k) {
    const std::string other = key + ParameterSet::beside;
    const std::int64_t beside = b.parameters().elements(other) / k;
    linear.weight = b.weight(key, n - beside, k);
    linear.adapter = adapter_of(b, key, n - beside, k);
    linear.beside = std::nullopt;
    if (beside == 0) return;
    linear.beside = b.weight(other, beside, k);
    if (linear.adapter)
        linear.adapter->beside = b.weight(key + ".lora_b" + ParameterSet::beside, beside, b.plan().lora.rank);
}

program::TensorId linear_forward(Builder& b, Linear& linear, program::TensorId x, program::Dtype out_dtype) {
    program::TensorId operand = operand_of(b, linear, x);
    const bool ring = linear.gather && b.pipelined();
    if (linear.gather && !ring) operand = b.gather_tokens(operand, linear.name + ".in_full");
    const std::int64_t piece = b.at(operand).rows;
    linear.rows = ring ? piece * b.plan().tp : piece;
    const program::TensorId y = b.tensor(linear.name, out_dtype, linear.rows, linear.width());
    Linear low;
    const Linear& read = with_multiplied(b, linear, true, low);
    if (!ring) {
        forward_rows(b, read, operand, y, rows_of(piece));
        return with_adapter(b, linear, x, y);
    }
    for (int step = 0; step < b.plan().tp; ++step) {
        const bool last = step + 1 == b.plan().tp;
        const program::TensorId next = last ? program::no_tensor : b.ring_step(operand, linear.name + ".in_ring");
        forward_rows(b, read, operand, y, ring_rows(b, piece, step));
        operand = next;
    }
    return y;
}

program::TensorId linear_backward(Builder& b, const Linear& linear, program::TensorId dy, program::TensorId low) {
    program::TensorId dy_row = low != program::no_tensor ? low : dy, dy_column = dy;
    b.phase = program::Phase::dgrad;
    if (b.quantized() && linear.quantize && low == program::no_tensor) {
        const Quantized q = quantize_gradient(b, linear, dy, true);
        dy_row = q.row;
        dy_column = q.column;
    }
    // The gather for wgrad is issued before dgrad so that it runs beside it.
    program::TensorId x = program::no_tensor;
    const bool trains = b.trains(linear.weight);
    if (trains) x = saved_of(b, linear);
    if (trains && linear.gather) x = b.gather_tokens(x, linear.name + ".in_again_full");
    program::TensorId dx = b.activation(linear.name + ".din", linear.rows, linear.weight.k);
    Linear rounded;
    dgrad_rows(b, with_multiplied(b, linear, false, rounded), dy_row, dx, rows_of(linear.rows));
    // The reduce-scatter of dx runs beside wgrad.
    if (linear.gather) dx = b.scatter_tokens(dx, linear.name + ".din_local");
    if (trains) {
        x = factor_of(b, linear, x);
        if (low != program::no_tensor && b.fp8_wgrad())
            dy_column = columns(b, low, linear.name + ".grad", b.one_scale());
        wgrad(b, linear, {dy_column}, x);
    }
    return adapter_backward(b, linear, dy, dx);
}

void linear_wgrad(Builder& b, const Linear& linear, program::TensorId dy) {
    b.phase = program::Phase::wgrad;
    const bool low = b.quantized() && linear.quantize;
    const program::TensorId column = low ? quantize_gradient(b, linear, dy, false).column : dy;
    wgrad(b, linear, {column}, factor_of(b, linear, saved_of(b, linear)));
}

program::TensorId linear_forward_scattered(Builder& b, Linear& linear, program::TensorId x, program::Dtype out_dtype,
                                           const std::string& name) {
    if (!b.pipelined()) return b.scatter_tokens(linear_forward(b, linear, x, out_dtype), name);
    const program::TensorId operand = operand_of(b, linear, x);
    linear.rows = b.at(operand).rows;
    std::int64_t pieces = reduction_pieces;
    while (pieces > 1 && linear.rows % (pieces * b.plan().tp) != 0) pieces /= 2; // The sequence is divisible by tp.
    const std::int64_t piece = linear.rows / pieces;
    const std::int64_t own = linear.rows / b.plan().tp, share = piece / b.plan().tp; // rows of one member
    const program::TensorId y_local = b.tensor(name, out_dtype, own, linear.weight.n);
    Linear low;
    const Linear& read = with_multiplied(b, linear, true, low);
    for (std::int64_t row = 0; row < own; row += share) {
        const program::TensorId y = b.tensor(linear.name, out_dtype, piece, linear.weight.n);
        program::GemmAttr rows = rows_of(piece);
        rows.a_offset = row * linear.weight.k;
        rows.runs = b.plan().tp;
        rows.run_stride = own * linear.weight.k;
        forward_rows(b, read, operand, y, rows);
        b.communicate(program::OpKind::reduce_scatter, groups::tensor, program::Stream::tensor, {y}, {y_local},
                      program::ReduceAttr{false, row * linear.weight.n, share * linear.weight.n});
    }
    return y_local;
}

program::TensorId linear_backward_gathered(Builder& b, const Linear& linear, program::TensorId dy,
                                           const std::string& name) {
    if (!b.pipelined()) return linear_backward(b, linear, b.gather_tokens(dy, name));
    b.phase = program::Phase::dgrad;
    const bool low = b.quantized() && linear.quantize;
    const std::int64_t piece = b.at(dy).rows;
    const program::TensorId x = saved_of(b, linear);
    const program::TensorId dx = b.activation(linear.name + ".din", linear.rows, linear.weight.k);
    Linear rounded;
    const Linear& weights = with_multiplied(b, linear, false, rounded);
    std::vector<program::TensorId> dy_columns;
    for (int step = 0; step < b.plan().tp; ++step) {
        const bool last = step + 1 == b.plan().tp;
        const program::TensorId next = last ? program::no_tensor : b.ring_step(dy, name);
        const Quantized q = low ? quantize_gradient(b, linear, dy, true, step) : Quantized{dy, dy};
        dgrad_rows(b, weights, q.row, dx, ring_rows(b, piece, step));
        dy_columns.push_back(q.column);
        dy = next;
    }
    wgrad(b, linear, dy_columns, factor_of(b, linear, x, b.plan().tp));
    return dx;
}

} // namespace moe::emit
