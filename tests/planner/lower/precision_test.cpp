// Precision by module: which products, saved activations and weights change, in bytes counted by hand.
#include "planner/lower/lower.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/memory/memory.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/plan_choices.hpp"
#include "planner/program/program.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <string>

using namespace moe;

namespace {

plan::Plan plan_of(const char* model, const char* hardware, machine::Precision precision) {
    plan::Plan plan;
    plan.model = std::make_shared<const model::Model>(families::load_model(model));
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware(hardware));
    plan.stack = plan.hardware->default_stack;
    plan.seq = plan.gbs = 4096;
    plan.gpus = plan.dp = plan.edp = 1;
    plan.gbs = 2;
    plan.precision = precision;
    return plan;
}

std::int64_t bytes(const plan::Plan& plan, memory::MemoryClass c) {
    return memory::plan_memory(lower::lower(plan, 0)).class_bytes[static_cast<std::size_t>(c)];
}

// Products whose weights or rows are of a precision, by module.
int products(const plan::Plan& plan, program::Module module, program::Dtype dtype) {
    const program::Program program = lower::lower(plan, 0);
    int count = 0;
    for (int t = 0; t < 2; ++t)
        for (const program::Op& op : program.templates[static_cast<std::size_t>(t)].ops) {
            const bool product = op.kind == program::OpKind::gemm || op.kind == program::OpKind::grouped_gemm ||
                                 op.kind == program::OpKind::attention || op.kind == program::OpKind::attention_grad;
            if (product && op.module == module)
                count += program.tensors[static_cast<std::size_t>(op.in[0])].dtype == dtype;
        }
    return count;
}

} // namespace

TEST_CASE("attention in FP8 reads FP8 operands and keeps them in place of BF16 ones") {
    const plan::Plan bf16 = plan_of("Llama3-8B", "h100", machine::Precision::bf16);
    plan::Plan fp8 = bf16;
    fp8.attention_precision = machine::Precision::fp8_tensor;
    REQUIRE(plan::check_plan(fp8).message == "");
    CHECK(products(bf16, program::Module::core_attn, program::Dtype::fp8_tensor) == 0);
    CHECK(products(fp8, program::Module::core_attn, program::Dtype::fp8_tensor) == 2 * 32);
    CHECK(products(fp8, program::Module::mlp, program::Dtype::fp8_tensor) == 0);
    // 32 + 2 * 8 heads of 128 for 4,096 tokens in 32 layers: one byte each instead of two.
    CHECK(bytes(bf16, memory::MemoryClass::saved) - bytes(fp8, memory::MemoryClass::saved) == 48LL * 128 * 4096 * 32);
}

TEST_CASE("the LM head in MXFP8: its products, its weights twice in one byte, its input in one") {
    const plan::Plan bf16 = plan_of("Llama3-8B", "gb200-nvl72", machine::Precision::bf16);
    plan::Plan low = bf16;
    low.head_precision = machine::Precision::mxfp8;
    REQUIRE(plan::check_plan(low).message == "");
    CHECK(products(low, program::Module::head, program::Dtype::mxfp8) == 3);
    CHECK(products(low, program::Module::mlp, program::Dtype::mxfp8) == 0);
    // 525.3 M weights: two copies of 33/32 bytes instead of one of 2.
    CHECK(static_cast<double>(bytes(low, memory::MemoryClass::weights) - bytes(bf16, memory::MemoryClass::weights)) ==
          nearly(525'336'576 / 16.0).epsilon(1e-4));
    // The final norm's output (4,096 columns for 4,096 tokens) is kept column-wise in 33/32 bytes, not in 2.
    CHECK(bytes(bf16, memory::MemoryClass::saved) - bytes(low, memory::MemoryClass::saved) == 4096LL * 4096 * 31 / 32);
    low.model = std::make_shared<const model::Model>([] {
        model::Model tied = families::load_model("Llama3-8B");
        tied.tied_embeddings = true;
        return tied;
    }());
    CHECK(plan::check_plan(low).counter == "head_precision");
}

TEST_CASE("experts may stay in BF16 beside MXFP8 linears, or the reverse") {
    plan::Plan plan = plan_of("Qwen3-30B-A3B", "gb200-nvl72", machine::Precision::mxfp8);
    CHECK(products(plan, program::Module::experts, program::Dtype::mxfp8) == 48 * 6);
    CHECK(products(plan, program::Module::attn_in, program::Dtype::mxfp8) == 48 * 3);
    const std::int64_t low = bytes(plan, memory::MemoryClass::weights);
    plan.expert_precision = machine::Precision::bf16;
    REQUIRE(plan::check_plan(plan).message == "");
    CHECK(products(plan, program::Module::experts, program::Dtype::mxfp8) == 0);
    CHECK(products(plan, program::Module::attn_in, program::Dtype::mxfp8) == 48 * 3);
    // 48 layers of 128 experts of 3 x 2048 x 768 weights, kept once in two bytes.
    const double experts = 48.0 * 128 * 3 * 2048 * 768;
    CHECK(static_cast<double>(low - bytes(plan, memory::MemoryClass::weights)) == nearly(experts / 16.0).epsilon(1e-4));
    plan.precision = machine::Precision::bf16;
    plan.expert_precision = machine::Precision::mxfp8;
    CHECK(products(plan, program::Module::experts, program::Dtype::mxfp8) == 48 * 6);
    CHECK(products(plan, program::Module::attn_in, program::Dtype::mxfp8) == 0);
}

