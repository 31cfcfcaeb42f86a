// Packing by CUDA kernels behind the host's signature, and what devices without block-scaled tensor cores answer.
#include "kernels/cuda/check.hpp"
#include "kernels/cuda/products/block_scaled.hpp"
#include "tests/kernels/packed_bytes.hpp"

#include <doctest/doctest.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>

namespace moe::test {
namespace {

constexpr std::size_t guard = 256;
constexpr int guard_value = 0xa5;

// Device memory between guards.
class Guarded {
public:
    explicit Guarded(std::size_t bytes) : bytes_(bytes) {
        CUDA_CHECK(cudaMalloc(&memory_, bytes + 2 * guard));
        CUDA_CHECK(cudaMemset(memory_, guard_value, bytes + 2 * guard));
    }
    ~Guarded() { cudaFree(memory_); }
    Guarded(const Guarded&) = delete;
    Guarded& operator=(const Guarded&) = delete;

    std::uint8_t* data() const { return static_cast<std::uint8_t*>(memory_) + guard; }
    void read(void* to) const {
        CUDA_CHECK(cudaMemcpy(to, data(), bytes_, cudaMemcpyDeviceToHost));
        for (const std::uint8_t* edge : {data() - guard, data() + bytes_}) {
            std::uint8_t bytes[guard];
            CUDA_CHECK(cudaMemcpy(bytes, edge, guard, cudaMemcpyDeviceToHost));
            if (std::any_of(bytes, bytes + guard, [](std::uint8_t b) { return b != guard_value; }))
                throw std::runtime_error("a kernel wrote outside of an operand");
        }
    }

private:
    std::size_t bytes_;
    void* memory_ = nullptr;
};

} // namespace

PackedBytes packed(const BlockShape& s, const Tensor& x) {
    const auto bytes = static_cast<std::size_t>(x.size()) * size_of(x.type());
    const Guarded from(bytes), codes(static_cast<std::size_t>(s.code_bytes())),
        scales(static_cast<std::size_t>(s.scale_bytes())), t(sizeof(unsigned));
    CUDA_CHECK(cudaMemcpy(from.data(), x.src().data, bytes, cudaMemcpyHostToDevice));
    const float one = 1.0f; // what mxfp8 leaves as it is
    CUDA_CHECK(cudaMemcpy(t.data(), &one, sizeof one, cudaMemcpyHostToDevice));
    cuda_pack_blocks(s, from.data(), codes.data(), scales.data(), static_cast<unsigned*>(static_cast<void*>(t.data())),
                     nullptr);
    CUDA_CHECK(cudaDeviceSynchronize());
    PackedBytes p(s);
    codes.read(p.codes.data());
    scales.read(p.scales.data());
    t.read(&p.t);
    p.t = s.fp4() ? std::max(p.t, 0x1p-126f) : p.t;
    return p;
}

TEST_CASE("block_scaled: products are taken where the device scales blocks, and there alone") {
    int device = 0, major = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CHECK(cuda_scales_blocks() == (major == 10));
    constexpr std::int64_t n = 256;
    const Tensor ones(Type::bf16, Vec(n * n, 1.0));
    const Guarded a(n * n * 2), c(n * n * 4);
    CUDA_CHECK(cudaMemcpy(a.data(), ones.src().data, n * n * 2, cudaMemcpyHostToDevice));
    const Src x{a.data(), Type::bf16};
    const Dst y{c.data(), Type::f32};
    for (const RoundFormat format : {RoundFormat::mxfp8, RoundFormat::nvfp4}) {
        GemmShape shape{n, n, n, true, false};
        CHECK(cuda_block_scaled_gemm(format, shape, x, x, y, nullptr) == (major == 10));
        shape.n = 48; // no multiple of 32
        CHECK(!cuda_block_scaled_gemm(format, shape, x, x, y, nullptr));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    std::vector<float> got(n * n);
    c.read(got.data());
    if (major == 10) {
        CHECK(std::all_of(got.begin(), got.end(), [](float x) { return x == static_cast<float>(n); }));
        return;
    }
    std::vector<std::uint8_t> bytes(n * n * 4); // Nothing was written where the answer is no.
    c.read(bytes.data());
    CHECK(std::all_of(bytes.begin(), bytes.end(), [](std::uint8_t b) { return b == guard_value; }));
}

} // namespace moe::test
