// Operands of products in precisions that the plan emulates (plan::Plan::computed_in()).
#pragma once

#include "planner/lower/emit/linear.hpp"

#include <string>

namespace moe::emit {

// x rounded in blocks of its rows and of its columns, each where asked for; a format whose scale is the tensor's gives
// both the same one. `counts` are those of routed rows.
Quantized round_operand(Builder& b, program::TensorId x, const std::string& name, bool row, bool column,
                        program::TensorId counts, program::RoundAttr::Role role);

// Weights of `copies` matrices as the open module's products read them: contracted over k (forward) or over n (dgrad).
// Themselves where the plan emulates nothing here.
program::TensorId multiplied(Builder& b, const Weight& weight, const std::string& name, int copies, bool forward);

} // namespace moe::emit
