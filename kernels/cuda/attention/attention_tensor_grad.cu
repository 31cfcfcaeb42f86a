// Gradients of attention on Hopper's tensor cores: one kernel goes over the queries of a tile of keys for dk and dv,
// one over the keys of a tile of queries for dq, so that every sum has one order.
//
// Both compute weights again from lse (FlashAttention, arXiv:2205.14135, algorithm 4): seven products of a head's width
// for every pair in a block that is seen, where a sum of dq in memory would take five.
#include "kernels/cuda/attention/attention_along.cuh"
#include "kernels/cuda/attention/attention_tensor.cuh"
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/scratch.hpp"

namespace moe::cuda {
namespace {

using namespace tensor_attention;

constexpr int stages = 2;
// Lanes that bring what belongs to a stage's queries.
[[maybe_unused]] constexpr int full_lanes = warp_size;

struct Maps {
    CUtensorMap q, k, v, dout;
};

struct Operands {
    const float *lse, *along; // along: dout . o of each query, of the heads from first_head on
    int first_head;
    Dst dq, dk, dv;
};

[[maybe_unused]] __device__ std::int64_t along_at(const AttentionSizes& z, const Operands& in, int b, int h,
                                                  std::int64_t query) {
    return z.lse(b, h - in.first_head, query);
}

// Log-sum-exp to the base 2; infinity, of which weights are zero, for queries that see nothing or that there are not.
[[maybe_unused]] __device__ float lse_of(const AttentionSizes& z, const Operands& in, int b, int h,
                                         std::int64_t query) {
    if (query >= z.s.seq_q) return INFINITY;
    const float lse = in.lse[z.lse(b, h, query)];
    return lse == -INFINITY ? INFINITY : lse * log2_e;
}

// Shared memory: two resident tiles, `stages` of two others and of numbers of their rows.
template <class Resident, class Resident2, class Streamed, class Streamed2, int numbers>
struct Layout {
    static constexpr int alignment = 1024, stage_bytes = Streamed::bytes + Streamed2::bytes;
    static constexpr int stages_at = Resident::bytes + Resident2::bytes;
    static constexpr int numbers_at = stages_at + stages * stage_bytes, numbers_bytes = 4 * numbers;
    static constexpr int barriers_at = numbers_at + stages * numbers_bytes;
    static constexpr int shared_bytes = alignment + barriers_at + 8 * (1 + 2 * stages);
    unsigned char* memory;
    unsigned start;

