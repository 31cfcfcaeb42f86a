// The builder that layer emitters write with: tensors and ops of the template that is open, with sizes, bytes and FLOPs
// filled in.
#pragma once

#include "planner/lower/emit/parameters.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/program.hpp"

#include <string>
#include <utility>
#include <vector>

namespace moe::emit {

// The groups that emitters name; a group of one rank gives an op-free path.
namespace groups {
inline constexpr plan::Group tensor{plan::Domain::dense, plan::axis::tensor};
inline constexpr plan::Group context{plan::Domain::dense, plan::axis::context};
inline constexpr plan::Group context_inner{plan::Domain::dense, plan::axis::context_inner};
inline constexpr plan::Group context_outer{plan::Domain::dense, plan::axis::context_outer};
inline constexpr plan::Group expert{plan::Domain::expert, plan::axis::expert};
inline constexpr plan::Group expert_inner{plan::Domain::expert, plan::axis::expert_inner};
inline constexpr plan::Group expert_outer{plan::Domain::expert, plan::axis::expert_outer};
inline constexpr plan::Group expert_tensor{plan::Domain::expert, plan::axis::tensor};
inline constexpr plan::Group dispatch{plan::Domain::expert, plan::axis::expert | plan::axis::tensor};
inline constexpr plan::Group samples{plan::Domain::dense, plan::axis::context | plan::axis::data};
inline constexpr plan::Group stage{plan::Domain::dense, // ranks that share the layers of a pipeline rank
                                   plan::axis::tensor | plan::axis::context | plan::axis::data};
inline constexpr plan::Group pipeline{plan::Domain::dense, plan::axis::pipeline};
inline constexpr plan::Group world{plan::Domain::dense,
                                   plan::axis::tensor | plan::axis::context | plan::axis::data | plan::axis::pipeline};
} // namespace groups

// A matrix-shaped weight [n, k] with its FP32 gradient; both are views of flat buckets.
struct Weight {
    program::TensorId value = program::no_tensor, gradient = program::no_tensor;
    std::int64_t n = 0, k = 0;
};

class Builder {
public:
    Builder(const plan::Plan& plan, program::Program& program, ParameterSet& parameters);

    const plan::Plan& plan() const { return plan_; }
    const model::Model& model() const { return *plan_.model; }
    program::Program& program() { return program_; }
    const program::Program& program() const { return program_; }
    ParameterSet& parameters() { return parameters_; }

    // Starts a template; ops go there until the next open(). Returns its index.
    int open(plan::SlotKind kind, int chunk);
    program::Template& current() { return program_.templates[static_cast<std::size_t>(open_)]; }
    int chunk() const { return chunk_; }

    // The module that the next ops belong to.
    program::Module module = program::Module::residual;
    program::Phase phase = program::Phase::forward;
    int layer = -1;
    bool bf16 = false;            // the layer is not quantized
    bool with_backward = true;    // a backward follows; else the forward is all there is
    bool named = true;            // tensors have names; segments are lowered by the ten thousand and need none
    std::int64_t cached_keys = 0; // generation: positions whose keys and values are kept from call to call

    program::Dtype activation_dtype() const { return activations_; }
    machine::Precision precision() const; // of the open module's products
    // True where their operands are rounded to a format that the plan emulates, and stay BF16.
    bool rounds() const { return plan_.emulates(precision()); }
    // True where they are quantized by rows to E4M3, gradients to E5M2, with one scale for each tensor.
    bool one_scale() const { return by_rows() && precision() == machine::Precision::fp8_tensor; }
    // The type that operands of the open module's products are quantized to; bf16 where they are not, or are rounded.
    bool quantized() const { return rounds() || quantized_dtype() != program::Dtype::bf16; }
    program::Dtype quantized_dtype() const;
    // True where they are quantized in one form only, see Plan::blocks_by_rows().
    bool by_rows() const { return plan_.blocks_by_rows() && quantized_dtype() == program::Dtype::fp8_block; }
    bool fp8_wgrad() const { return plan_.fp8_wgrad && by_rows(); }
    std::int64_t local_tokens() const { return local_; }       // T: outside the TP region
    std::int64_t gathered_tokens() const { return gathered_; } // S: inside

    // An activation of the open chunk. expected_rows < 0: all rows hold data.
    program::TensorId tensor(std::string name, program::Dtype dtype, std::int64_t rows, std::int64_t cols,
                             double expected_rows = -1.0);
    program::TensorId activation(std::string name, std::int64_t rows, std::int64_t cols, double expected_rows = -1.0) {
        return tensor(std::move(name), activations_, rows, cols, expected_rows);
    }
    const program::Tensor& at(program::TensorId id) const { return program_.tensors[static_cast<std::size_t>(id)]; }
    double expected_rows(program::TensorId id) const { return at(id).expected_rows; }

    // Appends an op; bytes default to its operands' (outputs that are accumulated into count twice), FLOPs to 0.
    program::Op& emit(program::OpKind kind, program::Operands in, program::Operands out, program::Attr attr = {});
    program::Op& communicate(program::OpKind kind, plan::Group group, program::Stream stream, program::Operands in,
                             program::Operands out, program::Attr attr = {});

    // C[m, n] (+)= op(A) op(B).
    program::Op& gemm(program::TensorId a, program::TensorId b, program::TensorId c, program::GemmAttr attr);
    // x + y where a layer ends; with hyper-connections its bytes are those of all residual streams.
    // Where the model has a factor of what layers add, y is multiplied by it first; residual_gradient() is y's
    // gradient.
    program::TensorId residual(program::TensorId x, program::TensorId y, const std::string& name);
    program::TensorId residual_gradient(program::TensorId dy, const std::string& name);
    program::TensorId scale(program::TensorId x, double factor, const std::string& name);
    // The sum of an FP32 tensor over the TP ranks; the identity without TP.
    program::TensorId sum_over_tp(program::TensorId partial, const std::string& name);
    program::TensorId add(program::TensorId a, program::TensorId b, const std::string& name);

    // True where the open module's products run piece by piece beside their gather or reduction over TP.
    bool pipelined() const;
    // [T, C] of the next member of the TP group, as a ring of tp - 1 steps brings the sequence together.
    program::TensorId ring_step(program::TensorId x, const std::string& name);
    // [T, C] -> [S, C] and back (summed); the identity without TP.
    program::TensorId gather_tokens(program::TensorId x, const std::string& name);
    program::TensorId scatter_tokens(program::TensorId x, const std::string& name);

    // The gradient of a frozen vector goes nowhere: kernels of norms make it beside that of their input. Frozen
    // matrices have none.
    Weight weight(const std::string& key, std::int64_t n, std::int64_t k);
    bool trains(const Weight& weight) const;

private:
    double operand_bytes(const program::Op& op) const;

    const plan::Plan& plan_;
    program::Program& program_;
    ParameterSet& parameters_;
    program::Dtype activations_ = program::Dtype::bf16;
    std::int64_t local_ = 0, gathered_ = 0;
    int open_ = -1, chunk_ = -1;
};

// Dtype of activations, and of quantized operands of products that a plan wants in a precision: bf16 where they are not
// quantized, or are rounded.
program::Dtype activation_dtype(machine::Precision precision);
program::Dtype quantized_dtype(const plan::Plan& plan, machine::Precision wanted);

} // namespace moe::emit
