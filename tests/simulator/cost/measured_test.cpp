// Costs from measured calls: between their points and shapes, of groups of several devices, and what a step adds.
#include "kernels/tiles.hpp"
#include "planner/program/program.hpp"
#include "simulator/cost/cost.hpp"
#include "tests/simulator/cost/priced.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

namespace {

moe::machine::Hardware gpu() {
    moe::machine::Hardware hardware;
    hardware.sm_count = 132;
    return hardware;
}

double seconds_of(const char* key, const std::vector<moe::machine::MeasuredCall>& calls, double work,
                  const std::vector<double>& sides) {
    return moe::cost::MeasuredFamily(gpu(), key, calls).seconds(work, sides);
}

double curve(const std::vector<moe::machine::MeasuredCall>& calls, double work) {
    return seconds_of("adamw", calls, work, {});
}

// A kernel that starts in 5 us, reaches 100 TFLOP/s, and less where n is small.
double kernel_seconds(double m, double n, double k) { return 5e-6 + 2.0 * m * n * k / (1e14 * n / (n + 300.0)); }

} // namespace

TEST_CASE("measured calls: points are met, between them a power law, beyond the last its rate") {
    const std::vector<moe::machine::MeasuredCall> calls{{1e6, 1e-3}, {4e6, 2e-3}, {16e6, 8e-3}};
    for (const moe::machine::MeasuredCall& call : calls) CHECK(curve(calls, call.work) == nearly(call.seconds));
    CHECK(curve(calls, 2e6) == nearly(1e-3 * std::sqrt(2.0)));
    CHECK(curve(calls, 64e6) == nearly(32e-3));
    CHECK(curve(calls, 0.25e6) == nearly(0.5e-3)); // slope of the first two points
    CHECK(curve({{2e6, 1e-3}}, 1e6) == nearly(0.5e-3));
    moe::machine::Hardware hardware = gpu();
    hardware.measured["adamw"] = calls;
    hardware.measured["add"] = {};
    const moe::cost::MeasuredFamilies families(hardware);
    CHECK(families.find("adamw")->seconds(4e6, {}) == nearly(2e-3));
    CHECK(families.find("adamw") == families.find("adamw")); // fitted once
    CHECK(families.find("add") == nullptr);
    CHECK(families.find("zero") == nullptr);
}

TEST_CASE("measured calls with sides: between shapes within 5 %, beyond them the rate of the nearest") {
    std::vector<moe::machine::MeasuredCall> calls;
    for (const double m : {1024.0, 2048.0, 4096.0, 8192.0})
        for (const double n : {512.0, 1024.0, 2048.0})
            for (const double k : {512.0, 2048.0})
                calls.push_back({2.0 * m * n * k, kernel_seconds(m, n, k), {m, n, k}});
    const auto predicted = [&](double m, double n, double k) {
        return seconds_of("gemm.nt", calls, 2.0 * m * n * k, {m, n, k});
    };
    for (const moe::machine::MeasuredCall& call : calls)
        CHECK(seconds_of("gemm.nt", calls, call.work, call.sides) == nearly(call.seconds).epsilon(0.05));
    for (const double m : {1500.0, 3000.0, 6000.0})
        for (const double n : {700.0, 1536.0})
            for (const double k : {768.0, 1024.0})
                CHECK(predicted(m, n, k) == nearly(kernel_seconds(m, n, k)).epsilon(0.05));
    CHECK(predicted(65536, 2048, 2048) == nearly(kernel_seconds(65536, 2048, 2048)).epsilon(0.1));
    // Sides that the calls do not have count for nothing.
    CHECK(seconds_of("rmsnorm", {{1e6, 1e-3}, {4e6, 2e-3}}, 1e6, {10.0, 10.0}) == nearly(1e-3));
}