namespace {

// Rows of one layer that ops of our blockwise FP8 quantize, by their results, and others leave or read in FP8; tensors
// of columns that others leave.
struct LowRows {
    std::int64_t rows = 0, columns = 0, both = 0, widened = 0, moved = 0, written = 0, turned = 0;
};

LowRows low_rows(const program::Program& program, int layer) {
    const auto tensor = [&](program::TensorId id) { return program.tensors[static_cast<std::size_t>(id)]; };
    LowRows out;
    for (int t = 0; t < 2; ++t)
        for (const program::Op& op : program.templates[static_cast<std::size_t>(t)].ops) {
            if (op.layer != layer) continue;
            if (op.kind == program::OpKind::quantize) {
                const bool row = op.out[0] != program::no_tensor, column = op.out.size() > 1;
                (row && column ? out.both : row ? out.rows : out.columns) += tensor(op.in[0]).rows;
                if (column) CHECK(tensor(op.out[1]).dtype == program::Dtype::fp8_columns);
                if (column) CHECK(op.phase == (row ? program::Phase::dgrad : program::Phase::wgrad));
            }
            if (op.kind == program::OpKind::dequantize) out.widened += tensor(op.in[0]).rows;
            if (op.kind == program::OpKind::permute && tensor(op.in[0]).dtype == program::Dtype::fp8_block)
                out.moved += tensor(op.out.back()).rows;
            const bool activates =
                op.kind == program::OpKind::activation || op.kind == program::OpKind::activation_grad;
            if (!activates && op.kind != program::OpKind::permute) continue;
            for (const program::TensorId id : op.out) {
                if (id == program::no_tensor) continue;
                if (activates && tensor(id).dtype == program::Dtype::fp8_block) out.written += tensor(id).rows;
                out.turned += tensor(id).dtype == program::Dtype::fp8_columns;
            }
        }
    return out;
}

} // namespace

TEST_CASE(
    "blockwise FP8 of ours quantizes a token once, and experts' activations and their gradients as they are written") {
    plan::Plan plan = plan_of("Qwen3-30B-A3B", "h200", machine::Precision::fp8_blockwise);
    plan.stack = "moe-plan";
    plan.gbs = plan.mbs = 1;
    const LowRows got = low_rows(lower::lower(plan, 0), 7);
    // Inputs and output gradients of both projections of attention, tokens before and gradients behind the experts.
    CHECK(got.rows == (4 + 2) * plan.seq);
    CHECK(got.widened == 2 * plan.seq); // what the projection of query, key and value reads, and the experts
    CHECK(got.moved == 2 * 8 * plan.seq);
    CHECK(got.written == 2 * 8 * plan.seq);
    CHECK(got.columns + got.both + got.turned == 0);
    // Rows are quantized where they arrive, with experts elsewhere.
    plan.gpus = plan.dp = plan.ep = 2;
    plan.gbs = 2;
    REQUIRE(plan::check_plan(plan).message == "");
    const program::Program spread = lower::lower(plan, 0);
    for (int t = 0; t < 2; ++t)
        for (const program::Op& op : spread.templates[static_cast<std::size_t>(t)].ops)
            if (op.kind == program::OpKind::permute)
                CHECK(spread.tensors[static_cast<std::size_t>(op.in[0])].dtype != program::Dtype::fp8_block);
}

TEST_CASE("wgrad in FP8 reads columns of its own blocks, made in the backward, and widens nothing") {
    plan::Plan plan = plan_of("Qwen3-30B-A3B", "h200", machine::Precision::fp8_blockwise);
    plan.stack = "moe-plan";
    plan.gbs = plan.mbs = 1;
    plan.fp8_wgrad = true;
    REQUIRE(plan::check_plan(plan).message == "");
    const program::Program program = lower::lower(plan, 0);
    const LowRows got = low_rows(program, 7);
    // Inputs of both projections of attention, tokens before and gradients behind the experts.
    CHECK(got.rows == (2 + 2) * plan.seq);
    CHECK(got.both == 2 * plan.seq);    // output gradients of both projections
    CHECK(got.columns == 2 * plan.seq); // what these read
    CHECK(got.turned == 4); // of both products of the experts operands and output gradients, as they are made
    CHECK(got.widened == 0);
    CHECK(got.moved == 3 * 8 * plan.seq); // rows, gradients, and rows again
    CHECK(got.written == 2 * 8 * plan.seq);
    int products = 0;
    for (const program::Op& op : program.templates[1].ops) {
        if (op.kind != program::OpKind::grouped_gemm || op.phase != program::Phase::wgrad) continue;
        ++products;
        for (const program::TensorId operand : {op.in[0], op.in[1]}) {
            const program::Tensor& columns = program.tensors[static_cast<std::size_t>(operand)];
            CHECK(columns.dtype == program::Dtype::fp8_columns);
            CHECK(columns.rows == (8 * plan.seq + 127 * 128) / 128 * 128); // 128 experts begin blocks of their own
        }
    }
    CHECK(products > 0);
}

