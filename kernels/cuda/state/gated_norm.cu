// The gated norm behind the rule of a layer with a state, and its gradient: of a head's columns, its gate behind the
// norm (delta rules), or of a group's, its gate before it (Mamba-2).
//
// Floors: o and z in and y out; dy, o and z in and do and dz out. Both are bound by memory: a team of threads holds a
// group's columns in registers.
#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/scratch.hpp"
#include "kernels/cuda/vector.cuh"

namespace moe::cuda {
namespace gated {
namespace {

constexpr int threads = 256, single = 32; // single: columns of a thread that takes them one by one

__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// The shape as kernels read it; strides of rows in elements. A group is `columns` of a row that are divided together by
// their root mean square. Groups that share their weights follow each other; gridDim.y counts those that do not.
struct Groups {
    std::int64_t items, values, projected, gate, weight; // gate: the column of p where z begins; weight: the first of w
    int columns, sharing, weights;                       // sharing: groups of a row with the same weights
    bool before;                                         // the gate comes before the norm
    float eps;

    __host__ explicit Groups(const StateShape& s)
        : values(s.values()),
          projected(s.projected()),
          gate(s.convolved()),
          columns(static_cast<int>(s.norm_columns())),
          before(s.rule == StateRule::ssd),
          eps(static_cast<float>(s.eps)) {
        sharing = before ? 1 : s.value_heads;
        weights = before ? s.key_heads : 1;
        weight = before ? s.part * s.values() : 0;
        items = s.rows * sharing;
    }
    __device__ std::int64_t row(std::int64_t item) const { return item / sharing; }
    __device__ std::int64_t first(std::int64_t item) const { return (item % sharing + blockIdx.y) * columns; }
};

// K packs of a group for each of the `team` threads that share it; blocks of `block`.
template <class Access, int team, int K, int block, bool gate_first>
struct Team {
    using A = Access;
    static constexpr int W = A::width, per_block = block / team, held = K, threads = block;
    static constexpr bool before = gate_first;