TEST_CASE("measured products: operands that move while they are multiplied count by the root of both squares") {
    const auto seconds = [](double m, double n, double k) {
        return 4e-6 + std::hypot(2.0 * m * n * k / 7e14, (m * n + m * k + n * k) * 2.0 / 3e12);
    };
    std::vector<moe::machine::MeasuredCall> calls;
    for (const double m : {512.0, 16384.0})
        for (const double n : {256.0, 8192.0})
            for (const double k : {64.0, 512.0, 4096.0})
                calls.push_back({2.0 * m * n * k, seconds(m, n, k), {m, n, k}});
    std::sort(calls.begin(), calls.end(), [](const auto& a, const auto& b) { return a.work < b.work; });
    for (const double m : {4096.0, 65536.0}) // added up, up to 12 % off
        for (const double n : {1024.0, 3072.0})
            for (const double k : {192.0, 1024.0})
                CHECK(seconds_of("gemm.nt.bf16", calls, 2.0 * m * n * k, {m, n, k}) ==
                      nearly(seconds(m, n, k)).epsilon(0.01));
}

TEST_CASE("measured attention: short sequences cost their rows, long ones their pairs") {
    const auto seconds = [](double heads, double seq) { return 5e-6 + 2e-9 * heads * seq + 1e-12 * heads * seq * seq; };
    std::vector<moe::machine::MeasuredCall> calls;
    const auto add = [&](double heads, double seq) {
        calls.push_back({640.0 * heads * seq * seq, seconds(heads, seq), {heads, seq, seq / 2, 128, 128, heads / 4}});
    };
    for (const double heads : {8.0, 16.0, 64.0})
        for (const double seq : {512.0, 2048.0, 4096.0}) add(heads, seq);
    std::sort(calls.begin(), calls.end(), [](const auto& a, const auto& b) { return a.work < b.work; });
    for (const double heads : {24.0, 128.0}) // by a start and the pairs alone up to 10 % off
        for (const double seq : {1024.0, 3072.0}) {
            const double predicted = seconds_of("attention_grad.bf16", calls, 640.0 * heads * seq * seq,
                                                {heads, seq, seq / 2, 128, 128, heads / 4});
            CHECK(predicted == nearly(seconds(heads, seq)).epsilon(0.03));
        }
}

TEST_CASE("measured dispatch and combine: a token travels once to a member, however many of its choices are there") {
    const auto seconds = [](double tokens, double bytes, double choices) {
        return 15e-6 + tokens * bytes * std::min(choices, 4.0) / 4e11;
    };
    const auto call = [&](double tokens, double bytes, double choices) {
        return moe::machine::MeasuredCall{
            tokens * bytes * choices, seconds(tokens, bytes, choices), {tokens, bytes, choices}};
    };
    std::vector<moe::machine::MeasuredCall> calls;
    for (const double tokens : {2560.0, 10240.0, 40960.0})
        for (const double bytes : {2048.0, 6144.0})
            for (const double choices : {1.0, 2.0, 8.0}) calls.push_back(call(tokens, bytes, choices));
    std::sort(calls.begin(), calls.end(), [](const auto& a, const auto& b) { return a.work < b.work; });
    for (const double choices : {2.0, 4.0, 6.0}) { // by all choices alike up to 32 % off
        const moe::machine::MeasuredCall at = call(16384, 4096, choices);
        for (const char* key : {"dispatch_tokens.x4", "combine_tokens.values.x4"}) {
            const double predicted = seconds_of(key, calls, at.work, at.sides);
            CHECK(predicted == nearly(at.seconds).epsilon(0.03));
        }
    }
}

