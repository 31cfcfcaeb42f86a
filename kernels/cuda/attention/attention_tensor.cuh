// What both directions of attention on Hopper's tensor cores share: tiles of heads in shared memory, masks, launches.
//
// For what the library does not take: documents, whose beginnings only the device knows. A CTA has a thread that loads
// and two warpgroups that multiply, 64 rows each. Scores stay in registers, where they become the left operand of the
// next product (FlashAttention-3, Shah et al., arXiv:2407.08608, section 3.1). Keys that no row of a tile sees are not
// loaded, so that time follows the lengths of documents.
#pragma once

#include "kernels/cuda/attention/attention.cuh"
#include "kernels/cuda/ptx/barrier.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/cuda/ptx/wgmma_registers.cuh"
#include "kernels/cuda/sm90/launch.cuh"

namespace moe::cuda::tensor_attention {

// Multiplying warpgroups, threads in all, rows of a tile's long side, elements in a row of a box.
inline constexpr int consumers = 2, threads = 128 * (1 + consumers), tile_rows = 64 * consumers, box_width = 64;
inline constexpr float log2_e = 1.4426950408889634f, ln_2 = 0.6931471805599453f;

// A tile of `rows` rows of one head in shared memory: boxes of 64 elements of every row, swizzled.
template <int rows, int width>
struct TileOf {
    static_assert(width % box_width == 0 && rows % 8 == 0);
    static constexpr int boxes = width / box_width, box_bytes = rows * 128, bytes = boxes * box_bytes;

