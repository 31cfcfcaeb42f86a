// The path of block-scaled products through the engine, bound to the CPU: which products take it, that their operands
// pack without loss, and that training keeps its bits.
#include "engine/backends/cpu/table.hpp"
#include "kernels/block_scaled.hpp"
#include "planner/lower/lower.hpp"
#include "planner/program/block_products.hpp"
#include "tests/engine/train/parity.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <utility>

using namespace moe;

namespace {

std::atomic<int> calls{0}, wrong{0};

// Elements of an operand that its packed form does not stand for.
int lost(RoundFormat format, std::int64_t rows, std::int64_t k, std::int64_t stride, bool contracted_first, Src x) {
    const BlockShape s{format, rows, k, stride, contracted_first};
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(s.code_bytes())),
        scales(static_cast<std::size_t>(s.scale_bytes()));
    const auto* const from = static_cast<const std::uint16_t*>(x.data);
    const float t = pack_blocks(s, from, codes.data(), scales.data());
    int count = 0;
    for (std::int64_t row = 0; row < rows; ++row)
        for (std::int64_t i = 0; i < k; ++i)
            count += unpacked(s, codes.data(), scales.data(), t, row, i) !=
                     float_of_bf16(from[contracted_first ? i * stride + row : row * stride + i]);
    return count;
}

// In the place of cuda_block_scaled_gemm(): packs, and multiplies what was there.
bool multiply(RoundFormat format, const GemmShape& s, Src a, Src b, Dst c, void* stream) {
    ++calls;
    wrong += lost(format, s.m, s.k, s.lda != 0 ? s.lda : (s.transpose_a ? s.m : s.k), s.transpose_a, a + s.a_offset);
    wrong += lost(format, s.n, s.k, s.ldb != 0 ? s.ldb : (s.transpose_b ? s.k : s.n), !s.transpose_b, b + s.b_offset);
    backends::cpu_backend().kernels->gemm(s, a, b, c, stream);
    return true;
}

// Products of whole blocks that a step of a plan on one rank runs.
int products_of(const plan::Plan& plan) {
    const program::Program program = lower::lower(plan, 0);
    const program::BlockProducts products(program);
    int count = 0;
    for (program::OpWalk walk(program); !walk.done(); walk.next())
        count += products.of(walk.op()) != machine::Precision::bf16;
    return count;
}

} // namespace

TEST_CASE("block-scaled: products of whole blocks take the back end's path, of operands that pack without loss") {
    ops::Backend scaling = backends::cpu_backend();
    scaling.block_scaled_gemm = multiply;
    for (const auto& [kind, precision] : {std::pair{"qwen3", "nvfp4"}, {"deepseek3", "mxfp8"}}) {
        CAPTURE(kind);
        const plan::Plan plan = small_plan(
            wide_model(kind), 1,
            {{"precision", precision}, {"head_precision", precision}, {"balance", "forced"}, {"recompute", "full"}},
            {32, 4});
        calls = wrong = 0;
        const Trained got = train_three(plan, 1, &scaling), want = train_three(plan);
        CHECK(calls == 3 * products_of(plan));
        CHECK(calls > 0);
        CHECK(wrong == 0);
        CHECK(got.losses == want.losses);
        CHECK(got.weights == want.weights);
    }
}
