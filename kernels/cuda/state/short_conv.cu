// The short convolution before the rule of a layer with a state, and its gradient.
//
// Floors: the convolution reads its columns of p and writes c, its gradient reads dc and p and writes dp. Both are
// bound by memory: a thread follows neighbouring channels along the positions of a segment, so that each row is read
// once, but for the taps - 1 at a segment's ends.
#include "kernels/cuda/state/short_conv.cuh"

#include "kernels/cuda/behind.cuh"
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/scratch.hpp"
#include "kernels/cuda/vector.cuh"

#include <algorithm>

namespace moe::cuda {
namespace conv {
namespace {

constexpr int usual_taps = 4; // of every published model
constexpr int shortest = 64;  // positions of a segment
constexpr int share = 8;      // threads that add up an element of dw
constexpr int together = 4;   // segments of a block of the gradient, which adds up their sums

// A thread's columns of rows, position after position: where the next are fetched from.
template <class A, int taps>
struct Rows {
    typename A::Held held[taps];
    Src x;
    std::int64_t at, step;

    __device__ Rows(const Conv& s, Src x_, std::int64_t stride, std::int64_t channel, int first, int b)
        : x(x_), at((std::int64_t{first} * s.batch + b) * stride + channel), step(s.batch * stride) {}
    // The next positions; `left`: how many there are.
    __device__ void fetch(int left) {
#pragma unroll
        for (int i = 0; i < taps; ++i) {
            if (i < left) held[i] = A::take(x, at);
            at += step;
        }
    }
};

// Calls run(checked, from) for each group of positions of [first, end), as many as there are taps; not checked are
// those that lie before `whole`.
template <int taps, class Run>
__device__ void for_groups(int first, int whole, int end, Run run) {
    int from = first;
    for (; from + taps <= whole; from += taps) run(std::false_type{}, from);
    for (; from < end; from += taps) run(std::true_type{}, from);
}

// A thread for W channels of the positions [first, first + each) of a sequence.
template <class A, int taps>
__global__ void __launch_bounds__(threads) forward_kernel(Conv s, Src p, Src w, Src bias, Dst c, int each) {
    constexpr int W = A::width;
    const std::int64_t channel = (std::int64_t{blockIdx.x} * threads + threadIdx.x) * W;
    if (channel >= s.columns) return;
    const int b = static_cast<int>(blockIdx.z), first = static_cast<int>(blockIdx.y) * each,
              end = min(first + each, s.seq);
    Rows<A, taps> next(s, p, s.projected, channel, first, b);
    next.fetch(end - first);
    Window<A, taps> window(s, p, w, bias, channel, first, b);
    const std::int64_t step = s.batch * s.columns;
    std::int64_t to = (std::int64_t{first} * s.batch + b) * s.columns + channel;
    for_groups<taps>(first, end, end, [&](auto checked, int from) {
        const Rows<A, taps> rows = next;
        next.fetch(end - from - taps);
#pragma unroll
        for (int i = 0; i < taps; ++i) {
            if (checked.value && from + i >= end) break;
            window.put(i, rows.held[i]);
            float sum[W];
            window.sums(s.starts != nullptr ? s.reach(from + i, b) : taps, i, sum);
#pragma unroll
            for (int k = 0; k < W; ++k) sum[k] *= sigmoid(sum[k]);
            A::put(c, to, sum);
            to += step;
        }
    });
}

// A thread's columns of p and dc on their way through shared memory, position after position: `stages` groups of as
// many as there are taps. A thread reads what it has fetched itself, so no barrier stands between.
template <class A, int taps>
struct Stages {
    using Held = typename A::Held;
    static constexpr int stages = taps <= usual_taps ? 3 : 2, bytes = 2 * stages * taps * threads * sizeof(Held);

    unsigned char* own;
    Src from[2];
    std::int64_t at[2], step[2];
    int stage = 0; // that the next fetch fills

