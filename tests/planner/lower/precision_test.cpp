// Precision by module: which products, saved activations and weights change, in bytes counted by hand.
#include "planner/lower/lower.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/memory/memory.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/program.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <string>

using namespace moe;

namespace {

Plan plan_of(const char* model, const char* hardware, Precision precision) {
    Plan plan;
    plan.model = std::make_shared<const Model>(load_model(model));
    plan.hardware = std::make_shared<const Hardware>(load_hardware(hardware));
    plan.stack = plan.hardware->default_stack;
    plan.seq = plan.gbs = 4096;
    plan.gpus = plan.dp = plan.edp = 1;
    plan.gbs = 2;
    plan.precision = precision;
    return plan;
}

std::int64_t bytes(const Plan& plan, MemoryClass c) {
    return plan_memory(lower(plan, 0)).class_bytes[static_cast<std::size_t>(c)];
}

// Products whose weights or rows are of a precision, by module.
int products(const Plan& plan, Module module, Dtype dtype) {
    const Program program = lower(plan, 0);
    int count = 0;
    for (int t = 0; t < 2; ++t)
        for (const Op& op : program.templates[static_cast<std::size_t>(t)].ops) {
            const bool product = op.kind == OpKind::gemm || op.kind == OpKind::grouped_gemm ||
                                 op.kind == OpKind::attention || op.kind == OpKind::attention_grad;
            if (product && op.module == module)
                count += program.tensors[static_cast<std::size_t>(op.in[0])].dtype == dtype;
        }
    return count;
}

} // namespace

TEST_CASE("attention in FP8 reads FP8 operands and keeps them in place of BF16 ones") {
    const Plan bf16 = plan_of("Llama3-8B", "h100", Precision::bf16);
    Plan fp8 = bf16;
    fp8.attention_precision = Precision::fp8_tensor;
    REQUIRE(check_plan(fp8).message == "");
    CHECK(products(bf16, Module::core_attn, Dtype::fp8_tensor) == 0);
    CHECK(products(fp8, Module::core_attn, Dtype::fp8_tensor) == 2 * 32);
    CHECK(products(fp8, Module::mlp, Dtype::fp8_tensor) == 0);
    // 32 + 2 * 8 heads of 128 for 4,096 tokens in 32 layers: one byte each instead of two.
    CHECK(bytes(bf16, MemoryClass::saved) - bytes(fp8, MemoryClass::saved) == 48LL * 128 * 4096 * 32);
}

TEST_CASE("the LM head in MXFP8: its products, its weights twice in one byte, its input in one") {
    const Plan bf16 = plan_of("Llama3-8B", "gb200-nvl72", Precision::bf16);
    Plan low = bf16;
    low.head_precision = Precision::mxfp8;
    REQUIRE(check_plan(low).message == "");
    CHECK(products(low, Module::head, Dtype::mxfp8) == 3);
    CHECK(products(low, Module::mlp, Dtype::mxfp8) == 0);
    // 525.3 M weights: two copies of 33/32 bytes instead of one of 2.
    CHECK(static_cast<double>(bytes(low, MemoryClass::weights) - bytes(bf16, MemoryClass::weights)) ==
          nearly(525'336'576 / 16.0).epsilon(1e-4));
    // The final norm's output (4,096 columns for 4,096 tokens) is kept column-wise in 33/32 bytes, not in 2.
    CHECK(bytes(bf16, MemoryClass::saved) - bytes(low, MemoryClass::saved) == 4096LL * 4096 * 31 / 32);
    low.model = std::make_shared<const Model>([] {
        Model tied = load_model("Llama3-8B");
        tied.tied_embeddings = true;
        return tied;
    }());
    CHECK(check_plan(low).counter == "head_precision");
}

TEST_CASE("experts may stay in BF16 beside MXFP8 linears, or the reverse") {
    Plan plan = plan_of("Qwen3-30B-A3B", "gb200-nvl72", Precision::mxfp8);
    CHECK(products(plan, Module::experts, Dtype::mxfp8) == 48 * 6);
    CHECK(products(plan, Module::attn_in, Dtype::mxfp8) == 48 * 3);
    const std::int64_t low = bytes(plan, MemoryClass::weights);
    plan.expert_precision = Precision::bf16;
    REQUIRE(check_plan(plan).message == "");
    CHECK(products(plan, Module::experts, Dtype::mxfp8) == 0);
    CHECK(products(plan, Module::attn_in, Dtype::mxfp8) == 48 * 3);
    // 48 layers of 128 experts of 3 x 2048 x 768 weights, kept once in two bytes.
    const double experts = 48.0 * 128 * 3 * 2048 * 768;
    CHECK(static_cast<double>(low - bytes(plan, MemoryClass::weights)) == nearly(experts / 16.0).epsilon(1e-4));
    plan.precision = Precision::bf16;
    plan.expert_precision = Precision::mxfp8;
    CHECK(products(plan, Module::experts, Dtype::mxfp8) == 48 * 6);
    CHECK(products(plan, Module::attn_in, Dtype::mxfp8) == 0);
}

