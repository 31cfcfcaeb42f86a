// What ops on routed rows cost beside their FLOPs and bytes: kernels and calls of single experts, and their biases.
#include "planner/machine/hardware.hpp"
#include "planner/plan/routing.hpp"
#include "planner/program/program.hpp"
#include "tests/simulator/cost/priced.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

namespace {

using moe::program::OpKind;

// Rows of a rank's experts, their weights, counts and routing weights.
moe::program::Program rows_of_experts(double rows, std::int64_t width) {
    moe::program::Program program;
    program.tensors.resize(4);
    for (moe::program::Tensor& tensor : program.tensors) {
        tensor.dtype = moe::program::Dtype::bf16;
        tensor.cols = width;
        tensor.expected_rows = rows;
    }
    return program;
}

moe::program::Op product(int experts, std::int64_t n, std::int64_t k, double rows) {
    moe::program::Op op;
    op.kind = OpKind::grouped_gemm;
    op.module = moe::program::Module::experts;
    op.in = {0, 1, 2};
    op.out = {3};
    op.attr = moe::program::GroupedGemmAttr{moe::program::GroupedMode::forward, experts, n, k,
                                            static_cast<std::int64_t>(rows)};
    op.flops = 2.0 * rows * static_cast<double>(n) * static_cast<double>(k);
    return op;
}

Priced on_gb200(const char* stack) { return Priced(stack, moe::machine::load_hardware("gb200-nvl72")); }

} // namespace

TEST_CASE("one local expert is a plain product, several have a kernel each") {
    Priced priced = on_gb200("bridge-26.04");
    priced.stack.costs.grouped_gemm = priced.stack.costs.gemm; // so that only the kernels differ
    const moe::program::Program program = rows_of_experts(65536, 4096);
    const double alone = priced(product(1, 4096, 4096, 65536), program).device;
    moe::program::Op plain;
    plain.kind = OpKind::gemm;
    plain.in = {0, 1};
    plain.out = {3};
    plain.attr = moe::program::GemmAttr{65536, 4096, 4096};
    CHECK(alone == nearly(priced(plain, program).device));
    const double sixteen = priced(product(16, 4096, 4096, 65536), program).device;
    CHECK(sixteen >= alone + 16.0 * priced.stack.costs.expert_seconds);
    priced.stack.costs.expert_seconds = 0.0;
    CHECK(sixteen - priced(product(16, 4096, 4096, 65536), program).device > 0.0);
}

TEST_CASE("fused experts: their own precisions, and a paged stash where the stack asks for one") {
    Priced bridge = on_gb200("bridge-26.08"), recipes = on_gb200("mlm-moe-recipes");
    CHECK_FALSE(moe::stack::fuses_experts(bridge.plan, bridge.stack)); // BF16
    bridge.plan.precision = recipes.plan.precision = moe::machine::Precision::mxfp8;
    CHECK(moe::stack::fuses_experts(bridge.plan, bridge.stack));
    CHECK_FALSE(moe::stack::fuses_experts(recipes.plan, recipes.stack));
    recipes.plan.paged_stash = true;
    CHECK(moe::stack::fuses_experts(recipes.plan, recipes.stack));
    CHECK_FALSE(moe::stack::fuses_experts(
        bridge.plan, moe::stack::load_stack("bridge-26.04", moe::machine::load_hardware("gb200-nvl72"))));
}

TEST_CASE("the host calls a product and a quantization for each local expert, one of all where they are fused") {
    Priced priced = on_gb200("bridge-26.08");
    priced.plan.precision = moe::machine::Precision::mxfp8;
    const moe::stack::StackCosts& costs = priced.stack.costs;
    const moe::program::Program program = rows_of_experts(65536, 2048);
    const double call = costs.launch_seconds * costs.routed_launches;
    moe::program::Op quantize;
    quantize.kind = OpKind::quantize;
    quantize.module = moe::program::Module::experts;
    quantize.in = {0};
    quantize.out = {1, 2};
    const moe::program::Op experts = product(128, 1536, 2048, 65536);
    CHECK(priced(experts, program).host == nearly(call));
    CHECK(priced(quantize, program).host == nearly(call * costs.quantize_launches));
    priced.stack.fused_experts.clear();
    CHECK(priced(experts, program).host == nearly(call + 128 * costs.expert_launch_seconds));
    CHECK(priced(quantize, program).host == nearly(call * costs.quantize_launches + 128 * costs.expert_launch_seconds));
    quantize.module = moe::program::Module::attn_in; // no routed rows
    CHECK(priced(quantize, program).host == nearly(costs.launch_seconds * costs.quantize_launches));
    // Merged slots cost the host their share more or less.
    const double alone = priced(experts, program).host;
    priced.plan.ep_overlap = true;
    CHECK(priced(experts, program).host == nearly(alone * costs.overlap_launches));
}

