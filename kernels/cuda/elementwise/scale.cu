// Rows times the routing probability, and the sigmoid gate of a shared expert.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/flat.cuh"
#include "kernels/cuda/router/scores.cuh"
#include "kernels/cuda/rows.cuh"

namespace moe::cuda {
namespace {

// The gate of a value, and its slope at the same place.
struct Gate {
    float value, slope;
    __device__ Gate(float g, bool softplus) {
        const float s = sigmoid(g);
        value = softplus ? fmaxf(g, 0.0f) + log1pf(expf(-fabsf(g))) : s;
        slope = softplus ? s : s * (1.0f - s);
    }
};

// Row r is multiplied by p[r], or by the gate of g[r].
struct Factor {
    const float* p;
    Src g;
    bool softplus = false;
    __device__ float operator()(std::int64_t row) const {
        return p != nullptr ? p[row] : Gate(load(g, row), softplus).value;
    }
    __device__ float slope(std::int64_t row) const { return Gate(load(g, row), softplus).slope; }
};
struct Counts {
    const std::int32_t* counts;
    int groups;
    std::int64_t rows, cols;
};

template <class A>
__global__ void __launch_bounds__(row_threads) scale_kernel(Src y, Factor factor, Counts c, Dst out) {
    constexpr int W = A::width;
    for_each_row(c.counts, c.groups, c.rows, [&](std::int64_t row) {
        const float by = factor(row);
        const std::int64_t start = row * c.cols;
        for_each_pack<4>(
            static_cast<int>(c.cols / W), [&](int p) { return A::take(y, start + p * W); },
            [&](int p, const typename A::Held& held) {
                float value[W];
#pragma unroll
                for (int j = 0; j < W; ++j) value[j] = held[j] * by;
                A::put(out, start + p * W, value);
            });
    });
}

// dy = dout * factor; of the factor's gradient dout . y the gate still takes its own slope.
template <class A>
__global__ void __launch_bounds__(row_threads)
    scale_grad_kernel(Src dout, Src y, Factor factor, Counts c, Dst dy, float* dp, Dst dg) {
    constexpr int W = A::width;
    struct Both {
        typename A::Held dout, y;
    };
    for_each_row(c.counts, c.groups, c.rows, [&](std::int64_t row) {
        const float by = factor(row);
        const std::int64_t start = row * c.cols;
        float along = 0.0f;
        for_each_pack<4>(
            static_cast<int>(c.cols / W),
            [&](int p) {
                return Both{A::take(dout, start + p * W), A::take(y, start + p * W)};
            },
            [&](int p, const Both& held) {
                float value[W];
#pragma unroll
                for (int j = 0; j < W; ++j) {
                    along += held.dout[j] * held.y[j];
                    value[j] = held.dout[j] * by;
                }
                A::put(dy, start + p * W, value);
            });
        along = warp_sum(along);
        if (lane_of_warp() != 0) return;
        if (dp != nullptr) {
            dp[row] = along;
        } else {
            store(dg, row, along * factor.slope(row));
        }
    });
}

void scale(Src y, const Factor& factor, const Counts& c, Dst out, void* stream) {
    with_access({y, out}, {c.cols},
                [&](auto access) { launch_rows<scale_kernel<decltype(access)>>(c.rows, stream, y, factor, c, out); });
}

void scale_grad(Src dout, Src y, const Factor& factor, const Counts& c, Dst dy, float* dp, Dst dg, void* stream) {
    with_access({dout, y, dy}, {c.cols}, [&](auto access) {
        launch_rows<scale_grad_kernel<decltype(access)>>(c.rows, stream, dout, y, factor, c, dy, dp, dg);
    });
}

// A gate for every value: out = y * gate(g) or, with dout, dy and dg.
template <class T>
struct Gates {
    Src y, g, dout;
    Dst out, dg;
    bool softplus;
    template <int W>
    struct Held {
        Pack<T, W> y, g, dout;
    };
    template <int W>
    __device__ Held<W> read(std::int64_t i) const {
        Held<W> held;
        held.y = Access<T, W>::take(y, i);
        held.g = Access<T, W>::take(g, i);
        if (dout.data != nullptr) held.dout = Access<T, W>::take(dout, i);
        return held;
    }
    template <int W>
    __device__ void write(std::int64_t i, const Held<W>& held) const {
        float value[W], slope[W];
#pragma unroll
        for (int j = 0; j < W; ++j) {
            const Gate gate(held.g[j], softplus);
            const float from = dout.data != nullptr ? static_cast<float>(held.dout[j]) : static_cast<float>(held.y[j]);
            value[j] = from * gate.value;
            slope[j] = from * static_cast<float>(held.y[j]) * gate.slope;
        }
        Access<T, W>::put(out, i, value);
        if (dout.data != nullptr) Access<T, W>::put(dg, i, slope);
    }
};

void sigmoid_scale(Src y, Src g, Dst out, std::int64_t rows, std::int64_t cols, bool softplus, void* stream) {
    if (cols > 1) return scale(y, {nullptr, g, softplus}, {nullptr, 0, rows, cols}, out, stream);
    with_access({y, g, out}, {}, [&](auto access) {
        using A = decltype(access);
        launch_flat<A::width>(Gates<typename A::Storage>{y, g, {}, out, {}, softplus}, rows, stream);
    });
}

void sigmoid_scale_grad(Src dout, Src y, Src g, Dst dy, Dst dg, std::int64_t rows, std::int64_t cols, bool softplus,
                        void* stream) {
    if (cols > 1) return scale_grad(dout, y, {nullptr, g, softplus}, {nullptr, 0, rows, cols}, dy, nullptr, dg, stream);
    with_access({y, g, dout, dy, dg}, {}, [&](auto access) {
        using A = decltype(access);
        launch_flat<A::width>(Gates<typename A::Storage>{y, g, dout, dy, dg, softplus}, rows, stream);
    });
}

void scale_rows(Src y, const float* p, const std::int32_t* counts, Dst out, int groups, std::int64_t rows,
                std::int64_t cols, void* stream) {
    scale(y, {p, {}}, {counts, groups, rows, cols}, out, stream);
}

void scale_rows_grad(Src dout, Src y, const float* p, const std::int32_t* counts, Dst dy, float* dp, int groups,
                     std::int64_t rows, std::int64_t cols, void* stream) {
    scale_grad(dout, y, {p, {}}, {counts, groups, rows, cols}, dy, dp, {}, stream);
}

} // namespace

void add_scale(Kernels& table) {
    table.sigmoid_scale = sigmoid_scale;
    table.sigmoid_scale_grad = sigmoid_scale_grad;
    table.scale_rows = scale_rows;
    table.scale_rows_grad = scale_rows_grad;
}

} // namespace moe::cuda
