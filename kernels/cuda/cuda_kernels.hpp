// The CUDA back end's op table: the signatures of kernels.hpp for device pointers.
//
// `stream` is a cudaStream_t of the current device (null: the legacy default stream). A call only enqueues work:
// nothing is copied between host and device, nothing waits and nothing is allocated, so every kernel can be captured in
// a CUDA graph. Differences from the CPU:
// * reduce_sum and reduce_max read the array `srcs` (at most 64 device pointers) on the host when they are called.
// * Sums have a fixed order, and what adds in memory adds once to an element, but for dq of attention where the shape
//   is not `deterministic` (kernels/kernel_args.hpp).
// * Dense products are cuBLASLt's where libcublasLt.so.13 can be opened when the table is made.
// * Attention of BF16 operands is cuDNN's where libcudnn.so.9 can be opened then. The first call of a shape makes its
//   plan and, where a stream has too little, allocates scratch; both may happen while the stream is being captured.
// * Sizes beyond the kernels' limits (attention heads wider than 256, more than 8 streams of a device with sums of
//   columns) throw std::runtime_error, as does every CUDA error.
#pragma once

#include "kernels/kernels.hpp"
#include "kernels/peers.hpp"
#include "kernels/slot_exchange.hpp"

#include <cstdint>
#include <string>

namespace moe {

// The table, every entry set; null where cuda_supported() says no.
const Kernels* cuda_kernels();

// The table without libraries, with which every entry is compared. Null likewise.
const Kernels* cuda_plain_kernels();
// The functions that move routed tokens between devices that reach each other's memory.
const PeerKernels& cuda_peer_kernels();
// The functions that exchange slots through windows.
const ExchangeKernels& cuda_exchange_kernels();

// True where grouped products run on the tiles of kernels/tiles.hpp on the current device: on Hopper.
bool cuda_has_tiles();

// The library of dense products with its version, or why it is not used.
std::string cuda_gemm_library();
// The library of attention with its version, or why it is not used.
std::string cuda_attention_library();
// Calls of attention and of its gradient so far, by whoever took them; what a graph repeats counts once.
struct AttentionCalls {
    std::int64_t library = 0, plain = 0;
};
AttentionCalls cuda_attention_calls();
// Device memory that libraries hold for all streams by now, beyond what is part of this module.
std::int64_t cuda_library_workspace_bytes();
// Forgets what belongs to a stream. To be called before the stream is destroyed, with its work done: the libraries'
// scratch belongs to a stream, and the graphs that were captured on it are not to be launched again.
void cuda_forget_stream(void* stream);

// Writes `value` to `place`, pinned memory of the host, when the stream has come there.
void cuda_mark(int* place, int value, void* stream);

// Copies `bytes` between device memory and pinned memory of the host, or within either, by `blocks` blocks, rounded up
// to whole pairs, on as many multiprocessors; wherever either side begins. A CUDA graph with such copies is kernels
// alone, and is queued in the time of those: copies by the driver's engines cost the host 3 us each
// (docs/notes/engine-graphs.md). Sides that do not lie alike within 16 bytes go byte by byte, a hundredth as fast.
void cuda_copy_by_blocks(void* to, const void* from, std::int64_t bytes, int blocks, void* stream);
// Such copies that the calling thread has queued or captured so far; what a graph repeats counts once.
std::int64_t cuda_copies_by_blocks();

// Turns the fills with zeros that libraries have put into a captured graph (a cudaGraph_t) into kernels: clear.hpp says
// why.
void cuda_replace_fills(void* captured);

// True where there is a driver and a device that the kernels are compiled for; if not, `why` says what is missing.
bool cuda_supported(std::string& why);

} // namespace moe