TEST_CASE("measured grouped products: widths that leave tiles part empty cost what the kernels choose tiles by") {
    // The kernels' own formula (kernels/tiles.hpp), which the simulator has from the profile.
    const auto seconds = [](std::span<const moe::TileKind> kinds, const moe::TiledProduct& product) {
        double cycles = std::numeric_limits<double>::infinity();
        for (const moe::TileKind& kind : kinds) cycles = std::min(cycles, moe::tiled_cycles(kind, product, 66));
        return 6e-6 + cycles / 1.6e9;
    };
    const auto product = [](const std::string& key, double rows, double n, double k) {
        if (key.find("wgrad") != std::string::npos) return moe::TiledProduct{16, rows, n, k, 0.0};
        return key.find("dgrad") != std::string::npos ? moe::TiledProduct{16, rows, 0.0, k, n}
                                                      : moe::TiledProduct{16, rows, 0.0, n, k};
    };
    const auto check = [&](const std::string& key, std::span<const moe::TileKind> kinds) {
        CAPTURE(key);
        moe::machine::Hardware hardware = gpu();
        for (const moe::TileKind& k : kinds)
            hardware.product_tiles[key].push_back(
                {moe::tile_multiprocessors, k.down, k.across, k.depth, k.step_cycles, k.tile_cycles, k.swapped});
        std::vector<moe::machine::MeasuredCall> calls;
        for (const double rows : {512.0, 1024.0, 2048.0})
            for (const double n : {512.0, 1024.0, 1536.0, 2048.0})
                for (const double k : {512.0, 1024.0, 2048.0})
                    calls.push_back({32 * rows * n * k, seconds(kinds, product(key, rows, n, k)), {rows, n, k, 16}});
        std::sort(calls.begin(), calls.end(), [](const auto& a, const auto& b) { return a.work < b.work; });
        const moe::cost::MeasuredFamily family(hardware, key, calls);
        for (const double rows : {700.0, 1024.0})
            for (const double n : {640.0, 896.0, 1152.0})
                for (const double k : {640.0, 1408.0}) {
                    const double expected = seconds(kinds, product(key, rows, n, k));
                    CHECK(family.seconds(32 * rows * n * k, {rows, n, k, 16}) == nearly(expected).epsilon(1e-3));
                }
    };
    check("grouped_gemm.forward.bf16", moe::row_tiles);
    check("grouped_gemm.dgrad.bf16", moe::row_tiles);
    check("grouped_gemm.wgrad.bf16.to-f32", moe::gradient_tiles);
    check("grouped_gemm.wgrad.set.bf16.to-f32", moe::gradient_tiles);
    check("grouped_gemm.forward.fp8-blockwise", moe::scaled_tiles);
}

TEST_CASE("measured profiles replace physics, op kind by op kind") {
    moe::machine::Hardware measured = moe::machine::load_hardware("cpu-local");
    measured.measured["gemm.nn"] = {{1e6, 1e-3}, {1e9, 1.0}};
    const Priced model("", measured);
    CHECK(model.stack.name == "moe-plan");
    moe::program::Program program;
    program.tensors.assign(2, moe::program::Tensor{});
    moe::program::Op op;
    op.kind = moe::program::OpKind::gemm;
    op.in = {0, 1};
    op.flops = 1e9;
    op.attr = moe::program::GemmAttr{1000, 1000, 500};
    CHECK(model(op, program).device == nearly(1.0));
    CHECK(model(op, program).host == 0.0);
    program.tensors[0].dtype = moe::program::Dtype::bf16; // not measured: back to physics
    CHECK(model(op, program).device < 0.5);
}

TEST_CASE("a product that sets a gradient costs what the nearest form that was measured does") {
    moe::machine::Hardware measured = moe::machine::load_hardware("cpu-local");
    moe::program::Program program;
    program.tensors.assign(3, moe::program::Tensor{});
    program.tensors[0].dtype = program.tensors[1].dtype = moe::program::Dtype::bf16;
    moe::program::Op op;
    op.kind = moe::program::OpKind::gemm;
    op.phase = moe::program::Phase::wgrad;
    op.in = {0, 1}, op.out = {2};
    op.flops = 1e9;
    op.attr = moe::program::GemmAttr{.m = 1000, .n = 1000, .k = 500, .transpose_a = true};
    double seconds = 3.0;
    for (const char* key : {"gemm.tn+.bf16.to-f32", "gemm.tn.bf16.to-f32", "gemm.tn.bf16"}) {
        measured.measured[key] = {{1e9, seconds}};
        const Priced model("", measured);
        program.tensors[2].dtype = moe::program::Dtype::bf16;
        CHECK(model(op, program).device == nearly(seconds));
        program.tensors[2].dtype = moe::program::Dtype::f32;
        CHECK(model(op, program).device == nearly(std::max(seconds, 2.0)));
        seconds -= 1.0;
    }
}

