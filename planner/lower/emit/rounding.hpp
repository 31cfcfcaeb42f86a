// Operands of products in fp8-tensor and in precisions that the plan emulates (plan::Plan::computed_in()).
#pragma once

#include "planner/lower/emit/linear.hpp"

#include <string>

namespace moe::emit {

// x, an operand of the layer `linear`, rounded in blocks of its rows and of its columns, each where asked for; a format
// whose scale is the tensor's gives both the same one. What is multiplied in FP8 (Builder::one_scale()) is quantized by
// rows, and `column` is what these stand for, in BF16. `counts` are those of routed rows.
//
// Scales of a history (fp8_scaling = delayed) are those of the layer's role. What a step rounds again, it does not
// report again.
Quantized round_operand(Builder& b, program::TensorId x, const std::string& name, const std::string& linear, bool row,
                        bool column, program::TensorId counts, program::RoundAttr::Role role);

// Weights of `copies` matrices as the open module's products read them: contracted over k (forward) or over n (dgrad).
// Themselves where the plan emulates nothing here; with delayed scaling those of one scale take their place in the
// histories then. `part` tells the weights of one layer apart, which share a scale.
program::TensorId multiplied(Builder& b, const Weight& weight, const std::string& linear, int copies, bool forward,
                             const char* part = "");

} // namespace moe::emit
