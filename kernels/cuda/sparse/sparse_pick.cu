// Sparse attention's choice of keys: scores of all keys that a query sees, the smallest that is picked, bit by bit, and
// the positions of those in order. Scores of heads of 128 columns come from the tensor cores, for as many rows at a
// time as the stream's memory holds; of others from loops.
#include "kernels/cuda/scratch.hpp"
#include "kernels/cuda/sparse/sparse.hpp"
#include "kernels/cuda/sparse/sparse_index.cuh"

namespace moe::cuda {
namespace {

constexpr int threads = 256, warps = threads / warp_size;

// A number that is larger where the score is; of equal scores the same, of one that is no number the smallest.
__device__ unsigned order_of(float score) {
    if (score != score) score = -INFINITY;
    if (score == 0.0f) score = 0.0f; // -0 is 0.
    const unsigned bits = __float_as_uint(score);
    return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

// Sum of a count over the block, and of those of the threads before.
struct Counted {
    int before, all;
};
__device__ Counted count_in_order(bool flag) {
    __shared__ int part[warps];
    const int lane = static_cast<int>(threadIdx.x) % warp_size, warp = static_cast<int>(threadIdx.x) / warp_size;
    const unsigned set = __ballot_sync(all_lanes, flag);
    __syncthreads(); // The counts before these have been read.
    if (lane == 0) part[warp] = __popc(set);
    __syncthreads();
    Counted out{__popc(set & ((1u << lane) - 1)), 0};
    for (int w = 0; w < warps; ++w) {
        if (w < warp) out.before += part[w];
        out.all += part[w];
    }
    return out;
}

// The top_k largest of the block's scores, by position; of equal ones those at lower positions.
__device__ void choose(const KeyList& seen, const unsigned* own, std::int64_t top_k, std::int32_t* picked) {
    const int thread = static_cast<int>(threadIdx.x);
    // The largest number that top_k scores reach.
    unsigned least = 0;
    for (int bit = 31; bit >= 0; --bit) {
        const unsigned tried = least | 1u << bit;
        int reach = 0;
        for (std::int64_t j = thread; j < seen.count; j += threads) reach += own[j] >= tried ? 1 : 0;
        if (block_sum(reach) >= top_k) least = tried;
    }
    int above = 0;
    for (std::int64_t j = thread; j < seen.count; j += threads) above += own[j] > least ? 1 : 0;
    const std::int64_t equal = top_k - block_sum(above); // that are picked of those that are equal to it
    std::int64_t done = 0, ties = 0;
    for (std::int64_t base = 0; base < seen.count; base += threads) {
        const std::int64_t j = base + thread;
        const bool tied = j < seen.count && own[j] == least;
        const Counted of_ties = count_in_order(tied);
        const bool takes = j < seen.count && (own[j] > least || (tied && ties + of_ties.before < equal));
        const Counted taken = count_in_order(takes);
        if (takes) picked[done + taken.before] = static_cast<std::int32_t>(seen.from + j);
        done += taken.all;
        ties += of_ties.all;
    }
}

// Where a query sees no more than top_k keys, it has them all.
__device__ bool takes_all(const KeyList& seen, std::int64_t top_k, std::int32_t* picked) {
    if (seen.count > top_k) return false;
    for (std::int64_t j = threadIdx.x; j < top_k; j += threads)
        picked[j] = j < seen.count ? static_cast<std::int32_t>(seen.from + j) : -1;
    return true;
}

// A block takes rows in turn; `scores` has seq_k numbers for each block.
__global__ void __launch_bounds__(threads)
    pick_kernel(IndexShape s, Src q, Src k, Src w, std::int32_t* keys, unsigned* scores) {
    extern __shared__ float query[]; // [heads, dim], and the weights behind
    const KeyPlaces z{s.keys};
    const int thread = static_cast<int>(threadIdx.x), width = s.heads * s.dim;
    float* const weights = query + width;
    unsigned* const own = scores + blockIdx.x * s.keys.seq_k;
    for (std::int64_t row = blockIdx.x; row < z.rows(); row += gridDim.x) {
        std::int32_t* const picked = keys + row * s.keys.top_k;
        const KeyList seen(z, nullptr, row);
        if (takes_all(seen, s.keys.top_k, picked)) continue;
        __syncthreads(); // The row before this one has been read.
        for (int i = thread; i < width; i += threads) query[i] = load(q, row * width + i);
        for (int h = thread; h < s.heads; h += threads) weights[h] = load(w, row * s.heads + h);
        __syncthreads();
        for (std::int64_t j = thread; j < seen.count; j += threads) {
            const std::int64_t at = z.row_of(seen.from + j, seen.sequence) * s.dim;
            own[j] = order_of(static_cast<float>(s.scale) * index_score(s, query, weights, k, at));
        }
        __syncthreads();
        choose(seen, own, s.keys.top_k, picked);
    }
}

// Scores on tensor cores: a block holds 128 keys, 32 in each warp's registers, and goes over its share of `count` rows
// from `first` on. scores[row - first, position]: of rows that choose, and of keys that they see.
struct Scored {
    IndexShape s;
    const __nv_bfloat16 *q, *k, *w;
    std::int64_t first, count;
    unsigned* scores;
};

constexpr int own_keys = 32, block_keys = own_keys * sparse_index::threads / warp_size, rows_each = 16;

template <int heads>
__global__ void __launch_bounds__(sparse_index::threads) score_kernel(Scored in) {
    using namespace sparse_index;
    __shared__ __align__(16) unsigned char queries[2][heads * row_bytes];
    __shared__ float weights[2][heads];
    const IndexShape& s = in.s;
    const KeyPlaces z{s.keys};
    const int thread = static_cast<int>(threadIdx.x), lane = thread % warp_size, warp = thread / warp_size;
    const std::int64_t sequence = blockIdx.y, tile_first = std::int64_t{blockIdx.x} * block_keys;
    // Rows of the sequence from in.first on, `rows_each` for each block.
    const std::int64_t from = in.first + (sequence - in.first % s.keys.batch + s.keys.batch) % s.keys.batch,
                       begin = from + std::int64_t{blockIdx.z} * rows_each * s.keys.batch,
                       end = min(begin + rows_each * s.keys.batch, in.first + in.count);
    const auto next = [&](std::int64_t row) { // that chooses and sees keys of the tile
        for (; row < end; row += s.keys.batch) {
            const KeyList seen(z, nullptr, row);
            if (seen.count > s.keys.top_k && seen.from < tile_first + block_keys && seen.from + seen.count > tile_first)
                break;
        }
        return row;
    };
    std::int64_t row = next(begin);
    if (row >= end) return;
    const auto fetch = [&](std::int64_t of, int buffer) {
        if (of < end) {
            copy_rows(ptx::shared_address(queries[buffer]), heads, in.q,
                      [&](int head) { return head < s.heads ? in.q + (of * s.heads + head) * wide : nullptr; });
            if (thread < heads)
                weights[buffer][thread] = thread < s.heads ? __bfloat162float(in.w[of * s.heads + thread]) : 0.0f;
        }
        commit_copies();
    };
    unsigned key[2][slices][4]; // of the warp's keys, which lie in rows of memory
    {
        const __nv_bfloat16* at[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const std::int64_t position = tile_first + warp * own_keys + i * 8 + lane / 4;
            at[i] = position < s.keys.seq_k ? in.k + z.row_of(position, sequence) * wide + lane % 4 * 2 : nullptr;
        }
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int slice = 0; slice < slices; ++slice)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const __nv_bfloat16* const from_row = at[2 * m + i % 2];
                    key[m][slice][i] = from_row == nullptr
                                           ? 0u
                                           : *reinterpret_cast<const unsigned*>(from_row + slice * 16 + i / 2 * 8);
                }
    }
    fetch(row, 0);
    for (int buffer = 0; row < end; buffer ^= 1) {
        const std::int64_t after = next(row + s.keys.batch);
        fetch(after, buffer ^ 1);
        wait_copies<1>();
        __syncthreads();
        const unsigned query = ptx::shared_address(queries[buffer]);
        float sums[4] = {}; // of keys lane / 4 + 8 i
#pragma unroll
        for (int block = 0; block < heads / 8; ++block) {
            float d[2][4] = {};
#pragma unroll
            for (int two = 0; two < slices / 2; ++two) {
                unsigned right[4];
                read_right(right, query, block * 8, two);
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    ptx::multiply_16x8(d[m], key[m][2 * two], right[0], right[1]);
                    ptx::multiply_16x8(d[m], key[m][2 * two + 1], right[2], right[3]);
                }
            }
            const float w0 = weights[buffer][block * 8 + lane % 4 * 2],
                        w1 = weights[buffer][block * 8 + lane % 4 * 2 + 1];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sums[i] += w0 * fmaxf(d[i / 2][i % 2 * 2], 0.0f) + w1 * fmaxf(d[i / 2][i % 2 * 2 + 1], 0.0f);
        }
        const KeyList seen(z, nullptr, row);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sums[i] += __shfl_xor_sync(all_lanes, sums[i], 1);
            sums[i] += __shfl_xor_sync(all_lanes, sums[i], 2);
            const std::int64_t position = tile_first + warp * own_keys + i * 8 + lane / 4;
            if (lane % 4 == 0 && seen.holds(position))
                in.scores[(row - in.first) * s.keys.seq_k + position] = order_of(static_cast<float>(s.scale) * sums[i]);
        }
        __syncthreads(); // The buffer has been read.
        row = after;
    }
}

