// Rows that arrived source by source into expert-major order, and back; the runs' places are found on the device.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/families.hpp"

namespace moe::cuda {
namespace {

constexpr int threads = 256, warps = threads / warp_size;
constexpr unsigned splits = 8; // blocks that share a run, since runs are few and of any length

struct Run { // consecutive rows of one source for one expert
    long long arrival, place, length;
};

// A block per run adds up what lies before the run on either side: in arrival order all earlier sources and this
// source's earlier experts, in expert-major order all earlier experts and the earlier sources of this one.
__device__ Run run_of(const RowsShape& s, const std::int32_t* all_counts, int order, int e) {
    long long arrival = 0, place = 0;
    const int sources = s.ep * s.etp;
    for (int i = static_cast<int>(threadIdx.x); i < sources * s.local; i += threads) {
        const int other = i / s.local, expert = i % s.local; // `other` counts in arrival order, member by member.
        const int row = other % s.ep * s.etp + other / s.ep;
        const long long rows = all_counts[std::int64_t{row} * s.experts + s.first + expert];
        if (other < order || (other == order && expert < e)) arrival += rows;
        if (expert < e || (expert == e && other < order)) place += rows;
    }
    Run run;
    run.arrival = block_sum(arrival);
    run.place = block_sum(place);
    const int row = order % s.ep * s.etp + order / s.ep;
    run.length = all_counts[std::int64_t{row} * s.experts + s.first + e];
    const long long last = run.arrival > run.place ? run.arrival : run.place;
    if (run.length > s.capacity - last) run.length = s.capacity - last;
    return run;
}

__global__ void __launch_bounds__(threads)
    sort_kernel(RowsShape s, Src from, const std::int32_t* all_counts, Dst to, bool back) {
    const int order = static_cast<int>(blockIdx.x) / s.local, e = static_cast<int>(blockIdx.x) % s.local;
    const Run run = run_of(s, all_counts, order, e);
    const int lane = static_cast<int>(threadIdx.x % warp_size);
    for (long long r = blockIdx.y * warps + threadIdx.x / warp_size; r < run.length; r += splits * warps) {
        const std::int64_t source = (back ? run.place : run.arrival) + r, target = (back ? run.arrival : run.place) + r;
        copy_row(from, source * s.cols, to, target * s.cols, s.cols, lane, warp_size);
    }
}

void reorder(const RowsShape& s, Src from, const std::int32_t* all_counts, Dst to, bool back, void* stream) {
    const std::int64_t runs = std::int64_t{s.ep} * s.etp * s.local;
    if (runs <= 0 || s.cols <= 0 || s.capacity <= 0) return;
    const dim3 grid(blocks_for(runs, 1), splits);
    sort_kernel<<<grid, threads, 0, stream_of(stream)>>>(s, from, all_counts, to, back);
    CUDA_CHECK(cudaGetLastError());
}

void sort_rows(const RowsShape& s, Src rows, const std::int32_t* all_counts, Dst sorted, void* stream) {
    reorder(s, rows, all_counts, sorted, false, stream);
}
void unsort_rows(const RowsShape& s, Src sorted, const std::int32_t* all_counts, Dst rows, void* stream) {
    reorder(s, sorted, all_counts, rows, true, stream);
}

} // namespace

void add_sort(Kernels& table) {
    table.sort_rows = sort_rows;
    table.unsort_rows = unsort_rows;
}

} // namespace moe::cuda
