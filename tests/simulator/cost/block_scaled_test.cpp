// Prices of products on tensor cores that scale blocks: on machines that have them, of operands that were rounded.
#include "planner/machine/hardware.hpp"
#include "planner/program/program.hpp"
#include "tests/simulator/cost/priced.hpp"

#include <doctest/doctest.h>

using namespace moe;

namespace {

constexpr std::int64_t size = 8192;

// C = A B^T of squares, operands rounded along the contracted index, or not at all.
struct Square {
    program::Program program;

    explicit Square(machine::Precision format) {
        for (int i = 0; i < 3; ++i) {
            program::Tensor tensor;
            tensor.dtype = program::Dtype::bf16;
            tensor.rows = tensor.cols = size;
            program.tensors.push_back(tensor);
        }
        program.templates.emplace_back();
        std::vector<program::Op>& ops = program.templates.back().ops;
        for (program::TensorId id = 0; id < 2 && format != machine::Precision::bf16; ++id) {
            program::RoundAttr round;
            round.format = format;
            round.run = size;
            program::Op op;
            op.kind = program::OpKind::quantize;
            op.out = {id, program::no_tensor};
            op.attr = round;
            ops.push_back(op);
        }
        program::GemmAttr attr;
        attr.m = attr.n = attr.k = size;
        attr.transpose_b = true;
        program::Op product;
        product.kind = program::OpKind::gemm;
        product.in = {0, 1};
        product.out = {2};
        product.attr = attr;
        product.flops = 2.0 * size * size * size;
        product.bytes = 6.0 * size * size;
        ops.push_back(product);
    }
};

double seconds(const char* hardware, machine::Precision of_plan, machine::Precision rounded) {
    Priced price("moe-plan", machine::load_hardware(hardware));
    price.plan.precision = of_plan;
    const Square square(rounded);
    return price(square.program.templates.back().ops.back(), square.program).device;
}

} // namespace

TEST_CASE("block-scaled products are priced at the rates of their tensor cores, with the passes that pack") {
    const machine::Precision bf16 = machine::Precision::bf16;
    for (const machine::Precision format : {machine::Precision::mxfp8, machine::Precision::nvfp4}) {
        CAPTURE(machine::to_string(format));
        const machine::Hardware b200 = machine::load_hardware("b200");
        const double least = 2.0 * size * size * size / b200.peak_flops[static_cast<std::size_t>(format)];
        const double operands = 2.0 * 2.0 * size * size / b200.memory_bandwidth; // read once, in BF16
        const double wide = seconds("b200", bf16, bf16), low = seconds("b200", format, format);
        CHECK(low > least + operands);
        CHECK(low < wide);
        CHECK(seconds("b200", format, bf16) == wide); // operands that nothing has rounded
        CHECK(seconds("h200", format, format) == seconds("h200", bf16, bf16));
    }
}
