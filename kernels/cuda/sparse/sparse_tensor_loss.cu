// An indexer's loss and its gradient on Hopper: with what the heads of attention give every key (sparse_shares.cu),
// queries and weights by rows, then keys by tiles of positions.
//
// The shares of keys and then the gradients of scores lie in the call's memory, a number for each key of a row. The
// indexer's own products are small and run on warps.
//
// Floor: 10 dim FLOPs for every head of the indexer and key.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/sparse/sparse.hpp"
#include "kernels/cuda/sparse/sparse_index.cuh"
#include "kernels/cuda/sparse/sparse_tensor.cuh"

namespace moe::cuda {
namespace {

struct Operands {
    IndexLossShape s;
    const __nv_bfloat16 *index_q, *index_k;
    Src w;
    const std::int32_t* keys; // null: all that a query sees
    __nv_bfloat16 *dindex_q, *dindex_k;
    Dst dw;
    float* work; // [rows, width]: shares, then gradients of scores; behind them [rows]: parts of the loss
    float* p;
    std::int64_t width;
};

using namespace sparse_index;

constexpr int warps = threads / warp_size, own_rows = 16; // rows of products of a warp

// Floats behind the tiles of a row's block: weights, parts of scores of each warp, and a number for each key.
constexpr int row_tiles = 3 * tile_bytes, row_floats = most_heads + warps * tile;

struct Adding {
    float sums[wide / 8][4];

