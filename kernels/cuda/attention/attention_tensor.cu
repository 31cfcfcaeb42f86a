// Attention forward on Hopper's tensor cores: 128 queries of a head go over blocks of the keys that they see.
//
// Floor: 2 (qk_dim + v_dim) FLOPs for every pair of a query and a key in blocks of 128 x 128 that are seen.
#include "kernels/cuda/attention/attention_tensor.cuh"
#include "kernels/cuda/families.hpp"

namespace moe::cuda {
namespace {

using namespace tensor_attention;

constexpr int block_keys = 128, stages = 2;

template <int qk_width, int v_width>
struct Layout {
    using Queries = TileOf<tile_rows, qk_width>;
    using Keys = TileOf<block_keys, qk_width>;
    using Values = TileOf<block_keys, v_width>;
    static constexpr int alignment = 1024;
    static constexpr int keys_at = Queries::bytes, values_at = keys_at + stages * Keys::bytes;
    static constexpr int barriers_at = values_at + stages * Values::bytes, shared_bytes = alignment + barriers_at + 128;
    unsigned start;

    __device__ explicit Layout(const void* memory)
        : start((ptx::shared_address(memory) + alignment - 1) / alignment * alignment) {}
    __device__ unsigned queries() const { return start; }
    __device__ unsigned keys(int stage) const { return start + keys_at + stage * Keys::bytes; }
    __device__ unsigned values(int stage) const { return start + values_at + stage * Values::bytes; }
    // Barriers: queries have come; keys, values of a stage have come; those of a stage are read.
    __device__ unsigned barrier(int i) const { return start + barriers_at + 8 * i; }
    __device__ unsigned queries_full() const { return barrier(0); }
    __device__ unsigned keys_full(int stage) const { return barrier(1 + stage); }
    __device__ unsigned values_full(int stage) const { return barrier(1 + stages + stage); }
    __device__ unsigned keys_empty(int stage) const { return barrier(1 + 2 * stages + stage); }
    __device__ unsigned values_empty(int stage) const { return barrier(1 + 3 * stages + stage); }
};

struct Maps {
    CUtensorMap q, k, v;
};

struct Operands {
    Src sinks;
    Dst o;
    float* lse;
};

// The softmax of a thread's two rows so far, to the base 2: maxima of all columns, sums of the thread's own.
struct Running {
    float max[2], sum[2];

    // Turns scores into weights under the new maximum; `factor`: what brings earlier sums to it.
    template <int count>
    __device__ void soften(float (&scores)[count], float scale, float (&factor)[2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float best = -INFINITY;
#pragma unroll
            for (int j = 0; j < count / 4; ++j)
                best = fmaxf(best, fmaxf(scores[4 * j + 2 * h], scores[4 * j + 2 * h + 1]));
            best = fmaxf(best, __shfl_xor_sync(all_lanes, best, 1));
            best = fmaxf(best, __shfl_xor_sync(all_lanes, best, 2));
            best = fmaxf(max[h], best * scale);
            const float base = best == -INFINITY ? 0.0f : best; // The row has seen nothing yet.
            factor[h] = exp2f(max[h] - base);
            max[h] = best;
            float added = 0.0f;
#pragma unroll
            for (int j = 0; j < count / 4; ++j) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& x = scores[4 * j + 2 * h + i];
                    x = exp2f(fmaf(x, scale, -base));
                    added += x;
                }
            }
            sum[h] = sum[h] * factor[h] + added;
        }
    }
    // Sums of all columns. (A template: where the kernel has no body, nothing else may stay unused.)
    template <int rows = 2>
    __device__ void finish() {
#pragma unroll
        for (int h = 0; h < rows; ++h) {
            sum[h] += __shfl_xor_sync(all_lanes, sum[h], 1);
            sum[h] += __shfl_xor_sync(all_lanes, sum[h], 2);
        }
    }
};

