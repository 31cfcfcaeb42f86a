// Dense products by cuBLASLt where the machine has it; what it does not take is left to our own kernels.
//
// The library is opened when a device is first used and not linked, so that one build runs with and without it, and on
// another distribution; every device has a handle and a workspace of its own. Algorithms are asked for once per shape,
// layout and alignment and kept; their workspace is part of this module, so that nothing is allocated by a call.
#include "kernels/cuda/cuda_kernels.hpp"
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/products/product.cuh"
#include "kernels/cuda/scratch.hpp"

#include <cublasLt.h>
#include <dlfcn.h>

#include <compare>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>

namespace moe::cuda {
namespace {

// The size is the one that cuBLAS recommends for Hopper and later (cuBLAS documentation, cublasSetWorkspace).
constexpr std::size_t workspace_bytes = std::size_t{32} << 20;
__device__ __align__(256) unsigned char workspace_memory[workspace_bytes];

void check_library(cublasStatus_t status, const char* what) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    throw std::runtime_error(std::string("cuBLASLt: ") + what + ": status " + std::to_string(status));
}

struct Functions {
    decltype(&cublasLtGetVersion) version = nullptr;
    decltype(&cublasLtCreate) create = nullptr;
    decltype(&cublasLtMatmul) matmul = nullptr;
    decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
    decltype(&cublasLtMatmulDescCreate) desc_create = nullptr;
    decltype(&cublasLtMatmulDescSetAttribute) desc_set = nullptr;
    decltype(&cublasLtMatrixLayoutCreate) layout_create = nullptr;
    decltype(&cublasLtMatrixLayoutSetAttribute) layout_set = nullptr;
    decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
    decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
    decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
};

// Everything that decides which algorithms there are. Sizes as cuBLASLt sees them: columns first.
struct Shape {
    std::int64_t m, n, k, lda, ldb, ldd;
    bool transpose_a, transpose_b, accumulate, wide_result, with_workspace;
    cudaDataType_t type;   // type of a and b; CUDA_R_8F_E4M3: with the scales of ScaledProduct
    cudaDataType_t b_type; // type of b, which is ScaledProduct's A: E4M3 or E5M2 beside an E4M3 one
    int align_a, align_b, align_d;
    int batch = 1;
    std::int64_t a_step = 0, b_step = 0, d_step = 0;
    bool block_scaled = false; // scales of BlockScaledProduct; its alpha and beta lie on the device
    auto operator<=>(const Shape&) const = default;
};

struct Choice {
    cublasLtMatmulDesc_t product = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
    cublasLtMatmulAlgo_t algorithm{};
    bool found = false;
};

int alignment_of(std::uintptr_t address) {
    int bytes = 1;
    while (bytes < 16 && address % (2 * static_cast<unsigned>(bytes)) == 0) bytes *= 2;
    return bytes;
}
int alignment_of(const void* p) { return alignment_of(reinterpret_cast<std::uintptr_t>(p)); }
// Of operands that lie so many elements apart.
int alignment_of(Src x, std::int64_t step) {
    return alignment_of(reinterpret_cast<std::uintptr_t>(x.data) |
                        (static_cast<std::uintptr_t>(step) * size_of(x.type)));
}

// The library wants the scales of a block of columns side by side, [blocks, rows], and those of weights in rows of
// whole 16 bytes, which most are already (b_rows is 0 then). A thread has four blocks of a row: what it reads lies
// together, what a warp writes does.
struct OrderedScales {
    const float *a, *b;
    float *a_out, *b_out;
    int rows, b_rows, blocks, b_stride;
};
__global__ void __launch_bounds__(256) order_scales_kernel(OrderedScales s) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), row = i % s.rows, first = i / s.rows * 4;
#pragma unroll
    for (int block = first; block < first + 4; ++block) {
        if (block < s.blocks) s.a_out[std::int64_t{block} * s.rows + row] = s.a[std::int64_t{row} * s.blocks + block];
    }
    const int steps = static_cast<int>(gridDim.x * blockDim.x);
    for (int j = i; j < s.b_rows * s.blocks; j += steps) s.b_out[j / s.blocks * s.b_stride + j % s.blocks] = s.b[j];
}

