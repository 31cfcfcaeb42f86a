// The gradient of rotary embedding with a warp per token, and of the norms of queries and keys before it.
#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/rope/rope_packs.cuh"
#include "kernels/cuda/rope/rope_packs.hpp"
#include "kernels/cuda/scratch.hpp"

namespace moe::cuda {
namespace {

// Sums of a lane's columns over heads and tokens: the gradient of the weights.
template <class A>
struct WeightSums {
    float first[A::width] = {}, second[A::width] = {};
};

// Heads [begin, end) of a token, which share one weight, and behind them heads up to `last` that are passed on.
struct HeadRange {
    int begin, end, last;
};

// The operands that the gradient reads for a few heads, a lane its packs of each.
template <class A, bool norm>
struct Step {
    static constexpr int together = norm ? 1 : 2;
    Heads<A, together> dout, qkv;
    __device__ void read(const RopeShape& s, const Lane<A>& lane, const RopeGradients& in, const HeadRange& heads,
                         std::int64_t row, int base) {
        const std::int64_t start = row * width_of(s);
        dout.read(in.dout, lane, start, s.head_dim, base + lane.side, heads.last);
        if constexpr (norm) qkv.read(in.qkv, lane, start, s.head_dim, base + lane.side, heads.end);
    }
};

// The next step of the same row on its way in registers.
template <class A, bool norm>
struct StepInRegisters {
    static constexpr std::size_t bytes = 0; // bytes of shared memory
    const RopeShape& s;
    const Lane<A>& lane;
    const RopeGradients& in;
    HeadRange heads;
    Step<A, norm> next;
    __device__ StepInRegisters(const RopeShape& shape, const Lane<A>& own, const RopeGradients& operands,
                               const HeadRange& range, uint4*)
        : s(shape), lane(own), in(operands), heads(range) {}
    __device__ void begin(std::int64_t row) { next.read(s, lane, in, heads, row, heads.begin); }
    __device__ Step<A, norm> take(std::int64_t row, int base) {
        const Step<A, norm> held = next;
        next.read(s, lane, in, heads, row, base + lane.sides * Step<A, norm>::together);
        return held;
    }
};

// Two steps on their way in shared memory, over the ends of rows. A lane reads only what it copied itself.
template <class A>
struct StepsInShared {
    using Held = typename A::Held;
    using T = typename A::Storage;
    static constexpr int ahead = 2, packs = 4; // ahead: steps; packs: packs of a lane in a step
    static constexpr std::size_t bytes = sizeof(Held) * row_threads * ahead * packs;
    const RopeShape& s;
    const Lane<A>& lane;
    const RopeGradients& in;
    HeadRange heads;
    uint4* slots;          // [ahead][packs][row_threads]
    std::int64_t next_row; // next row to fetch, from head next_base on
    int next_base, stage = 0;

