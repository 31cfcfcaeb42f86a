// The way of a tile's sums to device memory: BF16 or FP32, written or, of gradients, added to.
#pragma once

#include "kernels/cuda/ptx/tma.cuh"
#include "kernels/cuda/sm90/config.cuh"

namespace moe::cuda::sm90 {

// 16-byte pieces of a row are swapped by the row's place among eight, as the maps' swizzle has it.
__device__ inline unsigned place(unsigned buffer, int row, int piece) {
    return buffer + row * 128 + ((piece ^ row % 8) * 16);
}

// Hands a warpgroup's sums to the copy engine, which empties some of the `buffers` while others are filled. A part is
// 64 rows of 128 bytes.
template <class C>
class Writer {
public:
    __device__ Writer(const Maps& maps, const Grouped& p, const Shared<C>& shared, Dst c, int consumer)
        : map_(maps.c),
          p_(p),
          c_(c),
          shared_(shared),
          consumer_(consumer),
          thread_(static_cast<int>(threadIdx.x % 128)) {}

    // Before the tile's products: what will be added to is on its way while they are made.
    __device__ void begin(const Tile& tile) {
        if (C::update != Update::add || thread_ != 0) return;
        ptx::wait_stores_read<0>();
        for (int i = 0; i < C::buffers && i < parts_of(tile); ++i) fetch(tile, i);
    }

