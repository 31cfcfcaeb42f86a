// Sparse attention's choice of keys: scores of all keys that a query sees, the smallest that is picked, bit by bit, and
// the positions of those in order. Beside it what generation keeps, and the rotation around the latent.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/rotation.cuh"
#include "kernels/cuda/scratch.hpp"
#include "kernels/cuda/sparse.cuh"
#include "kernels/cuda/sparse.hpp"

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
        const std::int64_t top_k = s.keys.top_k;
        if (seen.count <= top_k) {
            for (std::int64_t j = thread; j < top_k; j += threads)
                picked[j] = j < seen.count ? static_cast<std::int32_t>(seen.from + j) : -1;
            continue;
        }
        __syncthreads(); // The row before this one has been read.
        for (int i = thread; i < width; i += threads) query[i] = load(q, row * width + i);
        for (int h = thread; h < s.heads; h += threads) weights[h] = load(w, row * s.heads + h);
        __syncthreads();
        for (std::int64_t j = thread; j < seen.count; j += threads) {
            const std::int64_t at = z.row_of(seen.from + j, seen.sequence) * s.dim;
            own[j] = order_of(static_cast<float>(s.scale) * index_score(s, query, weights, k, at));
        }
        __syncthreads();
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
}

void pick_keys(const IndexShape& s, Src q, Src k, Src w, std::int32_t* keys, void* stream) {
    if (s.keys.rows() <= 0) return;
    require(s.keys.seq_k <= scratch_floats, "the number of keys that an indexer compares", s.keys.seq_k,
            scratch_floats);
    const std::size_t shared = index_bytes(s);
    CUDA_CHECK(
        cudaFuncSetAttribute(pick_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
    const unsigned blocks = blocks_for(s.keys.rows(), 1, scratch_floats / s.keys.seq_k);
    auto* const scores = reinterpret_cast<unsigned*>(scratch_of(stream_of(stream)));
    pick_kernel<<<blocks, threads, shared, stream_of(stream)>>>(s, q, k, w, keys, scores);
    CUDA_CHECK(cudaGetLastError());
}

__global__ void __launch_bounds__(threads)
    cache_kernel(Src x, const std::int32_t* positions, Dst cache, std::int64_t cols) {
    const std::int64_t row = blockIdx.x;
    copy_row(x, row * cols, cache, positions[row] * cols, cols, static_cast<int>(threadIdx.x), threads);
}

void cache_rows(Src x, const std::int32_t* positions, Dst cache, std::int64_t rows, std::int64_t cols, void* stream) {
    if (rows <= 0 || cols <= 0) return;
    cache_kernel<<<blocks_for(rows, 1), threads, 0, stream_of(stream)>>>(x, positions, cache, cols);
    CUDA_CHECK(cudaGetLastError());
}

// Turns the pairs of columns from x_at on to those from y_at on.
__device__ void turn_row(const MlaRopeShape& s, Src x, std::int64_t x_at, Dst y, std::int64_t y_at, const Turn* turns,
                         float sign) {
    const int half = s.rope / 2;
    for (int i = static_cast<int>(threadIdx.x) % warp_size; i < half; i += warp_size) {
        const Pair pair(i, half, s.interleaved);
        float first = load(x, x_at + pair.first), second = load(x, x_at + pair.second);
        apply(turns[i], sign, first, second);
        store(y, y_at + pair.first, first);
        store(y, y_at + pair.second, second);
    }
}

// A block takes a token, its warps take turns with the heads; the key is the head behind the last.
__global__ void __launch_bounds__(threads)
    latent_rope_kernel(MlaRopeShape s, Src q, Src absorbed, Src latent, Src kv_down, const std::int32_t* positions,
                       Dst q_out, Dst k) {
    extern __shared__ Turn turns[];
    const std::int64_t row = blockIdx.x, wide = s.kv_lora + s.rope, qk = s.nope + s.rope;
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    fill_turns(turns, s.rope / 2, s.theta, s.scale, positions[row / s.batch]);
    for (int h = static_cast<int>(threadIdx.x) / warp_size; h <= s.heads; h += warps) {
        const std::int64_t head = row * s.heads + h;
        if (h == s.heads) {
            copy_row(latent, row * s.kv_lora, k, row * wide, s.kv_lora, lane, warp_size);
            turn_row(s, kv_down, row * wide + s.kv_lora, k, row * wide + s.kv_lora, turns, 1.0f);
        } else {
            copy_row(absorbed, head * s.kv_lora, q_out, head * wide, s.kv_lora, lane, warp_size);
            turn_row(s, q, head * qk + s.nope, q_out, head * wide + s.kv_lora, turns, 1.0f);
        }
    }
}

__global__ void __launch_bounds__(threads)
    latent_rope_grad_kernel(MlaRopeShape s, Src dq_out, Src dk, Src dq_nope, const std::int32_t* positions, Dst dq,
                            Dst dlatent, Dst dkv_down) {
    extern __shared__ Turn turns[];
    const std::int64_t row = blockIdx.x, wide = s.kv_lora + s.rope, qk = s.nope + s.rope;
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    fill_turns(turns, s.rope / 2, s.theta, s.scale, positions[row / s.batch]);
    for (int h = static_cast<int>(threadIdx.x) / warp_size; h <= s.heads; h += warps) {
        const std::int64_t head = row * s.heads + h;
        if (h == s.heads) {
            copy_row(dk, row * wide, dlatent, row * s.kv_lora, s.kv_lora, lane, warp_size);
            turn_row(s, dk, row * wide + s.kv_lora, dkv_down, row * wide + s.kv_lora, turns, -1.0f);
        } else {
            copy_row(dq_nope, head * s.nope, dq, head * qk, s.nope, lane, warp_size);
            turn_row(s, dq_out, head * wide + s.kv_lora, dq, head * qk + s.nope, turns, -1.0f);
        }
    }
}

std::size_t turn_bytes(const MlaRopeShape& s) { return static_cast<std::size_t>(s.rope / 2) * sizeof(Turn); }

void latent_rope(const MlaRopeShape& s, Src q, Src absorbed, Src latent, Src kv_down, const std::int32_t* positions,
                 Dst q_out, Dst k, void* stream) {
    if (s.tokens <= 0) return;
    latent_rope_kernel<<<blocks_for(s.tokens, 1), threads, turn_bytes(s), stream_of(stream)>>>(
        s, q, absorbed, latent, kv_down, positions, q_out, k);
    CUDA_CHECK(cudaGetLastError());
}

void latent_rope_grad(const MlaRopeShape& s, Src dq_out, Src dk, Src dq_nope, const std::int32_t* positions, Dst dq,
                      Dst dlatent, Dst dkv_down, void* stream) {
    if (s.tokens <= 0) return;
    latent_rope_grad_kernel<<<blocks_for(s.tokens, 1), threads, turn_bytes(s), stream_of(stream)>>>(
        s, dq_out, dk, dq_nope, positions, dq, dlatent, dkv_down);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_sparse(Kernels& table) {
    table.pick_keys = pick_keys;
    table.cache_rows = cache_rows;
    table.latent_rope = latent_rope;
    table.latent_rope_grad = latent_rope_grad;
    add_sparse_attention(table);
    add_sparse_loss(table);
}

} // namespace moe::cuda