    __device__ StepsInShared(const RopeShape& shape, const Lane<A>& own, const RopeGradients& operands,
                             const HeadRange& range, uint4* memory)
        : s(shape),
          lane(own),
          in(operands),
          heads(range),
          slots(memory),
          next_row(first_row()),
          next_base(range.begin) {
        for (int i = 0; i < ahead; ++i) fetch();
    }
    __device__ void begin(std::int64_t) {}
    __device__ Step<A, true> take(std::int64_t, int) {
        wait_for_groups<ahead - 1>();
        Step<A, true> held;
        held.dout.first[0] = get(0), held.dout.second[0] = get(1);
        held.qkv.first[0] = get(2), held.qkv.second[0] = get(3);
        fetch();
        return held;
    }

private:
    __device__ uint4* slot(int pack) const { return slots + (stage * packs + pack) * row_threads + threadIdx.x; }
    __device__ Held get(int pack) const {
        const uint4 four = *slot(pack);
        return {{four.x, four.y, four.z, four.w}};
    }
    // Fetches a step into the slots that were read last.
    __device__ void fetch() {
        const int h = next_base + lane.side;
        const std::int64_t at = next_row * width_of(s) + h * s.head_dim;
        const auto copy = [&](int pack, Src x) {
            copy_async(slot(pack), static_cast<const T*>(x.data) + at + lane.first);
            copy_async(slot(pack + 1), static_cast<const T*>(x.data) + at + lane.second);
        };
        if (next_row < s.tokens && h < heads.last) copy(0, in.dout);
        if (next_row < s.tokens && h < heads.end) copy(2, in.qkv);
        end_group();
        stage = stage + 1 < ahead ? stage + 1 : 0;
        next_base += lane.sides;
        if (next_base >= heads.last) next_base = heads.begin, next_row += row_step();
    }
};

// BF16 with norm has too few bytes on its way in the registers of 16 warps; all else is faster from registers.
template <class A, bool norm>
using Steps = std::conditional_t<norm && sizeof(typename A::Storage) == 2, StepsInShared<A>, StepInRegisters<A, norm>>;

template <class A, bool norm>
__device__ void grad_of_heads(const RopeShape& s, const Lane<A>& lane, const RopeGradients& in,
                              const typename A::Held (&weight)[2], const float* frequency, Turn* turns,
                              std::int64_t row, const HeadRange& heads, Steps<A, norm>& steps, Dst dqkv,
                              WeightSums<A>& dw) {
    constexpr int W = A::width, together = Step<A, norm>::together;
    const std::int64_t start = row * width_of(s);
    steps.begin(row);
    Turn turn[W];
    turns_of(s, lane, frequency, in.positions[row / s.batch], turns, turn);
    for (int base = heads.begin; base < heads.last; base += lane.sides * together) {
        const auto [dout, qkv] = steps.take(row, base);
#pragma unroll
        for (int t = 0; t < together; ++t) {
            const int h = base + lane.side + t * lane.sides;
            const std::int64_t at = start + h * s.head_dim;
            if (h >= heads.end && h < heads.last) {
                A::put(dqkv, at + lane.first, dout.first[t]);
                A::put(dqkv, at + lane.second, dout.second[t]);
            }
            float x[W] = {}, y[W] = {}, along = 0.0f, scale = 0.0f;
            if (h < heads.end) {
#pragma unroll
                for (int j = 0; j < W; ++j) x[j] = dout.first[t][j], y[j] = dout.second[t][j];
                apply_all(turn, -1.0f, s.interleaved, x, y);
            }
            if constexpr (norm) {
                if (h < heads.end) {
                    scale = in.rstd[row * (s.heads + s.kv_heads) + h];
#pragma unroll
                    for (int j = 0; j < W; ++j) {
                        const float a = x[j] * qkv.first[t][j], b = y[j] * qkv.second[t][j];
                        along += a * weight[0][j] + b * weight[1][j];
                        dw.first[j] += a * scale;
                        dw.second[j] += b * scale;
                    }
                }
                along = lane.sum(along) * scale * scale * scale * lane.share;
                if (h < heads.end) {
#pragma unroll
                    for (int j = 0; j < W; ++j) {
                        x[j] = x[j] * weight[0][j] * scale - qkv.first[t][j] * along;
                        y[j] = y[j] * weight[1][j] * scale - qkv.second[t][j] * along;
                    }
                }
            }
            if (h >= heads.end) continue;
            A::put(dqkv, at + lane.first, x);
            A::put(dqkv, at + lane.second, y);
        }
    }
}

// out[head_dim] of this block: over the heads side by side in a warp, then over its warps.
template <class A>
__device__ void sum_of_block(const RopeShape& s, const Lane<A>& lane, WeightSums<A>& dw, float* out) {
    __shared__ float part[row_warps][2 * most_pairs];
#pragma unroll
    for (int j = 0; j < A::width; ++j) {
        for (int offset = lane.lanes; offset < warp_size; offset *= 2) {
            dw.first[j] += __shfl_xor_sync(all_lanes, dw.first[j], offset);
            dw.second[j] += __shfl_xor_sync(all_lanes, dw.second[j], offset);
        }
        part[threadIdx.x / warp_size][lane.first + j] = dw.first[j]; // Lanes side by side hold the same number.
        part[threadIdx.x / warp_size][lane.second + j] = dw.second[j];
    }
    __syncthreads();
    for (int c = static_cast<int>(threadIdx.x); c < s.head_dim; c += row_threads) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < row_warps; ++w) sum += part[w][c];
        out[c] = sum;
    }
    __syncthreads();
}