TEST_CASE(
    "blockwise FP8 of ours quantizes a token once, and experts' activations and their gradients as they are written") {
    Plan plan = plan_of("Qwen3-30B-A3B", "h200", Precision::fp8_blockwise);
    plan.stack = "moe-plan";
    plan.gbs = plan.mbs = 1;
    const Program program = lower(plan, 0);
    const auto tensor = [&](TensorId id) { return program.tensors[static_cast<std::size_t>(id)]; };
    std::int64_t quantized = 0, widened = 0, moved = 0, written = 0; // rows by layer
    for (int t = 0; t < 2; ++t)
        for (const Op& op : program.templates[static_cast<std::size_t>(t)].ops) {
            if (op.layer != 7) continue;
            if (op.kind == OpKind::quantize) quantized += tensor(op.in[0]).rows;
            if (op.kind == OpKind::dequantize) widened += tensor(op.in[0]).rows;
            if (op.kind == OpKind::permute && tensor(op.in[0]).dtype == Dtype::fp8_block)
                moved += tensor(op.out[0]).rows;
            if (op.kind == OpKind::activation || op.kind == OpKind::activation_grad)
                written += tensor(op.out.back()).dtype == Dtype::fp8_block ? tensor(op.out.back()).rows : 0;
        }
    // Inputs and output gradients of both projections of attention, tokens before and gradients behind the experts.
    CHECK(quantized == (4 + 2) * plan.seq);
    CHECK(widened == 2 * plan.seq); // what the projection of query, key and value reads, and the experts
    CHECK(moved == 2 * 8 * plan.seq);
    CHECK(written == 2 * 8 * plan.seq);
    // With experts elsewhere rows are quantized where they arrive.
    plan.gpus = plan.dp = plan.ep = 2;
    plan.gbs = 2;
    REQUIRE(check_plan(plan).message == "");
    const Program spread = lower(plan, 0);
    for (int t = 0; t < 2; ++t)
        for (const Op& op : spread.templates[static_cast<std::size_t>(t)].ops)
            if (op.kind == OpKind::permute)
                CHECK(spread.tensors[static_cast<std::size_t>(op.in[0])].dtype != Dtype::fp8_block);
}

TEST_CASE("current scaling reads a tensor twice before it is FP8, delayed scaling once") {
    Plan plan = plan_of("Llama3-8B", "h100", Precision::fp8_tensor);
    const auto quantized = [&](Fp8Scaling scaling) {
        plan.fp8_scaling = scaling;
        REQUIRE(check_plan(plan).message == "");
        const Program program = lower(plan, 0);
        for (const Op& op : program.templates[0].ops)
            if (op.kind == OpKind::quantize) return op.bytes;
        return 0.0;
    };
    // The first: the attention norm's output, 4,096 x 4,096 in BF16, into a row-wise and a column-wise copy.
    CHECK(quantized(Fp8Scaling::delayed) == 4096.0 * 4096 * (2 + 1 + 1));
    CHECK(quantized(Fp8Scaling::current) == 4096.0 * 4096 * (2 + 2 + 1 + 1));
}

TEST_CASE("first and last layers may stay in BF16: their products, their weights, their attention") {
    Plan plan = plan_of("Qwen3-30B-A3B", "gb200-nvl72", Precision::mxfp8);
    const std::size_t kinds = plan.model->kinds.size();
    const std::int64_t low = bytes(plan, MemoryClass::weights);
    set_field(plan, "bf16_layers", "1+2");
    REQUIRE(check_plan(plan).message == "");
    CHECK(plan.model->kinds.size() == 2 * kinds);
    CHECK(plan.model->kind_of(0).bf16);
    CHECK_FALSE(plan.model->kind_of(1).bf16);
    CHECK_FALSE(plan.model->kind_of(45).bf16);
    CHECK(plan.model->kind_of(46).bf16);
    CHECK(products(plan, Module::experts, Dtype::mxfp8) == 45 * 6);
    CHECK(products(plan, Module::attn_in, Dtype::mxfp8) == 45 * 3);
    CHECK(products(plan, Module::experts, Dtype::bf16) == 3 * 6);
    // Weights of three layers once in two bytes instead of twice in 33/32 bytes each.
    const double layer = 128.0 * 3 * 2048 * 768 + 2048.0 * (32 + 4 + 4) * 128 + 32 * 128 * 2048.0;
    CHECK(static_cast<double>(low - bytes(plan, MemoryClass::weights)) == nearly(3 * layer / 16.0).epsilon(1e-3));
    plan.attention_precision = Precision::fp8_tensor;
    CHECK(products(plan, Module::core_attn, Dtype::fp8_tensor) == 45 * 2);
    CHECK(plan_to_json(plan_from_json(plan_to_json(plan), "plan.json")) == plan_to_json(plan));
    CHECK(plan_from_json(plan_to_json(plan), "plan.json").model->kinds == plan.model->kinds);
    set_field(plan, "bf16_layers", "none");
    CHECK(plan.model->kinds == load_model("Qwen3-30B-A3B").kinds);
    CHECK(plan_to_json(plan).find("bf16_layers") == std::string::npos);
}

TEST_CASE("layers that stay in BF16: what cannot be is refused") {
    Plan plan = plan_of("Qwen3-30B-A3B", "gb200-nvl72", Precision::mxfp8);
    for (const char* wrong : {"1", "1+", "+1", "1+x", "-1+1", "47+2", "1+2+3", ""}) {
        CAPTURE(std::string(wrong));
        CHECK(fault_of([&] { set_field(plan, "bf16_layers", wrong); }).find("bf16_layers=") != std::string::npos);
    }
    set_field(plan, "bf16_layers", "24+24");
    CHECK(check_plan(plan).message == "");
    plan.precision = Precision::bf16;
    CHECK(check_plan(plan).message.find("nothing else is quantized") != std::string::npos);
    set_field(plan, "bf16_layers", "1+1");
    plan.precision = Precision::mxfp8;
    std::string text = plan_to_json(plan);
    const std::size_t at = text.find("\"bf16_layers\": [");
    REQUIRE(at != std::string::npos);
    text.replace(text.find('[', at), text.find(']', at) - text.find('[', at) + 1, "[40, 9]");
    CHECK(fault_of([&] { plan_from_json(text, "plan.json"); }).find("bf16_layers") != std::string::npos);
}