template <int qk_width, int v_width>
__device__ void produce(const Maps& maps, const Layout<qk_width, v_width>& at, int query, int first, int end, int head,
                        int key_head, int sequence) {
    using L = Layout<qk_width, v_width>;
    ptx::arrive_expecting(at.queries_full(), L::Queries::bytes);
    L::Queries::load(maps.q, {0, query, head, sequence}, at.queries(), at.queries_full());
    Ring ring;
    for (int key = first; key < end; key += block_keys, ring.advance(stages)) {
        const int stage = ring.stage;
        ptx::wait(at.keys_empty(stage), ring.parity ^ 1);
        ptx::arrive_expecting(at.keys_full(stage), L::Keys::bytes);
        L::Keys::load(maps.k, {0, key, key_head, sequence}, at.keys(stage), at.keys_full(stage));
        ptx::wait(at.values_empty(stage), ring.parity ^ 1);
        ptx::arrive_expecting(at.values_full(stage), L::Values::bytes);
        L::Values::load(maps.v, {0, key, key_head, sequence}, at.values(stage), at.values_full(stage));
    }
}

template <int qk_width, int v_width>
__device__ void consume(const AttentionSizes& z, const Layout<qk_width, v_width>& at, const Operands& in, int consumer,
                        int query, int first, int end, int h, int b) {
    using L = Layout<qk_width, v_width>;
    const AttentionShape& s = z.s;
    const Place place;
    const int top = query + consumer * 64; // the warpgroup's first query
    const bool speaks = threadIdx.x % warp_size == 0;
    const float scale = static_cast<float>(s.scale) * log2_e;
    const Seen of_row[2] = {seen_by(z, b, top + place.row), seen_by(z, b, top + place.row + 8)};
    const int all_from = seen_by(z, b, top + 63).first, all_to = seen_by(z, b, top).end; // keys that all rows see
    float out[v_width / 2], scores[block_keys / 2], factor[2];
#pragma unroll
    for (float& x : out) x = 0.0f;
    Running running;
    const float sink = in.sinks.data != nullptr ? load(in.sinks, h) * log2_e : -INFINITY;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        running.max[i] = sink, running.sum[i] = sink == -INFINITY || place.column > 0 ? 0.0f : 1.0f;
        const std::int64_t row = top + place.row + 8 * i;
        if (!s.merge || row >= s.seq_q) continue;
        const float lse = in.lse[z.lse(b, h, row)] * log2_e; // One logit stands for all keys before.
        running.max[i] = lse, running.sum[i] = lse == -INFINITY || place.column > 0 ? 0.0f : 1.0f;
        const HeadRows head = z.o(b, h);
        const auto* from =
            static_cast<const __nv_bfloat162*>(in.o.data) + (head.start + row * head.step + place.column) / 2;
#pragma unroll
        for (int j = 0; j < v_width / 8; ++j) {
            if (8 * j + place.column >= s.v_dim) continue;
            const float2 two = __bfloat1622float2(from[4 * j]);
            out[4 * j + 2 * i] = two.x, out[4 * j + 2 * i + 1] = two.y;
        }
    }
    __syncwarp(); // All lanes of a row have read lse before one of them writes it.
    Ring ring;
    ptx::wait(at.queries_full(), 0);
    for (int key = first; key < end; key += block_keys, ring.advance(stages)) {
        const int stage = ring.stage;
        ptx::wait(at.keys_full(stage), ring.parity);
        ptx::fence_products();
        multiply_widths<typename L::Queries, typename L::Keys>(scores, at.queries(), consumer * 64, at.keys(stage));
        ptx::wait_products<0>();
        ptx::settle(scores);
        if (speaks) ptx::arrive(at.keys_empty(stage));
        if (key < all_from || key + block_keys > all_to) {
#pragma unroll
            for (int i = 0; i < block_keys / 2; ++i)
                if (!of_row[i / 2 % 2](key + i / 4 * 8 + place.column + i % 2)) scores[i] = -INFINITY;
        }
        running.soften(scores, scale, factor);
        unsigned weights[block_keys / 16][4];
        pack(scores, weights);
#pragma unroll
        for (int i = 0; i < v_width / 2; ++i) out[i] *= factor[i / 2 % 2];
        ptx::wait(at.values_full(stage), ring.parity);
        ptx::fence_products();
        multiply_rows<typename L::Values>(out, weights, at.values(stage));
        ptx::wait_products<0>();
        ptx::settle(out);
        if (speaks) ptx::arrive(at.values_empty(stage));
    }
    running.finish();
    float over[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) { // A query that sees nothing yields zeros.
        over[i] = running.sum[i] > 0.0f ? 1.0f / running.sum[i] : 0.0f;
        const std::int64_t row = top + place.row + 8 * i;
        if (place.column == 0 && row < s.seq_q)
            in.lse[z.lse(b, h, row)] = running.sum[i] > 0.0f ? running.max[i] * ln_2 + logf(running.sum[i]) : -INFINITY;
    }
    write_sums(in.o, z.o(b, h), top, s.seq_q, s.v_dim, over, out);
}