    __device__ Stages(unsigned char* memory, const Conv& s, Src p, Src dc, std::int64_t channel, int first, int b)
        : own(memory + threadIdx.x * sizeof(Held)), from{p, dc}, step{s.batch * s.projected, s.batch * s.columns} {
        const std::int64_t row = std::int64_t{first} * s.batch + b;
        at[0] = row * s.projected + channel, at[1] = row * s.columns + channel;
    }
    __device__ Held* place(int which, int of_stage, int i) const {
        return reinterpret_cast<Held*>(own + ((of_stage * 2 + which) * taps + i) * threads * sizeof(Held));
    }
    // The next group; `left`: how many positions there are.
    __device__ void fetch(int left) {
#pragma unroll
        for (int i = 0; i < taps; ++i)
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                if (i < left) bring(place(which, stage, i), from[which], at[which]);
                at[which] += step[which];
            }
        end_group();
        stage = stage + 1 == stages ? 0 : stage + 1;
    }
    // Before the fetch of a group: the stage of the first that has not been read, which is there.
    __device__ int wait() const {
        wait_for_groups<stages - 2>();
        return stage + 1 == stages ? 0 : stage + 1;
    }
    __device__ Held held(int which, int of_stage, int i) const {
        if constexpr (A::width == 1) {
            return *place(which, of_stage, i);
        } else {
            const uint2 two = *reinterpret_cast<const uint2*>(place(which, of_stage, i));
            return {{two.x, two.y}};
        }
    }

private:
    static __device__ void bring(Held* to, Src x, std::int64_t i) {
        if constexpr (A::width == 1)
            *to = A::take(x, i);
        else
            asm volatile(
                "cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(to))),
                "l"(static_cast<const typename A::Storage*>(x.data) + i)
                : "memory");
    }
};

// What a thread of the gradient adds up: of its channels the sums for dw and dbias, and dp of as many positions as
// there are taps, each at its remainder.
template <class A, int taps>
struct Grads {
    static constexpr int W = A::width;
    float sum[taps][W], bias[W], open[taps][W];
};

// The position at `place`, whose row is in the window; `own`: it counts for dw, and not only for what it reaches.
template <bool own, class A, int taps>
__device__ void take_position(const Window<A, taps>& window, int reach, int place, const typename A::Held& dc,
                              Grads<A, taps>& to) {
    constexpr int W = A::width;
    float grad[W];
    window.sums(reach, place, grad);
#pragma unroll
    for (int k = 0; k < W; ++k) {
        const float open = sigmoid(grad[k]), passed = dc[k] * open;
        grad[k] = passed + passed * (grad[k] - grad[k] * open);
        if (own) to.bias[k] += grad[k];
    }
    Window<A, taps>::reached(reach, place, [&](int j, int from) {
#pragma unroll
        for (int k = 0; k < W; ++k) {
            to.open[from][k] = window.tap[j][k] * grad[k] + (j == 0 ? 0.0f : to.open[from][k]); // its own is the first
            if (own) to.sum[j][k] += window.x[from][k] * grad[k];
        }
    });
}

template <class A, int taps>
constexpr int grad_bytes = std::max(Stages<A, taps>::bytes, (together - 1) * (taps + 1) * A::width *
                                                                (threads / together) * static_cast<int>(sizeof(float)));

// The same positions, and taps - 1 more that these reach; a block has `together` segments side by side.
// partial[segments, batch][channel, tap]: a channel's sum for dw, and behind the taps the one for dbias.
template <class A, int taps>
__global__ void __launch_bounds__(threads, taps <= usual_taps ? 2 : 1)
    grad_kernel(Conv s, Src dc, Src p, Src w, Src bias, Dst dp, float* partial, int each) {
    constexpr int W = A::width, across = threads / together;
    extern __shared__ __align__(16) unsigned char memory[];
    const int lane = static_cast<int>(threadIdx.x) % across, segment = static_cast<int>(threadIdx.x) / across;
    const std::int64_t channel = (std::int64_t{blockIdx.x} * across + lane) * W;
    const int b = static_cast<int>(blockIdx.z), first = (static_cast<int>(blockIdx.y) * together + segment) * each,
              end = min(first + each, s.seq), last = end + taps - 1;
    Grads<A, taps> to{};
    if (channel < s.columns && first < s.seq) {
        using S = Stages<A, taps>;
        S rows(memory, s, p, dc, channel, first, b);
        const int there = min(last, s.seq);
        for (int ahead = 0; ahead + 1 < S::stages; ++ahead) rows.fetch(there - first - ahead * taps);
        Window<A, taps> window(s, p, w, bias, channel, first, b);
        const std::int64_t step = s.batch * s.projected;
        std::int64_t at = ((std::int64_t{first} - (taps - 1)) * s.batch + b) * s.projected + channel;
        // whole: all positions are the segment's, and none reaches beyond the beginning of its document.
        const auto take = [&](auto whole, int from) {
            const int stage = rows.wait();
            rows.fetch(there - from - (S::stages - 1) * taps);
#pragma unroll
            for (int i = 0; i < taps; ++i) {
                if (!whole.value && from + i >= last) break;
                if (whole.value || from + i < s.seq) {
                    const int reach = !whole.value && s.starts != nullptr ? s.reach(from + i, b) : taps;
                    window.put(i, rows.held(0, stage, i));
                    if (whole.value || from + i < end)
                        take_position<true>(window, reach, i, rows.held(1, stage, i), to);
                    else
                        take_position<false>(window, reach, i, rows.held(1, stage, i), to);
                }
                // Of the position that nothing behind reaches any more.
                if (i + 1 == taps || from > first) A::put(dp, at, to.open[(i + 1) % taps]);
                at += step;
            }
        };
        for_groups<taps>(first, end, last, [&](auto checked, int from) {
            bool whole = !checked.value;
            if (whole && s.starts != nullptr)
                for (int i = 0; i < taps; ++i) whole = whole && s.reach(from + i, b) == taps;
            if (whole)
                take(std::true_type{}, from);
            else
                take(std::false_type{}, from);
        });
    }
    let_next_come();
    // Then sums of the other segments: [segment - 1][tap, channel][lane].
    auto* const others = reinterpret_cast<float*>(memory);
    const auto place = [&](int other, int j, int k) -> float& {
        return others[((other * (taps + 1) + j) * W + k) * across + lane];
    };
    __syncthreads();
    if (segment > 0) {
#pragma unroll
        for (int k = 0; k < W; ++k) {
            place(segment - 1, taps, k) = to.bias[k];
#pragma unroll
            for (int j = 0; j < taps; ++j) place(segment - 1, j, k) = to.sum[j][k];
        }
    }
    __syncthreads();
    if (segment > 0 || channel >= s.columns) return;
#pragma unroll
    for (int k = 0; k < W; ++k) {
        float* const out =
            partial + ((std::int64_t{blockIdx.y} * s.batch + b) * s.columns + channel + k) * (s.taps + 1);
#pragma unroll
        for (int other = 0; other < together - 1; ++other) {
            to.bias[k] += place(other, taps, k);
#pragma unroll
            for (int j = 0; j < taps; ++j) to.sum[j][k] += place(other, j, k);
        }
#pragma unroll
        for (int j = 0; j < taps; ++j)
            if (j < s.taps) out[s.taps - 1 - j] = to.sum[j][k];
        out[s.taps] = to.bias[k];
    }
}

// dw[row of the weights, tap] and dbias += partial, over all segments; `share` threads for each element.
__global__ void __launch_bounds__(threads)
    weight_kernel(Conv s, const float* partial, int parts, float* dw, float* dbias) {
    const std::int64_t i = (std::int64_t{blockIdx.x} * threads + threadIdx.x) / warp_size * (warp_size / share) +
                           threadIdx.x % (warp_size / share),
                       each = s.taps + 1, size = s.columns * each;
    float sum = 0.0f;
    wait_for_last();
    if (i < size) {
#pragma unroll 4
        for (int part = static_cast<int>(threadIdx.x % warp_size) / (warp_size / share); part < parts; part += share)
            sum += partial[part * size + i];
    }
#pragma unroll
    for (int offset = warp_size / 2; offset >= warp_size / share; offset /= 2)
        sum += __shfl_xor_sync(all_lanes, sum, offset);
    if (i >= size || threadIdx.x % warp_size >= warp_size / share) return;
    const std::int64_t row = s.weight_row(i / each);
    if (i % each < s.taps)
        dw[row * s.taps + i % each] += sum;
    else if (dbias != nullptr)
        dbias[row] += sum;
}

// Calls run(Access, taps): 8 bytes of channels of a thread if rows and parts of heads begin at whole packs.
template <class Run>
void with_packs(const Conv& s, Src p, Src c, Run run) {
    const auto with_taps = [&](auto access) {
        if (s.taps == usual_taps)
            run(access, std::integral_constant<int, usual_taps>{});
        else
            run(access, std::integral_constant<int, most_taps>{});
    };
    if (!whole_packs(p.type, {p, c}, {s.projected, s.columns, s.keys, s.values}))
        with_taps(Access<float, 1>{});
    else if (p.type == Type::f32)
        with_taps(Access<float, 2>{});
    else
        with_taps(Access<__nv_bfloat16, 4>{});
}

// channels: of a block.
dim3 grid_of(const Conv& s, int channels, int segments) {
    return {blocks_for(s.columns, channels), static_cast<unsigned>(segments), static_cast<unsigned>(s.batch)};
}

} // namespace
} // namespace conv

