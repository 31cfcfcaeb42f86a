// A part of a layer that is priced alone, as two matrices around a core.
#pragma once

#include "planner/lower/emit/linear.hpp"
#include "planner/model/model.hpp"

#include <string>

namespace moe::layers {

// A part that is priced alone (model::OpaquePart): a matrix with the weights of all before its core, a core of the same
// multiply-accumulates, a matrix behind it. It reads normed tokens and hands on what is added to the residual stream,
// nothing where the part has no output of its own.
class OpaquePartOps {
public:
    OpaquePartOps(const model::OpaquePart& part, std::string key, std::string hf_prefix)
        : part_(part), key_(std::move(key)), hf_(std::move(hf_prefix)) {}
    void declare(emit::ParameterSet& set, std::int64_t hidden) const;
    program::TensorId forward(emit::Builder& b, program::TensorId normed);
    program::TensorId backward(emit::Builder& b, program::TensorId dy);

private:
    std::int64_t columns(std::int64_t hidden) const; // of the matrix before the core
    double core_macs(const emit::Builder& b) const;  // per token
    void emit_core(emit::Builder& b, bool back, const program::Operands& in, const program::Operands& out) const;

    const model::OpaquePart& part_;
    std::string key_, hf_;
    emit::Linear in_, out_;
    program::TensorId mixed_ = program::no_tensor, core_ = program::no_tensor;
};

} // namespace moe::layers