    __device__ static void load(const CUtensorMap& map, ptx::HeadBox at, unsigned to, unsigned barrier) {
#pragma unroll
        for (int i = 0; i < boxes; ++i, at.inner += box_width) ptx::load_box(map, at, to + i * box_bytes, barrier);
    }
    // The operand whose rows are free, from row `row` on, at the 16 contracted elements number `slice` of its width.
    __device__ static std::uint64_t rows_at(unsigned tile, int row, int slice) {
        return ptx::describe<box_bytes>(tile + slice / 4 * box_bytes + row * 128) + slice % 4 * ptx::k16_step<false>;
    }
    // The operand whose width is free, at the 16 contracted rows number `slice`.
    __device__ static std::uint64_t across_at(unsigned tile, int slice) {
        return ptx::describe<box_bytes>(tile) + slice * ptx::k16_step<true>;
    }
};

// d = the products of 64 rows of A from `row` on and all rows of B over a head's width; under way when this returns.
template <class A, class B, int count>
__device__ void multiply_widths(float (&d)[count], unsigned a, int row, unsigned b) {
    static_assert(A::boxes == B::boxes);
#pragma unroll
    for (int slice = 0; slice < 4 * A::boxes; ++slice)
        ptx::multiply<false, false>(d, A::rows_at(a, row, slice), B::rows_at(b, 0, slice), slice);
    ptx::commit_products();
}

// The left operands that a product's sums make, for each 16 columns.
template <int count>
__device__ void pack(const float (&sums)[count], unsigned (&operands)[count / 8][4]) {
#pragma unroll
    for (int i = 0; i < count / 2; ++i) {
        const __nv_bfloat162 two = __floats2bfloat162_rn(sums[2 * i], sums[2 * i + 1]);
        operands[i / 4][i % 4] = *reinterpret_cast<const unsigned*>(&two);
    }
}

// d += weights times B's rows; under way when this returns.
template <class B, int count, int slices>
__device__ void multiply_rows(float (&d)[count], const unsigned (&weights)[slices][4], unsigned b) {
#pragma unroll
    for (int slice = 0; slice < slices; ++slice) ptx::multiply_registers(d, weights[slice], B::across_at(b, slice), 1);
    ptx::commit_products();
}

// The place of a thread in its warpgroup's sums: of element 4 j + 2 h + i row `row` + 8 h and column 8 j + `column` +
// i.
struct Place {
    int row, column;
    __device__ Place()
        : row(static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4),
          column(static_cast<int>(threadIdx.x) % 4 * 2) {}
};

// Keys [first, end) that a query sees.
struct Seen {
    int first, end;
    __device__ bool operator()(int key) const { return key >= first && key < end; }
};

__device__ inline Seen seen_by(const AttentionSizes& z, std::int64_t b, std::int64_t query) {
    const std::int64_t inside = query < z.s.seq_q ? query : z.s.seq_q - 1;
    return {static_cast<int>(z.first(b, inside)), static_cast<int>(z.last(inside))};
}

// Stages of shared memory from `start` on, and their barriers.
struct Ring {
    int stage = 0;
    unsigned parity = 0;
    __device__ void advance(int stages) {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

// Writes a warpgroup's sums, times `scale`, as rows of a head: those below `limit`, and columns below `dim`. add: to
// what is there.
template <int count>
__device__ void write_sums(Dst y, HeadRows head, std::int64_t row, std::int64_t limit, int dim, const float (&scale)[2],
                           const float (&sums)[count], bool add = false) {
    const Place place;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const std::int64_t at = row + place.row + 8 * h;
        if (at >= limit) continue;
        auto* to = static_cast<__nv_bfloat162*>(y.data) + (head.start + at * head.step + place.column) / 2;
#pragma unroll
        for (int j = 0; j < count / 4; ++j) {
            if (8 * j + place.column >= dim) continue;
            float2 two{sums[4 * j + 2 * h] * scale[h], sums[4 * j + 2 * h + 1] * scale[h]};
            if (add) {
                const float2 before = __bfloat1622float2(to[4 * j]);
                two.x += before.x, two.y += before.y;
            }
            to[4 * j] = __floats2bfloat162_rn(two.x, two.y);
        }
    }
}

// Rows of heads that lie `stride` elements apart, `sequences` of them in turn.
template <int box_rows>
CUtensorMap map_of_heads(const void* data, std::int64_t rows, int heads, int dim, std::int64_t sequences,
                         std::int64_t stride) {
    constexpr cuuint64_t element = 2;
    const auto count = [](std::int64_t n) { return static_cast<cuuint64_t>(n); };
    return sm90::map_of<__nv_bfloat16, 4>(
        data, {count(dim), count(rows), count(heads), count(sequences)},
        {count(sequences * stride) * element, count(dim) * element, count(stride) * element}, box_rows);
}

// Whether the operands are what the copy engine takes, on a card that has one, and their widths are what there is.
inline bool takes(const AttentionShape& s, std::initializer_list<Src> operands) {
    const AttentionSizes z(s);
    constexpr std::int64_t step = 8; // elements in 16 bytes
    const auto whole = [&](std::int64_t n) { return n % step == 0; };
    const bool sizes = s.seq_q > 0 && s.seq_k > 0 && s.qk_dim <= 192 && s.v_dim <= 128 && whole(s.qk_dim) &&
                       whole(s.v_dim) && whole(z.q_stride) && whole(z.k_stride) && whole(z.v_stride) &&
                       whole(s.q_offset) && whole(s.k_offset) && whole(s.v_offset);
    const bool types = std::all_of(operands.begin(), operands.end(), [](const Src& x) {
        return x.type == Type::bf16 && reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0;
    });
    return sizes && types && sm90::within_reach({}, {s.seq_q * s.batch, s.seq_k * s.batch}) &&
           sm90::multiprocessors() > 0;
}

// Calls with the widths that a shape's heads are filled up to.
template <class Call>
void with_widths(const AttentionShape& s, const Call& call) {
    if (s.qk_dim <= 64 && s.v_dim <= 64) return call.template operator()<64, 64>();
    if (s.qk_dim <= 128) return call.template operator()<128, 128>();
    call.template operator()<192, 128>();
}

} // namespace moe::cuda::tensor_attention
