// The CUDA back end: the same op kinds on the CUDA kernels, a rank's memory and queue on the current GPU.
#pragma once

#include "engine/ops/backend.hpp"

namespace moe::backends {

// Fills in all but the ops that kernels and the communicator carry out (engine/ops/backend.hpp). Throws Error
// (bad_input) where this machine has no GPU that the kernels are compiled for.
void fill_cuda(ops::Backend& backend);

// The memory of GPU number `device` behind pinned staging, and its streams. `replayed`: steps are captured as CUDA
// graphs.
std::unique_ptr<device::Device> open_cuda(bool replayed, int device);

// The power sample of GPU number `device`; all zero where the driver does not say.
device::PowerSample cuda_draw(int device);

// NCCL. Throws Error (bad_input) where this machine does not have it.
const comm::CollectiveLibrary& nccl_library();

// Memory of other GPUs over NVLink: those of this process directly, those of other processes of this machine by CUDA's
// inter-process handles.
const comm::PeerLibrary& cuda_peers();

} // namespace moe::backends