    __device__ explicit Layout(unsigned char* shared) {
        const unsigned address = ptx::shared_address(shared);
        start = (address + alignment - 1) / alignment * alignment;
        memory = shared + (start - address);
    }
    __device__ unsigned first() const { return start; }
    __device__ unsigned second() const { return start + Resident::bytes; }
    __device__ unsigned first_of(int stage) const { return start + stages_at + stage * stage_bytes; }
    __device__ unsigned second_of(int stage) const { return first_of(stage) + Streamed::bytes; }
    __device__ float* numbers_of(int stage) const {
        return reinterpret_cast<float*>(memory + numbers_at + stage * numbers_bytes);
    }
    __device__ unsigned ready() const { return start + barriers_at; }
    __device__ unsigned full(int stage) const { return ready() + 8 * (1 + stage); }
    __device__ unsigned empty(int stage) const { return ready() + 8 * (1 + stages + stage); }
    __device__ void begin(int arrivals) const { // arrivals at a full stage
        if (threadIdx.x == 0) {
            ptx::init_barrier(ready(), 1);
            for (int i = 0; i < stages; ++i) {
                ptx::init_barrier(full(i), static_cast<unsigned>(arrivals));
                ptx::init_barrier(empty(i), 4 * consumers);
            }
            ptx::fence_barrier_init();
        }
        __syncthreads();
    }
};

// Queries of a stage beside wide heads are fewer: their sums need the registers.
template <int qk_width>
constexpr int block_queries = qk_width > 128 ? 32 : 64;
constexpr int block_keys = 64;

template <int qk_width, int v_width>
using KeyLayout =
    Layout<TileOf<tile_rows, qk_width>, TileOf<tile_rows, v_width>, TileOf<block_queries<qk_width>, qk_width>,
           TileOf<block_queries<qk_width>, v_width>, 4 * block_queries<qk_width>>;
template <int qk_width, int v_width>
using QueryLayout = Layout<TileOf<tile_rows, qk_width>, TileOf<tile_rows, v_width>, TileOf<block_keys, qk_width>,
                           TileOf<block_keys, v_width>, 0>;

// The first query at which `reached`, which stays true from there on, holds; seq_q if none.
template <class Reached>
__device__ int first_query(int queries, const Reached& reached) {
    int low = 0, high = queries;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (reached(middle))
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

template <int qk_width, int v_width>
__global__ void __launch_bounds__(threads, 1)
    key_grad_kernel(const __grid_constant__ Maps maps, AttentionSizes z, Operands in, int first_key_head) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ unsigned char memory[];
    constexpr int queries = block_queries<qk_width>;
    using Keys = TileOf<tile_rows, qk_width>;
    using Values = TileOf<tile_rows, v_width>;
    using Queries = TileOf<queries, qk_width>;
    using Results = TileOf<queries, v_width>;
    const KeyLayout<qk_width, v_width> at(memory);
    at.begin(1 + full_lanes);
    const AttentionShape& s = z.s;
    const int warpgroup = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x / 128), 0);
    const int key = static_cast<int>(blockIdx.x) * tile_rows; // Under a causal mask the first keys are seen most.
    const int key_head = first_key_head + static_cast<int>(blockIdx.y), b = static_cast<int>(blockIdx.z);
    const int sharers = s.heads / s.kv_heads,
              last_key = static_cast<int>(s.seq_k < key + tile_rows ? s.seq_k : key + tile_rows) - 1;
    const int all = static_cast<int>(s.seq_q);
    const int from = first_query(all, [&](int i) { return z.last(i) > key; }) / queries * queries;
    const int to = first_query(all, [&](int i) { return z.first(b, i) > last_key; });
    if (warpgroup == 0) {
        ptx::give_registers<24>();
        if (threadIdx.x >= full_lanes) return;
        const int lane = static_cast<int>(threadIdx.x);
        if (lane == 0) {
            ptx::arrive_expecting(at.ready(), Keys::bytes + Values::bytes);
            Keys::load(maps.k, {0, key, key_head, b}, at.first(), at.ready());
            Values::load(maps.v, {0, key, key_head, b}, at.second(), at.ready());
        }
        Ring ring;
        for (int h = key_head * sharers; h < (key_head + 1) * sharers; ++h) {
            for (int query = from; query < to; query += queries, ring.advance(stages)) {
                const int stage = ring.stage;
                ptx::wait(at.empty(stage), ring.parity ^ 1);
                if (lane == 0) {
                    ptx::arrive_expecting(at.full(stage), Queries::bytes + Results::bytes);
                    Queries::load(maps.q, {0, query, h, b}, at.first_of(stage), at.full(stage));
                    Results::load(maps.dout, {0, query, h, b}, at.second_of(stage), at.full(stage));
                }
                float* numbers = at.numbers_of(stage);
                for (int i = lane; i < queries; i += full_lanes) {
                    const Seen seen = seen_by(z, b, query + i);
                    numbers[i] = lse_of(z, in, b, h, query + i);
                    numbers[queries + i] = query + i < all ? in.along[along_at(z, in, b, h, query + i)] : 0.0f;
                    numbers[2 * queries + i] = __int_as_float(seen.first);
                    numbers[3 * queries + i] = __int_as_float(seen.end);
                }
                ptx::arrive(at.full(stage));
            }
        }
        return;
    }
    ptx::take_registers<240>();
    const int consumer = warpgroup - 1;
    const Place place;
    const bool speaks = threadIdx.x % warp_size == 0;
    const float scale = static_cast<float>(s.scale) * log2_e;
    float dk[qk_width / 2], dv[v_width / 2], scores[queries / 2], dweights[queries / 2];
#pragma unroll
    for (float& x : dk) x = 0.0f;
#pragma unroll
    for (float& x : dv) x = 0.0f;
    ptx::wait(at.ready(), 0);
    Ring ring;
    for (int h = 0; h < sharers; ++h) {
        for (int query = from; query < to; query += queries, ring.advance(stages)) {
            const int stage = ring.stage;
            ptx::wait(at.full(stage), ring.parity);
            ptx::fence_products();
            multiply_widths<Keys, Queries>(scores, at.first(), consumer * 64, at.first_of(stage));
            multiply_widths<Values, Results>(dweights, at.second(), consumer * 64, at.second_of(stage));
            const float* numbers = at.numbers_of(stage);
            // Whether every key of the tile is seen by every query.
            const bool whole = key >= __float_as_int(numbers[3 * queries - 1]) &&
                               key + tile_rows <= __float_as_int(numbers[3 * queries]);
            ptx::wait_products<1>();
            ptx::settle(scores);
#pragma unroll
            for (int j = 0; j < queries / 8; ++j) {
                const int column = 8 * j + place.column;
                const float2 lse = *reinterpret_cast<const float2*>(numbers + column);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float& x = scores[4 * j + i];
                    x = exp2f(fmaf(x, scale, i % 2 == 0 ? -lse.x : -lse.y));
                }
                if (whole) continue;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const Seen seen{__float_as_int(numbers[2 * queries + column + i % 2]),
                                    __float_as_int(numbers[3 * queries + column + i % 2])};
                    if (!seen(key + consumer * 64 + place.row + i / 2 * 8)) scores[4 * j + i] = 0.0f;
                }
            }
            unsigned weights[queries / 16][4];
            pack(scores, weights);
            ptx::fence_products();
            multiply_rows<Results>(dv, weights, at.second_of(stage));
            ptx::wait_products<1>(); // dv's products may still be under way.
            ptx::settle(dweights);
#pragma unroll
            for (int j = 0; j < queries / 8; ++j) {
                const float2 along = *reinterpret_cast<const float2*>(numbers + queries + 8 * j + place.column);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    dweights[4 * j + i] = scores[4 * j + i] * (dweights[4 * j + i] - (i % 2 == 0 ? along.x : along.y));
            }
            unsigned dscores[queries / 16][4];
            pack(dweights, dscores);
            ptx::fence_products();
            multiply_rows<Queries>(dk, dscores, at.first_of(stage));
            ptx::wait_products<0>();
            ptx::settle(dv);
            ptx::settle(dk);
            if (speaks) ptx::arrive(at.empty(stage));
        }
    }
    const float by_scale[2] = {static_cast<float>(s.scale), static_cast<float>(s.scale)}, by_one[2] = {1.0f, 1.0f};
    write_sums(in.dk, z.k(b, key_head), key + consumer * 64, s.seq_k, s.qk_dim, by_scale, dk);
    write_sums(in.dv, z.v(b, key_head), key + consumer * 64, s.seq_k, s.v_dim, by_one, dv);
