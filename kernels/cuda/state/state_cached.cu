// A layer with a state one position at a time: its convolution behind a window of rows, then its rule.
//
// Floor: weights of the convolution and the state in and out, a row at a time: bound by launches.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/scratch.hpp"
#include "kernels/cuda/state/short_conv.cuh"

namespace moe::cuda {
namespace {

// The convolution of one row behind a window of those before it, and the window moved on. A thread for each channel.
__global__ void __launch_bounds__(conv::threads)
    conv_cached_kernel(conv::Conv s, Src p, Src w, Src bias, const std::int32_t* position, Dst window, float* c) {
    const std::int64_t channel = std::int64_t{blockIdx.x} * conv::threads + threadIdx.x;
    if (channel >= s.columns) return;
    const bool anew = *position == 0;
    const float x = load(p, channel);
    float sum = load(w, channel * s.taps + s.taps - 1) * x + (bias.data != nullptr ? load(bias, channel) : 0.0f);
    for (int j = 0; j + 1 < s.taps; ++j) {
        const float before = anew ? 0.0f : load(read_back(window), j * s.columns + channel);
        sum += load(w, channel * s.taps + j) * before;
        if (j > 0) store(window, (j - 1) * s.columns + channel, before);
    }
    if (s.taps > 1) store(window, (s.taps - 2) * s.columns + channel, x);
    c[channel] = sum * conv::sigmoid(sum);
}

// The recurrence of one position. A block for each value head, a thread for each of its columns.
__global__ void __launch_bounds__(128)
    rule_cached_kernel(StateShape s, std::int64_t gates, const float* c, Src p, Src a_log, Src dt_bias,
                       const std::int32_t* position, Dst o, float* state) {
    __shared__ float q[128], k[128];
    const int h = static_cast<int>(blockIdx.x), i = static_cast<int>(threadIdx.x),
              head = h / (s.value_heads / s.key_heads);
    const int keys = s.key_heads * s.key_dim;
    const bool in = i < s.key_dim;
    const float query = in ? c[head * s.key_dim + i] : 0.0f, key = in ? c[keys + head * s.key_dim + i] : 0.0f;
    const float q_squares = block_sum(query * query), k_squares = block_sum(key * key);
    q[i] = query * rsqrtf(q_squares + 1e-6f) * rsqrtf(static_cast<float>(s.key_dim));
    k[i] = key * rsqrtf(k_squares + 1e-6f);
    __syncthreads();
    if (i >= s.value_dim) return;
    const float step = load(p, gates + s.value_heads + h) + load(dt_bias, h);
    const float decay =
        *position == 0 ? 0.0f : expf(-expf(load(a_log, h)) * (step > 20.0f ? step : log1pf(expf(step))));
    const float beta = conv::sigmoid(load(p, gates + h));
    float* const column = state + static_cast<std::int64_t>(h) * s.key_dim * s.value_dim + i;
    float seen = 0.0f, out = 0.0f;
    for (int j = 0; j < s.key_dim; ++j) seen += decay == 0.0f ? 0.0f : decay * column[j * s.value_dim] * k[j];
    const float change = beta * (c[2 * keys + h * s.value_dim + i] - seen);
    for (int j = 0; j < s.key_dim; ++j) {
        const float now = (decay == 0.0f ? 0.0f : decay * column[j * s.value_dim]) + k[j] * change;
        column[j * s.value_dim] = now;
        out += now * q[j];
    }
    store(o, h * s.value_dim + i, out);
}

// The same of Mamba-2.
__global__ void __launch_bounds__(128)
    ssd_cached_kernel(StateShape s, std::int64_t gates, const float* c, Src p, Src a_log, Src dt_bias, Src skip,
                      const std::int32_t* position, Dst o, float* state) {
    const int h = static_cast<int>(blockIdx.x), i = static_cast<int>(threadIdx.x);
    if (i >= s.value_dim) return;
    const int keys = s.key_heads * s.key_dim;
    const float *q = c + h / (s.value_heads / s.key_heads) * s.key_dim, *k = q + keys;
    const float raw = load(p, gates + h) + load(dt_bias, h);
    const float step = fminf(fmaxf(raw > 20.0f ? raw : log1pf(expf(raw)), s.step_min), s.step_max);
    const float decay = *position == 0 ? 0.0f : expf(-expf(load(a_log, h)) * step);
    const float v = c[2 * keys + h * s.value_dim + i], u = step * v;
    float* const column = state + static_cast<std::int64_t>(h) * s.key_dim * s.value_dim + i;
    float out = load(skip, h) * v;
    for (int j = 0; j < s.key_dim; ++j) {
        const float now = (decay == 0.0f ? 0.0f : decay * column[j * s.value_dim]) + k[j] * u;
        column[j * s.value_dim] = now;
        out += now * q[j];
    }
    store(o, h * s.value_dim + i, out);
}

// Calls rule(convolved row, row of p, position, row of o) for each row behind its convolution.
template <class Rule>
void each_cached(const StateShape& s, Src p, Src w, Src bias, const std::int32_t* positions, Dst o, Dst window,
                 void* stream, Rule rule) {
    require(s.convolved() <= scratch_floats, "columns of a short convolution", s.convolved(), scratch_floats);
    float* const c = scratch_of(stream_of(stream));
    for (std::int64_t r = 0; r < s.rows; ++r) {
        const Src row = p + r * s.projected();
        conv_cached_kernel<<<blocks_for(s.convolved(), conv::threads), conv::threads, 0, stream_of(stream)>>>(
            conv::Conv(s), row, w, bias, positions + r, window, c);
        rule(c, row, positions + r, o + r * s.values());
    }
    CUDA_CHECK(cudaGetLastError());
}

void delta_cached(const StateShape& s, Src p, Src w, Src a_log, Src dt_bias, const std::int32_t* positions, Dst o,
                  Dst window, float* state, void* stream) {
    require(s.key_dim <= 128 && s.value_dim <= 128, "columns of a head of a delta rule",
            s.key_dim > s.value_dim ? s.key_dim : s.value_dim, 128);
    each_cached(s, p, w, {}, positions, o, window, stream,
                [&](const float* c, Src row, const std::int32_t* position, Dst out) {
                    rule_cached_kernel<<<static_cast<unsigned>(s.value_heads), 128, 0, stream_of(stream)>>>(
                        s, s.gates(), c, row, a_log, dt_bias, position, out, state);
                });
}

void ssd_cached(const StateShape& s, Src p, Src w, Src bias, Src a_log, Src dt_bias, Src skip,
                const std::int32_t* positions, Dst o, Dst window, float* state, void* stream) {
    require(s.value_dim <= 128, "columns of a head of Mamba-2", s.value_dim, 128);
    each_cached(s, p, w, bias, positions, o, window, stream,
                [&](const float* c, Src row, const std::int32_t* position, Dst out) {
                    ssd_cached_kernel<<<static_cast<unsigned>(s.value_heads), 128, 0, stream_of(stream)>>>(
                        s, s.gates(), c, row, a_log, dt_bias, skip, position, out, state);
                });
}

} // namespace

void add_state_cached(Kernels& table) {
    table.delta_cached = delta_cached;
    table.ssd_cached = ssd_cached;
}

} // namespace moe::cuda
