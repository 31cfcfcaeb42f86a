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

#include <map>
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

// Rows of one layer that ops of our blockwise FP8 quantize, by their results, and others leave or read in FP8.
struct LowRows {
    std::int64_t rows = 0, columns = 0, both = 0, widened = 0, moved = 0, written = 0;
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
                out.moved += tensor(op.out[0]).rows;
            if (op.kind == program::OpKind::activation || op.kind == program::OpKind::activation_grad)
                out.written +=
                    tensor(op.out.back()).dtype == program::Dtype::fp8_block ? tensor(op.out.back()).rows : 0;
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
    CHECK(got.columns + got.both == 0);
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
    CHECK(got.both == 2 * plan.seq); // output gradients of both projections
    // What these read, and of both products of the experts operands and output gradients.
    CHECK(got.columns == (2 + 4 * 8) * plan.seq);
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

TEST_CASE("our stack emulates MXFP8, NVFP4 and under FSDP per-tensor FP8: products read rounded BF16, weights stay") {
    using Role = program::RoundAttr::Role;
    for (const machine::Precision format :
         {machine::Precision::mxfp8, machine::Precision::nvfp4, machine::Precision::fp8_tensor}) {
        CAPTURE(machine::to_string(format));
        plan::Plan plan = plan_of("Qwen3-30B-A3B", "h200", format);
        plan.stack = "moe-plan";
        plan.gbs = plan.mbs = 1;
        plan.fsdp = format == machine::Precision::fp8_tensor;
        CHECK(plan.emulates(format));
        REQUIRE(plan::check_plan(plan).message == "");
        const bool fp4 = format == machine::Precision::nvfp4, mx = format == machine::Precision::mxfp8;
        const program::Program program = lower::lower(plan, 0);
        std::map<program::TensorId, const program::Op*> rounded;
        int products = 0, layer_ops = 0;
        double bytes_of_layer = 0.0;
        for (int t = 0; t < 2; ++t)
            for (const program::Op& op : program.templates[static_cast<std::size_t>(t)].ops) {
                if (const auto* round = std::get_if<program::RoundAttr>(&op.attr)) {
                    CHECK(round->format == format);
                    const bool stochastic = fp4 && round->role == Role::gradient;
                    CHECK((op.in.size() > 2) == stochastic);
                    CHECK((op.out.size() > 2) == !mx);
                    for (std::size_t i = 0; i < 2; ++i)
                        if (op.out[i] != program::no_tensor) rounded[op.out[i]] = &op;
                    if (op.layer == 7) bytes_of_layer += op.bytes, ++layer_ops;
                }
                const bool product = op.kind == program::OpKind::gemm || op.kind == program::OpKind::grouped_gemm;
                if (!product || op.module == program::Module::router || op.module == program::Module::head) continue;
                ++products;
                for (std::size_t i = 0; i < 2; ++i) {
                    REQUIRE(rounded.contains(op.in[i]));
                    CHECK(program.tensors[static_cast<std::size_t>(op.in[i])].dtype == program::Dtype::bf16);
                    const program::Op& source = *rounded.at(op.in[i]);
                    const Role role = std::get<program::RoundAttr>(source.attr).role;
                    const bool wgrad = op.phase == program::Phase::wgrad;
                    CHECK(role == (i == 1 ? (wgrad ? Role::activation : Role::weight)
                                          : (op.phase == program::Phase::forward ? Role::activation : Role::gradient)));
                    // Blocks lie along what is contracted: columns of rows, but rows in wgrad and of weights in dgrad.
                    const bool one = format == machine::Precision::fp8_tensor || (fp4 && role == Role::weight);
                    const bool along_rows = wgrad || (i == 1 && op.phase == program::Phase::dgrad);
                    CHECK(op.in[i] == source.out[along_rows && !one ? 1 : 0]);
                }
            }
        CHECK(products == 48 * (2 + 2) * 3);
        // Operands of attention's projections (the first one's input of 2048, gradients of 5120 and 2048) and of 8
        // experts per token (2048, 768 and 1536, 2048); attention's output of 4096, which its backward keeps, again for
        // wgrad; weights once forward and once backward.
        const double tokens = 4096.0, rows = 8.0 * tokens, kept = 2.0 * tokens * 4096,
                     activations = tokens * (2048 + 5120 + 2048) + rows * (2048 + 768 + 1536 + 2048),
                     weights = 2.0 * (2048.0 * 5120 + 4096.0 * 2048 + 128.0 * 3 * 2048 * 768);
        const double reads = mx ? 1.0 : 2.0, forms = format == machine::Precision::fp8_tensor ? 1.0 : 2.0;
        CHECK(bytes_of_layer == nearly(2.0 * (activations * (reads + forms) + (kept + weights) * (reads + 1.0))));
        CHECK(layer_ops == 7 + 2 + 8);
        plan::Plan bf16 = plan;
        bf16.precision = machine::Precision::bf16;
        CHECK(bytes(plan, memory::MemoryClass::weights) == bytes(bf16, memory::MemoryClass::weights));
        CHECK((program.io.noise != program::no_tensor) == fp4);
    }
}

// What the forward, dgrad and wgrad of linear layers read.
TEST_CASE(
    "our stack multiplies per-tensor FP8 as such: E4M3 by rows, gradients E5M2, weights quantized as a step begins") {
    using Role = program::RoundAttr::Role;
    for (const bool fp8_wgrad : {false, true}) {
        CAPTURE(fp8_wgrad);
        plan::Plan plan = plan_of("Qwen3-30B-A3B", "h200", machine::Precision::fp8_tensor);
        plan.stack = "moe-plan";
        plan.gbs = plan.mbs = 1;
        plan.fp8_wgrad = fp8_wgrad;
        REQUIRE(plan::check_plan(plan).message == "");
        REQUIRE(plan::check_executable(plan).message == "");
        CHECK_FALSE(plan.emulates(machine::Precision::fp8_tensor));
        const program::Program program = lower::lower(plan, 0);
        const auto tensor = [&](program::TensorId id) { return program.tensors[static_cast<std::size_t>(id)]; };
        const auto e5m2 = [](const program::Op& op) {
            const auto* grouped = std::get_if<program::GroupedGemmAttr>(&op.attr);
            return grouped != nullptr ? grouped->e5m2 : std::get<program::GemmAttr>(op.attr).e5m2;
        };
        int products = 0, rounded = 0, gradients = 0;
        for (std::size_t t = 0; t < 2; ++t)
            for (const program::Op& op : program.templates[t].ops) {
                if (const auto* round = std::get_if<program::RoundAttr>(&op.attr)) {
                    if (op.phase == program::Phase::forward) CHECK(round->role == Role::activation);
                    gradients += round->role == Role::gradient;
                    double bytes = 2.0 * tensor(op.in[0]).expected_bytes(); // twice: its largest comes first
                    for (std::size_t i = 0; i < 2; ++i)
                        if (op.out[i] != program::no_tensor) bytes += tensor(op.out[i]).expected_bytes();
                    CHECK(op.bytes == nearly(bytes));
                    ++rounded;
                }
                const bool product = op.kind == program::OpKind::gemm || op.kind == program::OpKind::grouped_gemm;
                if (!product || op.module == program::Module::router || op.module == program::Module::head) continue;
                ++products;
                const bool wgrad = op.phase == program::Phase::wgrad;
                const program::Dtype expected = !wgrad      ? program::Dtype::fp8_block
                                                : fp8_wgrad ? program::Dtype::fp8_columns
                                                            : program::Dtype::bf16;
                for (std::size_t i = 0; i < 2; ++i) CHECK(tensor(op.in[i]).dtype == expected);
                CHECK(e5m2(op) == (op.phase != program::Phase::forward));
            }
        CHECK(products == 48 * (2 + 2) * 3);
        CHECK(gradients == 48 * (2 + 2));
        CHECK(rounded == 48 * (2 * (2 + 2) + 1)); // attention's output, which its backward keeps, again for wgrad
        std::map<program::TensorId, int> largest;
        int matrices = 0;
        for (const program::Op& op : program.templates[static_cast<std::size_t>(program.slots.front().index)].ops) {
            const auto* m = std::get_if<program::QuantizeAttr>(&op.attr);
            if (m == nullptr) continue;
            ++matrices;
            CHECK(m->one_scale);
            REQUIRE(op.out.size() == 2);
            ++largest[op.out[1]];
            const double elements = static_cast<double>(m->groups * m->n * m->k);
            CHECK(op.bytes == nearly((4.0 + 4.0 + 2.0) * elements + 8.0 * static_cast<double>(m->scales())));
        }
        CHECK(matrices == 48 * 4);
        CHECK(largest.size() == 48 * 4);
        plan::Plan blocks = plan, bf16 = plan;
        blocks.precision = machine::Precision::fp8_blockwise;
        bf16.precision = machine::Precision::bf16, bf16.fp8_wgrad = false;
        CHECK(bytes(plan, memory::MemoryClass::weights) == bytes(blocks, memory::MemoryClass::weights));
        CHECK(bytes(plan, memory::MemoryClass::saved) < bytes(bf16, memory::MemoryClass::saved));
    }
}

TEST_CASE("delayed scaling of ours: three places for each layer, one report of each in a step, one reduction of all") {
    using Role = program::RoundAttr::Role;
    plan::Plan plan = plan_of("Qwen3-30B-A3B", "h200", machine::Precision::fp8_tensor);
    plan.stack = "moe-plan";
    plan.gpus = plan.dp = plan.edp = 2;
    plan.recompute = plan::recompute::full;
    plan.fp8_scaling = plan::Fp8Scaling::delayed;
    REQUIRE(plan::check_plan(plan).message == "");
    const program::Program program = lower::lower(plan, 0), forward = lower::lower_forward(plan, 0);
    const program::ProgramIo& io = program.io;
    const auto elements = [](const program::Program& of, program::TensorId id) {
        return of.tensors[static_cast<std::size_t>(id)].elements();
    };
    REQUIRE(io.scaled.size() == 48 * 4); // qkv, output, fc1 and fc2 of the experts
    for (const program::TensorId id : {io.scale_windows, io.scale_largest}) CHECK(elements(program, id) == 3 * 48 * 4);
    // An evaluation reads what the step has at the same places.
    REQUIRE(forward.io.scaled.size() == io.scaled.size());
    for (std::size_t i = 0; i < io.scaled.size(); ++i) {
        CHECK(forward.io.scaled[i].name == io.scaled[i].name);
        CHECK(forward.io.scaled[i].layer == io.scaled[i].layer);
    }
    std::map<int, int> reported;
    for (const program::Op& op : program.templates[static_cast<std::size_t>(program.slots.front().index)].ops) {
        const auto* weights = std::get_if<program::QuantizeAttr>(&op.attr);
        if (weights == nullptr) continue;
        CHECK(weights->slot % 3 == static_cast<int>(Role::weight));
        CHECK(op.in[1] == io.scale_windows);
        CHECK(op.out[1] == io.scale_largest);
        const double elements = static_cast<double>(weights->groups * weights->n * weights->k);
        CHECK(op.bytes == nearly(4.0 * elements + 8.0 * static_cast<double>(weights->scales()))); // gathered in BF16
        ++reported[weights->slot];
    }
    for (std::size_t t = 0; t < 2; ++t)
        for (const program::Op& op : program.templates[t].ops) {
            const auto* round = std::get_if<program::RoundAttr>(&op.attr);
            if (round == nullptr) continue;
            REQUIRE(round->slot >= 0);
            CHECK(round->slot % 3 == static_cast<int>(round->role));
            CHECK(io.scaled[static_cast<std::size_t>(round->slot / 3)].layer == op.layer);
            CHECK(op.in[4] == io.scale_windows);
            double once = program.tensors[static_cast<std::size_t>(op.in[0])].expected_bytes();
            for (std::size_t i = 0; i < 2; ++i)
                if (op.out[i] != program::no_tensor)
                    once += program.tensors[static_cast<std::size_t>(op.out[i])].expected_bytes();
            CHECK(op.bytes == nearly(once)); // read once and written
            if (op.out.size() < 3) continue;
            CHECK(op.out[2] == io.scale_largest);
            CHECK((op.phase == program::Phase::forward || round->role == Role::gradient));
            ++reported[round->slot];
        }
    CHECK(reported.size() == 3 * 48 * 4);
    for (const auto& [slot, times] : reported) CHECK(times == 1);
    for (const program::Template& tmpl : forward.templates)
        for (const program::Op& op : tmpl.ops)
            if (const auto* weights = std::get_if<program::QuantizeAttr>(&op.attr)) {
                CHECK(weights->slot >= 0);
                CHECK(op.out.size() == 1);
            } else if (std::holds_alternative<program::RoundAttr>(op.attr)) {
                CHECK(op.out.size() == 2);
            }
    int reductions = 0;
    for (const program::Op& op : program.templates.back().ops) {
        if (op.kind != program::OpKind::all_reduce || op.in[0] != io.scale_largest) continue;
        ++reductions;
        CHECK(std::get<program::ReduceAttr>(op.attr).max);
        CHECK(op.bytes == 4.0 * 3 * 48 * 4);
    }
    CHECK(reductions == 1);
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
