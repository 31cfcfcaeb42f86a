// What stands around the rule of a layer with a state: the short convolution before it, the gated norm behind it; and
// one position at a time.
//
// Floors: the convolution reads its columns of p and writes c, its gradient reads dc and p and writes dp; the norm
// reads o and z and writes y, its gradient reads dy, o and z and writes do and dz. All are bound by memory.
#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/group_norm.hpp"
#include "kernels/cuda/scratch.hpp"

namespace moe::cuda {
namespace {

constexpr int threads = 256, most_taps = 8, most_columns = 4; // columns of a head for each lane

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }
__device__ inline float silu_slope(float x) {
    const float s = sigmoid(x);
    return s * (1.0f + x * (1.0f - s));
}

// The shape as kernels read it; strides of rows in elements.
struct Conv {
    int batch, taps, part, parts;
    std::int64_t seq, keys, values, columns, projected;
    const std::int32_t* starts;

    __host__ explicit Conv(const StateShape& s)
        : batch(static_cast<int>(s.batch)),
          taps(s.kernel),
          part(s.part),
          parts(s.parts),
          seq(s.seq()),
          keys(s.keys()),
          values(s.values()),
          columns(s.convolved()),
          projected(s.projected()),
          starts(s.document_start) {}
    // Of each channel, the row of the weights that is its own.
    __device__ std::int64_t weight_row(std::int64_t c) const {
        if (c < 2 * keys) return (c / keys * parts + part) * keys + c % keys;
        return 2 * keys * parts + part * values + c - 2 * keys;
    }
    // Rows before the position's, itself among them, that its convolution reads.
    __device__ int reach(std::int64_t at, int b) const {
        const std::int64_t seen = at - (starts != nullptr ? starts[at * batch + b] : 0) + 1;
        return seen < taps ? static_cast<int>(seen) : taps;
    }
};

// A thread for each element of c.
__global__ void __launch_bounds__(threads) conv_kernel(Conv s, Src p, Src w, Src bias, Dst c) {
    const std::int64_t channel = std::int64_t{blockIdx.x} * threads + threadIdx.x;
    if (channel >= s.columns) return;
    const std::int64_t weight = s.weight_row(channel) * s.taps + s.taps - 1;
    const float base = bias.data != nullptr ? load(bias, s.weight_row(channel)) : 0.0f;
    for (std::int64_t r = blockIdx.y; r < s.seq * s.batch; r += gridDim.y) {
        const int reach = s.reach(r / s.batch, static_cast<int>(r % s.batch));
        float sum = base;
        for (int j = 0; j < reach; ++j) sum += load(w, weight - j) * load(p, (r - j * s.batch) * s.projected + channel);
        store(c, r * s.columns + channel, sum * sigmoid(sum));
    }
}

void short_conv(const StateShape& shape, Src p, Src w, Src bias, Dst c, void* stream) {
    if (shape.rows <= 0) return;
    const Conv s(shape);
    const dim3 grid(blocks_for(s.columns, threads), blocks_for(shape.rows, 1, 65535));
    conv_kernel<<<grid, threads, 0, stream_of(stream)>>>(s, p, w, bias, c);
    CUDA_CHECK(cudaGetLastError());
}

// A thread follows a channel along the positions [first, first + each) of a sequence, and taps - 1 more that these
// reach. partial[segment, batch][channel, tap]: its sum for dw, and behind the taps the one for dbias.
__global__ void __launch_bounds__(threads)
    conv_grad_kernel(Conv s, Src dc, Src p, Src w, Src bias, Dst dp, float* partial, std::int64_t each) {
    const std::int64_t channel = std::int64_t{blockIdx.x} * threads + threadIdx.x;
    if (channel >= s.columns) return;
    const int b = static_cast<int>(blockIdx.z);
    const std::int64_t first = blockIdx.y * each, weight = s.weight_row(channel) * s.taps + s.taps - 1;
    const std::int64_t end = first + each < s.seq ? first + each : s.seq;
    float tap[most_taps], x[most_taps], open[most_taps], sum[most_taps], bias_sum = 0.0f;
    const float base = bias.data != nullptr ? load(bias, s.weight_row(channel)) : 0.0f;
#pragma unroll
    for (int j = 0; j < most_taps; ++j) {
        tap[j] = j < s.taps ? load(w, weight - j) : 0.0f;
        const std::int64_t at = first - 1 - j; // x[j]: of the position j before the one before the first
        x[j] = at >= 0 ? load(p, (at * s.batch + b) * s.projected + channel) : 0.0f;
        open[j] = sum[j] = 0.0f;
    }
    for (std::int64_t at = first; at < end + s.taps - 1; ++at) {
#pragma unroll
        for (int j = most_taps - 1; j > 0; --j) x[j] = x[j - 1], open[j] = open[j - 1];
        open[0] = 0.0f;
        float grad = 0.0f;
        int reach = 0;
        if (at < s.seq) {
            const std::int64_t row = at * s.batch + b;
            x[0] = load(p, row * s.projected + channel);
            reach = s.reach(at, b);
            float pre = base;
#pragma unroll
            for (int j = 0; j < most_taps; ++j) pre += j < reach ? tap[j] * x[j] : 0.0f;
            grad = load(dc, row * s.columns + channel) * silu_slope(pre);
            if (at < end) bias_sum += grad;
        }
#pragma unroll
        for (int j = 0; j < most_taps; ++j)
            if (j < reach) {
                open[j] += tap[j] * grad;
                if (at < end) sum[j] += x[j] * grad;
            }
        const std::int64_t done = at - (s.taps - 1); // the position that nothing behind reaches any more
        float value = 0.0f;
#pragma unroll
        for (int j = 0; j < most_taps; ++j) value = j == s.taps - 1 ? open[j] : value;
        if (done >= first && done < end) store(dp, (done * s.batch + b) * s.projected + channel, value);
    }
    float* out = partial + ((std::int64_t{blockIdx.y} * s.batch + b) * s.columns + channel) * (s.taps + 1);
#pragma unroll
    for (int j = 0; j < most_taps; ++j)
        if (j < s.taps) out[s.taps - 1 - j] = sum[j];
    out[s.taps] = bias_sum;
}

// dw[row of the weights, tap] and dbias += partial, over all segments.
__global__ void __launch_bounds__(threads)
    conv_weight_kernel(Conv s, const float* partial, int parts, float* dw, float* dbias) {
    const std::int64_t i = std::int64_t{blockIdx.x} * threads + threadIdx.x, each = s.taps + 1, size = s.columns * each;
    if (i >= size) return;
    float sum = 0.0f;
    for (int part = 0; part < parts; ++part) sum += partial[part * size + i];
    const std::int64_t row = s.weight_row(i / each);
    if (i % each < s.taps)
        dw[row * s.taps + i % each] += sum;
    else if (dbias != nullptr)
        dbias[row] += sum;
}

void short_conv_grad(const StateShape& shape, Src dc, Src p, Src w, Src bias, Dst dp, float* dw, float* dbias,
                     void* stream) {
    if (shape.rows <= 0) return;
    require(shape.kernel <= most_taps, "taps of a short convolution", shape.kernel, most_taps);
    const Conv s(shape);
    const std::int64_t fit = scratch_floats / (s.columns * (s.taps + 1) * s.batch);
    require(fit >= 1, "columns of a short convolution", s.columns * s.batch, scratch_floats / (s.taps + 1));
    const std::int64_t wanted = ceil_div<std::int64_t>(s.seq, 64), segments = wanted < fit ? wanted : fit;
    const std::int64_t each = ceil_div(s.seq, segments), used = ceil_div(s.seq, each);
    float* const partial = scratch_of(stream_of(stream));
    const dim3 grid(blocks_for(s.columns, threads), static_cast<unsigned>(used), static_cast<unsigned>(s.batch));
    conv_grad_kernel<<<grid, threads, 0, stream_of(stream)>>>(s, dc, p, w, bias, dp, partial, each);
    CUDA_CHECK(cudaGetLastError());
    conv_weight_kernel<<<blocks_for(s.columns * (s.taps + 1), threads), threads, 0, stream_of(stream)>>>(
        s, partial, static_cast<int>(used * s.batch), dw, dbias);
    CUDA_CHECK(cudaGetLastError());
}

// A row of the norm: one head of one token.
struct Gated {
    std::int64_t rows; // tokens times heads
    int heads, dim;
    std::int64_t values, projected, gate; // gate: the column of p where z begins
    float eps;

