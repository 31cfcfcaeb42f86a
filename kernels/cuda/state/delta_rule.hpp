// The forward of a gated delta rule as its gradients run it again.
#pragma once

#include "kernels/kernels.hpp"

#include <cuda_runtime_api.h>

namespace moe::cuda {
namespace delta {

struct Rule;

// Throws std::runtime_error for heads that are wider than the kernels' shared memory.
void check_shape(const StateShape& shape);
// Systems of all chunks, then the states; o is written, or where Rule::grad is set V' and the states are kept.
void run_states(const Rule& rule, Dst o, cudaStream_t stream);

} // namespace delta

void add_delta_rule_grad(Kernels& table);

} // namespace moe::cuda
