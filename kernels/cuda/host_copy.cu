// Copies between device memory and pinned memory of the host by a few blocks: a ring of pieces in shared memory.
//
// Reads over PCIe are what has to be kept on its way: 55 GB/s times the 2 us that one takes under load are 110 KB, and
// the pieces that two blocks have asked for are 288. Writes are posted.
#include "kernels/cuda/cuda_kernels.hpp"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ptx/barrier.cuh"
#include "kernels/cuda/ptx/tma.cuh"

#include <algorithm>

namespace moe::cuda {

namespace {

// One warp, of which one thread moves the pieces: blocks leave registers and threads of their multiprocessor to others.
// They lie in pairs: products whose blocks come in pairs find room for as many as multiprocessors are left.
constexpr int warp_threads = warp_size, byte_threads = 1024;
constexpr unsigned pair = 2;
constexpr unsigned piece_bytes = 16384, pieces = 12; // bytes of a piece; pieces of a block coming in or going out
constexpr unsigned behind = 2;                       // pieces that may still leave while the place of another is filled

struct RingOfPieces {
    char rows[pieces][piece_bytes];
    std::uint64_t barriers[pieces];
};

thread_local std::int64_t copies_queued = 0;

struct Bytes {
    char* to;
    const char* from;
    std::int64_t count;
};

// The pieces of a block: one in gridDim.x, of `whole` bytes that begin `head` bytes behind the first.
class Pieces {
public:
    __device__ Pieces(const Bytes& all, unsigned head, std::int64_t whole)
        : to_(all.to + head), from_(all.from + head), whole_(whole) {}
    __device__ std::int64_t at(std::int64_t piece) const {
        return (blockIdx.x + piece * gridDim.x) * std::int64_t{piece_bytes};
    }
    __device__ bool has(std::int64_t piece) const { return at(piece) < whole_; }
    __device__ unsigned bytes(std::int64_t piece) const {
        const std::int64_t left = whole_ - at(piece);
        return left < piece_bytes ? static_cast<unsigned>(left) : piece_bytes;
    }
    __device__ char* to(std::int64_t piece) const { return to_ + at(piece); }
    __device__ const char* from(std::int64_t piece) const { return from_ + at(piece); }

private:
    char* to_;
    const char* from_;
    std::int64_t whole_;
};

// `whole` bytes, a multiple of 16, from the first address of 16 bytes on; lanes take those before and behind.
__global__ void __cluster_dims__(pair, 1, 1) __launch_bounds__(warp_threads)
    pieces_kernel(Bytes all, unsigned head, std::int64_t whole) {
    extern __shared__ __align__(128) char shared[];
    auto& ring = *reinterpret_cast<RingOfPieces*>(shared);
    const unsigned lane = threadIdx.x;
    if (blockIdx.x == 0) {
        if (lane < head) all.to[lane] = all.from[lane];
        const std::int64_t behind_all = head + whole + lane;
        if (behind_all < all.count) all.to[behind_all] = all.from[behind_all];
    }
    if (lane != 0) return;
    const Pieces mine(all, head, whole);
    const unsigned rows = ptx::shared_address(ring.rows), barriers = ptx::shared_address(ring.barriers);
    for (unsigned place = 0; place < pieces; ++place) ptx::init_barrier(barriers + 8 * place, 1);
    ptx::fence_barrier_init();
    const auto ask = [&](std::int64_t piece) {
        if (!mine.has(piece)) return;
        const unsigned place = static_cast<unsigned>(piece % pieces);
        ptx::arrive_expecting(barriers + 8 * place, mine.bytes(piece));
        ptx::load_bytes(rows + place * piece_bytes, mine.from(piece), mine.bytes(piece), barriers + 8 * place);
    };
    for (unsigned piece = 0; piece < pieces; ++piece) ask(piece);
    for (std::int64_t piece = 0; mine.has(piece); ++piece) {
        const unsigned place = static_cast<unsigned>(piece % pieces);
        ptx::wait(barriers + 8 * place, static_cast<unsigned>(piece / pieces) & 1u);
        ptx::store_bytes(mine.to(piece), rows + place * piece_bytes, mine.bytes(piece));
        ptx::commit_stores();
        ptx::wait_stores_read<behind>();
        if (piece >= behind) ask(piece - behind + pieces);
    }
    ptx::wait_stores<0>();
}

// Where both sides do not lie alike within 16 bytes.
__global__ void __launch_bounds__(byte_threads) bytes_kernel(Bytes all) {
    const std::int64_t threads = std::int64_t{gridDim.x} * byte_threads;
    for (std::int64_t i = std::int64_t{blockIdx.x} * byte_threads + threadIdx.x; i < all.count; i += threads)
        all.to[i] = all.from[i];
}

} // namespace

} // namespace moe::cuda

namespace moe {

void cuda_copy_by_blocks(void* to, const void* from, std::int64_t bytes, int blocks, void* stream) {
    using namespace cuda;
    if (bytes <= 0) return;
    ++copies_queued;
    const Bytes all{static_cast<char*>(to), static_cast<const char*>(from), bytes};
    const auto place = reinterpret_cast<std::uintptr_t>(to), other = reinterpret_cast<std::uintptr_t>(from);
    if (place % 16 != other % 16) {
        bytes_kernel<<<blocks_for(bytes, byte_threads, blocks), byte_threads, 0, stream_of(stream)>>>(all);
    } else {
        const std::int64_t head = std::min<std::int64_t>((16 - static_cast<std::int64_t>(place % 16)) % 16, bytes);
        const std::int64_t whole = (bytes - head) / 16 * 16;
        CUDA_CHECK(
            cudaFuncSetAttribute(pieces_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(RingOfPieces)));
        const unsigned grid = ceil_div(std::max(1u, blocks_for(whole, piece_bytes, blocks)), pair) * pair;
        pieces_kernel<<<grid, warp_threads, sizeof(RingOfPieces), stream_of(stream)>>>(all, static_cast<unsigned>(head),
                                                                                       whole);
    }
    CUDA_CHECK(cudaGetLastError());
}

std::int64_t cuda_copies_by_blocks() { return cuda::copies_queued; }

} // namespace moe
