// The short convolution before the rule of a layer with a state, and its gradient.
//
// Floors: the convolution reads its columns of p and writes c, its gradient reads dc and p and writes dp. Both are
// bound by memory: a thread follows neighbouring channels along the positions of a segment, so that each row is read
// once, but for the taps - 1 at a segment's ends.
#include "kernels/cuda/short_conv.cuh"

#include "kernels/cuda/families.hpp"
#include "kernels/cuda/scratch.hpp"
#include "kernels/cuda/vector.cuh"

namespace moe::cuda {
namespace conv {
namespace {

constexpr int usual_taps = 4;                           // of every published model
constexpr int ahead = 4;                                // rows that are on their way at once
constexpr std::int64_t short_each = 32, long_each = 64; // positions of a segment, forward and backward
constexpr int together = 4;                             // segments of a block of the gradient, which adds up their sums

__device__ inline float silu_slope(float x) {
    const float s = sigmoid(x);
    return s * (1.0f + x * (1.0f - s));
}

// What a thread holds of its channels: weights by how far back they reach, and the last rows, the newest first.
template <class A, int taps>
struct Window {
    static constexpr int W = A::width;
    float tap[taps][W], base[W];
    typename A::Held x[taps];

    __device__ Window(const Conv& s, Src p, Src w, Src bias, std::int64_t channel, std::int64_t first, int b) {
        const std::int64_t row = s.weight_row(channel);
#pragma unroll
        for (int i = 0; i < W; ++i) {
            base[i] = bias.data != nullptr ? load(bias, row + i) : 0.0f;
#pragma unroll
            for (int j = 0; j < taps; ++j) tap[j][i] = j < s.taps ? load(w, (row + i) * s.taps + s.taps - 1 - j) : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < taps; ++j) {
            const std::int64_t at = first - 1 - j; // x[j]: of the position j before the one before the first
            x[j] = at >= 0 ? A::take(p, (at * s.batch + b) * s.projected + channel) : typename A::Held{};
        }
    }
    __device__ void move(const typename A::Held& row) {
#pragma unroll
        for (int j = taps - 1; j > 0; --j) x[j] = x[j - 1];
        x[0] = row;
    }
    __device__ void sums(int reach, float (&sum)[W]) const {
#pragma unroll
        for (int i = 0; i < W; ++i) sum[i] = base[i];
#pragma unroll
        for (int j = 0; j < taps; ++j) {
            if (j >= reach) continue;
#pragma unroll
            for (int i = 0; i < W; ++i) sum[i] += tap[j][i] * x[j][i];
        }
    }
};

// A thread for W channels of the positions [first, first + each) of a sequence.
template <class A, int taps>
__global__ void __launch_bounds__(threads) forward_kernel(Conv s, Src p, Src w, Src bias, Dst c, std::int64_t each) {
    constexpr int W = A::width;
    const std::int64_t channel = (std::int64_t{blockIdx.x} * threads + threadIdx.x) * W;
    if (channel >= s.columns) return;
    const int b = static_cast<int>(blockIdx.z);
    const std::int64_t first = blockIdx.y * each, end = first + each < s.seq ? first + each : s.seq;
    Window<A, taps> window(s, p, w, bias, channel, first, b);
    for (std::int64_t from = first; from < end; from += ahead) {
        typename A::Held next[ahead];
#pragma unroll
        for (int i = 0; i < ahead; ++i) {
            const std::int64_t at = from + i;
            if (at < end) next[i] = A::take(p, (at * s.batch + b) * s.projected + channel);
        }
#pragma unroll
        for (int i = 0; i < ahead; ++i) {
            const std::int64_t at = from + i;
            if (at >= end) break;
            window.move(next[i]);
            float sum[W];
            window.sums(s.reach(at, b), sum);
#pragma unroll
            for (int j = 0; j < W; ++j) sum[j] *= sigmoid(sum[j]);
            A::put(c, (at * s.batch + b) * s.columns + channel, sum);
        }
    }
}

// The same positions, and taps - 1 more that these reach; a block has `together` segments side by side.
// partial[segments, batch][channel, tap]: a channel's sum for dw, and behind the taps the one for dbias.
template <class A, int taps>
__global__ void __launch_bounds__(threads)
    grad_kernel(Conv s, Src dc, Src p, Src w, Src bias, Dst dp, float* partial, std::int64_t each) {
    constexpr int W = A::width, across = threads / together;
    const int lane = static_cast<int>(threadIdx.x) % across, segment = static_cast<int>(threadIdx.x) / across;
    const std::int64_t channel = (std::int64_t{blockIdx.x} * across + lane) * W;
    const int b = static_cast<int>(blockIdx.z);
    const std::int64_t first = (std::int64_t{blockIdx.y} * together + segment) * each,
                       end = first + each < s.seq ? first + each : s.seq, last = end + s.taps - 1;
    float sum[taps][W] = {}, bias_sum[W] = {};
    if (channel < s.columns && first < s.seq) {
        Window<A, taps> window(s, p, w, bias, channel, first, b);
        float open[taps][W] = {};
        for (std::int64_t from = first; from < last; from += ahead) {
            typename A::Held next[ahead], grads[ahead];
#pragma unroll
            for (int i = 0; i < ahead; ++i) {
                const std::int64_t at = from + i, row = at * s.batch + b;
                if (at >= last || at >= s.seq) continue;
                next[i] = A::take(p, row * s.projected + channel);
                grads[i] = A::take(dc, row * s.columns + channel);
            }
#pragma unroll
            for (int i = 0; i < ahead; ++i) {
                const std::int64_t at = from + i;
                if (at >= last) break;
#pragma unroll
                for (int j = taps - 1; j > 0; --j) {
#pragma unroll
                    for (int k = 0; k < W; ++k) open[j][k] = open[j - 1][k];
                }
#pragma unroll
                for (int k = 0; k < W; ++k) open[0][k] = 0.0f;
                if (at < s.seq) {
                    const int reach = s.reach(at, b);
                    float grad[W];
                    window.move(next[i]);
                    window.sums(reach, grad);
#pragma unroll
                    for (int k = 0; k < W; ++k) {
                        grad[k] = grads[i][k] * silu_slope(grad[k]);
                        if (at < end) bias_sum[k] += grad[k];
                    }
#pragma unroll
                    for (int j = 0; j < taps; ++j) {
                        if (j >= reach) continue;
#pragma unroll
                        for (int k = 0; k < W; ++k) {
                            open[j][k] += window.tap[j][k] * grad[k];
                            if (at < end) sum[j][k] += window.x[j][k] * grad[k];
                        }
                    }
                }
                const std::int64_t done = at - (s.taps - 1); // the position that nothing behind reaches any more
                if (done < first || done >= end) continue;
                float value[W] = {};
#pragma unroll
                for (int j = 0; j < taps; ++j) {
#pragma unroll
                    for (int k = 0; k < W; ++k) value[k] = j == s.taps - 1 ? open[j][k] : value[k];
                }
                A::put(dp, (done * s.batch + b) * s.projected + channel, value);
            }
        }
    }
    __shared__ float others[together - 1][(taps + 1) * W][across];
    if (segment > 0) {
#pragma unroll
        for (int k = 0; k < W; ++k) {
            others[segment - 1][taps * W + k][lane] = bias_sum[k];
#pragma unroll
            for (int j = 0; j < taps; ++j) others[segment - 1][j * W + k][lane] = sum[j][k];
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
            bias_sum[k] += others[other][taps * W + k][lane];
#pragma unroll
            for (int j = 0; j < taps; ++j) sum[j][k] += others[other][j * W + k][lane];
        }
#pragma unroll
        for (int j = 0; j < taps; ++j)
            if (j < s.taps) out[s.taps - 1 - j] = sum[j][k];
        out[s.taps] = bias_sum[k];
    }
}

// dw[row of the weights, tap] and dbias += partial, over all segments; eight threads for each element.
__global__ void __launch_bounds__(threads)
    weight_kernel(Conv s, const float* partial, int parts, float* dw, float* dbias) {
    constexpr int share = 8;
    const std::int64_t i = (std::int64_t{blockIdx.x} * threads + threadIdx.x) / warp_size * (warp_size / share) +
                           threadIdx.x % (warp_size / share),
                       each = s.taps + 1, size = s.columns * each;
    float sum = 0.0f;
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

// Calls run(Access, taps): packs of 16 bytes, or of 8 where `half`, if rows and parts of heads begin at such ones.
template <bool half, class Run>
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
        with_taps(Access<float, 4>{});
    else
        with_taps(Access < __nv_bfloat16, half ? 4 : 8 > {});
}

// channels: of a block.
dim3 grid_of(const Conv& s, int channels, std::int64_t segments) {
    return {blocks_for(s.columns, channels), static_cast<unsigned>(segments), static_cast<unsigned>(s.batch)};
}

} // namespace
} // namespace conv

namespace {

void check_taps(const StateShape& s) {
    require(s.kernel <= conv::most_taps, "taps of a short convolution", s.kernel, conv::most_taps);
    require(s.batch <= 65535, "sequences of a short convolution", s.batch, 65535);
}

void short_conv(const StateShape& shape, Src p, Src w, Src bias, Dst c, void* stream) {
    if (shape.rows <= 0) return;
    check_taps(shape);
    const conv::Conv s(shape);
    const std::int64_t wanted = ceil_div(s.seq, conv::short_each), segments = wanted < 65535 ? wanted : 65535;
    const std::int64_t each = ceil_div(s.seq, segments);
    conv::with_packs<false>(s, p, Src{c.data, c.type}, [&](auto access, auto taps) {
        using A = decltype(access);
        conv::forward_kernel<A, decltype(taps)::value>
            <<<conv::grid_of(s, conv::threads * A::width, ceil_div(s.seq, each)), conv::threads, 0,
               stream_of(stream)>>>(s, p, w, bias, c, each);
    });
    CUDA_CHECK(cudaGetLastError());
}

void short_conv_grad(const StateShape& shape, Src dc, Src p, Src w, Src bias, Dst dp, float* dw, float* dbias,
                     void* stream) {
    if (shape.rows <= 0) return;
    check_taps(shape);
    const conv::Conv s(shape);
    const std::int64_t fit = scratch_floats / (s.columns * (s.taps + 1) * s.batch);
    require(fit >= 1, "columns of a short convolution", s.columns * s.batch, scratch_floats / (s.taps + 1));
    const std::int64_t wanted = ceil_div(s.seq, conv::long_each), most = fit * conv::together,
                       each = ceil_div(s.seq, wanted < most ? wanted : most),
                       used = ceil_div(s.seq, each * conv::together);
    float* const partial = scratch_of(stream_of(stream));
    conv::with_packs<true>(s, p, dc, [&](auto access, auto taps) {
        using A = decltype(access);
        conv::grad_kernel<A, decltype(taps)::value>
            <<<conv::grid_of(s, conv::threads / conv::together * A::width, used), conv::threads, 0,
               stream_of(stream)>>>(s, dc, p, w, bias, dp, partial, each);
    });
    CUDA_CHECK(cudaGetLastError());
    conv::
        weight_kernel<<<blocks_for(s.columns * (s.taps + 1) * 8, conv::threads), conv::threads, 0, stream_of(stream)>>>(
            s, partial, static_cast<int>(used * s.batch), dw, dbias);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_short_conv(Kernels& table) {
    table.short_conv = short_conv;
    table.short_conv_grad = short_conv_grad;
}

} // namespace moe::cuda