    // One piece `of` so many of the tile's columns; all of them unless asked for less.
    template <int of = 1>
    __device__ void write(const Tile& tile, const float (&sum)[C::halves][C::tile_n / 2], int piece = 0) {
        int done = piece * (C::parts / of); // number of parts done
#pragma unroll
        for (int h = 0; h < C::halves; ++h) {
            const int left = tile.rows_left - first_row(h), row = (C::wgrad ? tile.row : tile.routed) + first_row(h);
            if (left <= 0) break;
            const bool whole = C::wgrad || left >= 64; // Beyond its rows a gradient's map takes nothing.
#pragma unroll
            for (int i = 0; i < C::parts / of; ++i, ++done) {
                const int part = piece * (C::parts / of) + i;
                const int col = tile.col + part * C::result_columns;
                if (col >= p_.n) break;
                const unsigned buffer = shared_.results(consumer_) + next_ * C::buffer_bytes;
                if constexpr (C::update == Update::add) {
                    ptx::wait(shared_.fetched(consumer_, next_), parity_);
                } else {
                    if (thread_ == 0) ptx::wait_stores_read<C::buffers - 1>();
                    ptx::sync_warpgroup(1 + consumer_);
                }
                put(buffer, sum[h], part * (C::tile_n / 2 / C::parts));
                if (whole) ptx::fence_async_proxy();
                ptx::sync_warpgroup(1 + consumer_);
                if (++next_ == C::buffers) next_ = 0, parity_ ^= 1;
                if (thread_ == 0) {
                    if (whole) {
                        each_box({col, row, C::wgrad ? tile.group : 0}, buffer,
                                 [&](ptx::Box at, unsigned from) { ptx::store_box(map_, at, from); });
                    }
                    ptx::commit_stores(); // The group may be empty: a buffer's turn is counted in groups.
                    if (C::update == Update::add && done > 0 && done - 1 + C::buffers < parts_of(tile)) {
                        ptx::wait_stores_read<1>();
                        fetch(tile, done - 1 + C::buffers);
                    }
                }
                if (!whole) copy_rows(buffer, row, col, left);
            }
        }
    }
    __device__ void finish() {
        if (thread_ == 0) ptx::wait_stores_read<0>();
    }

private:
    __device__ int first_row(int half) const { return (C::in_turn ? half : consumer_) * 64; } // row in the tile
    __device__ int across(const Tile& tile) const {
        const int parts = ceil_div(p_.n - tile.col, C::result_columns);
        return parts < C::parts ? parts : C::parts;
    }
    __device__ int parts_of(const Tile& tile) const {
        return across(tile) * (C::halves == 2 && tile.rows_left > 64 ? 2 : 1);
    }
    // The boxes of a part that begins `at` an element of what is computed.
    template <class Move>
    __device__ static void each_box(ptx::Box at, unsigned buffer, const Move& move) {
        if constexpr (!C::swapped) {
            move(at, buffer);
        } else {
            move(ptx::Box{at.row, at.inner, at.plane}, buffer);
            if constexpr (!C::narrow) move(ptx::Box{at.row + 32, at.inner, at.plane}, buffer + C::buffer_bytes / 2);
        }
    }
    // One part of C to the next buffer.
    __device__ void fetch(const Tile& tile, int part) {
        const int down = part / across(tile), col = tile.col + part % across(tile) * C::result_columns;
        const unsigned barrier = shared_.fetched(consumer_, fetched_);
        ptx::arrive_expecting(barrier, C::buffer_bytes);
        each_box({col, tile.row + first_row(down), tile.group}, shared_.results(consumer_) + fetched_ * C::buffer_bytes,
                 [&](ptx::Box at, unsigned to) { ptx::load_box(map_, at, to, barrier); });
        if (++fetched_ == C::buffers) fetched_ = 0;
    }
    __device__ void put(unsigned buffer, const float (&sum)[C::tile_n / 2], int first) const {
        if constexpr (C::narrow) {
            put_bf16(buffer, sum, first);
        } else if constexpr (C::swapped) {
            put_transposed(buffer, sum, first);
        } else {
            put_f32(buffer, sum, first);
        }
    }
    __device__ void put_f32(unsigned buffer, const float (&sum)[C::tile_n / 2], int first) const {
        // Four neighbours have 8 columns of a row, and half a warp four rows. These are on the banks of different 8
        // columns only because odd rows take theirs in another order.
        const int lane = thread_ % warp_size, row = thread_ / warp_size * 16 + lane / 4;
        const bool odd = row % 2 == 1;
        const unsigned start = buffer + row * 128 + lane % 2 * 8,
                       piece = ((lane % 4 / 2) ^ (row % 8) ^ (odd ? 4 : 0)) * 16;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int even_at = first + j * 4 + h * 2, odd_at = first + (j ^ 2) * 4 + h * 2;
                const unsigned at = start + (piece ^ (j * 32)) + h * 1024;
                float x = odd ? sum[odd_at] : sum[even_at], y = odd ? sum[odd_at + 1] : sum[even_at + 1];
                if constexpr (C::update == Update::add) {
                    float c, d;
                    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(c), "=f"(d) : "r"(at) : "memory");
                    x += c, y += d;
                }
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x), "f"(y) : "memory");
            }
        }
    }
    // Columns of the sums as rows: a warp's elements of one store are 8 of each of 4 rows, all on different banks.
    __device__ void put_transposed(unsigned buffer, const float (&sum)[C::tile_n / 2], int first) const {
        const int lane = thread_ % warp_size, warp = thread_ / warp_size, row = lane % 4 * 2;
        const unsigned box = buffer + warp / 2 * (C::buffer_bytes / 2);
        const unsigned start = box + row * 128 + lane / 4 % 4 * 4, piece = ((warp % 2 * 4 + lane / 16) ^ row) * 16;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const unsigned at = start + i * 128 + (piece ^ (i * 16 + h * 32)) + j * 1024;
                    float x = sum[first + j * 4 + h * 2 + i];
                    if constexpr (C::update == Update::add) {
                        float c;
                        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(c) : "r"(at) : "memory");
                        x += c;
                    }
                    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
                }
            }
        }
    }
    __device__ void put_bf16(unsigned buffer, const float (&sum)[C::tile_n / 2], int first) const {
        const int lane = thread_ % warp_size, warp = thread_ / warp_size;
#pragma unroll
        for (int j = 0; j < 4; ++j) { // 16 x 16 elements of a warp, of which a lane has the place of eight
            const unsigned at = C::swapped ? place(buffer, j * 16 + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2)
                                           : place(buffer, warp * 16 + lane % 16, j * 2 + lane / 16);
            unsigned r[4], c[4] = {};
            if constexpr (C::update == Update::add) {
                static_assert(!C::swapped);
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                             : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
                             : "r"(at)
                             : "memory");
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float low = sum[first + j * 8 + i * 2], high = sum[first + j * 8 + i * 2 + 1];
                if constexpr (C::update == Update::add)
                    low += __uint_as_float(c[i] << 16), high += __uint_as_float(c[i] & 0xffff0000u);
                asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r[i]) : "f"(high), "f"(low));
            }
            if constexpr (C::swapped) {
                asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                             "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                             : "memory");
            } else {
                asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(r[0]),
                             "r"(r[1]), "r"(r[2]), "r"(r[3])
                             : "memory");
            }
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
    const Shared<C>& shared_;
    int consumer_, thread_, next_ = 0, fetched_ = 0;
    unsigned parity_ = 0;
};

} // namespace moe::cuda::sm90