    __device__ Adding() {
#pragma unroll
        for (auto& block : sums)
#pragma unroll
            for (float& x : block) x = 0.0f;
    }
    // += left [16, 16] times 16 rows of the tile, from `row` on.
    __device__ void add(const unsigned (&left)[4], unsigned tile, int row) {
#pragma unroll
        for (int column = 0; column < wide; column += 16) {
            unsigned right[4];
            read_right_rows(right, tile, row, column);
            ptx::multiply_16x8(sums[column / 8], left, right[0], right[1]);
            ptx::multiply_16x8(sums[column / 8 + 1], left, right[2], right[3]);
        }
    }
};

// Products of a warp's 16 rows and 8 rows of the tile.
__device__ __forceinline__ void multiply_rows(float (&d)[4], const unsigned (&left)[slices][4], unsigned tile,
                                              int row) {
#pragma unroll
    for (float& x : d) x = 0.0f;
#pragma unroll
    for (int two = 0; two < slices / 2; ++two) {
        unsigned right[4];
        read_right(right, tile, row, two);
        ptx::multiply_16x8(d, left[2 * two], right[0], right[1]);
        ptx::multiply_16x8(d, left[2 * two + 1], right[2], right[3]);
    }
}

// A block has a row, each warp 16 of its heads.
__global__ void __launch_bounds__(threads) row_grad_kernel(Operands in) {
    extern __shared__ __align__(16) unsigned char row_memory[];
    const IndexShape& s = in.s.index;
    const KeyPlaces z{s.keys};
    const std::int64_t row = z.rows() - 1 - blockIdx.x;
    const int thread = static_cast<int>(threadIdx.x), lane = thread % warp_size, warp = thread / warp_size;
    const unsigned start = ptx::shared_address(row_memory);
    float *const weights = reinterpret_cast<float*>(row_memory + row_tiles), *const parts = weights + most_heads,
                 *const scores = parts + warps * tile;
    const KeyList list(z, in.keys, row);
    const int count = static_cast<int>(list.count), tiles = ceil_div(count, tile);
    const auto key_tile = [&](int t) { return start + (1 + t % 2) * tile_bytes; };
    const auto fetch = [&](int t) {
        if (t < tiles)
            copy_rows(key_tile(t), tile, in.index_k, [&](int i) {
                const int j = t * tile + i;
                return j < count ? in.index_k + z.row_of(list.at(j), list.sequence) * wide : nullptr;
            });
        commit_copies();
    };
    copy_rows(start, most_heads, in.index_q,
              [&](int head) { return head < s.heads ? in.index_q + (row * s.heads + head) * wide : nullptr; });
    fetch(0);
    if (thread < most_heads) weights[thread] = thread < s.heads ? load(in.w, row * s.heads + thread) : 0.0f;
    wait_copies<0>();
    __syncthreads();
    unsigned query[slices][4];
#pragma unroll
    for (int slice = 0; slice < slices; ++slice) read_left(query[slice], start, warp * own_rows, slice);
    const float w[2] = {weights[warp * own_rows + lane / 4], weights[warp * own_rows + lane / 4 + 8]};
    for (int t = 0; t < tiles; ++t) {
        fetch(t + 1);
        wait_copies<1>();
        __syncthreads();
#pragma unroll
        for (int block = 0; block < tile; block += 8) {
            float d[4];
            multiply_rows(d, query, key_tile(t), block);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float sum = w[0] * fmaxf(d[i], 0.0f) + w[1] * fmaxf(d[2 + i], 0.0f);
#pragma unroll
                for (int lanes = 4; lanes < warp_size; lanes *= 2) sum += __shfl_xor_sync(all_lanes, sum, lanes);
                if (lane < 4) parts[warp * tile + block + lane * 2 + i] = sum;
            }
        }
        __syncthreads();
        if (thread >= tile) continue;
        float score = 0.0f;
        for (int from = 0; from < warps; ++from) score += parts[from * tile + thread];
        const int j = t * tile + thread;
        scores[j] = j < count ? static_cast<float>(s.scale) * score : -INFINITY;
    }
    __syncthreads();
    fetch(0); // The tiles come once more.
    float most = -INFINITY, sum = 0.0f;
    for (int j = thread; j < count; j += threads) most = fmaxf(most, scores[j]);
    most = block_max(most);
    for (int j = thread; j < count; j += threads) sum += expf(scores[j] - most);
    const float log_of_sum = most + logf(block_sum(sum));
    float* const own = in.work + row * in.width;
    const auto factor = static_cast<float>(in.s.factor * s.scale);
    const float part = static_cast<float>(in.s.core.heads) / static_cast<float>(in.s.all_heads);
    float loss = 0.0f;
    for (int j = thread; j < tiles * tile; j += threads) {
        if (j >= count) {
            scores[j] = 0.0f;
            continue;
        }
        const float p = own[j] / static_cast<float>(in.s.all_heads), log_chosen = scores[j] - log_of_sum;
        loss -= p * log_chosen;
        if (in.p != nullptr)
            in.p[row * in.width + j] = p;
        else if (p > 0.0f)
            loss += p * logf(p);
        scores[j] = own[j] = factor * (part * expf(log_chosen) - p);
    }
    if (in.p != nullptr)
        for (std::int64_t j = count + thread; j < in.width; j += threads) in.p[row * in.width + j] = 0.0f;
    loss = block_sum(loss);
    if (thread == 0) in.work[z.rows() * in.width + row] = loss;
    Adding dquery;
    float dweight[2] = {};
    for (int t = 0; t < tiles; ++t) {
        __syncthreads(); // The tile before this one has been read, and gradients are there.
        fetch(t + 1);
        wait_copies<1>();
        __syncthreads();
#pragma unroll
        for (int block = 0; block < tile; block += 16) {
            unsigned left[4];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float d[4];
                multiply_rows(d, query, key_tile(t), block + 8 * half);
                const float* const of = scores + t * tile + block + 8 * half + lane % 4 * 2;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float first = d[2 * h] > 0.0f ? of[0] : 0.0f, next = d[2 * h + 1] > 0.0f ? of[1] : 0.0f;
                    dweight[h] += first * fmaxf(d[2 * h], 0.0f) + next * fmaxf(d[2 * h + 1], 0.0f);
                    left[2 * half + h] = pack_two(first * w[h], next * w[h]);
                }
            }
            dquery.add(left, key_tile(t), block);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int head = warp * own_rows + lane / 4 + 8 * h;
        dweight[h] += __shfl_xor_sync(all_lanes, dweight[h], 1);
        dweight[h] += __shfl_xor_sync(all_lanes, dweight[h], 2);
        if (head >= s.heads) continue;
        if (lane % 4 == 0) store(in.dw, row * s.heads + head, dweight[h]);
        auto* const to = reinterpret_cast<__nv_bfloat162*>(in.dindex_q + (row * s.heads + head) * wide + lane % 4 * 2);
#pragma unroll
        for (int block = 0; block < wide / 8; ++block)
            to[4 * block] = __floats2bfloat162_rn(dquery.sums[block][2 * h], dquery.sums[block][2 * h + 1]);
    }
}