// Megatron-LM's TEGroupedMLP adds the last bias times routing weights in FP32, expert by expert.
TEST_CASE("biases of experts: the first in its product, the last in framework calls that move more than it holds") {
    Priced priced = on_gb200("bridge-26.04");
    const moe::program::Program program = rows_of_experts(65536, 2880);
    moe::program::Op add;
    add.kind = OpKind::grouped_bias_add;
    add.module = moe::program::Module::experts;
    add.in = {0, 1, 2};
    add.out = {3};
    add.attr = moe::program::GroupedBiasAttr{};
    add.bytes = 2.0 * 2.0 * 65536 * 2880;
    CHECK(priced(add, program).device == 0.0);
    add.in.push_back(3); // routing weights
    const double bandwidth = priced.hardware->memory_bandwidth * priced.stack.costs.memory;
    const double added = priced(add, program).device;
    CHECK(added > 28.0 * 65536 * 2880 / bandwidth);
    moe::program::Op gradient = add;
    gradient.kind = OpKind::grouped_bias_grad;
    // Qwen3-30B-A3B has 128 experts: two calls of the framework for each, four backward.
    const moe::stack::StackCosts& costs = priced.stack.costs;
    CHECK(priced(gradient, program).device - added ==
          nearly(8.0 * 65536 * 2880 / bandwidth + 2 * 128 * costs.expert_seconds));
    const double call = costs.launch_seconds * costs.routed_launches;
    CHECK(priced(add, program).host == nearly(call + 2 * 128 * costs.expert_launch_seconds));
    CHECK(priced(gradient, program).host == nearly(call + 4 * 128 * costs.expert_launch_seconds));
    priced.stack.costs.weighted_bias_bytes = -1.0; // a stack that says nothing: the bytes of the op
    CHECK(priced(add, program).device < added);
}

// DeepEP, branch hybrid-ep: csrc/hybrid_ep/backend/hybrid_ep_backend.cuh (intra_node_prob_buffer), which Megatron-LM's
// fused_a2a.py calls: FP32 routing weights for all experts of the NVLink domain go with a token to its experts, and
// their gradients come back with its gradient. Qwen3-30B-A3B: 128 experts, 8 of them for each token, 2,048 wide.
TEST_CASE("HybridEP sends a routing weight for every expert of the domain beside a token, other dispatchers none") {
    using moe::program::Phase;
    constexpr double tokens = 4096.0, width = 2048.0;
    const moe::plan::Group group{moe::plan::Domain::expert, moe::plan::axis::expert};
    const auto check = [&](const std::string& hardware, int ranks, double experts_of_domain) {
        CAPTURE(hardware);
        Priced priced("bridge-26.08", moe::machine::load_hardware(hardware), ranks);
        priced.plan.ep = ranks, priced.plan.edp = 1;
        const moe::model::Moe& moe = *priced.plan.model->kinds.back().moe;
        REQUIRE(moe.experts == 128);
        priced.stack.costs.dispatcher.at("hybridep").row = 0.0; // see below
        const auto exchange = [&](moe::plan::Dispatcher dispatcher, double bytes_of_token) {
            const moe::stack::LinkShares& shares = priced.stack.costs.dispatcher.at(moe::plan::to_string(dispatcher));
            const moe::cost::GroupLinks links =
                moe::cost::CostModel(priced.plan, priced.stack, priced.machine).links(group);
            return moe::cost::token_exchange_seconds(links, shares, tokens * bytes_of_token, moe) +
                   priced.stack.costs.kernel_seconds;
        };
        const auto seconds = [&](moe::plan::Dispatcher dispatcher, Phase phase, bool combine, std::int64_t cols) {
            priced.plan.dispatcher = dispatcher;
            moe::program::Op op;
            op.kind = OpKind::all_to_all_rows;
            op.phase = phase;
            op.stream = moe::program::Stream::expert;
            op.group = group;
            op.attr = moe::program::RowsAttr{cols, 0, moe.experts, ranks, 1, combine};
            op.bytes = tokens * moe.top_k * 2.0 * static_cast<double>(cols);
            return priced(op, {}).device;
        };
        constexpr auto hybridep = moe::plan::Dispatcher::hybridep, deepep = moe::plan::Dispatcher::deepep;
        const double token = 2.0 * width, beside = 4.0 * experts_of_domain;
        CHECK(seconds(hybridep, Phase::forward, false, 2048) == nearly(exchange(hybridep, token + beside)));
        CHECK(seconds(hybridep, Phase::forward, true, 2048) == nearly(exchange(hybridep, token)));
        CHECK(seconds(hybridep, Phase::dgrad, true, 2048) == nearly(exchange(hybridep, token + beside)));
        CHECK(seconds(hybridep, Phase::dgrad, false, 2048) == nearly(exchange(hybridep, token)));
        CHECK(seconds(hybridep, Phase::dgrad, true, 1) == nearly(exchange(hybridep, 2.0))); // the weights' own
        for (const bool combine : {false, true})
            for (const Phase phase : {Phase::forward, Phase::dgrad})
                CHECK(seconds(deepep, phase, combine, 2048) == nearly(exchange(deepep, token)));
    };
    check("gb200-nvl72", 16, 128.0); // all experts within one domain
    check("h100", 16, 64.0);         // 8 of 16 ranks in each node
}

