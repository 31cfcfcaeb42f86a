// The gradient of an activation in E4M3: rows and columns of dx, and columns of the activation itself, as products of
// scaled operands read them. Nothing of it passes through memory in BF16.
//
// A block of threads has 128 rows of a group and goes through their columns in squares: of the gate, of what it
// multiplies, and of dy. What comes of these takes their places in registers and is quantized square by square.
#include "kernels/cuda/elementwise/activation.cuh"
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/precision/column_square.cuh"

namespace moe::cuda {
namespace {

using Bf16 = __nv_bfloat16;

// One block of many threads on a multiprocessor: two of half as many had too few registers and took a third longer.
constexpr int threads = 512, rows_apart = Shares<threads>::rows, passes = Shares<threads>::passes;

// dgate, dup and y of 16 elements in place of gate, up and dy; the sum of their parts of dprobs.
template <bool swiglu>
__device__ float replace(const Kind<swiglu>& kind, float p, Values& gate, Values& up, Values& dy) {
    float along = 0.0f;
#pragma unroll
    for (int w = 0; w < Values::words; ++w) {
        const Slopes low = slopes_of(kind, gate[2 * w], up[2 * w], dy[2 * w], p);
        const Slopes high = slopes_of(kind, gate[2 * w + 1], up[2 * w + 1], dy[2 * w + 1], p);
        along += low.along + high.along;
        const auto word_of = [](float a, float b) {
            const __nv_bfloat162 two = __floats2bfloat162_rn(a, b);
            return *reinterpret_cast<const unsigned*>(&two);
        };
        gate.word[w] = word_of(low.gate, high.gate), up.word[w] = word_of(low.up, high.up);
        dy.word[w] = word_of(low.y, high.y);
    }
    return along;
}

// y of a square in BF16, until its turn comes: registers hold two squares, and not three.
struct Waiting {
    uint4 pack[passes][2][threads];

    __device__ void put(int p, const Values& x) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            pack[p][i][threadIdx.x] = {x.word[4 * i], x.word[4 * i + 1], x.word[4 * i + 2], x.word[4 * i + 3]};
    }
    __device__ Values take(int p) const {
        Values x;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 four = pack[p][i][threadIdx.x];
            x.word[4 * i] = four.x, x.word[4 * i + 1] = four.y, x.word[4 * i + 2] = four.z, x.word[4 * i + 3] = four.w;
        }
        return x;
    }
};
struct Memory {
    Columns<threads> columns;
    Waiting y;
};

template <bool swiglu>
__global__ void __launch_bounds__(threads, 1)
    grad_columns_kernel(ActivationShape s, Operands in, const Bf16* dy, float* dprobs, Fp8Rows q, Fp8Columns dx,
                        Fp8Columns y) {
    extern __shared__ __align__(16) char memory[];
    auto& shared = *reinterpret_cast<Memory*>(memory);
    const Kind<swiglu> kind(s);
    const std::int64_t index = blockIdx.x;
    const RowBlock block = block_at(in.counts, s.groups, s.rows, index);
    if (block.rows == 0) return;
    const int ffn = static_cast<int>(s.ffn), width = kind.gated ? 2 * ffn : ffn,
              pack = static_cast<int>(threadIdx.x) % sharers, top = static_cast<int>(threadIdx.x) / sharers,
              col = pack * square_pack;
    const std::int64_t first = block.first + top;
    const auto* const x = static_cast<const Bf16*>(in.x.data) + first * width + col;
    const Bf16* const grad = dy + first * ffn + col;
    const Fp8Rows rows{q.data + first * width + col, q.scale + first * (width / scale_block)};
    const auto within = [&](int p) { return p * rows_apart + top < block.rows; };
    const auto take = [&](Values(&to)[passes], const Bf16* from, int cols, bool some) {
#pragma unroll
        for (int p = 0; p < passes; ++p) to[p] = some && within(p) ? values_at(from + p * rows_apart * cols) : Values{};
    };
    float along[passes] = {};
    Values gate[passes], up[passes]; // and then dgate and dup
    take(gate, x, width, true);
    take(up, x + ffn, width, kind.gated);
    for (int tile = 0; tile < ffn; tile += scale_block) {
#pragma unroll
        for (int p = 0; p < passes; ++p) {
            Values other = within(p) ? values_at(grad + p * rows_apart * ffn + tile) : Values{}; // dy, and then y
            const float prob = within(p) && in.probs != nullptr ? in.probs[first + p * rows_apart] : 1.0f;
            along[p] += replace(kind, prob, gate[p], up[p], other);
            shared.y.put(p, other);
        }
        const auto target = [&](Fp8Columns to, int cols, int at) {
            const std::int64_t column = index * cols + at;
            return ColumnTarget{to.data + column * scale_block, to.scale + column, scale_block};
        };
        const auto put = [&](Values(&values)[passes], int at) {
            put_columns<false>(
                shared.columns, values, target(dx, width, at + tile), within,
                [&] {
#pragma unroll
                    for (int p = 0; p < passes; ++p)
                        put_row({rows.data + p * rows_apart * width + at + tile,
                                 rows.scale + (p * rows_apart * width + at + tile) / scale_block},
                                within(p), values[p]);
                },
                [&] { take(values, x + at + tile + scale_block, width, tile + scale_block < ffn); });
        };
        put(gate, 0);
        if (kind.gated) put(up, ffn);
        Values values[passes];
#pragma unroll
        for (int p = 0; p < passes; ++p) values[p] = shared.y.take(p);
        put_columns<false>(
            shared.columns, values, target(y, ffn, tile), within, [] {}, [] {});
    }
    if (dprobs == nullptr) return;
#pragma unroll
    for (int p = 0; p < passes; ++p) {
#pragma unroll
        for (int offset = sharers / 2; offset > 0; offset /= 2)
            along[p] += __shfl_xor_sync(all_lanes, along[p], offset);
        if (pack == 0 && within(p)) dprobs[first + p * rows_apart] = along[p];
    }
}

void activation_grad_columns(const ActivationShape& s, Src dy, Src x, const float* probs, const std::int32_t* counts,
                             float* dprobs, Fp8Rows q, Fp8Columns dx, Fp8Columns y, void* stream) {
    if (s.rows <= 0 || s.ffn <= 0) return;
    demand_packs("activation_grad_columns", {dy.data, x.data, q.data, dx.data, dx.scale, y.data, y.scale}, square_pack,
                 s.ffn);
    if (dy.type != Type::bf16 || x.type != Type::bf16 || s.ffn % scale_block != 0)
        throw std::runtime_error("activation_grad_columns: operands are not BF16 of multiples of 128 columns");
    const auto blocks = static_cast<unsigned>(column_blocks(s.rows, counts == nullptr ? 1 : s.groups));
    const auto run = [&](auto kernel) {
        constexpr auto bytes = static_cast<int>(sizeof(Memory));
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        kernel<<<blocks, threads, bytes, stream_of(stream)>>>(s, Operands{x, probs, counts},
                                                              static_cast<const Bf16*>(dy.data), dprobs, q, dx, y);
    };
    is_swiglu(s) ? run(grad_columns_kernel<true>) : run(grad_columns_kernel<false>);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_activation_columns(Kernels& table) { table.activation_grad_columns = activation_grad_columns; }

} // namespace moe::cuda