// A cluster has the keys at 64 positions, each warp 16 of them, and its CTAs take the rows in turn; their sums are
// added in the order of ranks.
__global__ void __launch_bounds__(threads) key_grad_kernel(Operands in) {
    constexpr int batch_rows = threads, sum_stride = wide + 4;
    __shared__ __align__(16) unsigned char queries[2][tile_bytes];
    __shared__ float weights[2][most_heads], scores[2][tile]; // and the gradients of a row's scores
    __shared__ unsigned long long masks[batch_rows];
    __shared__ std::int64_t first_keys[batch_rows];
    __shared__ int batch_queries[batch_rows], counts[warps];
    static_assert(tile * sum_stride * 4 <= sizeof queries);
    const IndexShape& s = in.s.index;
    const KeyPlaces z{s.keys};
    const int thread = static_cast<int>(threadIdx.x), lane = thread % warp_size, warp = thread / warp_size;
    const int rank = static_cast<int>(ptx::cluster_rank()), ctas = static_cast<int>(ptx::cluster_ctas());
    const std::int64_t number = blockIdx.x / ctas, sequence = number % s.keys.batch,
                       tile_first = number / s.keys.batch * tile;
    unsigned key[slices][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const std::int64_t position = tile_first + warp * own_rows + lane / 4 + 8 * h;
        const bool there = position < s.keys.seq_k;
        const __nv_bfloat16* const from = in.index_k + (there ? z.row_of(position, sequence) * wide : 0) + lane % 4 * 2;
#pragma unroll
        for (int slice = 0; slice < slices; ++slice)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                key[slice][2 * half + h] =
                    there ? *reinterpret_cast<const unsigned*>(from + slice * 16 + half * 8) : 0u;
    }
    Adding dkey;
    const std::int64_t each = std::int64_t{batch_rows} * ctas;
    for (std::int64_t base = 0; base < s.keys.seq_q; base += each) {
        const std::int64_t query = base + std::int64_t{thread} * ctas + rank;
        KeyList::Within own{0, 0};
        if (query < s.keys.seq_q && z.position(query) >= tile_first)
            own = KeyList(z, in.keys, query * s.keys.batch + sequence).within(tile_first);
        const unsigned some = __ballot_sync(all_lanes, own.mask != 0);
        __syncthreads(); // The batch before has been read.
        if (lane == 0) counts[warp] = __popc(some);
        __syncthreads();
        int before = __popc(some & ((1u << lane) - 1)), items = 0;
        for (int i = 0; i < warps; ++i) {
            if (i < warp) before += counts[i];
            items += counts[i];
        }
        if (own.mask != 0)
            masks[before] = own.mask, first_keys[before] = own.low, batch_queries[before] = static_cast<int>(query);
        __syncthreads();
        const auto fetch = [&](int item) {
            if (item < items) {
                const std::int64_t row = std::int64_t{batch_queries[item]} * s.keys.batch + sequence;
                const int buffer = item % 2;
                copy_rows(ptx::shared_address(queries[buffer]), most_heads, in.index_q, [&](int head) {
                    return head < s.heads ? in.index_q + (row * s.heads + head) * wide : nullptr;
                });
                if (thread < tile) {
                    const unsigned long long mask = masks[item], bit = 1ull << thread;
                    scores[buffer][thread] =
                        (mask & bit) != 0 ? in.work[row * in.width + first_keys[item] + __popcll(mask & (bit - 1))]
                                          : 0.0f;
                } else {
                    const int head = thread - tile;
                    weights[buffer][head] = head < s.heads ? load(in.w, row * s.heads + head) : 0.0f;
                }
            }
            commit_copies();
        };
        static_assert(threads == tile + most_heads);
        fetch(0);
        for (int item = 0; item < items; ++item) {
            const int buffer = item % 2;
            fetch(item + 1);
            wait_copies<1>();
            __syncthreads();
            if ((masks[item] >> (warp * own_rows) & 0xffff) != 0) {
                const unsigned tile_of = ptx::shared_address(queries[buffer]);
                const float of[2] = {scores[buffer][warp * own_rows + lane / 4],
                                     scores[buffer][warp * own_rows + lane / 4 + 8]};
                for (int head = 0; head < s.heads; head += 16) {
                    unsigned left[4];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float d[4];
                        multiply_rows(d, key, tile_of, head + 8 * half);
                        const float w0 = weights[buffer][head + 8 * half + lane % 4 * 2],
                                    w1 = weights[buffer][head + 8 * half + lane % 4 * 2 + 1];
#pragma unroll
                        for (int h = 0; h < 2; ++h)
                            left[2 * half + h] =
                                pack_two(d[2 * h] > 0.0f ? of[h] * w0 : 0.0f, d[2 * h + 1] > 0.0f ? of[h] * w1 : 0.0f);
                    }
                    dkey.add(left, tile_of, head);
                }
            }
            __syncthreads(); // The buffer has been read.
        }
    }
    auto* const sums = reinterpret_cast<float*>(queries);