namespace {

void check_shape(const StateShape& s) {
    require(s.kernel <= conv::most_taps, "taps of a short convolution", s.kernel, conv::most_taps);
    require(s.batch <= 65535, "sequences of a short convolution", s.batch, 65535);
    require(s.seq() <= INT32_MAX / 2, "positions of a short convolution", s.seq(), INT32_MAX / 2);
}

void short_conv(const StateShape& shape, Src p, Src w, Src bias, Dst c, void* stream) {
    if (shape.rows <= 0) return;
    check_shape(shape);
    const conv::Conv s(shape);
    const int segments = std::min(ceil_div(s.seq, conv::shortest), 65535), each = ceil_div(s.seq, segments);
    conv::with_packs(s, p, Src{c.data, c.type}, [&](auto access, auto taps) {
        using A = decltype(access);
        const dim3 grid = conv::grid_of(s, conv::threads * A::width, ceil_div(s.seq, each));
        conv::forward_kernel<A, decltype(taps)::value>
            <<<grid, conv::threads, 0, stream_of(stream)>>>(s, p, w, bias, c, each);
    });
    CUDA_CHECK(cudaGetLastError());
}

void short_conv_grad(const StateShape& shape, Src dc, Src p, Src w, Src bias, Dst dp, float* dw, float* dbias,
                     void* stream) {
    if (shape.rows <= 0) return;
    check_shape(shape);
    const conv::Conv s(shape);
    const std::int64_t fit = scratch_floats / (s.columns * (s.taps + 1) * s.batch);
    require(fit >= 1, "columns of a short convolution", s.columns * s.batch, scratch_floats / (s.taps + 1));
    float* const partial = scratch_of(stream_of(stream));
    int used = 0;
    conv::with_packs(s, p, dc, [&](auto access, auto taps) {
        using A = decltype(access);
        constexpr auto kernel = conv::grad_kernel<A, decltype(taps)::value>;
        constexpr int bytes = conv::grad_bytes<A, decltype(taps)::value>;
        dim3 grid = conv::grid_of(s, conv::threads / conv::together * A::width, 1);
        const std::int64_t most = std::min<std::int64_t>(ceil_div(s.seq, conv::shortest * conv::together), fit),
                           others = std::int64_t{grid.x} * grid.z,
                           resident = resident_blocks<kernel>(conv::threads, INT32_MAX, 1, bytes);
        // All blocks work for as long: they come in whole rounds.
        const std::int64_t rounds = others * most / resident;
        const int parts = static_cast<int>(rounds == 0 ? most : std::max<std::int64_t>(rounds * resident / others, 1)),
                  each = ceil_div(s.seq, parts * conv::together * taps()) * taps(); // in whole groups
        used = ceil_div(s.seq, each * conv::together);
        grid.y = static_cast<unsigned>(used);
        kernel<<<grid, conv::threads, bytes, stream_of(stream)>>>(s, dc, p, w, bias, dp, partial, each);
    });
    CUDA_CHECK(cudaGetLastError());
    launch_behind(conv::weight_kernel, dim3(blocks_for(s.columns * (s.taps + 1) * conv::share, conv::threads)),
                  conv::threads, stream, s, static_cast<const float*>(partial), used * s.batch, dw, dbias);
}

} // namespace

void add_short_conv(Kernels& table) {
    table.short_conv = short_conv;
    table.short_conv_grad = short_conv_grad;
}

} // namespace moe::cuda
