// An indexer's loss and its gradient: the softmaxes' sums of every query, then queries and weights by rows, then keys
// by a block of each, whose warps take turns with the queries that have picked it.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/scratch.hpp"
#include "kernels/cuda/sparse/sparse.cuh"
#include "kernels/cuda/sparse/sparse.hpp"

namespace moe::cuda {
namespace {

constexpr int threads = 256, warps = threads / warp_size, tile = 32, widest = 256, partial_blocks = 1024;

struct Operands {
    IndexLossShape s;
    Src q, k, index_q, index_k, w;
    const std::int32_t* keys; // null: all that a query sees
    Dst dindex_q, dindex_k, dw;
    float* lse; // [heads, rows] of attention, [rows] of the indexer, and [rows] with each query's part of the loss
    float* p;
    std::int64_t width; // of p
};

// What a key has of a query, where a whole warp asks: by the heads of attention, and the log of what the indexer gives.
struct KeyShare {
    float p, log_chosen;
};
__device__ KeyShare key_share(const Operands& in, std::int64_t row, std::int64_t key_row, float score) {
    const LatentShape& core = in.s.core;
    const std::int64_t rows = KeyPlaces{core.keys}.rows();
    float p = 0.0f;
    for (int h = 0; h < core.heads; ++h) {
        const float logit = static_cast<float>(core.scale) * warp_dot(in.q, (row * core.heads + h) * core.qk_dim, in.k,
                                                                      key_row * core.qk_dim, core.qk_dim);
        p += expf(logit - in.lse[h * rows + row]);
    }
    return {p / static_cast<float>(in.s.all_heads), score - in.lse[core.heads * rows + row]};
}

// The gradient of the key's score: what the heads give it is taken from what the indexer does.
__device__ float score_gradient(const IndexLossShape& s, const KeyShare& key) {
    const float part = static_cast<float>(s.core.heads) / static_cast<float>(s.all_heads);
    return static_cast<float>(s.factor * s.index.scale) * (part * expf(key.log_chosen) - key.p);
}

__device__ void take_query(const Operands& in, std::int64_t row, float* query, float* weights) {
    const IndexShape& s = in.s.index;
    const int width = s.heads * s.dim;
    for (int i = static_cast<int>(threadIdx.x); i < width; i += threads) query[i] = load(in.index_q, row * width + i);
    for (int h = static_cast<int>(threadIdx.x); h < s.heads; h += threads) weights[h] = load(in.w, row * s.heads + h);
    __syncthreads();
}

__global__ void __launch_bounds__(threads) sums_kernel(Operands in) {
    extern __shared__ float query[]; // and the weights behind
    __shared__ float most[threads], sums[threads];
    const IndexShape& s = in.s.index;
    const LatentShape& core = in.s.core;
    const KeyPlaces z{s.keys};
    const std::int64_t row = blockIdx.x, rows = z.rows();
    const int thread = static_cast<int>(threadIdx.x);
    float* const weights = query + s.heads * s.dim;
    take_query(in, row, query, weights);
    const KeyList list(z, in.keys, row);
    for (int h = thread / warp_size; h < core.heads; h += warps) {
        LogSum sum;
        for (std::int64_t j = 0; j < list.count; ++j)
            sum.add(static_cast<float>(core.scale) * warp_dot(in.q, (row * core.heads + h) * core.qk_dim, in.k,
                                                              z.row_of(list.at(j), list.sequence) * core.qk_dim,
                                                              core.qk_dim));
        if (thread % warp_size == 0) in.lse[h * rows + row] = sum.log();
    }
    LogSum sum;
    for (std::int64_t j = thread; j < list.count; j += threads)
        sum.add(static_cast<float>(s.scale) *
                index_score(s, query, weights, in.index_k, z.row_of(list.at(j), list.sequence) * s.dim));
    most[thread] = sum.most, sums[thread] = sum.sum;
    __syncthreads();
    if (thread != 0) return;
    LogSum all;
    for (int t = 0; t < threads; ++t) all.add({most[t], sums[t]});
    in.lse[core.heads * rows + row] = all.log();
}

// Floats of shared memory: query, weights, their gradients, products and gradients of a tile's scores.
std::size_t row_bytes(const IndexShape& s) {
    return 2 * index_bytes(s) + static_cast<std::size_t>(tile * (s.heads + 1)) * sizeof(float);
}

__global__ void __launch_bounds__(threads) row_grad_kernel(Operands in) {
    extern __shared__ float query[];
    const IndexShape& s = in.s.index;
    const KeyPlaces z{s.keys};
    const std::int64_t row = blockIdx.x;
    const int thread = static_cast<int>(threadIdx.x), lane = thread % warp_size, width = s.heads * s.dim;
    float *const weights = query + width, *const dquery = weights + s.heads, *const dweights = dquery + width,
                 *const products = dweights + s.heads, *const dscores = products + tile * s.heads;
    __shared__ float parts[warps]; // of the loss
    float loss = 0.0f;
    for (int i = thread; i < width + s.heads; i += threads) dquery[i] = 0.0f; // and the weights' behind
    take_query(in, row, query, weights);
    const KeyList list(z, in.keys, row);
    for (std::int64_t base = 0; base < list.count; base += tile) {
        const int count = static_cast<int>(list.count - base < tile ? list.count - base : tile);
        for (int j = thread / warp_size; j < count; j += warps) {
            const std::int64_t key_row = z.row_of(list.at(base + j), list.sequence);
            float score = 0.0f;
            for (int h = 0; h < s.heads; ++h) {
                float product = 0.0f;
                for (int c = lane; c < s.dim; c += warp_size)
                    product += query[h * s.dim + c] * load(in.index_k, key_row * s.dim + c);
                product = fmaxf(warp_sum(product), 0.0f);
                score += weights[h] * product;
                if (lane == 0) products[h * tile + j] = product;
            }
            const KeyShare key = key_share(in, row, key_row, static_cast<float>(s.scale) * score);
            if (lane != 0) continue;
            dscores[j] = score_gradient(in.s, key);
            loss -= key.p * key.log_chosen;
            if (in.p != nullptr)
                in.p[row * in.width + base + j] = key.p;
            else if (key.p > 0.0f)
                loss += key.p * logf(key.p);
        }
        __syncthreads();
        for (int i = thread; i < width; i += threads) {
            const int h = i / s.dim, c = i % s.dim;
            float sum = 0.0f;
            for (int j = 0; j < count; ++j)
                if (products[h * tile + j] > 0.0f)
                    sum += dscores[j] * load(in.index_k, z.row_of(list.at(base + j), list.sequence) * s.dim + c);
            dquery[i] += sum * weights[h];
        }
        for (int h = thread; h < s.heads; h += threads)
            for (int j = 0; j < count; ++j) dweights[h] += dscores[j] * products[h * tile + j];
        __syncthreads();
    }
    for (int i = thread; i < width; i += threads) store(in.dindex_q, row * width + i, dquery[i]);
    for (int h = thread; h < s.heads; h += threads) store(in.dw, row * s.heads + h, dweights[h]);
    if (in.p != nullptr)
        for (std::int64_t j = list.count + thread; j < in.width; j += threads) in.p[row * in.width + j] = 0.0f;
    if (lane == 0) parts[thread / warp_size] = loss;
    __syncthreads();
    if (thread != 0) return;
    float sum = 0.0f;
    for (const float part : parts) sum += part;
    in.lse[(in.s.core.heads + 1) * z.rows() + row] = sum;
}

// Adds the queries' parts of the loss in an order that is always the same.
__global__ void __launch_bounds__(threads)
    loss_kernel(const float* by_query, std::int64_t rows, double factor, float* loss) {
    double sum = 0.0;
    for (std::int64_t row = threadIdx.x; row < rows; row += threads) sum += by_query[row];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *loss += static_cast<float>(factor * sum);
}

// A thread's terms are added in FP32, those of threads and blocks in double: partial[block].
__global__ void __launch_bounds__(threads) xlogx_kernel(const float* x, std::int64_t n, double* partial) {
    float sum = 0.0f;
    for (std::int64_t i = std::int64_t{blockIdx.x} * threads + threadIdx.x; i < n;
         i += std::int64_t{gridDim.x} * threads)
        if (x[i] > 0.0f) sum += x[i] * logf(x[i]);
    const double all = block_sum(static_cast<double>(sum));
    if (threadIdx.x == 0) partial[blockIdx.x] = all;
}

__global__ void __launch_bounds__(partial_blocks)
    add_partial_kernel(const double* partial, int blocks, double factor, float* s) {
    const double sum = block_sum(static_cast<int>(threadIdx.x) < blocks ? partial[threadIdx.x] : 0.0);
    if (threadIdx.x == 0) *s += static_cast<float>(factor * sum);
}

void xlogx(const float* x, double factor, float* s, std::int64_t n, void* stream) {
    if (n <= 0) return;
    auto* partial = reinterpret_cast<double*>(scratch_of(stream_of(stream)));
    const unsigned blocks = blocks_for(n, threads * 16, partial_blocks);
    xlogx_kernel<<<blocks, threads, 0, stream_of(stream)>>>(x, n, partial);
    CUDA_CHECK(cudaGetLastError());
    add_partial_kernel<<<1, partial_blocks, 0, stream_of(stream)>>>(partial, static_cast<int>(blocks), factor, s);
    CUDA_CHECK(cudaGetLastError());
}

__global__ void __launch_bounds__(threads) key_grad_kernel(Operands in) {
    constexpr int columns = widest / warp_size;
    __shared__ float all[warps][widest];
    const IndexShape& s = in.s.index;
    const KeyPlaces z{s.keys};
    const std::int64_t position = blockIdx.x / s.keys.batch, sequence = blockIdx.x % s.keys.batch,
                       key_row = z.row_of(position, sequence);
    const int lane = static_cast<int>(threadIdx.x) % warp_size, warp = static_cast<int>(threadIdx.x) / warp_size;
    float sum[columns] = {};
    for (std::int64_t i = warp; i < s.keys.seq_q; i += warps) {
        const std::int64_t row = i * s.keys.batch + sequence;
        if (z.position(i) < position || !KeyList(z, in.keys, row).holds(position)) continue;
        const auto product = [&](int h) {
            return warp_dot(in.index_q, (row * s.heads + h) * s.dim, in.index_k, key_row * s.dim, s.dim);
        };
        float score = 0.0f;
        for (int h = 0; h < s.heads; ++h) score += load(in.w, row * s.heads + h) * fmaxf(product(h), 0.0f);
        const float d = score_gradient(in.s, key_share(in, row, key_row, static_cast<float>(s.scale) * score));
        for (int h = 0; h < s.heads; ++h) {
            if (!(product(h) > 0.0f)) continue;
            const float by = d * load(in.w, row * s.heads + h);
#pragma unroll
            for (int c = 0; c < columns; ++c) {
                const int at = lane + c * warp_size;
                if (at < s.dim) sum[c] += by * load(in.index_q, (row * s.heads + h) * s.dim + at);
            }
        }
    }
#pragma unroll
    for (int c = 0; c < columns; ++c) all[warp][lane + c * warp_size] = sum[c];
    __syncthreads();
    for (int at = static_cast<int>(threadIdx.x); at < s.dim; at += threads) {
        float total = 0.0f;
        for (int w = 0; w < warps; ++w) total += all[w][at];
        store(in.dindex_k, key_row * s.dim + at, total);
    }
}

void pick_keys_grad(const IndexLossShape& s, Src q, Src k, Src index_q, Src index_k, Src w, const std::int32_t* keys,
                    Dst dindex_q, Dst dindex_k, Dst dw, float* work, float* loss, float* p, void* stream) {
    const PickedKeys& z = s.index.keys;
    if (z.rows() <= 0) return;
    require(s.index.dim <= widest, "the width of an indexer's head", s.index.dim, widest);
    const Operands in{s,        q,        k,  index_q, index_k, w,        s.all_keys ? nullptr : keys,
                      dindex_q, dindex_k, dw, work,    p,       s.width()};
    const unsigned rows = blocks_for(z.rows(), 1);
    const std::size_t sums = index_bytes(s.index), gradients = row_bytes(s.index);
    CUDA_CHECK(cudaFuncSetAttribute(sums_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sums)));
    CUDA_CHECK(cudaFuncSetAttribute(row_grad_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(gradients)));
    sums_kernel<<<rows, threads, sums, stream_of(stream)>>>(in);
    CUDA_CHECK(cudaGetLastError());
    row_grad_kernel<<<rows, threads, gradients, stream_of(stream)>>>(in);
    CUDA_CHECK(cudaGetLastError());
    key_grad_kernel<<<blocks_for(z.batch * z.seq_k, 1), threads, 0, stream_of(stream)>>>(in);
    CUDA_CHECK(cudaGetLastError());
    if (loss == nullptr) return;
    add_losses(work + (s.core.heads + 1) * z.rows(), z.rows(), s.factor, loss, stream_of(stream));
}

} // namespace

void add_losses(const float* by_query, std::int64_t rows, double factor, float* loss, cudaStream_t stream) {
    loss_kernel<<<1, threads, 0, stream>>>(by_query, rows, factor, loss);
    CUDA_CHECK(cudaGetLastError());
}

void add_sparse_loss(Kernels& table) {
    table.pick_keys_grad = pick_keys_grad;
    table.xlogx = xlogx;
}

} // namespace moe::cuda