template <int qk_width, int v_width>
__global__ void __launch_bounds__(threads, 1)
    forward_kernel(const __grid_constant__ Maps maps, AttentionSizes z, Operands in) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ unsigned char memory[];
    const Layout<qk_width, v_width> at(memory);
    const int warpgroup = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x / 128), 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 1 + 2 * stages; ++i) ptx::init_barrier(at.barrier(i), 1);
        for (int i = 1 + 2 * stages; i < 1 + 4 * stages; ++i) ptx::init_barrier(at.barrier(i), 4 * consumers);
        ptx::fence_barrier_init();
        ptx::prefetch(maps.q), ptx::prefetch(maps.k), ptx::prefetch(maps.v);
    }
    __syncthreads();
    // Tiles with the most keys come first.
    const int query = static_cast<int>(gridDim.x - 1 - blockIdx.x) * tile_rows;
    const int h = static_cast<int>(blockIdx.y), b = static_cast<int>(blockIdx.z);
    const int first = seen_by(z, b, query).first / block_keys * block_keys,
              end = seen_by(z, b, query + tile_rows - 1).end;
    if (warpgroup == 0) {
        ptx::give_registers<24>();
        if (threadIdx.x == 0) produce(maps, at, query, first, end, h, h / (z.s.heads / z.s.kv_heads), b);
    } else {
        ptx::take_registers<240>();
        consume(z, at, in, warpgroup - 1, query, first, end, h, b);
    }
#endif
}

decltype(Kernels::attention) plain = nullptr; // what the table held before

void attention(const AttentionShape& s, Src q, Src k, Src v, Src sinks, Dst o, float* lse, void* stream) {
    if (!takes(s, {q, k, v, Src{o.data, o.type}})) return plain(s, q, k, v, sinks, o, lse, stream);
    const AttentionSizes z(s);
    with_widths(s, [&]<int qk_width, int v_width>() {
        const Src q_at = q + s.q_offset, k_at = k + s.k_offset, v_at = v + s.v_offset;
        const Maps maps{map_of_heads<tile_rows>(q_at.data, s.seq_q, s.heads, s.qk_dim, s.batch, z.q_stride),
                        map_of_heads<block_keys>(k_at.data, s.seq_k, s.kv_heads, s.qk_dim, s.batch, z.k_stride),
                        map_of_heads<block_keys>(v_at.data, s.seq_k, s.kv_heads, s.v_dim, s.batch, z.v_stride)};
        const dim3 grid(blocks_for(s.seq_q, tile_rows), static_cast<unsigned>(s.heads), static_cast<unsigned>(s.batch));
        constexpr int bytes = Layout<qk_width, v_width>::shared_bytes;
        const auto kernel = forward_kernel<qk_width, v_width>;
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        kernel<<<grid, threads, bytes, stream_of(stream)>>>(maps, z, Operands{sinks, o, lse});
        CUDA_CHECK(cudaGetLastError());
    });
}

} // namespace

void add_tensor_attention(Kernels& table) {
    plain = table.attention;
    table.attention = attention;
}

} // namespace moe::cuda
