// Operands of formats with one scale a tensor and of emulated formats: what is rounded where, read how often, and kept.
#include "planner/lower/lower.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/memory/memory.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/plan_choices.hpp"
#include "planner/program/program.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <map>

using namespace moe;

namespace {

plan::Plan slice_in(machine::Precision precision) {
    plan::Plan plan;
    plan.model = std::make_shared<const model::Model>(families::load_model("Qwen3-30B-A3B"));
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("h200"));
    plan.stack = plan.hardware->default_stack;
    plan.seq = plan.gbs = 4096;
    plan.gpus = plan.dp = plan.edp = 1;
    plan.gbs = 2;
    plan.precision = precision;
    return plan;
}

std::int64_t class_bytes(const plan::Plan& plan, memory::MemoryClass c) {
    return memory::plan_memory(lower::lower(plan, 0)).class_bytes[static_cast<std::size_t>(c)];
}
} // namespace

TEST_CASE("our stack emulates MXFP8, NVFP4 and under FSDP per-tensor FP8: products read rounded BF16, weights stay") {
    using Role = program::RoundAttr::Role;
    for (const machine::Precision format :
         {machine::Precision::mxfp8, machine::Precision::nvfp4, machine::Precision::fp8_tensor}) {
        CAPTURE(machine::to_string(format));
        plan::Plan plan = slice_in(format);
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
        CHECK(class_bytes(plan, memory::MemoryClass::weights) == class_bytes(bf16, memory::MemoryClass::weights));
        CHECK((program.io.noise != program::no_tensor) == fp4);
    }
}

// What the forward, dgrad and wgrad of linear layers read.
TEST_CASE(
    "our stack multiplies per-tensor FP8 as such: E4M3 by rows, gradients E5M2, weights quantized as a step begins") {
    using Role = program::RoundAttr::Role;
    for (const bool fp8_wgrad : {false, true}) {
        CAPTURE(fp8_wgrad);
        plan::Plan plan = slice_in(machine::Precision::fp8_tensor);
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
        CHECK(class_bytes(plan, memory::MemoryClass::weights) == class_bytes(blocks, memory::MemoryClass::weights));
        CHECK(class_bytes(plan, memory::MemoryClass::saved) < class_bytes(bf16, memory::MemoryClass::saved));
    }
}

TEST_CASE("delayed scaling of ours: three places for each layer, one report of each in a step, one reduction of all") {
    using Role = program::RoundAttr::Role;
    plan::Plan plan = slice_in(machine::Precision::fp8_tensor);
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
