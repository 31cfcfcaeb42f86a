// The gradient of an activation in E4M3: rows and columns of dx, and columns of the activation itself, as products of
// scaled operands read them. Nothing of it passes through memory in BF16.
//
// A block of threads has 128 rows of a group and goes through their columns in squares: of the gate, of what it
// multiplies, and of dy. What comes of these stays in registers until it leaves in a byte each. Where there are too few
// such rows for all multiprocessors, the blocks of a cluster share the squares, and add up what they have of dprobs.
#include "kernels/cuda/elementwise/activation.cuh"
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/precision/column_patch.cuh"
#include "kernels/cuda/ptx/barrier.cuh"

namespace moe::cuda {
namespace {

using Bf16 = __nv_bfloat16;

// dgate, dup and y of eight elements, out of gate, up and dy; the sum of their parts of dprobs.
template <bool swiglu>
__device__ float slopes_of_eight(const Kind<swiglu>& kind, float p, Eight& gate, Eight& up, Eight& dy) {
    float along = 0.0f;
#pragma unroll
    for (int w = 0; w < Eight::words; ++w) {
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

constexpr int stages = 2;        // squares of every operand on their way
constexpr int most_together = 8; // blocks of a cluster

struct Memory {
    uint4 arriving[stages][3][packed_rows][column_threads]; // a thread's own: no other waits for it
    ColumnExchange columns[3];
    RowExchange rows;
    float along[warps_across][scale_block];
};

template <bool swiglu>
__global__ void __launch_bounds__(column_threads, 1)
    grad_columns_kernel(ActivationShape s, Operands in, const Bf16* dy, float* dprobs, Fp8Rows q, Fp8Columns dx,
                        Fp8Columns y) {
    extern __shared__ __align__(16) char memory[];
    auto& shared = *reinterpret_cast<Memory*>(memory);
    const Kind<swiglu> kind(s);
    const std::int64_t index = blockIdx.x;
    const RowBlock block = block_at(in.counts, s.groups, s.rows, index);
    if (block.rows == 0) return;
    const PatchPlace at;
    const int ffn = static_cast<int>(s.ffn), width = kind.gated ? 2 * ffn : ffn;
    const std::int64_t first = block.first + at.row;
    const auto* const x = static_cast<const Bf16*>(in.x.data) + first * width + at.col;
    const Bf16* const grad = dy + first * ffn + at.col;
    const Fp8Rows rows{q.data + first * width + at.col, q.scale + first * (width / scale_block)};
    const auto within = [&](int p) { return at.row + p < block.rows; };
    // Row p of the square at `tile`: gate, up and dy.
    const auto ask = [&](int p, int tile, int of_stage) {
        if (tile >= ffn || !within(p)) return;
        auto& stage = shared.arriving[of_stage];
        copy_async(&stage[0][p][threadIdx.x], x + p * width + tile);
        if (kind.gated) copy_async(&stage[1][p][threadIdx.x], x + p * width + ffn + tile);
        copy_async(&stage[2][p][threadIdx.x], grad + p * ffn + tile);
    };
    const auto take = [&](int i, int p, int stage) {
        Eight out{};
        if (!within(p) || (i == 1 && !kind.gated)) return out;
        const uint4 four = shared.arriving[stage][i][p][threadIdx.x];
        out.word[0] = four.x, out.word[1] = four.y, out.word[2] = four.z, out.word[3] = four.w;
        return out;
    };
    float prob[packed_rows], along[packed_rows] = {};
#pragma unroll
    for (int p = 0; p < packed_rows; ++p) prob[p] = within(p) && in.probs != nullptr ? in.probs[first + p] : 1.0f;
    constexpr int square = static_cast<int>(scale_block);
    const int step = static_cast<int>(gridDim.y) * square, begin = static_cast<int>(blockIdx.y) * square;
    for (int ahead = 0; ahead < stages; ++ahead) {
#pragma unroll
        for (int p = 0; p < packed_rows; ++p) ask(p, begin + ahead * step, ahead);
        end_group();
    }
    for (int tile = begin, stage = 0; tile < ffn; tile += step, stage = (stage + 1) % stages) {
        Patch value[3]; // dgate, dup and y
        wait_for_groups<stages - 1>();
#pragma unroll
        for (int p = 0; p < packed_rows; ++p) {
#pragma unroll
            for (int i = 0; i < 3; ++i) value[i][p] = take(i, p, stage);
            along[p] += slopes_of_eight(kind, prob[p], value[0][p], value[1][p], value[2][p]);
            ask(p, tile + stages * step, stage);
        }
        end_group();
#pragma unroll
        for (int i = 0; i < 3; ++i)
            if (i != 1 || kind.gated) put_largest(shared.columns[i], value[i]);
        put_row_largest(shared.rows, value[0], value[1], at);
        __syncthreads();
        const auto target = [&](int i) {
            const std::int64_t column = i < 2 ? index * width + i * ffn + tile : index * ffn + tile;
            const Fp8Columns& to = i < 2 ? dx : y;
            return ColumnTarget{to.data + column * scale_block, to.scale + column, scale_block};
        };
        if (const int i = static_cast<int>(threadIdx.x) / (scale_block / 2); i < 3 && (i != 1 || kind.gated))
            put_scales(shared.columns[i], target(i), static_cast<int>(threadIdx.x) % (scale_block / 2));
        const RowScales scales(shared.rows, at);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (i == 1 && !kind.gated) break;
            const int col = i * ffn + tile;
#pragma unroll
            for (int p = 0; p < packed_rows; ++p)
                if (within(p))
                    put_row({rows.data + p * width + col, rows.scale + (p * width + col) / scale_block}, value[i][p],
                            scales.of(p, i == 1), at);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 3; ++i)
            if (i != 1 || kind.gated) put_columns(shared.columns[i], value[i], target(i), at, block.rows);
    }
    if (dprobs == nullptr) return;
#pragma unroll
    for (int p = 0; p < packed_rows; ++p) {
#pragma unroll
        for (int offset = packs_across / 2; offset > 0; offset /= 2)
            along[p] += __shfl_xor_sync(all_lanes, along[p], offset);
    }
    if (lane_of_warp() % packs_across == 0)
        *reinterpret_cast<float4*>(&shared.along[threadIdx.x / warp_size % warps_across][at.row]) = {
            along[0], along[1], along[2], along[3]};
    ptx::cluster_sync();
    const int row = static_cast<int>(threadIdx.x);
    if (blockIdx.y == 0 && row < block.rows) {
        float sum = 0.0f;
        for (unsigned rank = 0; rank < gridDim.y; ++rank) {
#pragma unroll
            for (const auto& of_warp : shared.along)
                sum += ptx::read_remote_float(ptx::in_cta(ptx::shared_address(&of_warp[row]), rank));
        }
        dprobs[block.first + row] = sum;
    }
    ptx::cluster_sync(); // The first block reads the memory of the others until here.
}

void activation_grad_columns(const ActivationShape& s, Src dy, Src x, const float* probs, const std::int32_t* counts,
                             float* dprobs, Fp8Rows q, Fp8Columns dx, Fp8Columns y, void* stream) {
    if (s.rows <= 0 || s.ffn <= 0) return;
    demand_packs("activation_grad_columns", {dy.data, x.data, q.data, dx.data, dx.scale, y.data, y.scale}, square_pack,
                 s.ffn);
    if (dy.type != Type::bf16 || x.type != Type::bf16 || s.ffn % scale_block != 0)
        throw std::runtime_error("activation_grad_columns: operands are not BF16 of multiples of 128 columns");
    const std::int64_t blocks = column_blocks(s.rows, counts == nullptr ? 1 : s.groups);
    unsigned together = 1; // one such block fills a multiprocessor
    while (together < most_together && 2 * together * scale_block <= s.ffn && blocks * together <= multiprocessors())
        together *= 2;
    const auto run = [&](auto kernel) {
        constexpr auto bytes = static_cast<int>(sizeof(Memory));
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        cudaLaunchAttribute cluster{};
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.y = together;
        cluster.val.clusterDim.x = cluster.val.clusterDim.z = 1;
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(static_cast<unsigned>(blocks), together);
        config.blockDim = column_threads;
        config.dynamicSmemBytes = bytes;
        config.stream = stream_of(stream);
        config.attrs = &cluster;
        config.numAttrs = 1;
        CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, s, Operands{x, probs, counts}, static_cast<const Bf16*>(dy.data),
                                      dprobs, q, dx, y));
    };
    is_swiglu(s) ? run(grad_columns_kernel<true>) : run(grad_columns_kernel<false>);
}

} // namespace

void add_activation_columns(Kernels& table) { table.activation_grad_columns = activation_grad_columns; }

} // namespace moe::cuda
