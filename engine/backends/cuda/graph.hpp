// Reduction of a captured step's graph: the edges that it need not hold.
#pragma once

#include <cuda_runtime_api.h>

namespace moe::backends {

// Drops edges that others imply: the order of a stream beside waits that span it. A step of 6,040 nodes under TP 4 on
// H200s had 1,548 of 8,118; without them its two graphs take 64 MiB instead of 116, and the recorded one 12 ms longer
// than the plain one instead of 45.
void drop_implied_edges(cudaGraph_t graph);

} // namespace moe::backends
