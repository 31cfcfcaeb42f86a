// Products of a chunk of a gated delta rule on the tensor cores: TF32 operands in shared memory, FP32 sums in
// registers.
//
// TF32 keeps more of an operand than BF16, in which it came. Matrices have 128 columns, or a slice of 32 of the
// state's, or 64 of a chunk's squares. Rows are four elements apart in their banks. A thread's elements of a product
// are four neighbours of each of two neighbouring rows, and what it reads of an operand are pairs: the places of rows,
// columns and contracted elements within a tensor core's product are chosen for that.
#pragma once

#include "kernels/cuda/delta_tiles.cuh"

namespace moe::cuda::delta {

inline constexpr int slice = 32; // columns of the state that a block passes on
inline constexpr int wide_stride = widest + 4, slice_stride = slice + 4, square_stride = rows + 4;

__device__ inline float tf32(float x) {
    unsigned rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
    return __uint_as_float(rounded);
}
__device__ inline float4 tf32(float4 x) { return {tf32(x.x), tf32(x.y), tf32(x.z), tf32(x.w)}; }
__device__ inline float4 times(float4 x, float by) { return {x.x * by, x.y * by, x.z * by, x.w * by}; }
__device__ inline float4 plus(float4 x, float4 y) { return {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w}; }
__device__ inline float dot(float4 x, float4 y) { return x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w; }
__device__ inline float4& four(float* at) { return *reinterpret_cast<float4*>(at); }
__device__ inline float4 four(const float* at) { return *reinterpret_cast<const float4*>(at); }
__device__ inline float2 two(const float* at) { return *reinterpret_cast<const float2*>(at); }

// A warp's piece of a product [m, n]: `down` times 16 rows and `across` times 16 columns, one piece for each warp of a
// `block` of so many threads.
template <int m, int n, int block = threads>
class Sums {
public:
    static constexpr int pieces = block / warp_size, area = m * n / pieces;
    static constexpr int across = area >= 1024 ? 2 : 1, down = area / (256 * across), in_row = n / (16 * across);
    static_assert(down * across * 256 * pieces == m * n);

    // thread: the caller's among those that share the product.
    __device__ explicit Sums(int thread = static_cast<int>(threadIdx.x))
        : row_(thread / warp_size / in_row * 16 * down + thread % warp_size / 4 * 2),
          col_(thread / warp_size % in_row * 16 * across),
          lane_(thread % 4) {
        clear();
    }
    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < down * across * 8; ++i) (&sum_[0][0][0][0])[i] = 0.0f;
    }

    // Adds op(A) op(B) over k contracted elements: A is stored [m, k], or [k, m] where ta; B [k, n], or [n, k] where
    // tb.
    template <bool ta, bool tb>
    __device__ void multiply(int k, const float* a, int lda, const float* b, int ldb) {
        const int group = static_cast<int>(threadIdx.x) % warp_size / 4 * 2;
#pragma unroll 4
        for (int l = lane_ * 2; l < k; l += 8) {
            float x[down][4], y[across][2][2]; // y[pair][of the pair][k]
#pragma unroll
            for (int u = 0; u < down; ++u) {
                const int i = row_ + u * 16;
                const float2 one = two(ta ? a + l * lda + i : a + i * lda + l),
                             other = two(ta ? a + (l + 1) * lda + i : a + (i + 1) * lda + l);
                x[u][0] = one.x, x[u][ta ? 1 : 2] = one.y, x[u][ta ? 2 : 1] = other.x, x[u][3] = other.y;
            }
#pragma unroll
            for (int v = 0; v < across; ++v) {
                const int j = col_ + v * 16 + group;
                const float2 one = two(tb ? b + j * ldb + l : b + l * ldb + j),
                             other = two(tb ? b + (j + 1) * ldb + l : b + (l + 1) * ldb + j);
                y[v][0][0] = one.x, y[v][tb ? 0 : 1][tb ? 1 : 0] = one.y;
                y[v][tb ? 1 : 0][tb ? 0 : 1] = other.x, y[v][1][1] = other.y;
            }
#pragma unroll
            for (int u = 0; u < down; ++u)
#pragma unroll
                for (int v = 0; v < across; ++v)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        float(&s)[4] = sum_[u][v][h];
                        asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                            "{%8, %9}, {%0, %1, %2, %3};"
                            : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
                            : "r"(__float_as_uint(x[u][0])), "r"(__float_as_uint(x[u][1])),
                              "r"(__float_as_uint(x[u][2])), "r"(__float_as_uint(x[u][3])),
                              "r"(__float_as_uint(y[v][h][0])), "r"(__float_as_uint(y[v][h][1])));
                    }
        }
    }

    // use(i, j, columns j to j + 3 of row i), by reference.
    template <class Use>
    __device__ void each(Use use) {
#pragma unroll
        for (int u = 0; u < down; ++u)
#pragma unroll
            for (int v = 0; v < across; ++v)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float(&s)[2][4] = sum_[u][v];
                    float4 x{s[0][r * 2], s[1][r * 2], s[0][r * 2 + 1], s[1][r * 2 + 1]};
                    use(row_ + u * 16 + r, col_ + v * 16 + lane_ * 4, x);
                    s[0][r * 2] = x.x, s[1][r * 2] = x.y, s[0][r * 2 + 1] = x.z, s[1][r * 2 + 1] = x.w;
                }
    }
    __device__ void put(float* to, int stride) {
        each([&](int i, int j, float4& x) { four(to + i * stride + j) = tf32(x); });
    }

private:
    float sum_[down][across][2][4];
    int row_, col_, lane_;
};

