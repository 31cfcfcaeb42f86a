// What layer emitters write with: tensors and ops of the template that is open, with sizes, bytes and FLOPs filled in.
#pragma once

#include "planner/lower/emit/parameters.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/program.hpp"

#include <string>
#include <utility>
#include <vector>

namespace moe {

// The groups that emitters name; a group of one rank gives an op-free path.
namespace groups {
inline constexpr Group tensor{Domain::dense, axis::tensor};
inline constexpr Group context{Domain::dense, axis::context};
inline constexpr Group expert{Domain::expert, axis::expert};
inline constexpr Group expert_tensor{Domain::expert, axis::tensor};
inline constexpr Group dispatch{Domain::expert, axis::expert | axis::tensor};
inline constexpr Group samples{Domain::dense, axis::context | axis::data};
inline constexpr Group pipeline{Domain::dense, axis::pipeline};
inline constexpr Group world{Domain::dense, axis::tensor | axis::context | axis::data | axis::pipeline};
} // namespace groups

// A matrix-shaped weight [n, k] with its FP32 gradient; both are views of flat buckets.
struct Weight {
    TensorId value = no_tensor, gradient = no_tensor;
    std::int64_t n = 0, k = 0;
};

class Builder {
public:
    Builder(const Plan& plan, Program& program, ParameterSet& parameters);

    const Plan& plan() const { return plan_; }
    const Model& model() const { return *plan_.model; }
    Program& program() { return program_; }
    const Program& program() const { return program_; }
    ParameterSet& parameters() { return parameters_; }

    // Starts a template; ops go there until the next open(). Returns its index.
    int open(SlotKind kind, int chunk);
    Template& current() { return program_.templates[static_cast<std::size_t>(open_)]; }
    int chunk() const { return chunk_; }

    // What the next ops belong to.
    Module module = Module::residual;
    Phase phase = Phase::forward;
    int layer = -1;
    bool bf16 = false; // of a layer that is not quantized

    Dtype activation_dtype() const { return activations_; }
    // What operands of the open module's products are quantized to; bf16: as they are.
    bool quantized() const { return quantized_dtype() != Dtype::bf16; }
    Dtype quantized_dtype() const;
    // Whether they are quantized in one form only, see Plan::blocks_by_rows().
    bool by_rows() const { return plan_.blocks_by_rows() && quantized_dtype() == Dtype::fp8_block; }
    std::int64_t local_tokens() const { return local_; }       // T: outside the TP region
    std::int64_t gathered_tokens() const { return gathered_; } // S: inside

    // An activation of the open chunk. expected_rows < 0: all rows hold data.
    TensorId tensor(std::string name, Dtype dtype, std::int64_t rows, std::int64_t cols, double expected_rows = -1.0);
    TensorId activation(std::string name, std::int64_t rows, std::int64_t cols, double expected_rows = -1.0) {
        return tensor(std::move(name), activations_, rows, cols, expected_rows);
    }
    const Tensor& at(TensorId id) const { return program_.tensors[static_cast<std::size_t>(id)]; }
    double expected_rows(TensorId id) const { return at(id).expected_rows; }

    // Appends an op; bytes default to its operands' (outputs that are accumulated into count twice), FLOPs to 0.
    Op& emit(OpKind kind, std::vector<TensorId> in, std::vector<TensorId> out, Attr attr = {});
    Op& communicate(OpKind kind, Group group, Stream stream, std::vector<TensorId> in, std::vector<TensorId> out,
                    Attr attr = {});

    // C[m, n] (+)= op(A) op(B).
    Op& gemm(TensorId a, TensorId b, TensorId c, GemmAttr attr);
    // x + y where a layer ends; with hyper-connections its bytes are those of all residual streams.
    TensorId residual(TensorId x, TensorId y, const std::string& name);
    TensorId add(TensorId a, TensorId b, const std::string& name);

    // Whether the open module's products run piece by piece beside their gather or reduction over TP.
    bool pipelined() const;
    // [T, C] of the next member of the TP group, as a ring of tp - 1 steps brings the sequence together.
    TensorId ring_step(TensorId x, const std::string& name);
    // [T, C] -> [S, C] and back (summed); the identity without TP.
    TensorId gather_tokens(TensorId x, const std::string& name);
    TensorId scatter_tokens(TensorId x, const std::string& name);

    Weight weight(const std::string& key, std::int64_t n, std::int64_t k) {
        return parameters_.weight(program_, key, n, k);
    }

private:
    double operand_bytes(const Op& op) const;

    const Plan& plan_;
    Program& program_;
    ParameterSet& parameters_;
    Dtype activations_ = Dtype::bf16;
    std::int64_t local_ = 0, gathered_ = 0;
    int open_ = -1, chunk_ = -1;
};

// Dtype of activations and of quantized operands (bf16 when the plan quantizes nothing) under a precision.
Dtype activation_dtype(Precision precision);
Dtype quantized_dtype(Precision precision);

} // namespace moe