// partial[2][gridDim.x][head_dim] of the weights' gradients, with norm only. Queries of all rows come before keys, so
// that the sums of one weight at a time need registers.
template <class A, bool norm>
__global__ void __launch_bounds__(row_threads, 2)
    rope_grad_packs_kernel(RopeShape s, RopeGradients in, Dst dqkv, float* partial) {
    extern __shared__ uint4 slots[];
    __shared__ float frequency[most_pairs];
    __shared__ Turn turns[row_warps][most_pairs];
    const Lane<A> lane(s);
    const int turned = s.heads + s.kv_heads, all = in.dout.data == dqkv.data ? turned : turned + s.kv_heads;
    for (int part = 0; part < 2; ++part) {
        const bool query = part == 0;
        const HeadRange heads = query ? HeadRange{0, s.heads, s.heads} : HeadRange{s.heads, turned, all};
        Steps<A, norm> steps(s, lane, in, heads, slots);
        if (query) fill_frequencies(s, frequency); // The first steps are on their way meanwhile.
        typename A::Held weight[2];
        if constexpr (norm) {
            const Src w = query ? in.wq : in.wk;
            weight[0] = A::take(w, lane.first), weight[1] = A::take(w, lane.second);
        }
        WeightSums<A> dw;
        for_each_row(nullptr, 0, s.tokens, [&](std::int64_t row) {
            grad_of_heads<A, norm>(s, lane, in, weight, frequency, turns[threadIdx.x / warp_size], row, heads, steps,
                                   dqkv, dw);
        });
        if constexpr (norm) {
            if (!query) let_next_come();
            const std::int64_t block = blockIdx.x + (query ? 0 : std::int64_t{gridDim.x});
            sum_of_block(s, lane, dw, partial + block * s.head_dim);
        }
    }
}

// The sums of both weights, out of partial[2][blocks][cols], in one launch.
struct TwoSums {
    float *first, *second;
};
__global__ void __launch_bounds__(sum_cols* sum_rows)
    sum_two_kernel(const float* partial, TwoSums out, std::int64_t blocks, std::int64_t cols) {
    wait_for_last();
    const bool second = blockIdx.y == 1;
    sum_columns(PartialTerm{partial + (second ? blocks * cols : 0), cols}, second ? out.second : out.first, 0, blocks,
                cols);
}
void launch_sum_two(const float* partial, TwoSums out, std::int64_t blocks, std::int64_t cols, void* stream) {
    launch_behind(sum_two_kernel, dim3(blocks_for(cols, sum_cols), 2), sum_cols * sum_rows, stream, partial, out,
                  blocks, cols);
}

} // namespace

bool rope_grad_packs(const RopeShape& s, const RopeGradients& given, Dst dqkv, float* dwq, float* dwk, void* stream) {
    RopeGradients in = given;
    if (!s.norm) in.qkv = in.wq = in.wk = Src{};
    return with_heads(s, {in.dout, dqkv, in.qkv, in.wq, in.wk}, [&](auto access, auto norm) {
        constexpr auto kernel = rope_grad_packs_kernel<decltype(access), norm()>;
        constexpr std::size_t shared = Steps<decltype(access), norm()>::bytes;
        float* const partial = norm() ? scratch_of(stream_of(stream)) : nullptr;
        const unsigned blocks = even_blocks<kernel>(s.tokens, shared);
        kernel<<<blocks, row_threads, shared, stream_of(stream)>>>(s, in, dqkv, partial);
        CUDA_CHECK(cudaGetLastError());
        if (!norm()) return;
        launch_sum_two(partial, {dwq, dwk}, blocks, s.head_dim, stream);
    });
}

} // namespace moe::cuda
