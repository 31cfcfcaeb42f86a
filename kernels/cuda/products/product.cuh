// Matrix products as a list of tiles: dense, or per expert with row counts that only the device knows.
#pragma once

#include "kernels/cuda/device.cuh"

namespace moe::cuda {

// C (+)= op(A) op(B) per group. The rows of the groups follow one another in the operands that have routed rows; a
// dense product is one group, several of them side by side are as many.
struct Product {
    enum class Routed : std::uint8_t { none, m, k }; // size that is a group's count of rows
    Routed routed = Routed::none;
    int groups = 1;
    std::int64_t m = 0, n = 0, k = 0, capacity = 0; // sizes, of which the routed one is not set
    std::int64_t lda = 0, ldb = 0, ldc = 0;
    bool transpose_a = false, transpose_b = false, accumulate = false;
    Src a, b;
    Dst c;
    const std::int32_t* counts = nullptr;
    std::int64_t a_group = 0, b_group = 0, c_group = 0; // elements from one group's operand to the next one's
    std::int64_t a_row = 0, b_row = 0, c_row = 0;       // elements from one routed row to the next one's
};

struct Tile { // corner of a tile in its group's C, and the group's operands
    std::int64_t m, n, k;
    std::int64_t a, b, c; // first element of each operand
    std::int64_t row, col;
};

// A persistent grid's walk over all tiles of all groups: each block takes every gridDim.x-th tile. The counts are read
// where they are used, so that nothing about the routing is needed to launch.
class Walk {
public:
    __device__ Walk(const Product& product, int tile_m, int tile_n)
        : p_(product), tile_m_(tile_m), tile_n_(tile_n), tile_(blockIdx.x) {}

    __device__ bool next(Tile& tile) {
        for (; group_ < p_.groups; ++group_) {
            const std::int64_t rows = rows_of();
            const std::int64_t m = p_.routed == Product::Routed::m ? rows : p_.m;
            const std::int64_t down = ceil_div(m, std::int64_t{tile_m_});
            // A group without rows adds nothing to an accumulated product.
            const bool nothing = p_.routed == Product::Routed::k && p_.accumulate && rows == 0;
            const std::int64_t tiles = nothing ? 0 : down * ceil_div(p_.n, std::int64_t{tile_n_});
            if (tile_ < first_ + tiles) {
                const std::int64_t local = tile_ - first_; // Tiles go down a column first: B's part stays in cache.
                tile.m = m;
                tile.n = p_.n;
                tile.k = p_.routed == Product::Routed::k ? rows : p_.k;
                tile.a = group_ * p_.a_group + row_ * p_.a_row;
                tile.b = group_ * p_.b_group + row_ * p_.b_row;
                tile.c = group_ * p_.c_group + row_ * p_.c_row;
                tile.row = local % down * tile_m_;
                tile.col = local / down * tile_n_;
                tile_ += gridDim.x;
                return true;
            }
            first_ += tiles;
            row_ += rows;
        }
        return false;
    }

private:
    __device__ std::int64_t rows_of() const {
        if (p_.routed == Product::Routed::none) return 0;
        const std::int64_t rows = count_of(p_.counts, group_), left = p_.capacity - row_;
        return rows < left ? rows : left;
    }

    const Product& p_;
    int tile_m_, tile_n_;
    int group_ = 0;
    std::int64_t tile_, first_ = 0, row_ = 0; // first_: tiles of the groups before, row_: rows of the groups before
};

// Launches of the two kernels. Both operands BF16: tensor cores; otherwise FP32 multiply-adds, since an FP32 operand
// may not be rounded.
void launch_bf16(const Product& product, cudaStream_t stream);
void launch_f32(const Product& product, cudaStream_t stream);

// The products by cuBLASLt, dense only; false where the machine has no such library or it does not take them at once.
bool library_gemm(const Product& product, cudaStream_t stream);

// C[rows, n] = A[rows, k] B[n, k]^T of E4M3 in BF16, with scales as ScaledShape has them.
struct ScaledProduct {
    std::int64_t rows = 0, n = 0, k = 0;
    const std::uint8_t *a = nullptr, *b = nullptr;
    const float *a_scale = nullptr, *b_scale = nullptr;
    void* c = nullptr;
    bool e5m2 = false; // A is E5M2
};
bool library_gemm(const ScaledProduct& product, cudaStream_t stream);

// C[rows, n] (+)= scalars[0] * A[rows, k] B[n, k]^T of packed operands (kernels/block_scaled.hpp): E4M3 with UE8M0, or
// E2M1 with UE4M3. scalars[1], beside it on the device, is 1 where C is added to, else 0.
struct BlockScaledProduct {
    std::int64_t rows = 0, n = 0, k = 0, ldc = 0;
    bool fp4 = false;
    const std::uint8_t *a = nullptr, *b = nullptr, *a_scale = nullptr, *b_scale = nullptr;
    const float* scalars = nullptr;
    Dst c;
};
// Whether the library has such a product of these sizes, for what this stream may use; operands are not read.
bool library_takes(const BlockScaledProduct& product, cudaStream_t stream);
bool library_gemm(const BlockScaledProduct& product, cudaStream_t stream);
bool library_is_open();

// A product of FP32 and BF16 by the same library, the FP32 operand in two parts; false where that is not one.
bool split_gemm(const Product& p, cudaStream_t stream);

// The grouped product by Hopper's wgmma, BF16 only; false where the device has none or the kernel does not take it:
// sizes and addresses must be multiples of 16 bytes.
bool sm90_grouped_gemm(const GroupedShape& shape, Src a, Src b, const std::int32_t* counts, Dst c, cudaStream_t stream);

// Blocks of a persistent grid: as many as there can be tiles, at most `per_multiprocessor` on each.
unsigned persistent_blocks(const Product& product, int tile_m, int tile_n, int per_multiprocessor);

} // namespace moe::cuda
