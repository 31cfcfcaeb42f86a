// Gradients of weights from columns of scaled E4M3, or E5M2 by E4M3: by Hopper's tensor cores, what those do not take
// element by element in FP32.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/precision/fp8.cuh"
#include "kernels/cuda/scratch.hpp"
#include "kernels/cuda/sm90/launch.cuh"
#include "kernels/cuda/sm90/scaled_wgrad.cuh"

namespace moe::cuda {
namespace {

using sm90::Pair;
using sm90::Update;

struct Call {
    const ScaledGradient& shape;
    Fp8Columns a, b;
    const std::int32_t* counts;
    Dst c;
    int multiprocessors;
    cudaStream_t stream;
};

// A row of blocks of threads for each group, each thread one element after the other.
__global__ void plain_kernel(ScaledGradient s, Fp8Columns a, Fp8Columns b, const std::int32_t* counts, Dst c) {
    const auto group = static_cast<int>(blockIdx.y);
    Rows rows{0, s.capacity};
    long long first = 0; // block
    if (counts != nullptr) {
        rows = rows_of_group(counts, group, s.capacity);
        for (int e = static_cast<int>(threadIdx.x); e < group; e += static_cast<int>(blockDim.x))
            first += ceil_div(count_of(counts, e), std::int64_t{scale_block});
        first = block_sum(first);
    }
    const long long end = first + ceil_div(rows.end - rows.begin, std::int64_t{scale_block});
    if (first == end && s.accumulate) return;
    for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < s.n * s.k;
         i += std::int64_t{gridDim.x} * blockDim.x) {
        const std::int64_t row = i / s.k, col = i % s.k, at = group * s.n * s.k + i;
        float sum = 0.0f;
        for (long long block = first; block < end; ++block) {
            const std::int64_t a_column = block * s.n + row, b_column = block * s.k + col;
            float part = 0.0f;
            for (int r = 0; r < scale_block; ++r)
                part += widen(a.data[a_column * scale_block + r], s.e5m2) * widen(b.data[b_column * scale_block + r]);
            sum += part * a.scale[a_column] * b.scale[b_column];
        }
        store(c, at, s.accumulate ? load(read_back(c), at) + sum : sum);
    }
}

bool nothing(const ScaledGradient& s) {
    return s.groups <= 0 || s.n <= 0 || s.k <= 0 || (s.capacity <= 0 && s.accumulate);
}

void plain_scaled_wgrad(const ScaledGradient& s, Fp8Columns a, Fp8Columns b, const std::int32_t* counts, Dst c,
                        void* stream) {
    if (nothing(s)) return;
    constexpr int threads = 256;
    const dim3 grid(blocks_for(s.n * s.k, threads, 1024), static_cast<unsigned>(s.groups));
    plain_kernel<<<grid, threads, 0, stream_of(stream)>>>(s, a, b, counts, c);
    CUDA_CHECK(cudaGetLastError());
}

template <class C>
void launch_tiles(const Call& call) {
    const ScaledGradient& s = call.shape;
    const std::int64_t blocks = column_blocks(s.capacity, s.groups);
    const sm90::Maps maps{sm90::map_of<std::uint8_t>(call.a.data, scale_block, s.n, blocks),
                          sm90::map_of<std::uint8_t>(call.b.data, scale_block, s.k, blocks),
                          C::narrow ? sm90::map_of<__nv_bfloat16>(call.c.data, s.k, s.n, s.groups)
                                    : sm90::map_of<float>(call.c.data, s.k, s.n, s.groups)};
    const sm90::Grouped p{s.groups,    static_cast<int>(s.n), static_cast<int>(s.k), 0, static_cast<int>(s.capacity),
                          call.counts, claims_of(call.stream)};
    sm90::launch<C>(sm90::scaled_wgrad_kernel<C>, call.multiprocessors, call.stream, maps, p,
                    sm90::ColumnScales{call.a.scale, call.b.scale}, call.c);
}

template <Update update, bool low, bool e5m2>
void launch(const Call& call) {
    using Wide = sm90::ScaledGradientConfig<256, 3, 4, Pair::along_m, update, low, e5m2>;
    using Middle = sm90::ScaledGradientConfig<192, 4, 3, Pair::along_m, update, low, e5m2>;
    using Flat = sm90::ScaledGradientConfig<256, 3, 4, Pair::along_n, update, low, e5m2>;
    const sm90::Grouped p{call.shape.groups, static_cast<int>(call.shape.n), static_cast<int>(call.shape.k), 0,
                          static_cast<int>(call.shape.capacity)};
    sm90::with_fastest<scaled_gradient_tiles, Wide, Middle, Flat>(
        p, call.multiprocessors, [&](auto config) { launch_tiles<decltype(config)>(call); });
}

template <bool e5m2>
void launch(const Call& call) {
    const bool add = call.shape.accumulate;
    if (call.c.type == Type::bf16)
        add ? launch<Update::add, true, e5m2>(call) : launch<Update::store, true, e5m2>(call);
    else
        add ? launch<Update::add, false, e5m2>(call) : launch<Update::store, false, e5m2>(call);
}

void scaled_wgrad(const ScaledGradient& s, Fp8Columns a, Fp8Columns b, const std::int32_t* counts, Dst c,
                  void* stream) {
    if (nothing(s)) return;
    const bool whole = s.capacity > 0 && s.n % 16 == 0 && s.k % 16 == 0 &&
                       sm90::within_reach({a.data, a.scale, b.data, b.scale, c.data}, {s.n, s.k, s.capacity});
    const int multiprocessors = whole ? sm90::multiprocessors() - s.reserved_sms / 2 * 2 : 0;
    if (multiprocessors <= 0) return plain_scaled_wgrad(s, a, b, counts, c, stream);
    const Call call{s, a, b, counts, c, multiprocessors, stream_of(stream)};
    s.e5m2 ? launch<true>(call) : launch<false>(call);
}

} // namespace

void add_scaled_wgrad(Kernels& table) { table.scaled_wgrad = scaled_wgrad; }
void add_plain_scaled_wgrad(Kernels& table) { table.scaled_wgrad = plain_scaled_wgrad; }

} // namespace moe::cuda
