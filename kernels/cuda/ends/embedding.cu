// The embedding table's slice of the vocabulary: look-up and deterministic gradient.
#include "kernels/cuda/clear.hpp"
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/rows.cuh"
#include "kernels/cuda/scratch.hpp"

namespace moe::cuda {
namespace {

constexpr int threads = 256;
constexpr int few_rows = 32;    // rows of one id that the block of the first one puts in order and adds up
constexpr int window = 2048;    // ids that a block looks through at a time for those of an id with more rows
constexpr int long_blocks = 64; // blocks that take ids with more rows

template <class A>
__global__ void __launch_bounds__(row_threads)
    embedding_kernel(const std::int32_t* ids, Src table, Dst x, std::int64_t rows, std::int64_t cols,
                     std::int64_t first, std::int64_t vocab_local) {
    constexpr int W = A::width;
    for_each_row(nullptr, 0, rows, [&](std::int64_t row) {
        const std::int64_t id = ids[row] - first;
        const bool here = id >= 0 && id < vocab_local;
        for_each_pack<4>(
            static_cast<int>(cols / W),
            [&](int p) { return here ? A::take(table, id * cols + p * W) : typename A::Held{}; },
            [&](int p, const typename A::Held& held) { A::put(x, row * cols + p * W, held); });
    });
}

// Rows by id, without a search: a chain of those of each id, the last that came first. The order of a chain depends on
// the order of atomics; whoever adds the rows puts them in order. Rows are counted from 1 here, so that 0 is none.
struct RowsOfIds {
    std::int32_t *last, *many;     // [vocab_local], [1]: how many are in many_ids
    std::int32_t *next, *many_ids; // [rows], [rows / few_rows]: ids that have more than few_rows
    const std::int32_t* ids;
    std::int64_t rows, first, vocab_local;

