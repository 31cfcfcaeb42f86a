// Dense products by cuBLASLt where the machine has it; what it does not take is left to the plain kernels.
//
// The library is opened when a device is first used and not linked, so that one build runs with and without it, and on
// another distribution; every device has a handle and a workspace of its own. Algorithms are asked for once per shape,
// layout and alignment and kept; their workspace is part of this module, so that nothing is allocated by a call.
#include "kernels/cuda/cuda_kernels.hpp"
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/product.cuh"

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

// What cuBLAS recommends for Hopper and later (cuBLAS documentation, cublasSetWorkspace).
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
    decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
    decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
    decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
};

// Everything that decides which algorithms there are. Sizes as cuBLASLt sees them: columns first.
struct Shape {
    std::int64_t m, n, k, lda, ldb, ldd;
    bool transpose_a, transpose_b, accumulate, bf16, wide_result, with_workspace;
    int align_a, align_b, align_d;
    auto operator<=>(const Shape&) const = default;
};

struct Choice {
    cublasLtMatmulDesc_t product = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
    cublasLtMatmulAlgo_t algorithm{};
    bool found = false;
};

int alignment_of(const void* p) {
    const auto address = reinterpret_cast<std::uintptr_t>(p);
    int bytes = 1;
    while (bytes < 16 && address % (2 * static_cast<unsigned>(bytes)) == 0) bytes *= 2;
    return bytes;
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
        find(f_.preference_create, "cublasLtMatmulPreferenceCreate");
        find(f_.preference_set, "cublasLtMatmulPreferenceSetAttribute");
        find(f_.preference_destroy, "cublasLtMatmulPreferenceDestroy");
        if (!complete || f_.create(&handle_) != CUBLAS_STATUS_SUCCESS) {
            about_ = "libcublasLt.so.13 could not be used: products by plain kernels";
            handle_ = nullptr;
            return;
        }
        CUDA_CHECK(cudaGetSymbolAddress(&workspace_, workspace_memory)); // loads the module before any capture
        about_ = "cuBLASLt " + std::to_string(f_.version());
    }

    const std::string& about() const { return about_; }

    // False where the product is not one that the library takes.
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
                          p.a.type == Type::bf16,
                          p.c.type == Type::f32,
                          owner_ == stream,
                          alignment_of(p.b.data),
                          alignment_of(p.a.data),
                          alignment_of(p.c.data)};
        auto [at, fresh] = choices_.try_emplace(shape);
        if (fresh) at->second = choose(shape);
        const Choice& choice = at->second;
        if (!choice.found) return false;
        const float one = 1.0f, beta = p.accumulate ? 1.0f : 0.0f;
        check_library(f_.matmul(handle_, choice.product, &one, p.b.data, choice.a, p.a.data, choice.b, &beta, p.c.data,
                                choice.d, p.c.data, choice.d, &choice.algorithm,
                                shape.with_workspace ? workspace_ : nullptr, shape.with_workspace ? workspace_bytes : 0,
                                stream),
                      "a product");
        return true;
    }

    void forget(cudaStream_t stream) {
        const std::lock_guard<std::mutex> lock(guard_);
        if (owner_ == stream) owner_ = nullptr;
    }

private:
    template <class Value>
    void set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, Value value) {
        check_library(f_.desc_set(desc, attribute, &value, sizeof value), "describing a product");
    }
    template <class Value>
    void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, Value value) {
        check_library(f_.preference_set(preference, attribute, &value, sizeof value), "stating a preference");
    }
    cublasLtMatrixLayout_t layout(bool bf16, std::int64_t rows, std::int64_t cols, std::int64_t stride) {
        cublasLtMatrixLayout_t made = nullptr;
        check_library(f_.layout_create(&made, bf16 ? CUDA_R_16BF : CUDA_R_32F, static_cast<std::uint64_t>(rows),
                                       static_cast<std::uint64_t>(cols), stride),
                      "describing a matrix");
        return made;
    }

    // Kept until the process ends: a captured graph may still hold what was chosen.
    Choice choose(const Shape& s) {
        Choice c;
        check_library(f_.desc_create(&c.product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a product");
        set(c.product, CUBLASLT_MATMUL_DESC_TRANSA, s.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
        set(c.product, CUBLASLT_MATMUL_DESC_TRANSB, s.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
        c.a = layout(s.bf16, s.transpose_a ? s.k : s.m, s.transpose_a ? s.m : s.k, s.lda);
        c.b = layout(s.bf16, s.transpose_b ? s.n : s.k, s.transpose_b ? s.k : s.n, s.ldb);
        c.d = layout(!s.wide_result, s.m, s.n, s.ldd);
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
    cudaStream_t owner_ = nullptr; // of the workspace: two streams would run into each other there
    std::map<Shape, Choice> choices_;
};

// By device; never closed, as graphs may hold what they chose.
struct Libraries {
    std::mutex guard;
    std::map<int, std::unique_ptr<Library>> opened;
};
Libraries& libraries() {
    static Libraries all;
    return all;
}

// Of the current device.
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
void forget_gemm_stream(void* stream) {
    const std::lock_guard<std::mutex> lock(libraries().guard);
    for (const auto& [device, opened] : libraries().opened) opened->forget(static_cast<cudaStream_t>(stream));
}

} // namespace moe::cuda

namespace moe {

std::string cuda_gemm_library() { return cuda::library().about(); }

} // namespace moe