// A block has a row; its scores come to shared memory where that holds them.
__global__ void __launch_bounds__(threads)
    choose_kernel(IndexShape s, std::int64_t first, const unsigned* scores, std::int32_t* keys, std::int64_t held) {
    extern __shared__ unsigned copy[];
    const std::int64_t row = first + blockIdx.x;
    const KeyList seen(KeyPlaces{s.keys}, nullptr, row);
    std::int32_t* const picked = keys + row * s.keys.top_k;
    if (takes_all(seen, s.keys.top_k, picked)) return;
    const unsigned* own = scores + blockIdx.x * s.keys.seq_k + seen.from;
    if (seen.count <= held) {
        for (std::int64_t j = threadIdx.x; j < seen.count; j += threads) copy[j] = own[j];
        own = copy;
        __syncthreads();
    }
    choose(seen, own, s.keys.top_k, picked);
}

void pick_by_tiles(const IndexShape& s, Src q, Src k, Src w, std::int32_t* keys, cudaStream_t stream) {
    constexpr std::int64_t most_held = 48 * 1024;
    const auto bf16 = [](Src x) { return static_cast<const __nv_bfloat16*>(x.data); };
    const PickedKeys& z = s.keys;
    const std::int64_t held = z.seq_k <= most_held ? z.seq_k : 0;
    const int bytes = static_cast<int>(held * 4);
    CUDA_CHECK(cudaFuncSetAttribute(choose_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    for (std::int64_t first = 0, count = 0; first < z.rows(); first += count) {
        // Scores of `count` rows lie where the lists of later rows will be, or in the stream's memory if that has more.
        const std::int64_t left = z.rows() - first, ahead = left * z.top_k / (z.top_k + z.seq_k),
                           aside = scratch_floats / z.seq_k;
        count = std::min(left, std::max(ahead, aside));
        auto* const scores = ahead > aside ? reinterpret_cast<unsigned*>(keys + (first + count) * z.top_k)
                                           : reinterpret_cast<unsigned*>(scratch_of(stream));
        const Scored in{s, bf16(q), bf16(k), bf16(w), first, count, scores};
        const dim3 grid(blocks_for(s.keys.seq_k, block_keys), static_cast<unsigned>(s.keys.batch),
                        blocks_for(ceil_div(count, s.keys.batch), rows_each));
        const auto kernel = s.heads <= 32 ? score_kernel<32> : score_kernel<64>;
        kernel<<<grid, sparse_index::threads, 0, stream>>>(in);
        CUDA_CHECK(cudaGetLastError());
        choose_kernel<<<blocks_for(count, 1), threads, static_cast<std::size_t>(bytes), stream>>>(s, first, scores,
                                                                                                  keys, held);
        CUDA_CHECK(cudaGetLastError());
    }
}

void pick_keys(const IndexShape& s, Src q, Src k, Src w, std::int32_t* keys, void* stream) {
    if (s.keys.rows() <= 0) return;
    require(s.keys.seq_k <= scratch_floats, "the number of keys that an indexer compares", s.keys.seq_k,
            scratch_floats);
    if (sparse_index::takes(s, {q, k, w})) return pick_by_tiles(s, q, k, w, keys, stream_of(stream));
    const std::size_t shared = index_bytes(s);
    CUDA_CHECK(
        cudaFuncSetAttribute(pick_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
    const unsigned blocks = blocks_for(s.keys.rows(), 1, scratch_floats / s.keys.seq_k);
    auto* const scores = reinterpret_cast<unsigned*>(scratch_of(stream_of(stream)));
    pick_kernel<<<blocks, threads, shared, stream_of(stream)>>>(s, q, k, w, keys, scores);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_sparse_pick(Kernels& table) { table.pick_keys = pick_keys; }

} // namespace moe::cuda
