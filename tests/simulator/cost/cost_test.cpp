// Costs of single ops against published kernel figures and against arithmetic by hand.
#include "planner/base/error.hpp"
#include "planner/program/program.hpp"
#include "simulator/cost/cost.hpp"
#include "tests/simulator/cost/priced.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <cmath>

namespace {

moe::stack::StackCosts ideal() {
    moe::stack::StackCosts costs;
    costs.kernel_seconds = 0.0;
    costs.memory = 1.0;
    costs.permute = 0.5;
    return costs;
}

moe::cost::Rates rates(const moe::machine::Hardware& hardware, const moe::stack::StackCosts& costs) {
    return {&hardware, &costs, 1.0};
}

// cuDNN attention on DeepSeek-V3's shape, one sequence: causal FLOPs, TFLOPS reached.
double attention_tflops(const char* machine, bool forward, std::int64_t seq,
                        moe::machine::Precision precision = moe::machine::Precision::bf16) {
    const moe::machine::Hardware hardware = moe::machine::load_hardware(machine);
    moe::stack::StackCosts costs = ideal();
    costs.attention_forward = 0.72;
    costs.attention_backward = 0.57;
    moe::program::Op op;
    op.kind = forward ? moe::program::OpKind::attention : moe::program::OpKind::attention_grad;
    moe::program::AttentionAttr attr;
    attr.seq_q = attr.seq_k = seq;
    attr.heads = attr.kv_heads = 128;
    attr.qk_dim = 192;
    attr.v_dim = 128;
    op.attr = attr;
    op.flops = static_cast<double>(seq) * static_cast<double>(seq) * 128 * 320 * (forward ? 1.0 : 2.5);
    return op.flops / moe::cost::attention_seconds(rates(hardware, costs), op, precision) / 1e12;
}

} // namespace

// arXiv 2603.07685 Table 9.
TEST_CASE("attention reaches the published rates within 5 %") {
    struct Row {
        const char* machine;
        bool forward;
        std::int64_t seq;
        double tflops;
    };
    for (const Row& row :
         {Row{"h100", true, 4096, 553}, Row{"h100", false, 4096, 422}, Row{"h100", true, 16384, 638},
          Row{"h100", false, 16384, 523}, Row{"gb200-nvl72", true, 4096, 1324}, Row{"gb200-nvl72", false, 4096, 1083},
          Row{"gb200-nvl72", true, 16384, 1698}, Row{"gb200-nvl72", false, 16384, 1298}}) {
        CAPTURE(row.machine);
        CAPTURE(row.seq);
        CAPTURE(row.forward);
        CHECK(attention_tflops(row.machine, row.forward, row.seq) == nearly(row.tflops).epsilon(0.05));
    }
}

// FlashAttention-3, arXiv 2407.08608, abstract: up to 740 TFLOPS in FP16 and close to 1.2 PFLOPS in FP8 on H100.
TEST_CASE("attention's forward waits for exponentials, which neither FP8 nor narrow heads spare") {
    const moe::machine::Hardware h = moe::machine::load_hardware("gb200-nvl72");
    moe::stack::StackCosts costs = ideal();
    moe::program::Op op;
    op.kind = moe::program::OpKind::attention;
    const auto seconds = [&](int width, moe::machine::Precision precision) {
        moe::program::AttentionAttr attr;
        attr.seq_q = attr.seq_k = 4096;
        attr.heads = attr.kv_heads = 64;
        attr.qk_dim = attr.v_dim = width;
        op.attr = attr;
        op.flops = 4096.0 * 4096 * 64 * 2 * width;
        return moe::cost::attention_seconds(rates(h, costs), op, precision);
    };
    costs.attention_exponentials = 1.0; // as long as BF16 products of heads of 128
    const double wide = seconds(128, moe::machine::Precision::bf16);
    CHECK(seconds(128, moe::machine::Precision::fp8_tensor) == nearly(wide));
    CHECK(seconds(64, moe::machine::Precision::bf16) == nearly(wide));
    costs.attention_exponentials = 0.5;
    CHECK(seconds(128, moe::machine::Precision::bf16) == nearly(wide));
    CHECK(seconds(128, moe::machine::Precision::fp8_tensor) < 0.65 * wide);
    CHECK(seconds(64, moe::machine::Precision::bf16) == nearly(std::sqrt(0.5) * wide));
    op.kind = moe::program::OpKind::attention_grad; // the backward has more products
    costs.attention_exponentials = 1.0;
    CHECK(seconds(128, moe::machine::Precision::fp8_tensor) < 0.65 * seconds(128, moe::machine::Precision::bf16));
}

