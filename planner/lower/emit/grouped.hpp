// Products of routed rows with the weights of their experts, and the adapters beside them.
#pragma once

#include "planner/lower/emit/linear.hpp"

#include <optional>
#include <string>

namespace moe::emit {

// One grouped GEMM; `operand` and `other` may be quantized copies.
void grouped(Builder& b, program::GroupedMode mode, program::TensorId operand, program::TensorId other,
             program::TensorId counts, program::TensorId out, program::GroupedGemmAttr attr);

// y[r, n] with what the adapters of `groups` experts add for x[r, k]; y itself without adapters.
program::TensorId with_adapter(Builder& b, std::optional<Adapter>& adapter, int groups, program::TensorId x,
                               program::TensorId counts, program::TensorId y, const std::string& name);
// Gradients of the adapters behind dy, and dx with their share. x: the input of the forward.
program::TensorId adapter_backward(Builder& b, const std::optional<Adapter>& adapter, int groups, program::TensorId dy,
                                   program::TensorId x, program::TensorId counts, program::TensorId dx,
                                   const std::string& name);

} // namespace moe::emit
