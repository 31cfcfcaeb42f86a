// What stands around sparse attention: rows that generation keeps, and the rotation around the latent.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/rope/rotation.cuh"
#include "kernels/cuda/sparse/sparse.hpp"

namespace moe::cuda {
namespace {

constexpr int threads = 256, warps = threads / warp_size;

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
    table.cache_rows = cache_rows;
    table.latent_rope = latent_rope;
    table.latent_rope_grad = latent_rope_grad;
    add_sparse_pick(table);
    add_sparse_attention(table);
    add_sparse_loss(table);
    add_tensor_sparse(table);
    add_tensor_sparse_grad(table);
    add_tensor_sparse_loss(table);
}

} // namespace moe::cuda
