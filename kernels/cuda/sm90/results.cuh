// How the sums of a tile reach device memory: rows of BF16 are written, FP32 gradients are added to.
#pragma once

#include "kernels/cuda/ptx/tma.cuh"
#include "kernels/cuda/sm90/config.cuh"

namespace moe::cuda::sm90 {

// 16-byte pieces of a row are swapped by the row's place among eight, as the maps' swizzle has it.
__device__ inline unsigned place(unsigned buffer, int row, int piece) {
    return buffer + row * 128 + ((piece ^ row % 8) * 16);
}

// Hands a warpgroup's sums to the copy engine, which empties some of the `buffers` while others are filled.
template <class C>
class Writer {
public:
    __device__ Writer(const Maps& maps, const Grouped& p, const Shared<C>& shared, Dst c, int consumer)
        : map_(maps.c),
          p_(p),
          c_(c),
          start_(shared.results(consumer)),
          consumer_(consumer),
          thread_(static_cast<int>(threadIdx.x % 128)) {}

    __device__ void write(const Tile& tile, const float (&sum)[C::tile_n / 2]) {
        const int left = tile.rows_left - consumer_ * 64, row = (C::wgrad ? tile.row : tile.routed) + consumer_ * 64;
        const bool whole = C::wgrad || left >= 64; // beyond its rows a gradient's map takes nothing
#pragma unroll
        for (int part = 0; part < C::parts; ++part) {
            const int col = tile.col + part * C::result_columns;
            if (col >= p_.n) break;
            if (thread_ == 0) ptx::wait_stores_read<C::buffers - 1>();
            ptx::sync_warpgroup(1 + consumer_);
            const unsigned buffer = start_ + next_ * C::box_bytes;
            if (++next_ == C::buffers) next_ = 0;
            put(buffer, sum, part * (C::tile_n / 2 / C::parts));
            if (whole) ptx::fence_async_proxy();
            ptx::sync_warpgroup(1 + consumer_);
            if (thread_ == 0) {
                if (C::wgrad) {
                    ptx::add_box(map_, {col, row, tile.group}, buffer);
                } else if (whole) {
                    ptx::store_box(map_, {col, row, 0}, buffer);
                }
                ptx::commit_stores(); // perhaps of nothing: a buffer's turn is counted in groups
            }
            if (!whole) copy_rows(buffer, row, col, left);
        }
    }
    __device__ void finish() {
        if (thread_ == 0) ptx::wait_stores_read<0>();
    }

private:
    __device__ void put(unsigned buffer, const float (&sum)[C::tile_n / 2], int first) const {
        if constexpr (C::wgrad) {
            put_f32(buffer, sum, first);
        } else {
            put_bf16(buffer, sum, first);
        }
    }
    __device__ void put_f32(unsigned buffer, const float (&sum)[C::tile_n / 2], int first) const {
        const int lane = thread_ % warp_size;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = thread_ / warp_size * 16 + lane / 4 + h * 8, i = first + j * 4 + h * 2;
                const unsigned at = place(buffer, row, j * 2 + lane % 4 / 2) + lane % 2 * 8;
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(sum[i]), "f"(sum[i + 1]) : "memory");
            }
        }
    }
    __device__ void put_bf16(unsigned buffer, const float (&sum)[C::tile_n / 2], int first) const {
        const int lane = thread_ % warp_size, row = thread_ / warp_size * 16 + lane % 16;
#pragma unroll
        for (int j = 0; j < 4; ++j) { // 16 x 16 elements of a warp
            unsigned r[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float low = sum[first + j * 8 + i * 2], high = sum[first + j * 8 + i * 2 + 1];
                asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r[i]) : "f"(high), "f"(low));
            }
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                             place(buffer, row, j * 2 + lane / 16)),
                         "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                         : "memory");
        }
    }
    // The rows of the buffer that are the group's.
    __device__ void copy_rows(unsigned buffer, int to, int col, int rows) const {
        auto* c = static_cast<__nv_bfloat16*>(c_.data);
        const int piece = thread_ % 8;
        if (col + piece * 8 >= p_.n) return;
        for (int row = thread_ / 8; row < rows; row += 16) {
            uint4 v;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                         : "r"(place(buffer, row, piece))
                         : "memory");
            *reinterpret_cast<uint4*>(c + std::int64_t{to + row} * p_.n + col + piece * 8) = v;
        }
    }

    const CUtensorMap& map_;
    const Grouped& p_;
    Dst c_;
    unsigned start_;
    int consumer_, thread_, next_ = 0;
};

} // namespace moe::cuda::sm90
