// Barriers and orderings of Hopper: mbarriers in shared memory, clusters, proxies, registers of a warpgroup.
//
// One function is one instruction or a loop around one. None names the cluster's scope: a release or acquire at it
// would make every wait and arrival a fence of the whole device (measured: a fifth to two thirds of the kernel's
// speed), and what these barriers hand over was read or written by the copy engine and the tensor cores, not by
// threads.
#pragma once

#include <cstdint>

namespace moe::cuda::ptx {

__device__ inline unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// The address of the same place in the shared memory of the cluster's CTA `rank`.
__device__ inline unsigned in_cta(unsigned address, unsigned rank) {
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

__device__ inline void init_barrier(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Barriers that were initialised become visible to the cluster and to the copy engine.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One arrival, and `bytes` more that the copy engine will report before the phase is complete.
__device__ inline void arrive_expecting(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// One arrival.
__device__ inline void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// One arrival as soon as the thread's copies (cp.async) so far are there; the barrier expects it.
__device__ inline void arrive_behind_copies(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// One arrival at the barrier of any CTA of the cluster.
__device__ inline void arrive_remote(unsigned cluster_barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_barrier) : "memory");
}

// Waits until the phase of this parity is complete.
__device__ inline void wait(unsigned barrier, unsigned parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}\n" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

// True where that phase is complete.
__device__ inline bool complete(unsigned barrier, unsigned parity) {
    unsigned done;
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, done;\n"
                 "}\n"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done != 0;
}

__device__ inline unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ inline unsigned cluster_ctas() {
    unsigned count;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
    return count;
}
// Every thread of the cluster comes to both; what was written before the first is read behind the second.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ inline void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}
// Out of the shared memory of any CTA of the cluster.
__device__ inline float2 read_remote(unsigned cluster_address) {
    float2 two;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                 : "=f"(two.x), "=f"(two.y)
                 : "r"(cluster_address)
                 : "memory");
    return two;
}

__device__ inline float read_remote_float(unsigned cluster_address) {
    float one;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(one) : "r"(cluster_address) : "memory");
    return one;
}

// Sends to the shared memory of any CTA of the cluster; the eight bytes are reported to a barrier there.
__device__ inline void send(unsigned cluster_address, float2 two, unsigned cluster_barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(cluster_address),
        "f"(two.x), "f"(two.y), "r"(cluster_barrier)
        : "memory");
}

__device__ inline void write_shared(unsigned address, int4 four) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(four.x), "r"(four.y), "r"(four.z),
                 "r"(four.w)
                 : "memory");
}
__device__ inline int4 read_shared(unsigned address) {
    int4 four;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
                 : "r"(address)
                 : "memory");
    return four;
}

// A warpgroup among itself; `id` is one of the CTA's 16 barriers, of which 0 is __syncthreads's.
__device__ inline void sync_warpgroup(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }

// One of two warpgroups waits and the other only lets it go.
__device__ inline void await_warpgroup(int id) { asm volatile("bar.sync %0, 256;" ::"r"(id) : "memory"); }
__device__ inline void release_warpgroup(int id) { asm volatile("bar.arrive %0, 256;" ::"r"(id) : "memory"); }

// Own writes to shared memory come before what the copy engine and the tensor cores read after the next barrier.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int registers>
__device__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

} // namespace moe::cuda::ptx
