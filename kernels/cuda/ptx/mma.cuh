// Tensor cores by warps: products m16n8k16 of BF16 operands in registers with FP32 sums, and operands out of shared
// memory.
#pragma once

namespace moe::cuda::ptx {

// d += A[16, 16] B[16, 8]. With g = lane / 4 and c = lane % 4 * 2 a lane holds
//   d: rows g (0, 1) and g + 8 (2, 3), columns c and c + 1;
//   a: two elements each of row g columns c, row g + 8 columns c, row g columns c + 8, row g + 8 columns c + 8;
//   b: of column g the rows c and c + 1, c + 8 and c + 9
// (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type").
__device__ inline void multiply_16x8(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four matrices of 8 x 8 elements of 2 bytes; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void read_matrices(unsigned (&to)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}
__device__ inline void read_matrices_transposed(unsigned (&to)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

// A matrix of 8 x 8 elements of 2 bytes, two neighbours of a row in each lane, the other way round.
__device__ inline unsigned transpose(unsigned two) {
    unsigned to;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(two));
    return to;
}

} // namespace moe::cuda::ptx