class Library {
public:
    Library() {
        const char* wanted = std::getenv("MOE_PLAN_CUBLASLT");
        if (wanted != nullptr && std::string(wanted) == "off") {
            about_ = "MOE_PLAN_CUBLASLT=off: products by plain kernels";
            return;
        }
        void* file = nullptr;
        for (const char* name : {"libcublasLt.so.13", "/usr/local/cuda/lib64/libcublasLt.so.13"})
            if (file == nullptr) file = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        if (file == nullptr) {
            about_ = "libcublasLt.so.13 was not found: products by plain kernels (set LD_LIBRARY_PATH to its folder)";
            return;
        }
        bool complete = true;
        const auto find = [&](auto& function, const char* name) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(file, name));
            complete = complete && function != nullptr;
        };
        find(f_.version, "cublasLtGetVersion");
        find(f_.create, "cublasLtCreate");
        find(f_.matmul, "cublasLtMatmul");
        find(f_.heuristic, "cublasLtMatmulAlgoGetHeuristic");
        find(f_.desc_create, "cublasLtMatmulDescCreate");
        find(f_.desc_set, "cublasLtMatmulDescSetAttribute");
        find(f_.layout_create, "cublasLtMatrixLayoutCreate");
        find(f_.layout_set, "cublasLtMatrixLayoutSetAttribute");
        find(f_.preference_create, "cublasLtMatmulPreferenceCreate");
        find(f_.preference_set, "cublasLtMatmulPreferenceSetAttribute");
        find(f_.preference_destroy, "cublasLtMatmulPreferenceDestroy");
        if (!complete || f_.create(&handle_) != CUBLAS_STATUS_SUCCESS) {
            about_ = "libcublasLt.so.13 could not be used: products by plain kernels";
            handle_ = nullptr;
            return;
        }
        CUDA_CHECK(cudaGetSymbolAddress(&workspace_, workspace_memory)); // The module is loaded before any capture.
        about_ = "cuBLASLt " + std::to_string(f_.version());
    }

    const std::string& about() const { return about_; }
    bool is_open() const { return handle_ != nullptr; }

    // False where the products are none that the library takes.
    bool multiply(const Product& p, cudaStream_t stream) {
        if (handle_ == nullptr || p.a.type != p.b.type || p.k <= 0) return false;
        if (p.a.type == Type::f32 && p.c.type != Type::f32) return false;
        const std::lock_guard<std::mutex> lock(guard_);
        if (owner_ == nullptr) owner_ = stream;
        // Row-major C = op(A) op(B) is column-major C^T = op(B)^T op(A)^T on the same memory.
        const Shape shape{p.n,
                          p.m,
                          p.k,
                          p.ldb,
                          p.lda,
                          p.ldc,
                          p.transpose_b,
                          p.transpose_a,
                          p.accumulate,
                          p.c.type == Type::f32,
                          owner_ == stream,
                          p.a.type == Type::bf16 ? CUDA_R_16BF : CUDA_R_32F,
                          p.a.type == Type::bf16 ? CUDA_R_16BF : CUDA_R_32F,
                          alignment_of(p.b, p.b_group),
                          alignment_of(p.a, p.a_group),
                          alignment_of(p.c, p.c_group),
                          p.groups,
                          p.b_group,
                          p.a_group,
                          p.c_group};
        const Choice& choice = choice_of(shape);
        if (!choice.found) return false;
        multiply(shape, choice, p.b.data, p.a.data, p.c.data, stream);
        return true;
    }

    // Multiplies in pieces of rows whose scales the stream's scratch has room for.
    bool multiply(const ScaledProduct& p, cudaStream_t stream) {
        const bool whole = p.rows % 16 == 0 && p.n % 16 == 0 && p.k % 16 == 0 && alignment_of(p.a) == 16 &&
                           alignment_of(p.b) == 16 && alignment_of(p.c) == 16;
        if (handle_ == nullptr || !whole) return false;
        const std::int64_t blocks = scale_blocks(p.k), stride = ceil_div(blocks, std::int64_t{4}) * 4;
        const bool in_place = stride == blocks && alignment_of(p.b_scale) == 16;
        const std::int64_t weights = in_place ? 0 : scale_blocks(p.n) * stride;
        const std::int64_t most = (scratch_floats - weights) / blocks / scale_block * scale_block;
        if (most <= 0) return false;
        const std::int64_t pieces = ceil_div(p.rows, most), each = scale_blocks(ceil_div(p.rows, pieces)) * scale_block;
        const std::lock_guard<std::mutex> lock(guard_);
        if (owner_ == nullptr) owner_ = stream;
        for (std::int64_t first = 0; first < p.rows; first += each) {
            const std::int64_t rows = p.rows - first < each ? p.rows - first : each;
            const Shape shape{p.n,
                              rows,
                              p.k,
                              p.k,
                              p.k,
                              p.n,
                              true,
                              false,
                              false,
                              false,
                              owner_ == stream,
                              CUDA_R_8F_E4M3,
                              p.e5m2 ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3,
                              16,
                              16,
                              16};
            const Choice& choice = choice_of(shape);
            if (!choice.found) return false;
            float* const a_scale = scratch_of(stream);
            float* const b_scale = a_scale + (scratch_floats - weights);
            const OrderedScales order{p.a_scale + first * blocks,
                                      p.b_scale,
                                      a_scale,
                                      b_scale,
                                      static_cast<int>(rows),
                                      in_place ? 0 : static_cast<int>(scale_blocks(p.n)),
                                      static_cast<int>(blocks),
                                      static_cast<int>(stride)};
            order_scales_kernel<<<blocks_for(rows * (stride / 4), 256), 256, 0, stream>>>(order);
            CUDA_CHECK(cudaGetLastError());
            set(choice.product, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, in_place ? p.b_scale : b_scale);
            set(choice.product, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const float*>(a_scale));
            multiply(shape, choice, p.b, p.a + first * p.k, static_cast<__nv_bfloat16*>(p.c) + first * p.n, stream);
        }
        return true;
    }

    bool takes(const BlockScaledProduct& p, cudaStream_t stream) {
        if (handle_ == nullptr) return false;
        const std::lock_guard<std::mutex> lock(guard_);
        if (owner_ == nullptr) owner_ = stream;
        return owner_ == stream && choice_of(shape_of(p)).found;
    }
    bool multiply(const BlockScaledProduct& p, cudaStream_t stream) {
        if (!takes(p, stream)) return false;
        const std::lock_guard<std::mutex> lock(guard_);
        const Shape shape = shape_of(p);
        const Choice& choice = choice_of(shape);
        set(choice.product, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b_scale);
        set(choice.product, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a_scale);
        multiply(shape, choice, p.b, p.a, p.c.data, stream, p.scalars);
        return true;
    }

    void forget(cudaStream_t stream) {
        const std::lock_guard<std::mutex> lock(guard_);
        if (owner_ == stream) owner_ = nullptr;
    }