#endif
}

template <int qk_width, int v_width>
__global__ void __launch_bounds__(threads, 1)
    query_grad_kernel(const __grid_constant__ Maps maps, AttentionSizes z, Operands in) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ unsigned char memory[];
    using Queries = TileOf<tile_rows, qk_width>;
    using Results = TileOf<tile_rows, v_width>;
    using Keys = TileOf<block_keys, qk_width>;
    using Values = TileOf<block_keys, v_width>;
    const QueryLayout<qk_width, v_width> at(memory);
    at.begin(1);
    const AttentionShape& s = z.s;
    const int warpgroup = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x / 128), 0);
    const int query = static_cast<int>(gridDim.x - 1 - blockIdx.x) * tile_rows;
    const int h = in.first_head + static_cast<int>(blockIdx.y), b = static_cast<int>(blockIdx.z);
    const int key_head = h / (s.heads / s.kv_heads);
    const int first = seen_by(z, b, query).first / block_keys * block_keys,
              end = seen_by(z, b, query + tile_rows - 1).end;
    if (warpgroup == 0) {
        ptx::give_registers<24>();
        if (threadIdx.x != 0) return;
        ptx::arrive_expecting(at.ready(), Queries::bytes + Results::bytes);
        Queries::load(maps.q, {0, query, h, b}, at.first(), at.ready());
        Results::load(maps.dout, {0, query, h, b}, at.second(), at.ready());
        Ring ring;
        for (int key = first; key < end; key += block_keys, ring.advance(stages)) {
            const int stage = ring.stage;
            ptx::wait(at.empty(stage), ring.parity ^ 1);
            ptx::arrive_expecting(at.full(stage), Keys::bytes + Values::bytes);
            Keys::load(maps.k, {0, key, key_head, b}, at.first_of(stage), at.full(stage));
            Values::load(maps.v, {0, key, key_head, b}, at.second_of(stage), at.full(stage));
        }
        return;
    }
    ptx::take_registers<240>();
    const int consumer = warpgroup - 1, top = query + consumer * 64;
    const Place place;
    const bool speaks = threadIdx.x % warp_size == 0;
    const float scale = static_cast<float>(s.scale) * log2_e;
    const Seen of_row[2] = {seen_by(z, b, top + place.row), seen_by(z, b, top + place.row + 8)};
    const int all_from = seen_by(z, b, top + 63).first, all_to = seen_by(z, b, top).end;
    float lse[2], along[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const std::int64_t row = top + place.row + 8 * i;
        lse[i] = lse_of(z, in, b, h, row);
        along[i] = row < s.seq_q ? in.along[along_at(z, in, b, h, row)] : 0.0f;
    }
    float dq[qk_width / 2], scores[block_keys / 2], dweights[block_keys / 2];