// Megatron Core sends with 16 multiprocessors where nothing is said (transformer_config.py: moe_hybridep_num_sms),
// Megatron-Bridge's performance recipes with 32.
TEST_CASE("HybridEP pays for each row that it sends over NVLink, twice as much with half the multiprocessors") {
    static constexpr double tokens = 4096.0, seconds_per_row = 4e-8;
    const auto check = [](const char* stack, double multiprocessors) {
        CAPTURE(stack);
        Priced priced(stack, moe::machine::load_hardware("gb200-nvl72"), 16);
        priced.plan.ep = 16, priced.plan.edp = 1;
        priced.plan.dispatcher = moe::plan::Dispatcher::hybridep;
        const moe::model::Moe& moe = *priced.plan.model->kinds.back().moe;
        const auto seconds = [&](std::int64_t cols, double row) {
            priced.stack.costs.dispatcher.at("hybridep").row = row;
            moe::program::Op op;
            op.kind = OpKind::all_to_all_rows;
            op.phase = moe::program::Phase::forward;
            op.stream = moe::program::Stream::expert;
            op.group = {moe::plan::Domain::expert, moe::plan::axis::expert};
            op.attr = moe::program::RowsAttr{cols, 0, moe.experts, 16, 1, true};
            op.bytes = tokens * moe.top_k * 2.0 * static_cast<double>(cols);
            return priced(op, {}).device;
        };
        const double rows =
            tokens * moe::plan::distinct_destinations(moe.experts, moe.top_k, 16, moe.router) * 15.0 / 16.0;
        for (const std::int64_t cols : {2048, 7168}) // as much for narrow rows as for wide ones
            CHECK(seconds(cols, seconds_per_row) - seconds(cols, 0.0) ==
                  nearly(rows * seconds_per_row / multiprocessors));
        CHECK(seconds(1, seconds_per_row) == nearly(seconds(1, 0.0))); // weights, which go with the rows
    };
    check("bridge-26.08", 32.0);
    check("mlm-moe-recipes", 16.0);
}

TEST_CASE("columns of permuted tokens, where no profile has their calls: rows, and columns by a pass of their own") {
    const std::int64_t tokens = 8192, cols = 2048, rows = 8 * tokens;
    moe::program::Program program;
    const auto tensor = [&](std::int64_t of, moe::program::Dtype dtype) {
        moe::program::Tensor t;
        t.dtype = dtype, t.rows = of, t.cols = cols, t.expected_rows = static_cast<double>(of);
        program.tensors.push_back(t);
        return static_cast<moe::program::TensorId>(program.tensors.size() - 1);
    };
    using moe::program::Dtype;
    const auto from = tensor(tokens, Dtype::fp8_block), places = tensor(rows, Dtype::i32);
    const auto moved = tensor(rows, Dtype::fp8_block), columns = tensor(rows, Dtype::fp8_columns);
    moe::machine::Hardware hardware = moe::machine::load_hardware("h200-measured");
    for (const char* kind : {"permute.columns.fp8-blockwise", "permute.both.fp8-blockwise"})
        REQUIRE(hardware.measured.erase(kind) == 1);
    const Priced priced("", hardware);
    const auto seconds = [&](moe::program::Op op) {
        for (const moe::program::Operands* side : {&op.in, &op.out})
            for (const moe::program::TensorId id : *side)
                if (id != moe::program::no_tensor && id != places)
                    op.bytes += program.tensors[static_cast<std::size_t>(id)].expected_bytes();
        return priced(op, program).device;
    };
    moe::program::Op permute;
    permute.kind = OpKind::permute;
    permute.attr = moe::program::PermuteAttr{tokens, cols, 8, 128};
    permute.in = {from, places}, permute.out = {moved};
    moe::program::Op both = permute, alone = permute, pass;
    both.out = {moved, columns}, alone.out = {moe::program::no_tensor, columns};
    pass.kind = OpKind::quantize;
    pass.attr = moe::program::ColumnBlocksAttr{};
    pass.in = {columns}, pass.out = {moe::program::no_tensor, columns};
    CHECK(seconds(alone) == nearly(seconds(pass)));
    CHECK(seconds(both) == nearly(seconds(permute) + seconds(pass)));
    CHECK(seconds(pass) > seconds(permute)); // columns are not had for the price of rows
}
