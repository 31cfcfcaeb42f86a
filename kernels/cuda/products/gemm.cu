// Dense and grouped matrix products: shapes turned into a Product, and the choice of the kernel.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/products/product.cuh"

namespace moe::cuda {

unsigned persistent_blocks(const Product& p, int tile_m, int tile_n, int per_multiprocessor) {
    int device = 0, multiprocessors = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    // Routed rows of m: full tiles of the capacity and at most one partial tile per group.
    const std::int64_t down = p.routed == Product::Routed::m ? p.capacity / tile_m + p.groups
                                                             : ceil_div(p.m, std::int64_t{tile_m}) * p.groups;
    const std::int64_t tiles = down * ceil_div(p.n, std::int64_t{tile_n});
    return blocks_for(tiles, 1, std::int64_t{multiprocessors} * per_multiprocessor);
}

namespace {

void launch(const Product& p, void* stream) {
    if (p.a.type == Type::bf16 && p.b.type == Type::bf16) {
        launch_bf16(p, stream_of(stream));
    } else {
        launch_f32(p, stream_of(stream));
    }
}

Product product_of(const GemmShape& s, Src a, Src b, Dst c) {
    Product p;
    p.m = s.m, p.n = s.n, p.k = s.k > 0 ? s.k : 0;
    p.lda = s.lda != 0 ? s.lda : (s.transpose_a ? s.m : s.k);
    p.ldb = s.ldb != 0 ? s.ldb : (s.transpose_b ? s.k : s.n);
    p.ldc = s.ldc != 0 ? s.ldc : s.n;
    p.transpose_a = s.transpose_a, p.transpose_b = s.transpose_b, p.accumulate = s.accumulate;
    p.a = a + s.a_offset, p.b = b + s.b_offset, p.c = c + s.c_offset;
    p.groups = s.batch, p.a_group = s.a_step, p.b_group = s.b_step, p.c_group = s.c_step;
    return p;
}

void plain_gemm(const GemmShape& s, Src a, Src b, Dst c, void* stream) {
    if (s.m <= 0 || s.n <= 0) return;
    launch(product_of(s, a, b, c), stream);
}

// What the library does not take at once it may take one by one.
void multiply(const Product& p, void* stream) {
    if (library_gemm(p, stream_of(stream))) return;
    if (p.groups == 1) {
        if (!split_gemm(p, stream_of(stream))) launch(p, stream);
        return;
    }
    Product one = p;
    one.groups = 1;
    for (int i = 0; i < p.groups; ++i) {
        one.a = p.a + i * p.a_group, one.b = p.b + i * p.b_group, one.c = p.c + i * p.c_group;
        multiply(one, stream);
    }
}

void gemm(const GemmShape& s, Src a, Src b, Dst c, void* stream) {
    if (s.m > 0 && s.n > 0) multiply(product_of(s, a, b, c), stream);
}

bool nothing(const GroupedShape& s) { return s.groups <= 0 || s.n <= 0 || s.k <= 0 || s.capacity <= 0; }

void plain_grouped_gemm(const GroupedShape& s, Src a, Src b, const std::int32_t* counts, Dst c, void* stream) {
    if (nothing(s)) return;
    Product p;
    p.groups = s.groups, p.capacity = s.capacity, p.counts = counts;
    p.a = a, p.b = b, p.c = c;
    const std::int64_t weight = s.n * s.k;
    switch (s.product) {
    case GroupedProduct::forward: // rows[r, k] W[n, k]^T
        p.routed = Product::Routed::m, p.n = s.n, p.k = s.k, p.transpose_b = true;
        p.lda = s.k, p.ldb = s.k, p.ldc = s.n;
        p.a_row = s.k, p.b_group = weight, p.c_row = s.n;
        break;
    case GroupedProduct::dgrad: // rows[r, n] W[n, k]
        p.routed = Product::Routed::m, p.n = s.k, p.k = s.n;
        p.lda = s.n, p.ldb = s.k, p.ldc = s.k;
        p.a_row = s.n, p.b_group = weight, p.c_row = s.k;
        break;
    case GroupedProduct::wgrad: // rows[r, n]^T rows[r, k]
        p.routed = Product::Routed::k, p.m = s.n, p.n = s.k, p.transpose_a = true;
        p.accumulate = s.accumulate;
        p.lda = s.n, p.ldb = s.k, p.ldc = s.k;
        p.a_row = s.n, p.b_row = s.k, p.c_group = weight;
        break;
    }
    launch(p, stream);
}

void grouped_gemm(const GroupedShape& s, Src a, Src b, const std::int32_t* counts, Dst c, void* stream) {
    if (nothing(s) || sm90_grouped_gemm(s, a, b, counts, c, stream_of(stream))) return;
    plain_grouped_gemm(s, a, b, counts, c, stream);
}

} // namespace

void add_gemm(Kernels& table) {
    table.gemm = gemm;
    table.grouped_gemm = grouped_gemm;
}
void add_plain_gemm(Kernels& table) {
    table.gemm = plain_gemm;
    table.grouped_gemm = plain_grouped_gemm;
}

} // namespace moe::cuda