TEST_CASE("attention in FP8 gains less than its products alone would") {
    const double fp8 = attention_tflops("h100", true, 16384, moe::machine::Precision::fp8_tensor);
    CHECK(fp8 == nearly(1200).epsilon(0.15));
    CHECK(fp8 / attention_tflops("h100", true, 16384) == nearly(1200.0 / 740.0).epsilon(0.02));
}

// docs/notes/kernels-sparse.md: milliseconds on a card of Hopper.
TEST_CASE("this project's kernels of sparse attention cost what they were measured at, within a quarter") {
    const moe::machine::Hardware h = moe::machine::load_hardware("h200");
    const moe::stack::StackCosts costs = ideal();
    using moe::program::OpKind;
    const auto milliseconds = [&](OpKind kind, int heads, int index_heads, std::int64_t seq, std::int64_t picked,
                                  moe::machine::Precision precision) {
        moe::program::Op op;
        op.kind = kind;
        moe::program::AttentionAttr attr;
        attr.seq_q = attr.seq_k = seq;
        attr.heads = heads, attr.qk_dim = 576, attr.v_dim = 512, attr.picked = picked;
        attr.index.heads = index_heads, attr.index.dim = 128;
        if (kind == OpKind::pick_keys) attr.heads = index_heads, attr.qk_dim = attr.v_dim = 128, attr.picked = 0;
        op.attr = attr;
        return moe::cost::own_attention_seconds(rates(h, costs), op, precision) * 1e3;
    };
    struct Row {
        OpKind kind;
        int heads, index_heads;
        std::int64_t seq, picked;
        double milliseconds;
        bool tensor = true;
    };
    for (const Row& row :
         {Row{OpKind::attention, 128, 64, 4096, 2048, 3.93}, Row{OpKind::attention, 128, 64, 16384, 2048, 18.6},
          Row{OpKind::attention, 64, 32, 4096, 2048, 1.99}, Row{OpKind::attention_grad, 128, 64, 4096, 2048, 19.6},
          Row{OpKind::attention_grad, 128, 64, 16384, 2048, 237.0},
          Row{OpKind::attention_grad, 64, 32, 4096, 2048, 9.96}, Row{OpKind::pick_keys, 128, 64, 4096, 2048, 0.951},
          Row{OpKind::pick_keys, 128, 64, 16384, 2048, 13.7}, Row{OpKind::pick_keys_grad, 128, 64, 4096, 2048, 9.25},
          Row{OpKind::pick_keys_grad, 128, 64, 16384, 2048, 54.9},
          Row{OpKind::attention, 128, 64, 512, 256, 19.0, false},
          Row{OpKind::attention_grad, 128, 64, 512, 256, 200.0, false},
          Row{OpKind::pick_keys_grad, 128, 64, 512, 256, 57.5, false}}) {
        CAPTURE(moe::program::to_string(row.kind));
        CAPTURE(row.heads);
        CAPTURE(row.seq);
        CHECK(milliseconds(row.kind, row.heads, row.index_heads, row.seq, row.picked,
                           row.tensor ? moe::machine::Precision::bf16 : moe::machine::Precision::fp32) ==
              nearly(row.milliseconds).epsilon(0.25));
    }
}

TEST_CASE("products: whole waves run at the rate, a tile more costs a wave, splitting the inner loop helps few tiles") {
    const moe::machine::Hardware h = moe::machine::load_hardware("h100"); // 132 SMs
    const moe::stack::StackCosts costs = ideal();
    const auto seconds = [&](double m, double n, double k) {
        return moe::cost::gemm_seconds(rates(h, costs), 800e12, 1, m, n, k, 0.0);
    };
    const double wave = 132 * 2.0 * 256 * 128 * 8192 / 800e12;
    CHECK(seconds(256 * 132, 128, 8192) == nearly(wave));
    CHECK(seconds(256 * 264, 128, 8192) == nearly(2 * wave));
    CHECK(seconds(256 * 133, 128, 8192) > 1.05 * wave);
    CHECK(seconds(256 * 133, 128, 8192) <= 2 * wave);
    CHECK(seconds(256, 128, 8192) < 0.25 * wave); // one tile, its inner loop on several SMs
    // Bytes are the floor.
    CHECK(moe::cost::gemm_seconds(rates(h, costs), 800e12, 1, 128, 128, 128, 3.35e12) >= 1.0);
    // Many small groups fill the machine as one large product does.
    CHECK(moe::cost::gemm_seconds(rates(h, costs), 800e12, 132, 256, 128, 8192, 0.0) == nearly(wave));
    moe::stack::StackCosts slow = costs;
    slow.tile_seconds = 1e-6;
    CHECK(moe::cost::gemm_seconds(rates(h, slow), 800e12, 1, 256 * 132, 128, 8192, 0.0) == nearly(wave + 1e-6));
}

