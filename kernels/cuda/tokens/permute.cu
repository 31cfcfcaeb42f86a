// Rows to their places in expert-major order and back; the places come from permute_map.
#include "kernels/cuda/clear.hpp"
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/rows.cuh"

namespace moe::cuda {
namespace {

constexpr int together = 8; // copies of a token, or packs of a lane's copies, in flight
constexpr std::int64_t narrow_row = warp_size;

// The token side of a copy is a row of its own, or one row for all copies of a token.
struct Move {
    std::int64_t tokens, cols;
    int copies;
    explicit Move(const PermuteShape& s)
        : tokens(s.per_copy ? s.tokens * s.top_k : s.tokens), cols(s.cols), copies(s.per_copy ? 1 : s.top_k) {}
};

// Places [first, first + count) of a token's copies, -1 for those that it has not.
template <int count>
__device__ void places_of(const Move& m, const std::int32_t* row_of, std::int64_t token, int first,
                          std::int32_t (&place)[count]) {
#pragma unroll
    for (int k = 0; k < count; ++k) place[k] = first + k < m.copies ? row_of[token * m.copies + first + k] : -1;
}

// A pack that this multiprocessor will not read again.
template <class A>
__device__ void put_away(Dst y, std::int64_t i, const typename A::Held& held) {
    if constexpr (A::width == 1) {
        A::put(y, i, held);
    } else {
        static_assert(A::Held::words == 4, "16 bytes");
        asm volatile("st.global.L1::no_allocate.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(
                         static_cast<typename A::Storage*>(y.data) + i),
                     "r"(held.word[0]), "r"(held.word[1]), "r"(held.word[2]), "r"(held.word[3])
                     : "memory");
    }
}

// x is read once for all copies of a token, and a copy is written in one go: stores that change from row to row reach
// memory more slowly.
template <class A>
__global__ void __launch_bounds__(row_threads, 2) scatter_kernel(Move m, Src x, const std::int32_t* row_of, Dst rows) {
    constexpr int W = A::width, most = 16; // packs of a lane at a time
    const int packs = static_cast<int>(m.cols / W);
    for_each_row(nullptr, 0, m.tokens, [&](std::int64_t token) {
        for (int first = 0; first < m.copies; first += together) {
            std::int32_t place[together];
            places_of(m, row_of, token, first, place);
            for (int start = lane_of_warp(); start < packs; start += most * warp_size) {
                typename A::Held held[most];
#pragma unroll
                for (int p = 0; p < most; ++p) {
                    const int pack = start + p * warp_size;
                    if (pack < packs) held[p] = A::take(x, token * m.cols + pack * W);
                }
#pragma unroll
                for (int k = 0; k < together; ++k) {
                    if (place[k] < 0) continue;
#pragma unroll
                    for (int p = 0; p < most; ++p) {
                        const int pack = start + p * warp_size;
                        if (pack < packs) put_away<A>(rows, std::int64_t{place[k]} * m.cols + pack * W, held[p]);
                    }
                }
            }
        }
    });
}

// The sums that a lane adds up at a time: packs a warp's width apart, from `pack` on, of a row of `packs`.
template <class A, int side>
struct Sums {
    float value[side][A::width] = {};
    bool found = false;