    __host__ explicit Gated(const StateShape& s)
        : rows(s.rows * s.value_heads),
          heads(s.value_heads),
          dim(s.value_dim),
          values(s.values()),
          projected(s.projected()),
          gate(s.convolved()),
          eps(static_cast<float>(s.eps)) {}
    __device__ std::int64_t o(std::int64_t row) const { return row / heads * values + row % heads * dim; }
    __device__ std::int64_t z(std::int64_t row) const { return row / heads * projected + gate + row % heads * dim; }
};

struct Lane {
    float x[most_columns], z[most_columns], w[most_columns];
    float inverse; // of the root mean square
};

__device__ Lane read_lane(const Gated& s, Src o, Src p, Src w, std::int64_t row) {
    Lane lane;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < most_columns; ++i) {
        const int c = static_cast<int>(threadIdx.x % warp_size) + i * warp_size;
        const bool in = c < s.dim;
        lane.x[i] = in ? load(o, s.o(row) + c) : 0.0f;
        lane.z[i] = in ? load(p, s.z(row) + c) : 0.0f;
        lane.w[i] = in ? load(w, c) : 0.0f;
        squares += lane.x[i] * lane.x[i];
    }
    lane.inverse = rsqrtf(warp_sum(squares) / static_cast<float>(s.dim) + s.eps);
    return lane;
}

