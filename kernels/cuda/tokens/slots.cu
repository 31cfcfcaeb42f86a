// Routed rows into slots of a fixed size and back, columns into parts, and the marks that say how far a stream is.
#include "kernels/cuda/cuda_kernels.hpp"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/families.hpp"

namespace moe::cuda {
namespace {

constexpr int threads = 256, warps = threads / warp_size;
constexpr unsigned splits = 32; // blocks that share a part, since parts are few

struct Part {
    long long first, rows; // first row in the buffer, and number of rows
};

// A cell (source, expert) of all_counts belongs to one part of the buffer, or to none of this rank.
__device__ int part_of(const SlotShape& s, int cell) {
    const int source = cell / s.experts, to = cell % s.experts / (s.experts / s.ep);
    const int from = source / s.etp, member = source % s.etp;
    if (s.parts == RowParts::sent) return from == s.rank && member == s.member ? to : -1;
    if (to != s.rank) return -1;
    if (s.parts == RowParts::arriving) return member == s.member ? from : -1;
    return member;
}

// The whole block adds up what lies before the part and in it.
__device__ Part place_of(const SlotShape& s, const std::int32_t* all_counts, int part) {
    long long before = 0, rows = 0;
    for (int cell = static_cast<int>(threadIdx.x); cell < s.ep * s.etp * s.experts; cell += threads) {
        const int at = part_of(s, cell);
        if (at < 0 || at > part) continue;
        (at < part ? before : rows) += count_of(all_counts, cell);
    }
    Part p;
    p.first = block_sum(before);
    p.rows = block_sum(rows);
    if (p.rows > s.slot_rows) p.rows = s.slot_rows;
    if (p.rows > s.capacity - p.first) p.rows = s.capacity - p.first;
    return p;
}

__global__ void __launch_bounds__(threads)
    slots_kernel(SlotShape s, Src from, const std::int32_t* all_counts, Dst to, bool back) {
    const int part = static_cast<int>(blockIdx.x);
    const Part p = place_of(s, all_counts, part);
    const int lane = static_cast<int>(threadIdx.x % warp_size);
    for (long long r = blockIdx.y * warps + threadIdx.x / warp_size; r < p.rows; r += splits * warps) {
        const std::int64_t row = p.first + r, slot = part * s.slot_rows + r;
        copy_row(from, (back ? slot : row) * s.cols, to, (back ? row : slot) * s.cols, s.cols, lane, warp_size);
    }
}

void move_slots(const SlotShape& s, Src from, const std::int32_t* all_counts, Dst to, bool back, void* stream) {
    if (s.cols <= 0 || s.slot_rows <= 0 || s.capacity <= 0) return;
    const dim3 grid(static_cast<unsigned>(s.count()), splits);
    slots_kernel<<<grid, threads, 0, stream_of(stream)>>>(s, from, all_counts, to, back);
    CUDA_CHECK(cudaGetLastError());
}

void rows_to_slots(const SlotShape& s, Src rows, const std::int32_t* all_counts, Dst slots, void* stream) {
    move_slots(s, rows, all_counts, slots, false, stream);
}
void slots_to_rows(const SlotShape& s, Src slots, const std::int32_t* all_counts, Dst rows, void* stream) {
    move_slots(s, slots, all_counts, rows, true, stream);
}

// A warp per row and part.
__global__ void __launch_bounds__(threads)
    parts_kernel(PartsShape s, std::int64_t columns, Src from, Dst to, bool back) {
    const std::int64_t item = std::int64_t{blockIdx.x} * warps + threadIdx.x / warp_size;
    if (item >= s.rows * s.parts) return;
    const int lane = static_cast<int>(threadIdx.x % warp_size);
    const std::int64_t part = item / s.rows, row = item % s.rows, cols = columns;
    std::int64_t wide = row * cols, packed = item * (cols / s.parts);
    for (const std::int64_t piece : s.pieces) {
        const std::int64_t share = piece / s.parts, at = wide + part * share;
        copy_row(from, back ? packed : at, to, back ? at : packed, share, lane, warp_size);
        wide += piece;
        packed += share;
    }
}

void move_parts(const PartsShape& s, Src from, Dst to, bool back, void* stream) {
    if (s.rows <= 0 || s.cols() <= 0) return;
    parts_kernel<<<blocks_for(s.rows * s.parts, warps), threads, 0, stream_of(stream)>>>(s, s.cols(), from, to, back);
    CUDA_CHECK(cudaGetLastError());
}

void split_columns(const PartsShape& s, Src x, Dst y, void* stream) { move_parts(s, x, y, false, stream); }
void join_columns(const PartsShape& s, Src x, Dst y, void* stream) { move_parts(s, x, y, true, stream); }

// The host reads the place while streams run: the write must not wait in a cache of the device.
__global__ void mark_kernel(volatile int* place, int value) {
    *place = value;
    __threadfence_system();
}

} // namespace

void add_slots(Kernels& table) {
    table.rows_to_slots = rows_to_slots;
    table.slots_to_rows = slots_to_rows;
    table.split_columns = split_columns;
    table.join_columns = join_columns;
}

} // namespace moe::cuda

namespace moe {

void cuda_mark(int* place, int value, void* stream) {
    cuda::mark_kernel<<<1, 1, 0, cuda::stream_of(stream)>>>(place, value);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace moe