    // += the copies at `place` in this order; the first found replaces it, so that a single one is moved as it is.
    template <int count>
    __device__ void add(Src rows, int packs, int pack, const std::int32_t (&place)[count]) {
        typename A::Held held[count][side];
#pragma unroll
        for (int k = 0; k < count; ++k)
#pragma unroll
            for (int i = 0; i < side; ++i) {
                const int at = pack + i * warp_size;
                if (place[k] >= 0 && at < packs)
                    held[k][i] = A::take(rows, (std::int64_t{place[k]} * packs + at) * A::width);
            }
#pragma unroll
        for (int k = 0; k < count; ++k) {
            if (place[k] < 0) continue;
#pragma unroll
            for (int i = 0; i < side; ++i)
#pragma unroll
                for (int j = 0; j < A::width; ++j) value[i][j] = found ? value[i][j] + held[k][i][j] : held[k][i][j];
            found = true;
        }
    }
};

// A row per copy, moved as it is.
template <class A>
__global__ void __launch_bounds__(row_threads) fetch_kernel(Move m, Src rows, const std::int32_t* row_of, Dst y) {
    constexpr int W = A::width;
    for_each_row(nullptr, 0, m.tokens, [&](std::int64_t copy) {
        const std::int64_t from = row_of[copy];
        for_each_pack<4>(
            static_cast<int>(m.cols / W),
            [&](int p) { return from >= 0 ? A::take(rows, from * m.cols + p * W) : typename A::Held{}; },
            [&](int p, const typename A::Held& held) { A::put(y, copy * m.cols + p * W, held); });
    });
}

// y = sum over the copies in the order of k, all at a time or `together`, and of as many packs of a lane as keep so
// many loads in flight.
template <class A, int count>
__global__ void __launch_bounds__(row_threads) gather_kernel(Move m, Src rows, const std::int32_t* row_of, Dst y) {
    constexpr int W = A::width, side = together / count;
    const int packs = static_cast<int>(m.cols / W);
    for_each_row(nullptr, 0, m.tokens, [&](std::int64_t token) {
        std::int32_t place[count];
        places_of(m, row_of, token, 0, place);
        for (int pack = lane_of_warp(); pack < packs; pack += side * warp_size) {
            Sums<A, side> sums;
            sums.add(rows, packs, pack, place);
            for (int first = count; count == together && first < m.copies; first += count) {
                std::int32_t more[count];
                places_of(m, row_of, token, first, more);
                sums.add(rows, packs, pack, more);
            }
#pragma unroll
            for (int i = 0; i < side; ++i) {
                const int at = pack + i * warp_size;
                if (at < packs) A::put(y, token * m.cols + at * W, sums.value[i]);
            }
        }
    });
}

// Rows of few columns, such as one weight per copy, take a thread per element.
__global__ void __launch_bounds__(row_threads)
    narrow_scatter_kernel(Move m, Src x, const std::int32_t* row_of, Dst rows) {
    const std::int64_t i = std::int64_t{blockIdx.x} * row_threads + threadIdx.x, copy = i / m.cols, c = i % m.cols;
    if (copy >= m.tokens * m.copies || row_of[copy] < 0) return;
    store(rows, row_of[copy] * m.cols + c, load(x, copy / m.copies * m.cols + c));
}
__global__ void __launch_bounds__(row_threads)
    narrow_gather_kernel(Move m, Src rows, const std::int32_t* row_of, Dst y) {
    const std::int64_t i = std::int64_t{blockIdx.x} * row_threads + threadIdx.x, token = i / m.cols, c = i % m.cols;
    if (token >= m.tokens) return;
    float sum = 0.0f;
    bool found = false;
    for (int k = 0; k < m.copies; ++k) {
        const std::int64_t row = row_of[token * m.copies + k];
        if (row < 0) continue;
        const float value = load(rows, row * m.cols + c);
        sum = found ? sum + value : value;
        found = true;
    }
    store(y, i, sum);
}

void permute(const PermuteShape& s, Src x, const std::int32_t* row_of, Dst rows, void* stream) {
    clear(rows.data, s.padded_rows * s.cols * static_cast<std::int64_t>(size_of(rows.type)), stream_of(stream));
    const Move m(s);
    if (m.tokens <= 0 || m.copies <= 0 || s.cols <= 0) return;
    if (s.cols < narrow_row) {
        const unsigned blocks = blocks_for(m.tokens * m.copies * s.cols, row_threads);
        narrow_scatter_kernel<<<blocks, row_threads, 0, stream_of(stream)>>>(m, x, row_of, rows);
        CUDA_CHECK(cudaGetLastError());
        return;
    }
    with_access({x, rows}, {s.cols}, [&](auto access) {
        launch_rows<scatter_kernel<decltype(access)>>(m.tokens, stream, m, x, row_of, rows);
    });
}

void unpermute(const PermuteShape& s, Src rows, const std::int32_t* row_of, Dst y, void* stream) {
    const Move m(s);
    if (m.tokens <= 0 || s.cols <= 0) return;
    if (s.cols < narrow_row) {
        const unsigned blocks = blocks_for(m.tokens * s.cols, row_threads);
        narrow_gather_kernel<<<blocks, row_threads, 0, stream_of(stream)>>>(m, rows, row_of, y);
        CUDA_CHECK(cudaGetLastError());
        return;
    }
    with_access({rows, y}, {s.cols}, [&](auto access) {
        if (m.copies == 1) {
            launch_rows<fetch_kernel<decltype(access)>>(m.tokens, stream, m, rows, row_of, y);
        } else if (m.copies == 2) {
            launch_rows<gather_kernel<decltype(access), 2>>(m.tokens, stream, m, rows, row_of, y);
        } else if (m.copies <= 4) {
            launch_rows<gather_kernel<decltype(access), 4>>(m.tokens, stream, m, rows, row_of, y);
        } else {
            launch_rows<gather_kernel<decltype(access), 8>>(m.tokens, stream, m, rows, row_of, y);
        }
    });
}

} // namespace

void add_permute(Kernels& table) {
    table.permute = permute;
    table.unpermute = unpermute;
}

} // namespace moe::cuda
