// Hopper's copy engine (TMA): boxes of tensors of three dimensions, and of groups of rows, to and from shared memory.
//
// Coordinates go from the contiguous dimension outward. Elements outside the tensor are read as zero and not written.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace moe::cuda::ptx {

struct Box { // corner of the box
    int inner, row, plane;
};

__device__ inline void prefetch(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// A box in a tensor of groups of rows (launch.cuh), which begins `at` rows into the group of `rows` rows from `first`
// on. Elements beyond the group are read as zero.
struct GroupBox {
    static constexpr int span = 1 << 30;
    int inner, first, rows, at;
};

// One box to shared memory; its bytes are reported to the barrier.
__device__ inline void load_box(const CUtensorMap& map, Box at, unsigned shared, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared),
                 "l"(&map), "r"(barrier), "r"(at.inner), "r"(at.row), "r"(at.plane)
                 : "memory");
}

// One box to that place of every CTA in `ctas` (a bit each), reported to each one's barrier.
__device__ inline void load_box(const CUtensorMap& map, Box at, unsigned shared, unsigned barrier, unsigned ctas) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared),
                 "l"(&map), "r"(barrier), "r"(at.inner), "r"(at.row), "r"(at.plane),
                 "h"(static_cast<std::uint16_t>(ctas))
                 : "memory");
}

__device__ inline void load_box(const CUtensorMap& map, GroupBox at, unsigned shared, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
                 "l"(&map), "r"(barrier), "r"(at.inner), "r"(GroupBox::span - at.rows + at.at), "r"(at.first + at.rows),
                 "r"(GroupBox::span)
                 : "memory");
}
__device__ inline void load_box(const CUtensorMap& map, GroupBox at, unsigned shared, unsigned barrier, unsigned ctas) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
                 "l"(&map), "r"(barrier), "r"(at.inner), "r"(GroupBox::span - at.rows + at.at), "r"(at.first + at.rows),
                 "r"(GroupBox::span), "h"(static_cast<std::uint16_t>(ctas))
                 : "memory");
}

// A box of one head's rows in a tensor [sequences, heads, rows, width].
struct HeadBox {
    int inner, row, head, sequence;
};

__device__ inline void load_box(const CUtensorMap& map, HeadBox at, unsigned shared, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
                 "l"(&map), "r"(barrier), "r"(at.inner), "r"(at.row), "r"(at.head), "r"(at.sequence)
                 : "memory");
}

__device__ inline void store_box(const CUtensorMap& map, Box at, unsigned shared) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
                 "r"(shared), "r"(at.inner), "r"(at.row), "r"(at.plane)
                 : "memory");
}

// Bytes in a row, 16 at a time, from and to addresses of 16: no tensor, any device's memory.
__device__ inline void load_bytes(unsigned shared, const void* from, unsigned bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}
// The same to the second-level cache only.
__device__ inline void prefetch_bytes(const void* from, unsigned bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
__device__ inline void store_bytes(void* to, unsigned shared, unsigned bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared), "r"(bytes)
                 : "memory");
}
// Bytes that threads have written to global memory, and others have waited for, come before what the engine reads next.
__device__ inline void fence_global_proxy() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// A thread's stores since the last commit are one group.
__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most `pending` of the thread's groups still read shared memory.
template <int pending>
__device__ void wait_stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// Waits until at most `pending` of the thread's groups are still being written.
template <int pending>
__device__ void wait_stores() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

} // namespace moe::cuda::ptx