TEST_CASE("current scaling reads a tensor twice before it is FP8, delayed scaling once") {
    plan::Plan plan = plan_of("Llama3-8B", "h100", machine::Precision::fp8_tensor);
    const auto quantized = [&](plan::Fp8Scaling scaling) {
        plan.fp8_scaling = scaling;
        REQUIRE(plan::check_plan(plan).message == "");
        const program::Program program = lower::lower(plan, 0);
        for (const program::Op& op : program.templates[0].ops)
            if (op.kind == program::OpKind::quantize) return op.bytes;
        return 0.0;
    };
    // The first: the attention norm's output, 4,096 x 4,096 in BF16, into a row-wise and a column-wise copy.
    CHECK(quantized(plan::Fp8Scaling::delayed) == 4096.0 * 4096 * (2 + 1 + 1));
    CHECK(quantized(plan::Fp8Scaling::current) == 4096.0 * 4096 * (2 + 2 + 1 + 1));
}

TEST_CASE("first and last layers may stay in BF16: their products, their weights, their attention") {
    plan::Plan plan = plan_of("Qwen3-30B-A3B", "gb200-nvl72", machine::Precision::mxfp8);
    const std::size_t kinds = plan.model->kinds.size();
    const std::int64_t low = bytes(plan, memory::MemoryClass::weights);
    plan::set_field(plan, "bf16_layers", "1+2");
    REQUIRE(plan::check_plan(plan).message == "");
    CHECK(plan.model->kinds.size() == 2 * kinds);
    CHECK(plan.model->kind_of(0).bf16);
    CHECK_FALSE(plan.model->kind_of(1).bf16);
    CHECK_FALSE(plan.model->kind_of(45).bf16);
    CHECK(plan.model->kind_of(46).bf16);
    CHECK(products(plan, program::Module::experts, program::Dtype::mxfp8) == 45 * 6);
    CHECK(products(plan, program::Module::attn_in, program::Dtype::mxfp8) == 45 * 3);
    CHECK(products(plan, program::Module::experts, program::Dtype::bf16) == 3 * 6);
    // Weights of three layers once in two bytes instead of twice in 33/32 bytes each.
    const double layer = 128.0 * 3 * 2048 * 768 + 2048.0 * (32 + 4 + 4) * 128 + 32 * 128 * 2048.0;
    CHECK(static_cast<double>(low - bytes(plan, memory::MemoryClass::weights)) ==
          nearly(3 * layer / 16.0).epsilon(1e-3));
    plan.attention_precision = machine::Precision::fp8_tensor;
    CHECK(products(plan, program::Module::core_attn, program::Dtype::fp8_tensor) == 45 * 2);
    CHECK(plan::plan_to_json(plan::plan_from_json(plan::plan_to_json(plan), "plan.json")) == plan::plan_to_json(plan));
    CHECK(plan::plan_from_json(plan::plan_to_json(plan), "plan.json").model->kinds == plan.model->kinds);
    plan::set_field(plan, "bf16_layers", "none");
    CHECK(plan.model->kinds == families::load_model("Qwen3-30B-A3B").kinds);
    CHECK(plan::plan_to_json(plan).find("bf16_layers") == std::string::npos);
}

TEST_CASE("layers that stay in BF16: what cannot be is refused") {
    plan::Plan plan = plan_of("Qwen3-30B-A3B", "gb200-nvl72", machine::Precision::mxfp8);
    for (const char* wrong : {"1", "1+", "+1", "1+x", "-1+1", "47+2", "1+2+3", ""}) {
        CAPTURE(std::string(wrong));
        CHECK(fault_of([&] { plan::set_field(plan, "bf16_layers", wrong); }).find("bf16_layers=") != std::string::npos);
    }
    plan::set_field(plan, "bf16_layers", "24+24");
    CHECK(plan::check_plan(plan).message == "");
    plan.precision = machine::Precision::bf16;
    CHECK(plan::check_plan(plan).message.find("nothing else is quantized") != std::string::npos);
    plan::set_field(plan, "bf16_layers", "1+1");
    plan.precision = machine::Precision::mxfp8;
    std::string text = plan::plan_to_json(plan);
    const std::size_t at = text.find("\"bf16_layers\": [");
    REQUIRE(at != std::string::npos);
    text.replace(text.find('[', at), text.find(']', at) - text.find('[', at) + 1, "[40, 9]");
    CHECK(fault_of([&] { plan::plan_from_json(text, "plan.json"); }).find("bf16_layers") != std::string::npos);
}
