// Rotary embedding with a warp per token: each lane holds the two packs of a head that turn into each other.
#include "kernels/cuda/rope_packs.hpp"

#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/rotation.cuh"
#include "kernels/cuda/rows.cuh"
#include "kernels/cuda/scratch.hpp"

namespace moe::cuda {
namespace {

constexpr int most_pairs = warp_size * 8; // rotated pairs of a head that one warp holds

// Which columns of every head a lane holds: packs at `first` and `second`, turned by pairs [pair, pair + W) or, beyond
// the rotated columns, not at all. A warp holds several heads side by side.
template <class A>
struct Lane {
    static constexpr int W = A::width;
    int lanes, side, sides, first, second, pair;
    float share; // of an element in the mean over a head
    bool turns;
    __device__ Lane(const RopeShape& s)
        : lanes(s.head_dim / (2 * W)),
          side(lane_of_warp() / lanes),
          sides(warp_size / lanes),
          share(1.0f / static_cast<float>(s.head_dim)) {
        const int l = lane_of_warp() % lanes;
        pair = l * W;
        turns = 2 * l * W < s.rotary_dim;
        first = turns && !s.interleaved ? l * W : 2 * l * W;
        second = turns && !s.interleaved ? first + s.rotary_dim / 2 : first + W;
    }
    // Over the lanes of a head; the whole warp comes.
    __device__ float sum(float value) const {
        for (int offset = lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(all_lanes, value, offset);
        return value;
    }
};

// The frequencies of a head's pairs, which a block computes once: a power in double takes long.
__device__ void fill_frequencies(const RopeShape& s, float* frequency) {
    const int half = s.rotary_dim / 2;
    for (int i = static_cast<int>(threadIdx.x); i < half; i += row_threads) {
        frequency[i] = frequency_of(i, half, s.theta, s.scale);
    }
    __syncthreads();
}
// This lane's turns at a position. The warp makes each once, in `all` [rotary_dim / 2] of its own.
template <class A>
__device__ void turns_of(const RopeShape& s, const Lane<A>& lane, const float* frequency, std::int32_t position,
                         Turn* all, Turn (&turn)[A::width]) {
    __syncwarp(); // those of the row before have been read
    for (int i = lane_of_warp(); i < s.rotary_dim / 2; i += warp_size)
        all[i] = turn_of(position, frequency[i], static_cast<float>(s.scale.magnitude));
    __syncwarp();
#pragma unroll
    for (int j = 0; j < A::width; ++j) turn[j] = lane.turns ? all[lane.pair + j] : Turn{1.0f, 0.0f};
}

__device__ std::int64_t width_of(const RopeShape& s) { return std::int64_t{s.heads + 2 * s.kv_heads} * s.head_dim; }

// The two packs of each of a few heads that a lane works on together.
template <class A, int together>
struct Heads {
    typename A::Held first[together], second[together];
    __device__ void read(Src x, const Lane<A>& lane, std::int64_t start, int head_dim, int head, int heads) {
#pragma unroll
        for (int t = 0; t < together; ++t) {
            const int h = head + t * lane.sides;
            if (h >= heads) break;
            first[t] = A::take(x, start + h * head_dim + lane.first);
            second[t] = A::take(x, start + h * head_dim + lane.second);
        }
    }
};

// Queries, keys and values are one list of heads: values are passed on, if they go anywhere. The next heads are on
// their way while these are turned, and the first while their turns are made.
template <class A, bool norm>
__global__ void __launch_bounds__(row_threads, 2)
    rope_packs_kernel(RopeShape s, Src qkv, const std::int32_t* positions, Src wq, Src wk, Dst out, float* rstd) {
    constexpr int W = A::width, together = 2;
    const Lane<A> lane(s);
    const int turned = s.heads + s.kv_heads, heads = qkv.data == out.data ? turned : turned + s.kv_heads;
    __shared__ float frequency[most_pairs];
    __shared__ Turn turns[row_warps][most_pairs];
    fill_frequencies(s, frequency);
    typename A::Held weight[4]; // of queries and keys, first and second pack
    if constexpr (norm) {
        weight[0] = A::take(wq, lane.first), weight[1] = A::take(wq, lane.second);
        weight[2] = A::take(wk, lane.first), weight[3] = A::take(wk, lane.second);
    }
    for_each_row(nullptr, 0, s.tokens, [&](std::int64_t row) {
        const std::int64_t start = row * width_of(s);
        Heads<A, together> next;
        next.read(qkv, lane, start, s.head_dim, lane.side, heads);
        Turn turn[W];
        turns_of(s, lane, frequency, positions[row / s.batch], turns[threadIdx.x / warp_size], turn);
        for (int base = 0; base < heads; base += lane.sides * together) {
            const Heads<A, together> held = next;
            next.read(qkv, lane, start, s.head_dim, base + lane.side + lane.sides * together, heads);
#pragma unroll
            for (int t = 0; t < together; ++t) {
                const int h = base + lane.side + t * lane.sides;
                float scale = 1.0f;
                if constexpr (norm) {
                    float squares = 0.0f;
                    if (h < turned) {
#pragma unroll
                        for (int j = 0; j < W; ++j)
                            squares += held.first[t][j] * held.first[t][j] + held.second[t][j] * held.second[t][j];
                    }
                    scale = rsqrtf(lane.sum(squares) * lane.share + static_cast<float>(s.eps));
                    if (h < turned && lane_of_warp() % lane.lanes == 0) rstd[row * turned + h] = scale;
                }
                if (h >= heads) continue;
                const std::int64_t at = start + h * s.head_dim;
                if (h >= turned) {
                    A::put(out, at + lane.first, held.first[t]);
                    A::put(out, at + lane.second, held.second[t]);
                    continue;
                }
                float x[W], y[W];
                const bool query = h < s.heads;
#pragma unroll
                for (int j = 0; j < W; ++j) {
                    x[j] = held.first[t][j], y[j] = held.second[t][j];
                    if constexpr (norm) {
                        x[j] *= (query ? weight[0][j] : weight[2][j]) * scale;
                        y[j] *= (query ? weight[1][j] : weight[3][j]) * scale;
                    }
                }
                apply_all(turn, 1.0f, s.interleaved, x, y);
                A::put(out, at + lane.first, x);
                A::put(out, at + lane.second, y);
            }
        }
    });
}

// Sums of a lane's columns over heads and tokens: the gradient of the weights.
template <class A>
struct WeightSums {
    float first[A::width] = {}, second[A::width] = {};
};

// Heads [begin, end) of a token, which share one weight, and behind them heads up to `last` that are passed on.
struct HeadRange {
    int begin, end, last;
};
template <class A, bool norm>
__device__ void grad_of_heads(const RopeShape& s, const Lane<A>& lane, const RopeGradients& in, Src w,
                              const float* frequency, Turn* turns, std::int64_t row, const HeadRange& heads, Dst dqkv,
                              WeightSums<A>& dw) {
    constexpr int W = A::width, together = norm ? 1 : 2;
    const std::int64_t start = row * width_of(s);
    const int step = lane.sides * together;
    Heads<A, together> next_dout, next_qkv;
    next_dout.read(in.dout, lane, start, s.head_dim, heads.begin + lane.side, heads.last);
    if constexpr (norm) next_qkv.read(in.qkv, lane, start, s.head_dim, heads.begin + lane.side, heads.end);
    typename A::Held weight[2];
    if constexpr (norm) weight[0] = A::take(w, lane.first), weight[1] = A::take(w, lane.second);
    Turn turn[W];
    turns_of(s, lane, frequency, in.positions[row / s.batch], turns, turn);
    for (int base = heads.begin; base < heads.last; base += step) {
        const Heads<A, together> dout = next_dout, qkv = next_qkv;
        next_dout.read(in.dout, lane, start, s.head_dim, base + lane.side + step, heads.last);
        if constexpr (norm) next_qkv.read(in.qkv, lane, start, s.head_dim, base + lane.side + step, heads.end);
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
        part[threadIdx.x / warp_size][lane.first + j] = dw.first[j]; // lanes side by side hold the same number
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
    __shared__ float frequency[most_pairs];
    __shared__ Turn turns[row_warps][most_pairs];
    fill_frequencies(s, frequency);
    const Lane<A> lane(s);
    const int turned = s.heads + s.kv_heads, all = in.dout.data == dqkv.data ? turned : turned + s.kv_heads;
    for (int part = 0; part < 2; ++part) {
        const bool query = part == 0;
        WeightSums<A> dw;
        for_each_row(nullptr, 0, s.tokens, [&](std::int64_t row) {
            const HeadRange heads = query ? HeadRange{0, s.heads, s.heads} : HeadRange{s.heads, turned, all};
            grad_of_heads<A, norm>(s, lane, in, query ? in.wq : in.wk, frequency, turns[threadIdx.x / warp_size], row,
                                   heads, dqkv, dw);
        });
        if constexpr (norm) {
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
    const bool second = blockIdx.y == 1;
    sum_columns(PartialTerm{partial + (second ? blocks * cols : 0), cols}, second ? out.second : out.first, 0, blocks,
                cols);
}
void launch_sum_two(const float* partial, TwoSums out, std::int64_t blocks, std::int64_t cols, void* stream) {
    sum_two_kernel<<<dim3(blocks_for(cols, sum_cols), 2), sum_cols * sum_rows, 0, stream_of(stream)>>>(partial, out,
                                                                                                       blocks, cols);
    CUDA_CHECK(cudaGetLastError());
}

// Whether two packs per lane make up a head, and the rotated columns too.
template <class A>
bool fits(const RopeShape& s) {
    const int lanes = s.head_dim / (2 * A::width);
    return s.head_dim % (2 * A::width) == 0 && s.rotary_dim % (2 * A::width) == 0 && lanes <= warp_size &&
           (lanes & (lanes - 1)) == 0;
}

// Two blocks of a multiprocessor at most, since more rows at once come slower out of memory, and so many that every
// warp has as many rows as the next.
template <auto kernel>
unsigned even_blocks(std::int64_t tokens) {
    const std::int64_t most = resident_blocks<kernel>(row_threads, tokens, row_warps), two = 2 * multiprocessors();
    const std::int64_t work = ceil_div(tokens, std::int64_t{row_warps}), rows = ceil_div(work, most < two ? most : two);
    return blocks_for(work, rows);
}

// run(Access, norm) as constants; false where packs do not fit.
template <class Run>
bool with_heads(const RopeShape& s, std::initializer_list<Src> operands, Run run) {
    bool done = false;
    with_access(operands, {s.head_dim}, [&](auto access) {
        using A = decltype(access);
        if constexpr (A::width > 1) {
            if (!fits<A>(s)) return;
            done = true;
            if (s.norm) {
                run(access, std::true_type{});
            } else {
                run(access, std::false_type{});
            }
        }
    });
    return done;
}

} // namespace

bool rope_packs(const RopeShape& s, Src qkv, const std::int32_t* positions, Src wq, Src wk, Dst out, float* rstd,
                void* stream) {
    if (!s.norm) wq = wk = Src{};
    return with_heads(s, {qkv, out, wq, wk}, [&](auto access, auto norm) {
        constexpr auto kernel = rope_packs_kernel<decltype(access), norm()>;
        const unsigned blocks = even_blocks<kernel>(s.tokens);
        kernel<<<blocks, row_threads, 0, stream_of(stream)>>>(s, qkv, positions, wq, wk, out, rstd);
        CUDA_CHECK(cudaGetLastError());
    });
}

bool rope_grad_packs(const RopeShape& s, const RopeGradients& given, Dst dqkv, float* dwq, float* dwk, void* stream) {
    RopeGradients in = given;
    if (!s.norm) in.qkv = in.wq = in.wk = Src{};
    return with_heads(s, {in.dout, dqkv, in.qkv, in.wq, in.wk}, [&](auto access, auto norm) {
        constexpr auto kernel = rope_grad_packs_kernel<decltype(access), norm()>;
        float* const partial = norm() ? scratch_of(stream_of(stream)) : nullptr;
        const unsigned blocks = even_blocks<kernel>(s.tokens);
        kernel<<<blocks, row_threads, 0, stream_of(stream)>>>(s, in, dqkv, partial);
        CUDA_CHECK(cudaGetLastError());
        if (!norm()) return;
        launch_sum_two(partial, {dwq, dwk}, blocks, s.head_dim, stream);
    });
}

} // namespace moe::cuda