private:
    const Choice& choice_of(const Shape& shape) {
        auto [at, fresh] = choices_.try_emplace(shape);
        if (fresh) at->second = choose(shape);
        return at->second;
    }
    // Of the stream that owns the workspace.
    static Shape shape_of(const BlockScaledProduct& p) {
        const cudaDataType_t type = p.fp4 ? CUDA_R_4F_E2M1 : CUDA_R_8F_E4M3;
        Shape s{p.n,  p.rows, p.k,  p.k, p.k, p.ldc, true, false, false, p.c.type == Type::f32,
                true, type,   type, 16,  16,  16};
        s.block_scaled = true;
        return s;
    }
    // Operands in the library's order; alpha and beta from the device where `scalars` are given.
    void multiply(const Shape& s, const Choice& choice, const void* a, const void* b, void* d, cudaStream_t stream,
                  const float* scalars = nullptr) {
        const float host[2] = {1.0f, s.accumulate ? 1.0f : 0.0f};
        const float* const alpha = scalars != nullptr ? scalars : host;
        check_library(f_.matmul(handle_, choice.product, alpha, a, choice.a, b, choice.b, alpha + 1, d, choice.d, d,
                                choice.d, &choice.algorithm, s.with_workspace ? workspace_ : nullptr,
                                s.with_workspace ? workspace_bytes : 0, stream),
                      "a product");
    }

    template <class Value>
    void set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, Value value) {
        check_library(f_.desc_set(desc, attribute, &value, sizeof value), "describing a product");
    }
    template <class Value>
    void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, Value value) {
        check_library(f_.preference_set(preference, attribute, &value, sizeof value), "stating a preference");
    }
    // Of `batch` matrices, the first elements of which lie `step` apart.
    cublasLtMatrixLayout_t layout(cudaDataType_t type, std::int64_t rows, std::int64_t cols, std::int64_t stride,
                                  std::int32_t batch, std::int64_t step) {
        cublasLtMatrixLayout_t made = nullptr;
        check_library(
            f_.layout_create(&made, type, static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(cols), stride),
            "describing a matrix");
        if (batch == 1) return made;
        check_library(f_.layout_set(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch),
                      "describing matrices");
        check_library(f_.layout_set(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step, sizeof step),
                      "describing matrices");
        return made;
    }

    // Kept until the process ends: a captured graph may still hold what was chosen.
    Choice choose(const Shape& s) {
        Choice c;
        check_library(f_.desc_create(&c.product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a product");
        set(c.product, CUBLASLT_MATMUL_DESC_TRANSA, s.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
        set(c.product, CUBLASLT_MATMUL_DESC_TRANSB, s.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
        if (s.type == CUDA_R_8F_E4M3 || s.type == CUDA_R_4F_E2M1) {
            const auto blocks = s.type == CUDA_R_4F_E2M1 ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3
                                                         : CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
            set(c.product, CUBLASLT_MATMUL_DESC_A_SCALE_MODE,
                std::int32_t{s.block_scaled ? blocks : CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F});
            set(c.product, CUBLASLT_MATMUL_DESC_B_SCALE_MODE,
                std::int32_t{s.block_scaled ? blocks : CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F});
            if (s.block_scaled)
                set(c.product, CUBLASLT_MATMUL_DESC_POINTER_MODE, std::int32_t{CUBLASLT_POINTER_MODE_DEVICE});
            set(c.product, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(workspace_)); // any address
            set(c.product, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(workspace_));
        }
        c.a = layout(s.type, s.transpose_a ? s.k : s.m, s.transpose_a ? s.m : s.k, s.lda, s.batch, s.a_step);
        c.b = layout(s.b_type, s.transpose_b ? s.n : s.k, s.transpose_b ? s.k : s.n, s.ldb, s.batch, s.b_step);
        c.d = layout(s.wide_result ? CUDA_R_32F : CUDA_R_16BF, s.m, s.n, s.ldd, s.batch, s.d_step);
        cublasLtMatmulPreference_t preference = nullptr;
        check_library(f_.preference_create(&preference), "stating a preference");
        set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, s.with_workspace ? workspace_bytes : std::size_t{0});
        // Partial sums in FP32 only: others would be rounded to the result's type between the parts of k.
        set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
            static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
        set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<std::uint32_t>(s.align_a));
        set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<std::uint32_t>(s.align_b));
        set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<std::uint32_t>(s.align_d));
        set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<std::uint32_t>(s.align_d));
        cublasLtMatmulHeuristicResult_t best{};
        int results = 0;
        const cublasStatus_t status =
            f_.heuristic(handle_, c.product, c.a, c.b, c.d, c.d, preference, 1, &best, &results);
        f_.preference_destroy(preference);
        c.found = status == CUBLAS_STATUS_SUCCESS && results > 0 && best.state == CUBLAS_STATUS_SUCCESS;
        if (c.found) c.algorithm = best.algo;
        return c;
    }

    Functions f_;
    cublasLtHandle_t handle_ = nullptr;
    std::string about_;
    void* workspace_ = nullptr;
    std::mutex guard_;
    cudaStream_t owner_ = nullptr; // owner of the workspace: two streams would run into each other there
    std::map<Shape, Choice> choices_;
};

