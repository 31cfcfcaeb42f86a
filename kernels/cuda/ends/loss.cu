// Cross-entropy over a vocabulary that may be cut into slices: the pieces between the reductions over the slices.
#include "kernels/cuda/ends/cross_entropy.hpp"
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/scratch.hpp"
#include "kernels/cuda/vector.cuh"

namespace moe::cuda {
namespace {

constexpr int threads = 512;
constexpr int together = 4; // packs in flight per thread
constexpr int sum_threads = 1024;

// Columns of the slice that are real vocabulary entries.
__host__ __device__ std::int64_t real_columns(const LossShape& s) {
    const std::int64_t left = s.vocab - s.first;
    return left < 0 ? 0 : left < s.vocab_local ? left : s.vocab_local;
}

// A row is cut into runs that a block goes over at once. Blocks follow each other along a row and from row to row, so
// that those at work together touch one stretch of memory: a block per row would read hundreds of places at a time,
// which took a half longer to read and more than twice as long to write.
struct Runs {
    std::int64_t count; // number of runs per row
    std::int64_t rows;
    Runs(const LossShape& s, int width)
        : count(ceil_div(s.vocab_local, std::int64_t{threads} * together * width)), rows(s.rows) {
        if (count < 1) count = 1;
    }
    unsigned blocks() const { return blocks_for(rows * count, 1); }
};

// The range that a block goes over: packs [begin, end) of a row, and in its last run the columns behind the last whole
// pack.
template <class A>
struct Run {
    std::int64_t row, start, columns;
    int index, begin, end;
    bool last;
    __device__ Run(const LossShape& s, std::int64_t runs)
        : row(blockIdx.x / runs),
          start(row * s.vocab_local),
          columns(real_columns(s)),
          index(static_cast<int>(blockIdx.x - row * runs)),
          last(index == runs - 1) {
        const int packs = static_cast<int>(columns / A::width), each = static_cast<int>((packs + runs - 1) / runs);
        begin = index * each < packs ? index * each : packs;
        end = begin + each < packs ? begin + each : packs;
    }
    // Calls packs(column, held) for whole packs, a few loads ahead; rest(column) for what is left.
    template <class Packs, class Rest>
    __device__ void over(Src x, Packs packs, Rest rest) const {
        for (int first = begin + static_cast<int>(threadIdx.x); first < end; first += threads * together) {
            typename A::Held held[together];
#pragma unroll
            for (int t = 0; t < together; ++t) {
                if (first + t * threads < end) held[t] = A::take(x, start + (first + t * threads) * A::width);
            }
#pragma unroll
            for (int t = 0; t < together; ++t) {
                if (first + t * threads < end) packs((first + t * threads) * A::width, held[t]);
            }
        }
        if (!last) return;
        for (std::int64_t c = columns / A::width * A::width + threadIdx.x; c < columns; c += threads) rest(c);
    }
};

// The difference to the largest logit is exact enough for the fast exponential; the exact one takes longer than the
// memory.
__device__ float exponential(float x) { return __expf(x); }

// largest[row * runs + run]
template <class A>
__global__ void __launch_bounds__(threads) max_kernel(LossShape s, Src logits, std::int64_t runs, float* largest) {
    const Run<A> run(s, runs);
    float best = -INFINITY;
    run.over(
        logits,
        [&](int, const typename A::Held& held) {
#pragma unroll
            for (int j = 0; j < A::width; ++j) best = fmaxf(best, held[j]);
        },
        [&](std::int64_t c) { best = fmaxf(best, load(logits, run.start + c)); });
    best = block_max(best);
    if (threadIdx.x == 0) largest[blockIdx.x] = best;
}

__global__ void __launch_bounds__(threads)
    max_of_runs_kernel(const float* largest, std::int64_t runs, std::int64_t rows, float* max) {
    const std::int64_t row = std::int64_t{blockIdx.x} * threads + threadIdx.x;
    if (row >= rows) return;
    float best = -INFINITY;
    for (std::int64_t run = 0; run < runs; ++run) best = fmaxf(best, largest[row * runs + run]);
    max[row] = best;
}

// sums[(row * runs + run) * step]
template <class A>
__global__ void __launch_bounds__(threads)
    sum_kernel(LossShape s, Src logits, const float* max, std::int64_t runs, float* sums, int step) {
    const Run<A> run(s, runs);
    const float largest = max[run.row];
    float sum = 0.0f;
    run.over(
        logits,
        [&](int, const typename A::Held& held) {
#pragma unroll
            for (int j = 0; j < A::width; ++j) sum += exponential(held[j] - largest);
        },
        [&](std::int64_t c) { sum += exponential(load(logits, run.start + c) - largest); });
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[std::int64_t{blockIdx.x} * step] = sum;
}

__global__ void __launch_bounds__(threads) stat_kernel(LossShape s, Src logits, const std::int32_t* labels,
                                                       const float* sums, std::int64_t runs, int step, float* stat) {
    const std::int64_t row = std::int64_t{blockIdx.x} * threads + threadIdx.x;
    if (row >= s.rows) return;
    float sum = 0.0f;
    for (std::int64_t run = 0; run < runs; ++run) sum += sums[(row * runs + run) * step];
    const std::int64_t label = labels[row] - s.first;
    const bool here = labels[row] >= 0 && label >= 0 && label < real_columns(s);
    stat[2 * row] = labels[row] < 0 ? 0.0f : sum;
    stat[2 * row + 1] = here ? load(logits, row * s.vocab_local + label) : 0.0f;
}

// Times this a scale holds for the labels that count; 1 changes no bit.
__device__ float share_of(const LossShape& s) { return s.share != nullptr ? *s.share : 1.0f; }

// One block: some thousand rows, and a fixed order.
__global__ void __launch_bounds__(sum_threads)
    loss_kernel(LossShape s, const float* max, const float* stat, float* loss) {
    double sum = 0.0;
    for (std::int64_t row = threadIdx.x; row < s.rows; row += sum_threads) {
        if (stat[2 * row] == 0.0f) continue; // The row has no label.
        sum += log(static_cast<double>(stat[2 * row])) + static_cast<double>(max[row]) -
               static_cast<double>(stat[2 * row + 1]);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) *loss += static_cast<float>(s.scale * sum * share_of(s));
}

template <class A>
__global__ void __launch_bounds__(threads) grad_kernel(LossShape s, Src logits, const float* max, const float* stat,
                                                       const std::int32_t* labels, std::int64_t runs, Dst dlogits) {
    const Run<A> run(s, runs);
    const float scale = static_cast<float>(s.scale) * share_of(s);
    const std::int64_t label = labels[run.row] >= 0 ? labels[run.row] - s.first : -1;
    const float largest = max[run.row], factor = labels[run.row] >= 0 ? scale / stat[2 * run.row] : 0.0f;
    run.over(
        logits,
        [&](int c, const typename A::Held& held) {
            float value[A::width];
#pragma unroll
            for (int j = 0; j < A::width; ++j) value[j] = exponential(held[j] - largest) * factor;
            if (label >= c && label < c + A::width) {
#pragma unroll
                for (int j = 0; j < A::width; ++j) value[j] -= c + j == label ? scale : 0.0f;
            }
            A::put(dlogits, run.start + c, value);
        },
        [&](std::int64_t c) {
            const float value = exponential(load(logits, run.start + c) - largest) * factor;
            store(dlogits, run.start + c, value - (c == label ? scale : 0.0f));
        });
    if (!run.last) return;
    for (std::int64_t c = run.columns + threadIdx.x; c < s.vocab_local; c += threads)
        store(dlogits, run.start + c, 0.0f);
}

void ce_max(const LossShape& s, Src logits, float* max, void* stream) {
    if (s.rows <= 0) return;
    with_access({logits}, {s.vocab_local}, [&](auto access) {
        using A = decltype(access);
        Runs runs(s, A::width);
        if (s.rows * runs.count > scratch_floats) runs.count = 1;
        float* const largest = runs.count == 1 ? max : scratch_of(stream_of(stream));
        max_kernel<A><<<runs.blocks(), threads, 0, stream_of(stream)>>>(s, logits, runs.count, largest);
        CUDA_CHECK(cudaGetLastError());
        if (runs.count == 1) return;
        const unsigned blocks = blocks_for(s.rows, threads);
        max_of_runs_kernel<<<blocks, threads, 0, stream_of(stream)>>>(largest, runs.count, s.rows, max);
        CUDA_CHECK(cudaGetLastError());
    });
}

void ce_sum(const LossShape& s, Src logits, const float* max, const std::int32_t* labels, float* stat, void* stream) {
    if (s.rows <= 0) return;
    with_access({logits}, {s.vocab_local}, [&](auto access) {
        using A = decltype(access);
        Runs runs(s, A::width);
        if (s.rows * runs.count > scratch_floats) runs.count = 1;
        float* const sums = runs.count == 1 ? stat : scratch_of(stream_of(stream));
        const int step = runs.count == 1 ? 2 : 1;
        sum_kernel<A><<<runs.blocks(), threads, 0, stream_of(stream)>>>(s, logits, max, runs.count, sums, step);
        CUDA_CHECK(cudaGetLastError());
        stat_kernel<<<blocks_for(s.rows, threads), threads, 0, stream_of(stream)>>>(s, logits, labels, sums, runs.count,
                                                                                    step, stat);
        CUDA_CHECK(cudaGetLastError());
    });
}

void ce_grad(const LossShape& s, Src logits, const float* max, const float* stat, const std::int32_t* labels,
             Dst dlogits, void* stream) {
    if (s.rows <= 0) return;
    with_access({logits, dlogits}, {s.vocab_local}, [&](auto access) {
        using A = decltype(access);
        const Runs runs(s, A::width);
        grad_kernel<A>
            <<<runs.blocks(), threads, 0, stream_of(stream)>>>(s, logits, max, stat, labels, runs.count, dlogits);
        CUDA_CHECK(cudaGetLastError());
    });
}

void ce_loss(const LossShape& s, const float* max, const float* stat, float* loss, void* stream) {
    if (s.rows <= 0) return;
    loss_kernel<<<1, sum_threads, 0, stream_of(stream)>>>(s, max, stat, loss);
    CUDA_CHECK(cudaGetLastError());
}

void cross_entropy(const LossShape& s, double gradient_scale, Src logits, const std::int32_t* labels, float* max,
                   float* stat, float* loss, Dst dlogits, void* stream) {
    if (!cross_entropy_rows(s, gradient_scale, logits, labels, max, stat, dlogits, stream)) {
        ce_max(s, logits, max, stream);
        ce_sum(s, logits, max, labels, stat, stream);
        LossShape gradient = s;
        gradient.scale = gradient_scale;
        ce_grad(gradient, logits, max, stat, labels, dlogits, stream);
    }
    ce_loss(s, max, stat, loss, stream);
}

} // namespace

void add_loss(Kernels& table) {
    table.ce_max = ce_max;
    table.ce_sum = ce_sum;
    table.ce_loss = ce_loss;
    table.ce_grad = ce_grad;
    table.cross_entropy = cross_entropy;
}

} // namespace moe::cuda