    RowsOfIds(float* scratch, const std::int32_t* i, std::int64_t r, std::int64_t f, std::int64_t v)
        : last(reinterpret_cast<std::int32_t*>(scratch)),
          many(last + v),
          next(many + 1),
          many_ids(next + r),
          ids(i),
          rows(r),
          first(f),
          vocab_local(v) {}
    static bool fits(std::int64_t rows, std::int64_t vocab_local) {
        return vocab_local + 1 + rows + rows / few_rows <= scratch_floats;
    }
    __device__ std::int64_t id(std::int64_t row) const {
        const std::int64_t local = ids[row] - first;
        return local >= 0 && local < vocab_local ? local : -1;
    }
};

__global__ void __launch_bounds__(threads) rows_of_ids_kernel(RowsOfIds r) {
    const std::int64_t row = std::int64_t{blockIdx.x} * threads + threadIdx.x;
    const std::int64_t id = row < r.rows ? r.id(row) : -1;
    if (id >= 0) r.next[row] = atomicExch(r.last + id, static_cast<std::int32_t>(row) + 1);
}

// sum += the rows listed, in this order, `together` of them read before the first is added.
template <class A, int together>
__device__ void add_rows(Src dx, std::int64_t cols, std::int64_t column, const std::int32_t* listed, int n,
                         float (&sum)[A::width]) {
    for (int first = 0; first < n; first += together) {
        typename A::Held held[together];
#pragma unroll
        for (int t = 0; t < together; ++t) {
            if (first + t < n) held[t] = A::take(dx, listed[first + t] * cols + column);
        }
#pragma unroll
        for (int t = 0; t < together; ++t) {
            if (first + t >= n) break;
#pragma unroll
            for (int j = 0; j < A::width; ++j) sum[j] += held[t][j];
        }
    }
}

// Rows of an id that occurs several times, in order, and how many they are; more than few_rows are not listed. All
// threads come.
__device__ int list_rows(const RowsOfIds& r, std::int64_t id, std::int32_t (&sorted)[few_rows]) {
    __shared__ std::int32_t list[few_rows];
    __shared__ int count;
    if (threadIdx.x == 0) {
        int n = 0;
        for (std::int32_t at = r.last[id]; at != 0 && n <= few_rows; at = r.next[at - 1], ++n)
            if (n < few_rows) list[n] = at - 1;
        count = n;
    }
    __syncthreads();
    const int n = count;
    if (n > few_rows) return n;
    if (static_cast<int>(threadIdx.x) < n) {
        const std::int32_t mine = list[threadIdx.x];
        int before = 0;
        for (int j = 0; j < n; ++j) before += list[j] < mine ? 1 : 0;
        sorted[before] = mine;
    }
    __syncthreads();
    return n;
}

// The block of the row of an id that came first adds all rows of that id in order: no two blocks write the same place,
// so that the sum is the same every time. The bytes that most ids need, which occur once, are read before it is known
// how often they do.
template <class A>
__global__ void __launch_bounds__(threads) embedding_grad_kernel(RowsOfIds r, Src dx, Dst dtable, std::int64_t cols) {
    constexpr int W = A::width, together = 4; // More registers would leave fewer blocks.
    using Table = Access<float, W>;
    __shared__ std::int32_t sorted[few_rows];
    const std::int64_t row = blockIdx.x, id = r.id(row);
    if (id < 0 || r.next[row] != 0) return;
    const bool alone = r.last[id] == row + 1;
    const std::int64_t column = (std::int64_t{blockIdx.y} * threads + threadIdx.x) * W;
    const bool mine = column < cols;
    float sum[W] = {};
    typename A::Held own;
    if (mine) {
        const auto old = Table::take(read_back(dtable), id * cols + column);
        own = A::take(dx, row * cols + column);
#pragma unroll
        for (int j = 0; j < W; ++j) sum[j] = old[j];
    }
    if (alone) {
#pragma unroll
        for (int j = 0; j < W; ++j) sum[j] += mine ? own[j] : 0.0f;
    } else {
        const int n = list_rows(r, id, sorted);
        if (n > few_rows) {
            if (threadIdx.x == 0 && blockIdx.y == 0)
                r.many_ids[atomicAdd(r.many, 1)] = static_cast<std::int32_t>(id); // The ids come in any order.
            return;
        }
        if (mine) add_rows<A, together>(dx, cols, column, sorted, n, sum);
    }
    if (mine) Table::put(dtable, id * cols + column, sum);
}

// The rows with this id among `length` ids from ids[0] on, in order; returns how many. All threads come, and all have
// read `found` when they do.
__device__ int rows_with(std::int64_t id, const RowsOfIds& r, std::int64_t base, int length,
                         std::int32_t (&found)[window]) {
    constexpr int each = window / threads;
    __shared__ int warp_ends[threads / warp_size];
    const int first = static_cast<int>(threadIdx.x) * each, lane = lane_of_warp();
    unsigned matches = 0;
    for (int i = 0; i < each; ++i)
        if (first + i < length && r.ids[base + first + i] - r.first == id) matches |= 1u << i;
    int end = __popc(matches);
    for (int offset = 1; offset < warp_size; offset *= 2) {
        const int left = __shfl_up_sync(all_lanes, end, offset);
        if (lane >= offset) end += left;
    }
    __syncthreads();
    if (lane == warp_size - 1) warp_ends[threadIdx.x / warp_size] = end;
    __syncthreads();
    int total = 0;
    for (int w = 0; w < threads / warp_size; ++w) {
        if (w < static_cast<int>(threadIdx.x) / warp_size) end += warp_ends[w];
        total += warp_ends[w];
    }
    int at = end - __popc(matches);
    for (int i = 0; i < each; ++i)
        if ((matches >> i & 1u) != 0) found[at++] = static_cast<std::int32_t>(base + first + i);
    __syncthreads();
    return total;
}

// Ids with many rows, as spaces and commas have: a chain of additions each, so that many rows must be on their way.
template <class A>
__global__ void __launch_bounds__(threads)
    embedding_grad_long_kernel(RowsOfIds r, Src dx, Dst dtable, std::int64_t cols) {
    constexpr int W = A::width, together = 16;
    using Table = Access<float, W>;
    __shared__ std::int32_t found[window];
    const std::int64_t column = (std::int64_t{blockIdx.y} * threads + threadIdx.x) * W;
    const bool mine = column < cols;
    for (int at = static_cast<int>(blockIdx.x); at < *r.many; at += long_blocks) {
        const std::int64_t id = r.many_ids[at];
        float sum[W] = {};
        if (mine) {
            const auto old = Table::take(read_back(dtable), id * cols + column);
#pragma unroll
            for (int j = 0; j < W; ++j) sum[j] = old[j];
        }
        for (std::int64_t base = 0; base < r.rows; base += window) {
            const int length = static_cast<int>(r.rows - base < window ? r.rows - base : window);
            const int n = rows_with(id, r, base, length, found);
            if (mine) add_rows<A, together>(dx, cols, column, found, n, sum);
        }
        if (mine) Table::put(dtable, id * cols + column, sum);
    }
}

// This way needs no scratch memory for all ids: the block of an id's first row looks for the others, which costs rows^2
// / 2 comparisons at worst, out of the L2 cache.
__global__ void __launch_bounds__(threads)
    embedding_search_kernel(const std::int32_t* ids, Src dx, float* dtable, std::int64_t rows, std::int64_t cols,
                            std::int64_t first, std::int64_t vocab_local) {
    __shared__ std::int32_t alike[threads];
    const std::int64_t row = blockIdx.x, id = ids[row] - first;
    if (id < 0 || id >= vocab_local) return;
    for (std::int64_t base = 0; base < row; base += threads) {
        const std::int64_t r = base + threadIdx.x;
        if (__syncthreads_or(r < row && ids[r] == ids[row])) return;
    }
    const std::int64_t c = std::int64_t{blockIdx.y} * threads + threadIdx.x;
    float sum = c < cols ? dtable[id * cols + c] : 0.0f;
    for (std::int64_t base = row; base < rows; base += threads) {
        const std::int64_t r = base + threadIdx.x;
        __syncthreads(); // The previous window has been read.
        alike[threadIdx.x] = r < rows && ids[r] == ids[row] ? 1 : 0;
        if (!__syncthreads_or(alike[threadIdx.x])) continue;
        for (int i = 0; i < threads; ++i) {
            if (alike[i] != 0 && c < cols) sum += load(dx, (base + i) * cols + c);
        }
    }
    if (c < cols) dtable[id * cols + c] = sum;
}

void embedding(const std::int32_t* ids, Src table, Dst x, std::int64_t rows, std::int64_t cols, std::int64_t first,
               std::int64_t vocab_local, void* stream) {
    if (rows <= 0 || cols <= 0) return;
    with_access({table, x}, {cols}, [&](auto access) {
        launch_rows<embedding_kernel<decltype(access)>>(rows, stream, ids, table, x, rows, cols, first, vocab_local);
    });
}

void embedding_grad(const std::int32_t* ids, Src dx, float* dtable, std::int64_t rows, std::int64_t cols,
                    std::int64_t first, std::int64_t vocab_local, void* stream) {
    if (rows <= 0 || cols <= 0) return;
    if (!RowsOfIds::fits(rows, vocab_local)) {
        const dim3 grid(blocks_for(rows, 1), blocks_for(cols, threads));
        embedding_search_kernel<<<grid, threads, 0, stream_of(stream)>>>(ids, dx, dtable, rows, cols, first,
                                                                         vocab_local);
        CUDA_CHECK(cudaGetLastError());
        return;
    }
    const RowsOfIds r(scratch_of(stream_of(stream)), ids, rows, first, vocab_local);
    clear(r.last, (vocab_local + 1) * static_cast<std::int64_t>(sizeof(std::int32_t)), stream_of(stream));
    rows_of_ids_kernel<<<blocks_for(rows, threads), threads, 0, stream_of(stream)>>>(r);
    CUDA_CHECK(cudaGetLastError());
    with_access({dx, Src{dtable, dx.type}}, {cols}, [&](auto access) {
        using A = decltype(access);
        const dim3 grid(blocks_for(rows, 1), blocks_for(cols, threads * A::width));
        embedding_grad_kernel<A><<<grid, threads, 0, stream_of(stream)>>>(r, dx, Dst{dtable, Type::f32}, cols);
        if (rows <= few_rows) return;
        embedding_grad_long_kernel<A>
            <<<dim3(long_blocks, grid.y), threads, 0, stream_of(stream)>>>(r, dx, Dst{dtable, Type::f32}, cols);
    });
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_embedding(Kernels& table) {
    table.embedding = embedding;
    table.embedding_grad = embedding_grad;
}

} // namespace moe::cuda