TEST_CASE("measured collectives: groups of that size cost what was measured, others that over the formula's ratio") {
    moe::machine::Hardware measured = moe::machine::load_hardware("h200");
    measured.measured["all_gather.x2"] = {{1e6, 20e-6}, {1e9, 5e-3}};
    moe::program::Program program;
    moe::program::Tensor tensor;
    tensor.dtype = moe::program::Dtype::bf16;
    program.tensors.assign(2, tensor);
    moe::program::Op op;
    op.kind = moe::program::OpKind::all_gather;
    op.in = {0};
    op.bytes = 1e9;
    op.group = {moe::plan::Domain::dense, moe::plan::axis::data};
    const auto seconds = [&](const moe::machine::Hardware& hardware, int gpus) {
        return Priced("moe-plan", hardware, gpus)(op, program).device;
    };
    const moe::machine::Hardware datasheet = moe::machine::load_hardware("h200");
    CHECK(seconds(measured, 2) == nearly(5e-3));
    CHECK(seconds(measured, 4) / 5e-3 == nearly(seconds(datasheet, 4) / seconds(datasheet, 2)).epsilon(0.01));
    CHECK(seconds(measured, 16) == seconds(datasheet, 16)); // over two NVLink domains: the formula
    program.tensors[0].dtype = moe::program::Dtype::f32;    // bytes are bytes
    CHECK(seconds(measured, 2) == nearly(5e-3));
    measured.measured["all_gather.x4"] = {{1e6, 30e-6}, {1e9, 7e-3}};
    CHECK(seconds(measured, 4) == nearly(7e-3));
    CHECK(seconds(measured, 8) / 7e-3 == nearly(seconds(datasheet, 8) / seconds(datasheet, 4)).epsilon(0.01));
    op.kind = moe::program::OpKind::reduce_scatter; // not measured
    CHECK(seconds(measured, 2) == seconds(datasheet, 2));
}

TEST_CASE("measured dispatch: by what a call takes along and by the multiprocessors that it has") {
    moe::machine::Hardware measured = moe::machine::load_hardware("h200");
    const auto one = [](double seconds) {
        return std::vector<moe::machine::MeasuredCall>{{1e6, seconds, {128.0, 4096.0, 2.0}}};
    };
    measured.measured["dispatch_tokens.x2"] = one(1e-3);
    measured.measured["dispatch_tokens.values.x2"] = one(2e-3);
    measured.measured["dispatch_tokens.values.beside.x2"] = one(3e-3);
    measured.measured["combine_tokens.values.x2"] = one(4e-3);
    measured.measured["all_gather.x2"] = {{1e6, 5e-3}};
    measured.measured["all_gather.peers.x2"] = {{1e6, 6e-3}};
    Priced priced("moe-plan", measured, 2);
    moe::plan::Plan& plan = priced.plan;
    plan.ep = 2;
    plan.edp = 1;
    plan.dispatcher = moe::plan::Dispatcher::hybridep;
    moe::program::Program program;
    const auto tensor = [&](moe::program::Dtype dtype, std::int64_t rows, std::int64_t cols) {
        moe::program::Tensor t;
        t.dtype = dtype;
        t.rows = rows;
        t.cols = cols;
        program.tensors.push_back(t);
        return static_cast<moe::program::TensorId>(program.tensors.size() - 1);
    };
    const moe::program::TensorId x = tensor(moe::program::Dtype::bf16, 128, 2048),
                                 rows = tensor(moe::program::Dtype::bf16, 256, 2048),
                                 numbers = tensor(moe::program::Dtype::i32, 256, 1),
                                 values = tensor(moe::program::Dtype::f32, 256, 1);
    moe::program::Op op;
    op.kind = moe::program::OpKind::dispatch_tokens;
    op.stream = moe::program::Stream::expert;
    op.group = {moe::plan::Domain::expert, moe::plan::axis::expert};
    op.attr = moe::program::RowsAttr{2048, 256, 128, 2, 1, false};
    op.in = {x, numbers, numbers, values};
    op.out = {rows, values, numbers};
    op.bytes = 1e6;
    const auto cost = [&] { return priced(op, program); };
    const auto seconds = [&] { return cost().device; };
    CHECK(seconds() == nearly(2e-3));
    plan.ep_overlap = true; // few multiprocessors in merged slots, as many as ever in the others
    CHECK(cost().merged == nearly(3e-3));
    CHECK(seconds() == nearly(2e-3));
    plan.ep_overlap = false;
    CHECK(cost().merged == nearly(2e-3));
    std::get<moe::program::RowsAttr>(op.attr).beside = true; // a shared expert computes meanwhile
    CHECK(seconds() == nearly(3e-3));
    std::get<moe::program::RowsAttr>(op.attr).beside = false;
    op.in = {x, numbers, numbers, moe::program::no_tensor, numbers}; // the gradient's way: places are known
    CHECK(seconds() == nearly(1e-3));
    op.kind = moe::program::OpKind::combine_tokens;
    op.attr = moe::program::RowsAttr{2048, 256, 128, 2, 1, true};
    op.in = {rows, numbers, numbers, numbers, values};
    op.out = {x, rows, values};
    CHECK(seconds() == nearly(4e-3));

    moe::program::Op gather; // of counts, which go where the tokens go
    gather.kind = moe::program::OpKind::all_gather;
    gather.stream = moe::program::Stream::expert;
    gather.group = op.group;
    gather.in = {numbers};
    const auto of_bytes = [&](double bytes) {
        gather.bytes = bytes;
        return priced(gather, program).device;
    };
    CHECK(of_bytes(1024.0) == nearly(6e-3 * 1024.0 / 1e6));
    CHECK(of_bytes(1e6) == nearly(5e-3));
    plan.dispatcher = moe::plan::Dispatcher::alltoall;
    CHECK(of_bytes(1024.0) == nearly(5e-3 * 1024.0 / 1e6));
}

