// The embedding table's slice of the vocabulary: look-up and deterministic gradient.
#include "kernels/cuda/clear.hpp"
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/rows.cuh"
#include "kernels/cuda/scratch.hpp"

namespace moe::cuda {
namespace {

constexpr int threads = 256;
constexpr int most_sorted = 2048; // rows of one id that a block puts in order in shared memory

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

// Rows by id, without a search: how often each id occurs, where its rows begin in `list`, and the place of each row
// there. The places depend on which atomic came first; whoever adds the rows puts them in order.
struct RowsOfIds {
    std::int32_t *count, *begin, *place, *list, *end; // [vocab_local], [vocab_local], [rows], [rows], [1]
    const std::int32_t* ids;
    std::int64_t rows, first, vocab_local;

    RowsOfIds(float* scratch, const std::int32_t* i, std::int64_t r, std::int64_t f, std::int64_t v)
        : count(reinterpret_cast<std::int32_t*>(scratch)),
          begin(count + v + 1),
          place(begin + v),
          list(place + r),
          end(count + v),
          ids(i),
          rows(r),
          first(f),
          vocab_local(v) {}
    static bool fits(std::int64_t rows, std::int64_t vocab_local) {
        return 2 * (rows + vocab_local) + 1 <= scratch_floats;
    }
    __device__ std::int64_t id(std::int64_t row) const {
        const std::int64_t local = ids[row] - first;
        return local >= 0 && local < vocab_local ? local : -1;
    }
};

enum class Step { count, begin, list };
template <Step step>
__global__ void __launch_bounds__(threads) rows_of_ids_kernel(RowsOfIds r) {
    const std::int64_t row = std::int64_t{blockIdx.x} * threads + threadIdx.x;
    const std::int64_t id = row < r.rows ? r.id(row) : -1;
    if constexpr (step == Step::begin) { // one atomic per warp: all go to one place
        const bool starts = id >= 0 && r.place[row] == 0;
        const int n = starts ? r.count[id] : 0, lane = lane_of_warp();
        int end = n;
        for (int offset = 1; offset < warp_size; offset *= 2) {
            const int left = __shfl_up_sync(all_lanes, end, offset);
            if (lane >= offset) end += left;
        }
        int first = lane == warp_size - 1 && end > 0 ? atomicAdd(r.end, end) : 0;
        first = __shfl_sync(all_lanes, first, warp_size - 1);
        if (starts) r.begin[id] = first + end - n;
    }
    if (id < 0) return;
    if constexpr (step == Step::count) r.place[row] = atomicAdd(r.count + id, 1);
    if constexpr (step == Step::list) r.list[r.begin[id] + r.place[row]] = static_cast<std::int32_t>(row);
}

// sum += the rows that row_at names, in this order.
template <class A, class RowAt>
__device__ void add_rows(Src dx, std::int64_t cols, std::int64_t column, int n, RowAt row_at, float (&sum)[A::width]) {
    constexpr int together = 4; // more registers would leave fewer blocks, and most ids occur once
    for (int first = 0; first < n; first += together) {
        typename A::Held held[together];
#pragma unroll
        for (int t = 0; t < together; ++t) {
            if (first + t < n) held[t] = A::take(dx, row_at(first + t) * cols + column);
        }
#pragma unroll
        for (int t = 0; t < together; ++t) {
            if (first + t >= n) break;
#pragma unroll
            for (int j = 0; j < A::width; ++j) sum[j] += held[t][j];
        }
    }
}

// Rows of an id that occurs several times, at most most_sorted of them, in order. All threads come.
__device__ void sort_list(const std::int32_t* list, int n, std::int32_t (&sorted)[most_sorted]) {
    for (int i = static_cast<int>(threadIdx.x); i < n; i += threads) {
        const std::int32_t mine = list[i];
        int before = 0;
        for (int j = 0; j < n; ++j) before += list[j] < mine ? 1 : 0;
        sorted[before] = mine;
    }
    __syncthreads();
}

// The block of an id's first listed row adds all rows of that id in order: no two blocks write the same place, so that
// the sum is the same every time. What most ids need, which occur once, is read before it is known how often they do.
template <class A>
__global__ void __launch_bounds__(threads) embedding_grad_kernel(RowsOfIds r, Src dx, Dst dtable, std::int64_t cols) {
    constexpr int W = A::width;
    using Table = Access<float, W>;
    __shared__ std::int32_t sorted[most_sorted];
    const std::int64_t row = blockIdx.x, id = r.id(row), place = r.place[row];
    if (id < 0 || place != 0) return;
    const int n = r.count[id], thread = static_cast<int>(threadIdx.x);
    const std::int64_t column = (std::int64_t{blockIdx.y} * threads + thread) * W;
    const bool mine = column < cols;
    float sum[W] = {};
    typename A::Held own;
    if (mine) {
        const auto old = Table::take(read_back(dtable), id * cols + column);
        own = A::take(dx, row * cols + column);
#pragma unroll
        for (int j = 0; j < W; ++j) sum[j] = old[j];
    }
    if (n == 1) {
#pragma unroll
        for (int j = 0; j < W; ++j) sum[j] += mine ? own[j] : 0.0f;
    } else if (n <= most_sorted) {
        sort_list(r.list + r.begin[id], n, sorted);
        if (mine)
            add_rows<A>(
                dx, cols, column, n, [&](int i) -> std::int64_t { return sorted[i]; }, sum);
    } else { // looked for among all, a window at a time
        for (std::int64_t base = 0; base < r.rows; base += most_sorted) {
            const int length = static_cast<int>(r.rows - base < most_sorted ? r.rows - base : most_sorted);
            __syncthreads(); // the window before has been read
            for (int i = thread; i < length; i += threads) sorted[i] = r.ids[base + i];
            __syncthreads();
            for (int i = 0; i < length; ++i) {
                if (sorted[i] - r.first == id && mine)
                    add_rows<A>(
                        dx, cols, column, 1, [&](int) { return base + i; }, sum);
            }
        }
    }
    if (mine) Table::put(dtable, id * cols + column, sum);
}

// Without scratch memory for all ids: the block of an id's first row looks for the others, which costs rows^2 / 2
// comparisons at worst, out of the L2 cache.
__global__ void __launch_bounds__(threads)
    embedding_search_kernel(const std::int32_t* ids, Src dx, float* dtable, std::int64_t rows, std::int64_t cols,
                            std::int64_t first, std::int64_t vocab_local) {
    __shared__ std::int32_t window[threads];
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
        __syncthreads(); // the window before has been read
        window[threadIdx.x] = r < rows && ids[r] == ids[row] ? 1 : 0;
        if (!__syncthreads_or(window[threadIdx.x])) continue;
        for (int i = 0; i < threads; ++i) {
            if (window[i] != 0 && c < cols) sum += load(dx, (base + i) * cols + c);
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
    const unsigned blocks = blocks_for(rows, threads);
    clear(r.count, (vocab_local + 1) * static_cast<std::int64_t>(sizeof(std::int32_t)), stream_of(stream));
    rows_of_ids_kernel<Step::count><<<blocks, threads, 0, stream_of(stream)>>>(r);
    CUDA_CHECK(cudaGetLastError());
    rows_of_ids_kernel<Step::begin><<<blocks, threads, 0, stream_of(stream)>>>(r);
    CUDA_CHECK(cudaGetLastError());
    rows_of_ids_kernel<Step::list><<<blocks, threads, 0, stream_of(stream)>>>(r);
    CUDA_CHECK(cudaGetLastError());
    with_access({dx, Src{dtable, dx.type}}, {cols}, [&](auto access) {
        using A = decltype(access);
        const dim3 grid(blocks_for(rows, 1), blocks_for(cols, threads * A::width));
        embedding_grad_kernel<A><<<grid, threads, 0, stream_of(stream)>>>(r, dx, Dst{dtable, Type::f32}, cols);
    });
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_embedding(Kernels& table) {
    table.embedding = embedding;
    table.embedding_grad = embedding_grad;
}

} // namespace moe::cuda