// The libraries by device; never closed, as graphs may hold what they chose.
struct Libraries {
    std::mutex guard;
    std::map<int, std::unique_ptr<Library>> opened;
};
Libraries& libraries() {
    static Libraries all;
    return all;
}

// The library of the current device.
Library& library() {
    int device = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    const std::lock_guard<std::mutex> lock(libraries().guard);
    std::unique_ptr<Library>& found = libraries().opened[device];
    if (!found) found = std::make_unique<Library>();
    return *found;
}

} // namespace

bool library_gemm(const Product& p, cudaStream_t stream) { return library().multiply(p, stream); }
bool library_gemm(const ScaledProduct& p, cudaStream_t stream) { return library().multiply(p, stream); }
bool library_takes(const BlockScaledProduct& p, cudaStream_t stream) { return library().takes(p, stream); }
bool library_gemm(const BlockScaledProduct& p, cudaStream_t stream) { return library().multiply(p, stream); }
bool library_is_open() { return library().is_open(); }
void forget_gemm_stream(void* stream) {
    const std::lock_guard<std::mutex> lock(libraries().guard);
    for (const auto& [device, opened] : libraries().opened) opened->forget(static_cast<cudaStream_t>(stream));
}

} // namespace moe::cuda

namespace moe {

std::string cuda_gemm_library() { return cuda::library().about(); }

} // namespace moe
