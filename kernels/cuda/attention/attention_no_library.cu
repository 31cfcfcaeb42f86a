// The stand-in for attention_library.cu where this was built without cuDNN's headers: the plain kernels stay in the
// table.
#include "kernels/cuda/cuda_kernels.hpp"
#include "kernels/cuda/families.hpp"

namespace moe::cuda {

void add_library_attention(Kernels&) {}
void forget_attention_stream(void*) {}

} // namespace moe::cuda

namespace moe {

std::string cuda_attention_library() { return "built without cuDNN's headers: attention by plain kernels"; }
AttentionCalls cuda_attention_calls() { return {}; } // Without a library there are no calls to count.
std::int64_t cuda_library_workspace_bytes() { return 0; }

} // namespace moe
