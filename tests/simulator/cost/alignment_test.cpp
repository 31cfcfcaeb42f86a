// Prices of products by how the rows of their operands and results begin.
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/program/program.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/cost/alignment.hpp"
#include "simulator/replay/simulate.hpp"
#include "simulator/replay/walls.hpp"

#include <doctest/doctest.h>

#include <memory>

using namespace moe;

namespace {

stack::StackCosts known() {
    stack::StackCosts costs;
    costs.unaligned = 0.5, costs.unaligned_odd = 0.25, costs.unaligned_experts = 0.125;
    return costs;
}

// C[m, n] = A[m, k] B[k, n] of BF16, and how much longer it takes.
struct Product {
    program::Program program;
    program::Op op;

    explicit Product(program::GemmAttr attr, program::Dtype result = program::Dtype::bf16) {
        for (const program::Dtype dtype : {program::Dtype::bf16, program::Dtype::bf16, result}) {
            program::Tensor tensor;
            tensor.dtype = dtype;
            program.tensors.push_back(tensor);
        }
        op.kind = program::OpKind::gemm;
        op.in = {0, 1};
        op.out = {2};
        op.attr = attr;
    }
    double slowdown() const { return cost::alignment_slowdown(known(), op, program); }
    std::int64_t width() const { return cost::unaligned_width(op, program); }
};

program::GemmAttr sides(std::int64_t m, std::int64_t n, std::int64_t k) {
    program::GemmAttr attr;
    attr.m = m, attr.n = n, attr.k = k;
    return attr;
}

} // namespace

TEST_CASE("alignment: the width of every operand and of the result counts, the number of rows does not") {
    CHECK(Product(sides(4096, 32128, 2048)).slowdown() == 1.0);
    CHECK(Product(sides(4095, 32128, 2048)).slowdown() == 1.0); // rows
    CHECK(Product(sides(4096, 32049, 2048)).slowdown() == 4.0);
    CHECK(Product(sides(4096, 32049, 2048)).width() == 32049);
    CHECK(Product(sides(4096, 2048, 32050)).slowdown() == 2.0);
    CHECK(Product(sides(4096, 2048, 32052)).width() == 32052);
    program::GemmAttr transposed = sides(32049, 2048, 4096); // a gradient: A is stored [k, m]
    transposed.transpose_a = true;
    CHECK(Product(transposed, program::Dtype::f32).slowdown() == 4.0);
    program::GemmAttr slice = sides(4096, 2048, 2048); // columns of a wider tensor
    slice.lda = 4100;
    CHECK(Product(slice).slowdown() == 2.0);
    slice.lda = 4096, slice.a_offset = 3;
    CHECK(Product(slice).slowdown() == 4.0);
    CHECK(Product(sides(4096, 2052, 2048), program::Dtype::f32).width() == 2052); // B's rows, C's are whole
}

TEST_CASE("alignment: vectors and other ops are left alone") {
    CHECK(Product(sides(4096, 1, 2048)).slowdown() == 1.0);
    Product other(sides(4096, 33, 2048));
    other.op.attr = program::NormAttr{};
    CHECK(other.slowdown() == 1.0);
}

TEST_CASE("alignment: experts of odd width cost more, the vocabulary is padded, and the walls say what is lost") {
    const auto machine = std::make_shared<const machine::Hardware>(machine::load_hardware("h100"));
    const auto walls_of = [&](const char* name, std::int64_t width) {
        model::Model model = families::load_model("Qwen3-30B-A3B");
        model.layers.resize(3);
        model.vocab = 32000; // the model's profile asks for multiples of 1,187: 32,049
        for (model::LayerKind& kind : model.kinds) kind.moe->ffn = width;
        plan::Plan plan;
        plan.model = std::make_shared<const model::Model>(model);
        plan.hardware = machine;
        plan.stack = name;
        plan.seq = 4096, plan.gbs = 4, plan.mbs = 2;
        const stack::Stack stack = stack::load_stack(name, *machine);
        return replay::walls(plan, stack, replay::simulate(plan, stack));
    };
    const replay::Walls own = walls_of("moe-plan", 768), megatron = walls_of("bridge-26.08", 768),
                        odd = walls_of("moe-plan", 767);
    CHECK(own.unaligned == 0);
    CHECK(megatron.unaligned == 3 * 2); // the head's products of two micro-batches
    CHECK(megatron.unaligned_width == 32049);
    CHECK(megatron.unaligned_seconds > 0.0);
    CHECK(odd.unaligned > 3 * 3 * 2);
    CHECK(odd.unaligned_width == 767);
    CHECK(odd.unaligned_seconds > own.model_seconds);
}