#pragma unroll
    for (int block = 0; block < wide / 8; ++block)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            *reinterpret_cast<float2*>(sums + (warp * own_rows + lane / 4 + 8 * h) * sum_stride + block * 8 +
                                       lane % 4 * 2) = {dkey.sums[block][2 * h], dkey.sums[block][2 * h + 1]};
    ptx::cluster_sync();
    const int share = tile / ctas;
    for (int i = thread; i < share * (wide / 2); i += threads) {
        const int row = rank * share + i / (wide / 2), column = i % (wide / 2) * 2;
        float2 all{0.0f, 0.0f};
        for (int from = 0; from < ctas; ++from) {
            const float2 part = ptx::read_remote(
                ptx::in_cta(ptx::shared_address(sums + row * sum_stride + column), static_cast<unsigned>(from)));
            all.x += part.x, all.y += part.y;
        }
        if (tile_first + row < s.keys.seq_k)
            *reinterpret_cast<__nv_bfloat162*>(in.dindex_k + z.row_of(tile_first + row, sequence) * wide + column) =
                __floats2bfloat162_rn(all.x, all.y);
    }
    ptx::cluster_sync();
}

std::int64_t row_bytes_of(const IndexLossShape& s) {
    return row_tiles + (row_floats + ceil_div<std::int64_t>(s.width(), tile) * tile) * 4;
}

bool takes_loss(const IndexLossShape& s, std::initializer_list<Src> operands, Src dindex_q, Src dindex_k) {
    constexpr std::int64_t most_shared = 227 * 1024;
    const bool typed = std::all_of(operands.begin(), operands.end(), [](const Src& x) {
        return x.type == Type::bf16 && reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0;
    });
    return typed && s.core.qk_dim == sparse_tensor::wide && takes(s.index, {dindex_q, dindex_k}) &&
           row_bytes_of(s) <= most_shared && sm90::multiprocessors() > 0;
}

decltype(Kernels::pick_keys_grad) plain = nullptr; // what the table held before

void pick_keys_grad(const IndexLossShape& s, Src q, Src k, Src index_q, Src index_k, Src w, const std::int32_t* keys,
                    Dst dindex_q, Dst dindex_k, Dst dw, float* work, float* loss, float* p, void* stream) {
    if (!takes_loss(s, {q, k, index_q, index_k}, {dindex_q.data, dindex_q.type}, {dindex_k.data, dindex_k.type}))
        return plain(s, q, k, index_q, index_k, w, keys, dindex_q, dindex_k, dw, work, loss, p, stream);
    const PickedKeys& z = s.index.keys;
    if (z.rows() <= 0) return;
    const auto bf16 = [](Src x) { return static_cast<const __nv_bfloat16*>(x.data); };
    const Operands in{s,
                      bf16(index_q),
                      bf16(index_k),
                      w,
                      s.all_keys ? nullptr : keys,
                      static_cast<__nv_bfloat16*>(dindex_q.data),
                      static_cast<__nv_bfloat16*>(dindex_k.data),
                      dw,
                      work,
                      p,
                      s.width()};
    const unsigned rows = blocks_for(z.rows(), 1);
    find_shares(s, q, k, keys, work, stream_of(stream));

    const int bytes = static_cast<int>(row_bytes_of(s));
    CUDA_CHECK(cudaFuncSetAttribute(row_grad_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    row_grad_kernel<<<rows, threads, static_cast<std::size_t>(bytes), stream_of(stream)>>>(in);
    CUDA_CHECK(cudaGetLastError());

    constexpr unsigned ctas = 8;
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = ctas, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks_for(z.seq_k, tile) * static_cast<unsigned>(z.batch) * ctas);
    config.blockDim = dim3(threads);
    config.stream = stream_of(stream);
    config.attrs = &cluster;
    config.numAttrs = 1;
    CUDA_CHECK(cudaLaunchKernelEx(&config, key_grad_kernel, in));
    if (loss != nullptr) add_losses(work + z.rows() * s.width(), z.rows(), s.factor, loss, stream_of(stream));
}

} // namespace

void add_tensor_sparse_loss(Kernels& table) {
    plain = table.pick_keys_grad;
    table.pick_keys_grad = pick_keys_grad;
}

} // namespace moe::cuda