// Sums over columns by row, in one order: out[piece of columns][row] for each warp's piece, added up by sum_pieces.
template <int n, int block>
struct RowSums {
    using Product = Sums<rows, n, block>;
    static constexpr int pieces = Product::in_row;
    float part[pieces][rows];
    // of(i, j, x): a row's share of four columns.
    template <class Of>
    __device__ void gather(Product& sums, Of of) {
        float total[Product::down][2] = {};
        int piece = 0, first = 0, at = 0;
        sums.each([&](int i, int j, float4& x) {
            total[at / (2 * Product::across)][at % 2] += of(i, j, x);
            if (at++ == 0) first = i;
            piece = j / (16 * Product::across);
        });
#pragma unroll
        for (int u = 0; u < Product::down; ++u)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float sum = total[u][r];
                sum += __shfl_xor_sync(all_lanes, sum, 1);
                sum += __shfl_xor_sync(all_lanes, sum, 2);
                if (threadIdx.x % 4 == 0) part[piece][first + u * 16 + r] = sum;
            }
    }
    __device__ float of(int i) const {
        float sum = 0.0f;
#pragma unroll
        for (int p = 0; p < pieces; ++p) sum += part[p][i];
        return sum;
    }
};

// A thread's share of a matrix of `count` rows: packs of 16 bytes on their way to registers, whose rows `at` finds.
template <class T, int columns, int count = rows, int block = threads>
class Packs {
public:
    static constexpr int each = 16 / sizeof(T), across = columns / each, most = (count * across + block - 1) / block;
    template <class At>
    __device__ void load(const T* x, int n, At at) {
#pragma unroll
        for (int u = 0; u < most; ++u)
            value_[u] = row(u) < n ? *reinterpret_cast<const uint4*>(x + at(row(u)) + column()) : uint4{0, 0, 0, 0};
    }
    __device__ static int row(int u) { return static_cast<int>(threadIdx.x) / across + u * (block / across); }
    __device__ static int column() { return static_cast<int>(threadIdx.x) % across * each; }
    // put(u, i, j, x): columns j to j + 3 of row i, of pack u.
    template <class Put>
    __device__ void put(Put put) const {
#pragma unroll
        for (int u = 0; u < most; ++u) {
            const uint4 v = value_[u];
            if (count * across % block != 0 && row(u) >= count) continue;
            if constexpr (sizeof(T) == 2) {
                put(u, row(u), column(), float4{low(v.x), high(v.x), low(v.y), high(v.y)});
                put(u, row(u), column() + 4, float4{low(v.z), high(v.z), low(v.w), high(v.w)});
            } else {
                put(u, row(u), column(),
                    float4{__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)});
            }
        }
    }
    __device__ void put(float* to, int stride) const {
        put([&](int, int i, int j, float4 x) { four(to + i * stride + j) = tf32(x); });
    }

private:
    __device__ static float low(unsigned both) { return __uint_as_float(both << 16); } // BF16 is FP32's upper half
    __device__ static float high(unsigned both) { return __uint_as_float(both & 0xffff0000u); }
    uint4 value_[most];
};

template <int block>
using Elements = Packs<__nv_bfloat16, widest, rows, block>;

__device__ inline const __nv_bfloat16* elements(Src x) { return static_cast<const __nv_bfloat16*>(x.data); }

// t <- (I + A)^-1 of the strictly lower A, in FP32: blocks of 16 rows on the diagonal, then those below by the ones
// above them. `between_` holds three blocks. All threads take part; they have met before and meet at the end.
template <int block_threads = threads>
__device__ void invert(const float* a, float* t, float* between_) {
    constexpr int block = 16, blocks = rows / block;
    const int thread = static_cast<int>(threadIdx.x);
    for (int item = thread; item < rows * rows; item += block_threads)
        t[item / rows * square_stride + item % rows] = 0.0f;
    __syncthreads();
    if (thread < rows) {
        const int first = thread / block * block, column = thread % block;
        float x[block];
#pragma unroll
        for (int i = 0; i < block; ++i) {
            float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
            for (int l = 0; l < i; ++l) sum -= a[(first + i) * square_stride + first + l] * x[l];
            x[i] = sum;
            t[(first + i) * square_stride + first + column] = sum;
        }
    }
    __syncthreads();
    for (int below = 1; below < blocks; ++below) {
        for (int item = thread; item < (blocks - below) * block * block; item += block_threads) {
            const int at = item / (block * block), i = item / block % block, j = item % block;
            const float* row = a + ((at + below) * block + i) * square_stride + at * block;
            const float* column = t + at * block * square_stride + at * block + j;
            float sum = 0.0f;
            for (int l = 0; l < below * block; ++l) sum += row[l] * column[l * square_stride];
            between_[item] = sum;
        }
        __syncthreads();
        for (int item = thread; item < (blocks - below) * block * block; item += block_threads) {
            const int at = item / (block * block), i = item / block % block, j = item % block;
            const int first = (at + below) * block;
            float sum = 0.0f;
#pragma unroll
            for (int l = 0; l < block; ++l)
                sum -= t[(first + i) * square_stride + first + l] * between_[at * block * block + l * block + j];
            t[(first + i) * square_stride + at * block + j] = sum;
        }
        __syncthreads();
    }
}

template <class Kernel>
void allow_shared(Kernel* kernel, std::size_t bytes) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

// The forward, and the states of the gradients' (o empty); then the gradients of the states and of all else, as far as
// rows_kernel and weights_kernel take them up. Of calls that Rule::tensor takes.
void run_tensor_states(const Rule& rule, Dst o, cudaStream_t stream);
void run_tensor_grads(const Rule& rule, Src dout, Dst dc, Dst dp, cudaStream_t stream);

} // namespace moe::cuda::delta