TEST_CASE("what a step adds: large products at the pace of the slowest GPU, communication with its wait") {
    moe::machine::Hardware measured = moe::machine::load_hardware("h200");
    const double peak = measured.peak_flops[static_cast<std::size_t>(moe::machine::Precision::bf16)];
    measured.measured["gemm.nn.bf16"] = {{0.8 * peak * 1e-3, 1e-3, {4096.0, 4096.0, 4096.0}}};
    measured.measured["gemm.nt.bf16"] = {{0.3 * peak * 1e-3, 1e-3, {4096.0, 4096.0, 4096.0}}};
    measured.measured["all_gather.x2"] = {{1e9, 5e-3}};
    measured.measured["large_products.x2"] = {{0.5, 0.55}};
    measured.measured["wait_in_step.x2"] = {{0.0, 2e-3}};
    Priced priced("moe-plan", measured, 2);
    moe::plan::Plan& plan = priced.plan;
    moe::program::Program program;
    moe::program::Tensor tensor;
    tensor.dtype = moe::program::Dtype::bf16;
    program.tensors.assign(3, tensor);
    moe::program::Op op;
    op.kind = moe::program::OpKind::gemm;
    op.in = {0, 1};
    op.out = {2};
    const auto seconds = [&] { return priced(op, program).device; };
    op.attr = moe::program::GemmAttr{4096, 4096, 4096};
    op.flops = 0.8 * peak * 1e-3;
    CHECK(seconds() == nearly(1.1e-3));
    plan.gpus = plan.dp = plan.edp = 1;
    CHECK(seconds() == nearly(1e-3));
    plan.gpus = plan.dp = plan.edp = 2;
    std::get<moe::program::GemmAttr>(op.attr).transpose_b = true; // far from the limit of power
    op.flops = 0.3 * peak * 1e-3;
    CHECK(seconds() == nearly(1e-3));
    op = {};
    op.kind = moe::program::OpKind::all_gather;
    op.in = {0};
    op.bytes = 1e9;
    op.group = {moe::plan::Domain::dense, moe::plan::axis::data};
    CHECK(seconds() == nearly(7e-3));
}
