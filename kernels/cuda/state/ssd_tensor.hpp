// Mamba-2 on the tensor cores: which calls its kernels take, and the calls.
#pragma once

#include "kernels/kernels.hpp"

#include <cuda_runtime_api.h>

#include <initializer_list>

namespace moe::cuda::ssd {

// True for operands in BF16 whose rows are whole packs of 16 bytes, of more than 64 positions, with states of up to 256
// rows and 128 columns (gradients of more than 128 rows: 64 columns). `work` holds what the plain kernels need and no
// more.
bool tensor_takes(const StateShape& shape, bool grad, std::initializer_list<Src> operands);

// As Kernels::ssd and Kernels::ssd_grad, of calls that tensor_takes().
void run_tensor(const StateShape& shape, Src c, Src p, Src a_log, Src dt_bias, Src skip, Dst o, float* work,
                cudaStream_t stream);
void run_tensor_grads(const StateShape& shape, Src dout, Src c, Src p, Src a_log, Src dt_bias, Src skip, Dst dc, Dst dp,
                      float* da_log, float* ddt_bias, float* dskip, float* work, cudaStream_t stream);

} // namespace moe::cuda::ssd
