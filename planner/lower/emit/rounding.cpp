// Rounding of operands as ops: which blocks each recipe has, and what their stochastic rounding is numbered by.
//
// Transformer Engine's recipes (transformer_engine/common/recipe/__init__.py): MXFP8 in E4M3; per-tensor FP8 with E5M2
// for gradients (Format.HYBRID); NVFP4 with weights in squares, gradients rounded stochastically and, of inputs and
// gradients, a Hadamard transform in what wgrad multiplies. Delayed scaling has one quantizer for each operand of a
// layer there, too; its amaxes are reduced over the ranks that share the layer (transformer_engine/pytorch/fp8.py).
#include "planner/lower/emit/rounding.hpp"

#include "planner/plan/plan.hpp"

#include <algorithm>

namespace moe::emit {

namespace {

// FNV-1a: a name of a tensor among those of a step that is the same in every plan.
std::uint64_t named(int layer, const std::string& name) {
    std::uint64_t hash = 0xcbf29ce484222325u ^ static_cast<std::uint64_t>(layer + 1);
    for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    return hash;
}

// One scale for the whole tensor, or squares: the same values whichever index is contracted.
bool one_form(machine::Precision format, program::RoundAttr::Role role) {
    return format == machine::Precision::fp8_tensor ||
           (format == machine::Precision::nvfp4 && role == program::RoundAttr::Role::weight);
}

bool scales_tensor(machine::Precision format) { return format != machine::Precision::mxfp8; }

// The place of an operand's scale. Entries are in the order of the forward, and so the same without a backward.
int slot_of(Builder& b, const std::string& linear, program::RoundAttr::Role role) {
    program::ProgramIo& io = b.program().io;
    auto found = std::find_if(io.scaled.begin(), io.scaled.end(), [&](const program::ScaledIo& entry) {
        return entry.layer == b.layer && entry.name == linear;
    });
    if (found == io.scaled.end()) {
        found = io.scaled.insert(found, {b.layer, linear});
        for (const program::TensorId id : {io.scale_windows, io.scale_largest}) {
            program::Tensor& all = b.program().tensors[static_cast<std::size_t>(id)];
            all.rows += program::scaled_roles;
            all.expected_rows = static_cast<double>(all.rows);
        }
    }
    return static_cast<int>(found - io.scaled.begin()) * program::scaled_roles + static_cast<int>(role);
}

// Weights of one scale have the slot when they are quantized, as a step begins.
void take_slot(Builder& b, const Weight& weight, const std::string& linear) {
    const program::Tensor& value = b.at(weight.value);
    for (program::Bucket& bucket : b.program().buckets) {
        if (bucket.weights != value.base) continue;
        for (program::Bucket::Matrix& m : bucket.matrices)
            if (b.at(m.value).offset == value.offset) m.slot = slot_of(b, linear, program::RoundAttr::Role::weight);
    }
}

// Whether the operand is one that the step rounds for the first time, and that counts.
bool reports(const Builder& b, program::RoundAttr::Role role) {
    return b.with_backward && (role == program::RoundAttr::Role::gradient || b.phase == program::Phase::forward);
}

} // namespace

Quantized round_operand(Builder& b, program::TensorId x, const std::string& name, const std::string& linear, bool row,
                        bool column, program::TensorId counts, program::RoundAttr::Role role) {
    const program::Tensor shape = b.at(x);
    program::RoundAttr attr;
    attr.format = b.precision();
    attr.role = role;
    attr.batch = b.plan().mbs;
    // Rows of other TP ranks begin blocks of their own, as what is rounded before it is gathered does.
    const std::int64_t own = b.local_tokens();
    attr.run = role == program::RoundAttr::Role::weight || shape.rows % own != 0 ? shape.rows : own;
    const bool one = one_form(attr.format, role);
    const bool low = b.one_scale();
    const auto make = [&](bool wanted, program::Dtype dtype, const char* suffix) {
        return wanted ? b.tensor(name + suffix, dtype, shape.rows, shape.cols, shape.expected_rows)
                      : program::no_tensor;
    };
    const Quantized q{make(row || one, low ? b.quantized_dtype() : program::Dtype::bf16, ".row"),
                      make(column && (low || !one), program::Dtype::bf16, low ? ".values" : ".column")};
    program::Operands in{x};
    if (counts != program::no_tensor) in.push_back(counts);
    if (attr.format == machine::Precision::nvfp4 && role == program::RoundAttr::Role::gradient) {
        in.resize(2, program::no_tensor);
        in.append({b.program().io.positions, b.program().io.noise});
        attr.tensor = named(b.layer, name);
        if (shape.rows == own && counts == program::no_tensor) attr.ring = b.plan().tp;
    }
    program::Operands out{q.row, q.column};
    const program::ProgramIo& io = b.program().io;
    const bool delayed = attr.format == machine::Precision::fp8_tensor && b.plan().keeps_scales();
    if (delayed) {
        attr.slot = slot_of(b, linear, role);
        in.resize(4, program::no_tensor);
        in.push_back(io.scale_windows);
        if (reports(b, role)) out.push_back(io.scale_largest);
    } else if (scales_tensor(attr.format)) {
        out.push_back(b.tensor(name + ".largest", program::Dtype::f32, 2, 1));
    }
    program::Op& op = b.emit(program::OpKind::quantize, std::move(in), std::move(out), attr);
    // A scale of the tensor's own largest magnitude takes a read of its own.
    op.bytes = (scales_tensor(attr.format) && !delayed ? 2.0 : 1.0) * shape.expected_bytes();
    for (const program::TensorId result : {q.row, q.column})
        if (result != program::no_tensor) op.bytes += b.at(result).expected_bytes();
    return {q.row, one && !low ? q.row : q.column};
}

program::TensorId multiplied(Builder& b, const Weight& weight, const std::string& linear, int copies, bool forward,
                             const char* part) {
    if (b.one_scale() && b.plan().keeps_scales()) take_slot(b, weight, linear);
    if (!b.rounds()) return weight.value;
    const Quantized q = round_operand(b, weight.value, linear + part + (forward ? ".weight" : ".weight_again"), linear,
                                      forward, !forward, program::no_tensor, program::RoundAttr::Role::weight);
    std::get<program::RoundAttr>(b.current().ops.back().attr).run = weight.n / copies;
    return forward ? q.row : q.column;
}

} // namespace moe::emit