#pragma unroll
    for (float& x : dq) x = 0.0f;
    ptx::wait(at.ready(), 0);
    Ring ring;
    for (int key = first; key < end; key += block_keys, ring.advance(stages)) {
        const int stage = ring.stage;
        ptx::wait(at.full(stage), ring.parity);
        ptx::fence_products();
        multiply_widths<Queries, Keys>(scores, at.first(), consumer * 64, at.first_of(stage));
        multiply_widths<Results, Values>(dweights, at.second(), consumer * 64, at.second_of(stage));
        const bool whole = key >= all_from && key + block_keys <= all_to;
        ptx::wait_products<1>();
        ptx::settle(scores);
#pragma unroll
        for (int i = 0; i < block_keys / 2; ++i) {
            float& x = scores[i];
            x = exp2f(fmaf(x, scale, -lse[i / 2 % 2]));
            if (!whole && !of_row[i / 2 % 2](key + i / 4 * 8 + place.column + i % 2)) x = 0.0f;
        }
        ptx::wait_products<0>();
        ptx::settle(dweights);
#pragma unroll
        for (int i = 0; i < block_keys / 2; ++i) dweights[i] = scores[i] * (dweights[i] - along[i / 2 % 2]);
        unsigned dscores[block_keys / 16][4];
        pack(dweights, dscores);
        ptx::fence_products();
        multiply_rows<Keys>(dq, dscores, at.first_of(stage));
        ptx::wait_products<0>();
        ptx::settle(dq);
        if (speaks) ptx::arrive(at.empty(stage));
    }
    const float by_scale[2] = {static_cast<float>(s.scale), static_cast<float>(s.scale)};
    write_sums(in.dq, z.q(b, h), top, s.seq_q, s.qk_dim, by_scale, dq, s.merge);
#endif
}

decltype(Kernels::attention_grad) plain = nullptr; // what the table held before

template <class Layout, class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, cudaStream_t stream, const Arguments&... arguments) {
    constexpr int bytes = Layout::shared_bytes;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    kernel<<<grid, threads, bytes, stream>>>(arguments...);
    CUDA_CHECK(cudaGetLastError());
}