TEST_CASE("memory-bound ops: gathers are slower, a fused quantization moves less and starts no kernel") {
    const moe::machine::Hardware h = moe::machine::load_hardware("h100");
    moe::stack::StackCosts costs = ideal();
    costs.kernel_seconds = 1e-6;
    moe::program::Op op;
    op.kind = moe::program::OpKind::rmsnorm;
    op.bytes = 3.35e9;
    CHECK(moe::cost::memory_bound_seconds(rates(h, costs), op) == nearly(1e-3 + 1e-6));
    op.kind = moe::program::OpKind::permute;
    CHECK(moe::cost::memory_bound_seconds(rates(h, costs), op) == nearly(2e-3 + 1e-6));
    op.kind = moe::program::OpKind::quantize;
    CHECK(moe::cost::memory_bound_seconds(rates(h, costs), op) == nearly(1e-3 + 1e-6));
    moe::cost::Rates fused = rates(h, costs);
    fused.quantize_share = 0.5;
    CHECK(moe::cost::memory_bound_seconds(fused, op) == nearly(0.5e-3));
}

TEST_CASE("the cost model: a machine without the precision is refused, graphs cost the host less") {
    Priced priced("bridge-26.08", moe::machine::load_hardware("h100"));
    const moe::stack::StackCosts& costs = priced.stack.costs;
    moe::program::Program program;
    moe::program::Tensor tensor;
    tensor.dtype = moe::program::Dtype::mxfp8;
    program.tensors.assign(2, tensor);
    moe::program::Op op;
    op.kind = moe::program::OpKind::gemm;
    op.in = {0, 1};
    op.attr = moe::program::GemmAttr{1024, 1024, 1024};
    op.flops = 2.0 * 1024 * 1024 * 1024;
    CHECK_THROWS_WITH_AS(priced(op, program), doctest::Contains("mxfp8"), moe::Error);
    program.tensors[0].dtype = moe::program::Dtype::f32; // the narrower operand decides
    program.tensors[1].dtype = moe::program::Dtype::bf16;
    CHECK(priced(op, program).device > op.flops / 989e12);
    CHECK(priced(op, program).host == costs.launch_seconds);
    priced.plan.cuda_graph = moe::plan::CudaGraph::full;
    CHECK(priced(op, program).host == costs.graph_launch_seconds);
}

TEST_CASE("a deterministic backward of attention that our kernels take is priced by calls in any order") {
    moe::program::Program program;
    program.tensors.resize(1);
    program.tensors[0].dtype = moe::program::Dtype::bf16;
    const auto seconds = [&](const char* machine, int heads, int kv_heads, bool deterministic) {
        Priced priced("moe-plan", moe::machine::load_hardware(machine));
        priced.plan.precision = moe::machine::Precision::bf16;
        moe::program::AttentionAttr attr;
        attr.batch = 2, attr.seq_q = attr.seq_k = 4096;
        attr.heads = heads, attr.kv_heads = kv_heads, attr.qk_dim = attr.v_dim = 128,
        attr.deterministic = deterministic;
        moe::program::Op op;
        op.kind = moe::program::OpKind::attention_grad;
        op.attr = attr;
        op.in = {0}, op.out = {0};
        op.flops = 2.0 * 5 * 128 * heads * 4096.0 * 4096.0;
        return priced(op, program).device;
    };
    CHECK(seconds("h200-measured", 32, 4, true) == seconds("h200-measured", 32, 4, false));
    // Four key heads are work for half of the GPU, which the library has, and takes longer.
    CHECK(seconds("h200-measured", 32, 2, true) > 1.05 * seconds("h200-measured", 32, 2, false));
}
