// AdamW on a shard, and the squared norm in two stages whose order does not depend on the launch.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/precision/fp8.cuh"
#include "kernels/cuda/scratch.hpp"
#include "kernels/cuda/vector.cuh"

namespace moe::cuda {
namespace {

constexpr int threads = 256;
constexpr int partial_blocks = 1024;

// A thread's squares are added in FP32 within a round of a few packs and in double from round to round: conversions to
// double, 16 per clock and multiprocessor, would take longer than the memory.
template <class A>
__global__ void __launch_bounds__(threads) squares_kernel(Src x, std::int64_t n, double* partial) {
    constexpr int W = A::width, together = 8;
    // A block reads whole pieces, wherever memory's banks are.
    constexpr int step = threads;
    const std::int64_t packs = n / W, piece = threads * together;
    double sum = 0.0;
    for (std::int64_t p = blockIdx.x * piece + threadIdx.x; p < packs; p += gridDim.x * piece) {
        typename A::Held held[together];
#pragma unroll
        for (int t = 0; t < together; ++t) {
            if (p + t * step < packs) held[t] = A::take(x, (p + t * step) * W);
        }
        float round = 0.0f;
#pragma unroll
        for (int t = 0; t < together; ++t) {
            if (p + t * step >= packs) break;
            float squares = 0.0f;
#pragma unroll
            for (int j = 0; j < W; ++j) squares += held[t][j] * held[t][j];
            round += squares;
        }
        sum += static_cast<double>(round);
    }
    const std::int64_t last = packs * W + threadIdx.x;
    if (blockIdx.x == 0 && last < n) {
        const float value = load(x, last);
        sum += static_cast<double>(value) * static_cast<double>(value);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(partial_blocks) add_squares_kernel(const double* partial, int blocks, float* s) {
    const double sum = block_sum(static_cast<int>(threadIdx.x) < blocks ? partial[threadIdx.x] : 0.0);
    if (threadIdx.x == 0) *s += static_cast<float>(sum);
}

// Exact division and root would take longer than the memory; these are within 2 units of the last place.
__device__ float root(float x) {
    float y = 0.0f;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

struct Hyper {
    float beta1, beta2, eps, step, decay, correction2, factor; // factors that all elements share, so divided once
    __device__ Hyper(const AdamShape& s, const float* h, float norm)
        : beta1(h[1]),
          beta2(h[2]),
          eps(h[3]),
          step(h[0] * s.rate / h[6]),
          decay(h[0] * s.rate * (s.decay < 0.0f ? h[4] : s.decay)),
          correction2(1.0f / h[7]),
          factor(h[5] > 0.0f && norm > h[5] ? h[5] / (norm + 1e-6f) : 1.0f) {}

    // One element: m and v move, master follows them.
    __device__ void update(float g, float& m, float& v, float& master, bool decayed) const {
        const float grad = factor * g;
        m = beta1 * m + (1.0f - beta1) * grad;
        v = beta2 * v + (1.0f - beta2) * grad * grad;
        master -= (decayed ? decay : 0.0f) * master + __fdividef(step * m, root(v * correction2) + eps);
    }
};

struct AdamOperands {
    const float *g, *squares, *hyper, *overflow;
    float* master;
    Dst m, v, w;
};

// M: storage of both moments, P: of the parameters. The rest of a shard that is no multiple of W goes element by
// element.
template <class M, class P, int W>
struct Adam {
    const AdamShape& s;
    const AdamOperands& o;
    const Hyper& h;
    struct Held {
        Pack<float, W> g, master;
        Pack<M, W> m, v;
    };
    __device__ Held read(std::int64_t i) const {
        return {Access<float, W>::take({o.g, Type::f32}, i), Access<float, W>::take({o.master, Type::f32}, i),
                Access<M, W>::take(read_back(o.m), i), Access<M, W>::take(read_back(o.v), i)};
    }
    __device__ void write(std::int64_t i, const Held& held) const {
        float m[W], v[W], master[W];
#pragma unroll
        for (int j = 0; j < W; ++j) {
            m[j] = held.m[j], v[j] = held.v[j], master[j] = held.master[j];
            h.update(held.g[j], m[j], v[j], master[j], s.decay >= 0.0f || s.offset + i + j < s.decayed);
        }
        Access<M, W>::put(o.m, i, m);
        Access<M, W>::put(o.v, i, v);
        Access<float, W>::put({o.master, Type::f32}, i, master);
        if (o.w.data != nullptr) Access<P, W>::put(o.w, i, master);
    }
};

template <class M, class P, int W>
__global__ void __launch_bounds__(threads) adamw_kernel(AdamShape s, AdamOperands o) {
    if (o.overflow != nullptr && *o.overflow > 0.0f) return;
    if (o.hyper[8] > 0.0f && !(*o.squares <= o.hyper[8])) return;
    const Hyper h(s, o.hyper, sqrtf(*o.squares));
    const Adam<M, P, W> adam{s, o, h};
    const std::int64_t packs = s.elements / W, mine = std::int64_t{blockIdx.x} * threads + threadIdx.x;
    if (mine < packs) adam.write(mine * W, adam.read(mine * W));
    if constexpr (W > 1) {
        const Adam<M, P, 1> rest{s, o, h};
        const std::int64_t i = packs * W + threadIdx.x;
        if (blockIdx.x == 0 && i < s.elements) rest.write(i, rest.read(i));
    }
}

template <class M, class P, int W>
void launch_adamw(const AdamShape& s, const AdamOperands& o, void* stream) {
    const unsigned blocks = blocks_for(ceil_div(s.elements, std::int64_t{W}), threads);
    adamw_kernel<M, P, W><<<blocks, threads, 0, stream_of(stream)>>>(s, o);
    CUDA_CHECK(cudaGetLastError());
}

struct Mxfp8Operands {
    const float *g, *squares, *hyper, *overflow;
    float* master;
    std::uint8_t *code, *scale;
    Dst v, w;
};

// Four elements a thread, so that eight neighbouring lanes hold a block of 32 and find its scale among themselves.
template <class V, class P>
__global__ void __launch_bounds__(threads) mxfp8_kernel(AdamShape s, Mxfp8Operands o) {
    if (o.overflow != nullptr && *o.overflow > 0.0f) return;
    if (o.hyper[8] > 0.0f && !(*o.squares <= o.hyper[8])) return;
    constexpr int W = 4, sharers = 8;
    const Hyper h(s, o.hyper, sqrtf(*o.squares));
    const std::int64_t pack = std::int64_t{blockIdx.x} * threads + threadIdx.x, i = pack * W;
    const bool within = i < s.elements; // whole blocks: all eight lanes of one or none
    float m[W] = {};
    if (within) {
        const auto g = Access<float, W>::take({o.g, Type::f32}, i),
                   before = Access<float, W>::take({o.master, Type::f32}, i);
        const auto squares = Access<V, W>::take(read_back(o.v), i);
        const unsigned power = o.scale[pack / sharers];
        widen_four(*reinterpret_cast<const unsigned*>(o.code + i),
                   __uint_as_float(power == 255 ? 0x7fc00000u : power << 23), m);
        float v[W], master[W];
#pragma unroll
        for (int j = 0; j < W; ++j) {
            v[j] = squares[j], master[j] = before[j];
            h.update(g[j], m[j], v[j], master[j], s.decay >= 0.0f || s.offset + i + j < s.decayed);
        }
        Access<V, W>::put(o.v, i, v);
        Access<float, W>::put({o.master, Type::f32}, i, master);
        if (o.w.data != nullptr) Access<P, W>::put(o.w, i, master);
    }
    Pack<float, W> held;
    unsigned largest = 0;
#pragma unroll
    for (int j = 0; j < W; ++j) {
        held.word[j] = __float_as_uint(m[j]);
        largest = max(largest, held.word[j] & 0x7fffffffu);
    }
#pragma unroll
    for (int offset = sharers / 2; offset > 0; offset /= 2)
        largest = max(largest, __shfl_xor_sync(all_lanes, largest, offset));
    if (!within) return;
    const BlockScale block(largest);
    if (pack % sharers == 0) o.scale[pack / sharers] = static_cast<std::uint8_t>(__float_as_uint(block.scale) >> 23);
    *reinterpret_cast<unsigned*>(o.code + i) = four_e4m3(held, 0, block.inverse);
}

void adamw_mxfp8(const AdamShape& s, const float* g, const float* squares, const float* hyper, const float* overflow,
                 float* master, std::uint8_t* code, std::uint8_t* scale, Dst v, Dst w, void* stream) {
    if (s.elements <= 0) return;
    if (s.elements % 32 != 0 || !aligned(g) || !aligned(master) || !aligned(code) || !all_aligned({v, w}))
        throw std::runtime_error("adamw_mxfp8: a shard of " + std::to_string(s.elements) +
                                 " elements that are no whole blocks of 32, or an operand that is not aligned");
    const Mxfp8Operands o{g, squares, hyper, overflow, master, code, scale, v, w};
    const unsigned blocks = blocks_for(ceil_div(s.elements, std::int64_t{4}), threads);
    with_storage(v.type, [&](auto moment) {
        with_storage(w.type, [&](auto weight) {
            mxfp8_kernel<decltype(moment), decltype(weight)><<<blocks, threads, 0, stream_of(stream)>>>(s, o);
        });
    });
    CUDA_CHECK(cudaGetLastError());
}

void sum_squares(Src x, float* s, std::int64_t n, void* stream) {
    if (n <= 0) return;
    auto* partial = reinterpret_cast<double*>(scratch_of(stream_of(stream)));
    const unsigned blocks = blocks_for(n, threads * 32, partial_blocks);
    with_access({x}, {}, [&](auto access) {
        squares_kernel<decltype(access)><<<blocks, threads, 0, stream_of(stream)>>>(x, n, partial);
    });
    CUDA_CHECK(cudaGetLastError());
    add_squares_kernel<<<1, partial_blocks, 0, stream_of(stream)>>>(partial, static_cast<int>(blocks), s);
    CUDA_CHECK(cudaGetLastError());
}

void adamw(const AdamShape& s, const float* g, const float* squares, const float* hyper, const float* overflow,
           float* master, Dst m, Dst v, Dst w, void* stream) {
    if (s.elements <= 0) return;
    const AdamOperands o{g, squares, hyper, overflow, master, m, v, w};
    if (m.type != v.type || !aligned(g) || !aligned(master) || !all_aligned({m, v, w}))
        return launch_adamw<float, float, 1>(s, o, stream);
    with_storage(m.type, [&](auto moment) {
        with_storage(w.type, [&](auto weight) { launch_adamw<decltype(moment), decltype(weight), 4>(s, o, stream); });
    });
}

} // namespace

void add_optimizer(Kernels& table) {
    table.sum_squares = sum_squares;
    table.adamw = adamw;
    table.adamw_mxfp8 = adamw_mxfp8;
}

} // namespace moe::cuda