// A warp for each row.
__global__ void __launch_bounds__(threads) gated_kernel(Gated s, Src o, Src p, Src w, Dst y) {
    const std::int64_t row = (std::int64_t{blockIdx.x} * threads + threadIdx.x) / warp_size;
    if (row >= s.rows) return;
    const Lane lane = read_lane(s, o, p, w, row);
#pragma unroll
    for (int i = 0; i < most_columns; ++i) {
        const int c = static_cast<int>(threadIdx.x % warp_size) + i * warp_size;
        if (c < s.dim) store(y, s.o(row) + c, lane.x[i] * lane.inverse * lane.w[i] * lane.z[i] * sigmoid(lane.z[i]));
    }
}

void check_width(const StateShape& s) {
    require(s.value_dim <= most_columns * warp_size, "columns of a head of a gated norm", s.value_dim,
            most_columns * warp_size);
}

void gated_norm(const StateShape& shape, Src o, Src p, Src w, Dst y, void* stream) {
    if (shape.rows <= 0) return;
    if (shape.rule == StateRule::ssd) return group_norm(shape, o, p, w, y, stream_of(stream));
    check_width(shape);
    const Gated s(shape);
    gated_kernel<<<blocks_for(s.rows, threads / warp_size), threads, 0, stream_of(stream)>>>(s, o, p, w, y);
    CUDA_CHECK(cudaGetLastError());
}

// A warp takes every so many rows; partial[warp][column]: its sum for dw.
__global__ void __launch_bounds__(threads)
    gated_grad_kernel(Gated s, Src dy, Src o, Src p, Src w, Dst dout, Dst dp, float* partial) {
    const std::int64_t warp = (std::int64_t{blockIdx.x} * threads + threadIdx.x) / warp_size;
    float sum[most_columns] = {};
    for (std::int64_t row = warp; row < s.rows; row += std::int64_t{gridDim.x} * threads / warp_size) {
        const Lane lane = read_lane(s, o, p, w, row);
        float grad[most_columns], dz[most_columns], along = 0.0f;
#pragma unroll
        for (int i = 0; i < most_columns; ++i) {
            const int c = static_cast<int>(threadIdx.x % warp_size) + i * warp_size;
            const float g = c < s.dim ? load(dy, s.o(row) + c) : 0.0f, unit = lane.x[i] * lane.inverse;
            const float dnormed = g * lane.z[i] * sigmoid(lane.z[i]);
            dz[i] = g * unit * lane.w[i] * silu_slope(lane.z[i]);
            sum[i] += dnormed * unit;
            grad[i] = dnormed * lane.w[i];
            along += grad[i] * unit;
        }
        along = warp_sum(along) / static_cast<float>(s.dim);
#pragma unroll
        for (int i = 0; i < most_columns; ++i) {
            const int c = static_cast<int>(threadIdx.x % warp_size) + i * warp_size;
            if (c >= s.dim) continue;
            store(dout, s.o(row) + c, lane.inverse * (grad[i] - lane.x[i] * lane.inverse * along));
            store(dp, s.z(row) + c, dz[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < most_columns; ++i) {
        const int c = static_cast<int>(threadIdx.x % warp_size) + i * warp_size;
        if (c < s.dim) partial[warp * s.dim + c] = sum[i];
    }
}

void gated_norm_grad(const StateShape& shape, Src dy, Src o, Src p, Src w, Dst dout, Dst dp, float* dw, void* stream) {
    if (shape.rows <= 0) return;
    if (shape.rule == StateRule::ssd) return group_norm_grad(shape, dy, o, p, w, dout, dp, dw, stream);
    check_width(shape);
    const Gated s(shape);
    constexpr int warps = threads / warp_size;
    const unsigned blocks = blocks_for(s.rows, 4 * warps, scratch_floats / (128 * warps) - 1);
    float* const partial = scratch_of(stream_of(stream));
    gated_grad_kernel<<<blocks, threads, 0, stream_of(stream)>>>(s, dy, o, p, w, dout, dp, partial);
    CUDA_CHECK(cudaGetLastError());
    launch_sum_columns(PartialTerm{partial, s.dim}, dw, blocks * warps, s.dim, stream);
}

// The convolution of one row behind a window of those before it, and the window moved on. A thread for each channel.
__global__ void __launch_bounds__(threads)
    conv_cached_kernel(Conv s, Src p, Src w, Src bias, const std::int32_t* position, Dst window, float* c) {
    const std::int64_t channel = std::int64_t{blockIdx.x} * threads + threadIdx.x;
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
    c[channel] = sum * sigmoid(sum);
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
    const float beta = sigmoid(load(p, gates + h));
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
        conv_cached_kernel<<<blocks_for(s.convolved(), threads), threads, 0, stream_of(stream)>>>(
            Conv(s), row, w, bias, positions + r, window, c);
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

void add_delta_conv(Kernels& table) {
    table.short_conv = short_conv;
    table.short_conv_grad = short_conv_grad;
    table.gated_norm = gated_norm;
    table.gated_norm_grad = gated_norm_grad;
    table.delta_cached = delta_cached;
    table.ssd_cached = ssd_cached;
}

} // namespace moe::cuda