void attention_grad(const AttentionShape& s, Src dout, Src q, Src k, Src v, Src o, const float* lse, Src sinks, Dst dq,
                    Dst dk, Dst dv, float* dsinks, void* stream) {
    const auto source = [](Dst y) { return Src{y.data, y.type}; };
    // along of as many key heads at a time as the stream's scratch has room for.
    const std::int64_t rows = s.seq_q * s.batch, of_key_head = s.kv_heads > 0 ? s.heads / s.kv_heads * rows : 0;
    if (!takes(s, {dout, q, k, v, o, source(dq), source(dk), source(dv)}) || of_key_head > scratch_floats)
        return plain(s, dout, q, k, v, o, lse, sinks, dq, dk, dv, dsinks, stream);
    const AttentionSizes z(s);
    const int sharers = s.heads / s.kv_heads, most = static_cast<int>(scratch_floats / of_key_head);
    with_widths(s, [&]<int qk_width, int v_width>() {
        const Src q_at = q + s.q_offset, k_at = k + s.k_offset, v_at = v + s.v_offset;
        constexpr int queries = block_queries<qk_width>;
        const std::int64_t o_stride = std::int64_t{s.heads} * s.v_dim;
        const Maps of_keys{map_of_heads<queries>(q_at.data, s.seq_q, s.heads, s.qk_dim, s.batch, z.q_stride),
                           map_of_heads<tile_rows>(k_at.data, s.seq_k, s.kv_heads, s.qk_dim, s.batch, z.k_stride),
                           map_of_heads<tile_rows>(v_at.data, s.seq_k, s.kv_heads, s.v_dim, s.batch, z.v_stride),
                           map_of_heads<queries>(dout.data, s.seq_q, s.heads, s.v_dim, s.batch, o_stride)};
        const Maps of_queries{map_of_heads<tile_rows>(q_at.data, s.seq_q, s.heads, s.qk_dim, s.batch, z.q_stride),
                              map_of_heads<block_keys>(k_at.data, s.seq_k, s.kv_heads, s.qk_dim, s.batch, z.k_stride),
                              map_of_heads<block_keys>(v_at.data, s.seq_k, s.kv_heads, s.v_dim, s.batch, z.v_stride),
                              map_of_heads<tile_rows>(dout.data, s.seq_q, s.heads, s.v_dim, s.batch, o_stride)};
        float* along = scratch_of(stream_of(stream));
        for (int first = 0; first < s.kv_heads; first += most) {
            const int key_heads = s.kv_heads - first < most ? s.kv_heads - first : most;
            const Operands in{lse, along, first * sharers, dq, dk, dv};
            constexpr int along_threads = 256;
            along_kernel<<<blocks_for(key_heads * of_key_head, along_threads / warp_size, 4096), along_threads, 0,
                           stream_of(stream)>>>(s, dout, o, in.first_head, key_heads * sharers, along);
            CUDA_CHECK(cudaGetLastError());
            if (sinks.data != nullptr) {
                sink_kernel<<<static_cast<unsigned>(key_heads * sharers), 512, 0, stream_of(stream)>>>(
                    s, lse, along, in.first_head, sinks, dsinks);
                CUDA_CHECK(cudaGetLastError());
            }
            const auto batch = static_cast<unsigned>(s.batch), heads = static_cast<unsigned>(key_heads);
            launch<KeyLayout<qk_width, v_width>>(key_grad_kernel<qk_width, v_width>,
                                                 dim3(blocks_for(s.seq_k, tile_rows), heads, batch), stream_of(stream),
                                                 of_keys, z, in, first);
            launch<QueryLayout<qk_width, v_width>>(
                query_grad_kernel<qk_width, v_width>,
                dim3(blocks_for(s.seq_q, tile_rows), heads * static_cast<unsigned>(sharers), batch), stream_of(stream),
                of_queries, z, in);
        }
    });
}

} // namespace

void add_tensor_attention_grad(Kernels& table) {
    plain = table.attention_grad;
    table.attention_grad = attention_grad;
}

} // namespace moe::cuda
