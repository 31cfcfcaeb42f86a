// Tokens on their way between NVLink domains: which go where, and what of their choices concerns the domain they reach.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/families.hpp"

namespace moe::cuda {
namespace {

constexpr int threads = 256, place_threads = 1024, place_warps = place_threads / warp_size;
static_assert(place_warps == warp_size, "a warp scans the counts of all warps");

// One block per domain goes over all tokens in order and numbers those that go there.
__global__ void __launch_bounds__(place_threads)
    token_kernel(DomainShape s, const std::int32_t* index, std::int32_t* counts, std::int32_t* slot_of,
                 float* overflow) {
    __shared__ int warp_counts[place_warps];
    const int domain = static_cast<int>(blockIdx.x), each = s.experts / s.domains, first = domain * each;
    const int lane = static_cast<int>(threadIdx.x % warp_size), warp = static_cast<int>(threadIdx.x / warp_size);
    std::int64_t next = 0; // tokens of this domain before those at hand
    for (std::int64_t base = 0; base < s.tokens; base += place_threads) {
        const std::int64_t token = base + threadIdx.x;
        bool goes = false;
        for (int k = 0; token < s.tokens && k < s.top_k; ++k) {
            const std::int32_t expert = index[token * s.top_k + k];
            goes = goes || (expert >= first && expert < first + each);
        }
        const unsigned going = __ballot_sync(all_lanes, goes);
        __syncthreads(); // The previous counts have been read.
        if (lane == 0) warp_counts[warp] = __popc(going);
        __syncthreads();
        const int others = warp_counts[lane];
        const std::int64_t place = next + warp_sum(lane < warp ? others : 0) + __popc(going & ((1u << lane) - 1u));
        next += warp_sum(others);
        if (token < s.tokens)
            slot_of[token * s.domains + domain] =
                goes && place < s.slot_rows ? static_cast<std::int32_t>(domain * s.slot_rows + place) : -1;
    }
    if (threadIdx.x != 0) return;
    counts[domain] = static_cast<std::int32_t>(next < s.slot_rows ? next : s.slot_rows);
    if (overflow != nullptr && next > s.slot_rows) atomicAdd(overflow, static_cast<float>(next - s.slot_rows));
}

__global__ void __launch_bounds__(threads)
    expert_kernel(DomainShape s, const std::int32_t* index, const std::int32_t* counts, std::int32_t* to) {
    const std::int64_t i = std::int64_t{blockIdx.x} * threads + threadIdx.x, slot = s.slot_rows * s.top_k;
    if (i >= s.domains * slot) return;
    const int each = s.experts / s.domains, first = s.domain * each;
    const bool holds = i % slot / s.top_k < counts[i / slot * s.domains + s.domain];
    const std::int32_t expert = holds ? index[i] : -1;
    to[i] = expert >= first && expert < first + each ? expert - first : -1;
}

void token_domains(const DomainShape& s, const std::int32_t* index, std::int32_t* counts, std::int32_t* slot_of,
                   float* overflow, void* stream) {
    if (s.domains <= 0) return;
    token_kernel<<<static_cast<unsigned>(s.domains), place_threads, 0, stream_of(stream)>>>(s, index, counts, slot_of,
                                                                                            overflow);
    CUDA_CHECK(cudaGetLastError());
}

void domain_experts(const DomainShape& s, const std::int32_t* index, const std::int32_t* counts, std::int32_t* to,
                    void* stream) {
    const std::int64_t n = s.domains * s.slot_rows * s.top_k;
    if (n <= 0) return;
    expert_kernel<<<blocks_for(n, threads), threads, 0, stream_of(stream)>>>(s, index, counts, to);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_domains(Kernels& table) {
    table.token_domains = token_domains;
    table.domain_experts = domain_experts;
}

} // namespace moe::cuda