    int lane, number;
    __device__ Team() : lane(static_cast<int>(threadIdx.x) % team), number(static_cast<int>(threadIdx.x) / team) {}
    __device__ int column(int k) const { return (lane + k * team) * W; }
    static __device__ float sum(float x) {
        if constexpr (team > warp_size) {
            return block_sum(x);
        } else {
#pragma unroll
            for (int offset = team / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(all_lanes, x, offset);
            return x;
        }
    }
};

// What a thread holds of a group: o and z as they lie in memory, and what is normed.
template <class T>
struct Held {
    typename T::A::Held x[T::held], z[T::held];
    float normed[T::held][T::W];
    float inverse; // of the root mean square
};

// All threads come; `in`: there is such an item.
template <class T>
__device__ void read_group(const T& t, const Groups& s, Src o, Src p, std::int64_t item, bool in, Held<T>& held) {
    float squares = 0.0f;
    const std::int64_t row = s.row(item), first = s.first(item);
#pragma unroll
    for (int k = 0; k < T::held; ++k) {
        const int c = t.column(k);
        const bool mine = in && c < s.columns;
        held.x[k] = mine ? T::A::take(o, row * s.values + first + c) : typename T::A::Held{};
        held.z[k] = mine ? T::A::take(p, row * s.projected + s.gate + first + c) : typename T::A::Held{};
    }
#pragma unroll
    for (int k = 0; k < T::held; ++k) {
#pragma unroll
        for (int j = 0; j < T::W; ++j) {
            const float x = held.x[k][j], z = held.z[k][j];
            held.normed[k][j] = T::before ? x * z * sigmoid(z) : x;
            squares += held.normed[k][j] * held.normed[k][j];
        }
    }
    held.inverse = rsqrtf(T::sum(squares) / static_cast<float>(s.columns) + s.eps);
}

template <class T>
__device__ void read_weights(const T& t, const Groups& s, Src w, float (&weight)[T::held][T::W]) {
    const std::int64_t from = s.weight + std::int64_t{blockIdx.y} * s.columns;
#pragma unroll
    for (int k = 0; k < T::held; ++k) {
        if (t.column(k) < s.columns) take_small<T::W>(w, from + t.column(k), weight[k]);
    }
}

template <class T>
__global__ void __launch_bounds__(T::threads) forward_kernel(Groups s, Src o, Src p, Src w, Dst y) {
    const T t;
    float weight[T::held][T::W] = {};
    read_weights(t, s, w, weight);
    for (std::int64_t from = std::int64_t{blockIdx.x} * T::per_block; from < s.items;
         from += std::int64_t{gridDim.x} * T::per_block) {
        const std::int64_t item = from + t.number;
        const bool in = item < s.items;
        Held<T> held;
        read_group(t, s, o, p, item, in, held);
#pragma unroll
        for (int k = 0; k < T::held; ++k) {
            if (!in || t.column(k) >= s.columns) continue;
            float value[T::W];
#pragma unroll
            for (int j = 0; j < T::W; ++j) {
                const float z = held.z[k][j], x = held.normed[k][j] * held.inverse * weight[k][j];
                value[j] = T::before ? x : x * z * sigmoid(z);
            }
            T::A::put(y, s.row(item) * s.values + s.first(item) + t.column(k), value);
        }
    }
}

// partial[block][column of the weights]: the sum of a block's items for dw.
template <class T>
__global__ void __launch_bounds__(T::threads)
    grad_kernel(Groups s, Src dy, Src o, Src p, Src w, Dst dout, Dst dp, float* partial) {
    const T t;
    float weight[T::held][T::W] = {}, sum[T::held][T::W] = {};
    read_weights(t, s, w, weight);
    for (std::int64_t from = std::int64_t{blockIdx.x} * T::per_block; from < s.items;
         from += std::int64_t{gridDim.x} * T::per_block) {
        const std::int64_t item = from + t.number, at = s.row(item) * s.values + s.first(item),
                           gate = s.row(item) * s.projected + s.gate + s.first(item);
        const bool in = item < s.items;
        typename T::A::Held g[T::held];
#pragma unroll
        for (int k = 0; k < T::held; ++k)
            g[k] = in && t.column(k) < s.columns ? T::A::take(dy, at + t.column(k)) : typename T::A::Held{};
        Held<T> held;
        read_group(t, s, o, p, item, in, held);
        float along = 0.0f, open[T::held][T::W];
#pragma unroll
        for (int k = 0; k < T::held; ++k) {
#pragma unroll
            for (int j = 0; j < T::W; ++j) {
                const float z = held.z[k][j], d = T::before ? g[k][j] : g[k][j] * z;
                open[k][j] = sigmoid(z);
                held.normed[k][j] *= held.inverse;
                const float own = T::before ? d : d * open[k][j];
                sum[k][j] += own * held.normed[k][j];
                along += own * weight[k][j] * held.normed[k][j];
            }
        }
        along = T::sum(along) / static_cast<float>(s.columns);
#pragma unroll
        for (int k = 0; k < T::held; ++k) {
            if (!in || t.column(k) >= s.columns) continue;
            float to_o[T::W], to_z[T::W];
#pragma unroll
            for (int j = 0; j < T::W; ++j) {
                const float z = held.z[k][j], gate_open = open[k][j], gated = z * gate_open,
                            slope = gate_open + gated * (1.0f - gate_open), unit = held.normed[k][j],
                            weighted = g[k][j] * weight[k][j],
                            d = held.inverse * ((T::before ? weighted : weighted * gated) - unit * along);
                to_o[j] = T::before ? d * gated : d;
                to_z[j] = slope * (T::before ? d * held.x[k][j] : weighted * unit);
            }
            T::A::put(dout, at + t.column(k), to_o);
            T::A::put(dp, gate + t.column(k), to_z);
        }
    }
    const std::int64_t width = std::int64_t{s.weights} * s.columns;
    float* const out = partial + blockIdx.x * width + std::int64_t{blockIdx.y} * s.columns;
    if constexpr (T::per_block == 1) {
#pragma unroll
        for (int k = 0; k < T::held; ++k) {
#pragma unroll
            for (int j = 0; j < T::W; ++j)
                if (t.column(k) + j < s.columns) out[t.column(k) + j] = sum[k][j];
        }
    } else {
        __shared__ float all[T::per_block][T::threads / T::per_block * T::held * T::W];
#pragma unroll
        for (int k = 0; k < T::held; ++k) {
#pragma unroll
            for (int j = 0; j < T::W; ++j) all[t.number][t.column(k) + j] = sum[k][j];
        }
        __syncthreads();
        for (int c = static_cast<int>(threadIdx.x); c < s.columns; c += T::threads) {
            float total = 0.0f;
#pragma unroll
            for (int n = 0; n < T::per_block; ++n) total += all[n][c];
            out[c] = total;
        }
    }
}

// Calls run(Team) for groups of so many columns: of packs where they lie so, element by element elsewhere.
template <bool before, class Run>
void with_team(const Groups& s, std::initializer_list<Src> operands, Src w, Run run) {
    const auto of_packs = [&](auto access) {
        using A = decltype(access);
        const std::int64_t packs = s.columns / A::width;
        if (packs <= 16)
            run(Team<A, 16, 1, threads, before>{});
        else if (packs <= 64)
            run(Team<A, 32, 2, threads, before>{});
        else if (packs <= 128)
            run(Team<A, 128, 1, 128, before>{});
        else if (packs <= 256)
            run(Team<A, 256, 1, 256, before>{});
        else
            run(Team<A, 256, 4, 256, before>{});
    };
    require(s.columns <= single * threads, "columns of a group of a gated norm", s.columns, single * threads);
    const Type type = operands.begin()->type;
    const int width = type == Type::f32 ? 4 : 8;
    if (!aligned(w) || !whole_packs(type, operands, {s.values, s.projected, s.gate, s.columns}) ||
        s.columns > 4 * threads * width)
        run(Team<Access<float, 1>, threads, single, threads, before>{});
    else if (type == Type::f32)
        of_packs(Access<float, 4>{});
    else
        of_packs(Access<__nv_bfloat16, 8>{});
}

template <class Run>
void with_team(const Groups& s, std::initializer_list<Src> operands, Src w, Run run) {
    if (s.before)
        with_team<true>(s, operands, w, run);
    else
        with_team<false>(s, operands, w, run);
}

} // namespace
} // namespace gated

namespace {

void gated_norm(const StateShape& shape, Src o, Src p, Src w, Dst y, void* stream) {
    if (shape.rows <= 0) return;
    const gated::Groups s(shape);
    gated::with_team(s, {o, p, Src{y.data, y.type}}, w, [&](auto team) {
        using T = decltype(team);
        const dim3 grid(blocks_for(s.items, T::per_block, std::int64_t{16} * multiprocessors()),
                        static_cast<unsigned>(s.weights));
        gated::forward_kernel<T><<<grid, T::threads, 0, stream_of(stream)>>>(s, o, p, w, y);
    });
    CUDA_CHECK(cudaGetLastError());
}

void gated_norm_grad(const StateShape& shape, Src dy, Src o, Src p, Src w, Dst dout, Dst dp, float* dw, void* stream) {
    if (shape.rows <= 0) return;
    const gated::Groups s(shape);
    const std::int64_t width = std::int64_t{s.weights} * s.columns, fit = scratch_floats / width,
                       usual = ceil_div<std::int64_t>(8 * multiprocessors(), s.weights);
    require(fit >= 1, "columns of a gated norm", width, scratch_floats);
    float* const partial = scratch_of(stream_of(stream));
    gated::with_team(s, {dy, o, p, Src{dout.data, dout.type}, Src{dp.data, dp.type}}, w, [&](auto team) {
        using T = decltype(team);
        const unsigned blocks = blocks_for(s.items, T::per_block, fit < usual ? fit : usual);
        const dim3 grid(blocks, static_cast<unsigned>(s.weights));
        gated::grad_kernel<T><<<grid, T::threads, 0, stream_of(stream)>>>(s, dy, o, p, w, dout, dp, partial);
        CUDA_CHECK(cudaGetLastError());
        launch_sum_columns(PartialTerm{partial, width}, dw + s.weight, blocks, width, stream);
    });
}

} // namespace

void add_gated_norm(Kernels& table) {
    table.gated_norm = gated_norm;
    table.gated_norm_grad = gated_norm_grad;
}

} // namespace moe::cuda
