// Squares of 128 x 128 elements in E4M3 that a block of threads holds, as they are and transposed.
#pragma once

#include "kernels/cuda/precision/fp8.cuh"

namespace moe::cuda {

inline constexpr int sharers = scale_block / square_pack; // threads of a row of a square
inline constexpr int square_threads = 256;
inline constexpr int square_rows = square_threads / sharers; // rows of a square that are read at a time

// Weights in BF16, two in a register, so that several squares of a multiprocessor are under way.
using Values = Pack<__nv_bfloat16, square_pack>;

__device__ inline uint4 rounded(const Values& x, float inverse) {
    return {four_e4m3(x, 0, inverse), four_e4m3(x, 4, inverse), four_e4m3(x, 8, inverse), four_e4m3(x, 12, inverse)};
}

template <class T>
__device__ Values in_bf16(const Pack<T, square_pack>& x) {
    if constexpr (sizeof(T) == 2) {
        return x;
    } else {
        float value[square_pack];
#pragma unroll
        for (int j = 0; j < square_pack; ++j) value[j] = x[j];
        return Access<__nv_bfloat16, square_pack>::pack(value);
    }
}
template <class T>
__device__ Values values_at(const T* x) {
    return in_bf16(Access<T, square_pack>::take({x, Type::f32}, 0));
}

// The square's bytes by rows of 128, each row's eight packs of 16 exchanged by the number of its 16 rows: then neither
// the rows that are written nor the columns that are read, 16 rows of a thread, meet in a bank.
struct Square {
    uint4 pack[scale_block * sharers];
    __device__ uint4& at(int row, int pack_of_row) {
        return pack[row * sharers + (pack_of_row ^ (row / square_pack % sharers))];
    }
    __device__ unsigned word(int row, int word_of_row) {
        return reinterpret_cast<const unsigned*>(&at(row, word_of_row / 4))[word_of_row % 4];
    }
};

// Four bytes of four rows each as four rows of four bytes.
__device__ inline void transpose(const unsigned (&row)[4], unsigned (&column)[4]) {
    const unsigned low01 = __byte_perm(row[0], row[1], 0x5140), high01 = __byte_perm(row[0], row[1], 0x7362);
    const unsigned low23 = __byte_perm(row[2], row[3], 0x5140), high23 = __byte_perm(row[2], row[3], 0x7362);
    column[0] = __byte_perm(low01, low23, 0x5410), column[1] = __byte_perm(low01, low23, 0x7632);
    column[2] = __byte_perm(high01, high23, 0x5410), column[3] = __byte_perm(high01, high23, 0x7632);
}

// Each thread has four columns and 16 rows of them.
__device__ inline void put_transposed(Square& square, std::uint8_t* to, std::int64_t stride, int rows, int cols) {
    const int row = static_cast<int>(threadIdx.x) % sharers * square_pack,
              col = static_cast<int>(threadIdx.x) / sharers * 4;
    if (row >= rows || col >= cols) return;
    unsigned out[4][square_pack / 4];
#pragma unroll
    for (int i = 0; i < square_pack / 4; ++i) {
        const unsigned in[] = {square.word(row + 4 * i, col / 4), square.word(row + 4 * i + 1, col / 4),
                               square.word(row + 4 * i + 2, col / 4), square.word(row + 4 * i + 3, col / 4)};
        unsigned turned[4];
        transpose(in, turned);
#pragma unroll
        for (int c = 0; c < 4; ++c) out[c][i] = turned[c];
    }
#pragma unroll
    for (int c = 0; c < 4; ++c)
        *reinterpret_cast<uint4*>(to + (col + c) * stride + row) = uint4{out[c][0], out[c][1], out[c][2], out[c][3]};
}

} // namespace moe::cuda
