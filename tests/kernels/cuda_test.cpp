// Runs the op tests on the CUDA kernels and prints one table of errors and times; skipped where there is no device.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "kernels/cuda/check.hpp"
#include "kernels/cuda/cuda_kernels.hpp"
#include "planner/program/communicators.hpp"
#include "tests/kernels/case.hpp"
#include "tests/kernels/cuda_alignment.hpp"
#include "tests/kernels/cuda_bandwidth.hpp"
#include "tests/kernels/cuda_host_copy.hpp"
#include "tests/kernels/cuda_ring.hpp"
#include "tests/kernels/cuda_staging.hpp"
#include "tests/kernels/cuda_timing.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <malloc.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iostream>
#include <optional>
#include <string_view>

namespace {

using namespace moe;
using namespace moe::test;

constexpr int skipped_status = 77; // meson's and automake's exit status of a skipped test

// One line of the report: a worst error beside the tolerance it is held to, or a time beside the floor that the
// device's memory and arithmetic set, or beside the plain kernel of the same product. Only the last times carry a bar.
struct Line {
    std::string name, unit;
    double ours = 0.0, reference = 0.0;
    std::optional<double> bar; // of the ratio
    double ratio() const { return ours == 0.0 ? 0.0 : ours / reference; }
    bool ok() const { return !bar || ratio() <= *bar; }
};

// The case nearest to its tolerance for each op and tolerance.
std::vector<Line> error_lines() {
    std::vector<Line> lines;
    for (const Checked& c : all_checked()) {
        const std::string op = c.name.substr(0, c.name.find(' '));
        const std::string name = fmt::format("{} (tolerance {:.0e})", op, c.tolerance);
        const Line line{name, "relative error", c.error, c.tolerance, 1.0};
        const auto at = std::find_if(lines.begin(), lines.end(), [&](const Line& l) { return l.name == name; });
        if (at == lines.end()) {
            lines.push_back(line);
        } else if (!(line.ratio() <= at->ratio())) {
            *at = line;
        }
    }
    return lines;
}

struct Device {
    std::string name;
    double bytes_per_second = 0.0, f32_flops = 0.0, bf16_flops = 0.0;
};

// Peaks from the device's own clocks. An SM of compute capability 9.0 does 128 FP32 multiply-adds and 2048 dense BF16
// ones on its tensor cores per clock (NVIDIA H100 white paper, tables of SM resources: 66.9 and 989.4 TFLOPS with 132
// SMs at 1.98 and 1.83 GHz).
Device describe_device() {
    int device = 0, clock_khz = 0, memory_khz = 0, bus_bits = 0, multiprocessors = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&memory_khz, cudaDevAttrMemoryClockRate, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&bus_bits, cudaDevAttrGlobalMemoryBusWidth, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    cudaDeviceProp properties{};
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    const double clock = 1e3 * clock_khz * multiprocessors;
    return {properties.name, 2.0 * 1e3 * memory_khz * bus_bits / 8.0, clock * 256.0, clock * 4096.0};
}

std::vector<Line> time_lines(const Device& device) {
    std::vector<Line> lines;
    for (const auto family :
         {gemm_benchmarks, attention_benchmarks, state_benchmarks, norm_benchmarks, rope_benchmarks,
          activation_benchmarks, router_benchmarks, sinkhorn_benchmarks, permute_benchmarks, quantize_benchmarks,
          quantize_columns_benchmarks, round_benchmarks, loss_benchmarks, optimizer_benchmarks}) {
        for (const Case& c : family()) {
            const bool bf16 = c.name.find("bf16*bf16") != std::string::npos || c.name.find("f32") == std::string::npos;
            const double peak = bf16 ? device.bf16_flops : device.f32_flops;
            const double floor = std::max(c.bytes / device.bytes_per_second, c.flops / peak);
            const double ours = device_seconds(c.call) * 1e6;
            lines.push_back({c.name, "us", ours, floor * 1e6, std::nullopt});
            if (c.name.rfind("gemm ", 0) != 0 && c.name.rfind("grouped_gemm ", 0) != 0) continue;
            staged_plain() = true;
            lines.push_back({c.name + ": beside the plain kernel", "us", ours, device_seconds(c.call) * 1e6, 1.02});
            staged_plain() = false;
        }
    }
    return lines;
}

// The fused loss and its gradient beside the three passes over the logits that it stands for.
void add_cross_entropy(const std::vector<Moved>& all, std::vector<Line>& lines) {
    constexpr double bar = 1.05; // of their time; the fused one needs no second buffer of logits
    constexpr std::string_view fused = "cross_entropy ", pieces[] = {"ce_max ", "ce_sum ", "ce_grad "};
    for (const Moved& m : all) {
        if (m.name.rfind(fused, 0) != 0) continue;
        const std::string sizes = m.name.substr(fused.size());
        double seconds = 0.0;
        for (const Moved& piece : all)
            for (const std::string_view op : pieces)
                if (piece.name == std::string(op) + sizes) seconds += piece.seconds;
        lines.push_back({m.name + ": beside its pieces", "us", m.seconds * 1e6, seconds * 1e6, bar});
    }
}

// Kernels that only move bytes, held to 0.85 of what a copy of as many bytes moves in the same run.
std::vector<Line> bandwidth_lines(const std::string& part) {
    constexpr double bar = 1.0 / 0.85; // of the time
    const double large = 4.0 * 1024 * 1024 * 1024, copied = 1e-9 * large / copy_seconds(large);
    std::vector<Line> lines{{"copy of 4 GiB, GB/s read and written", "GB/s", copied, copied, std::nullopt}};
    const std::vector<Moved> all = bandwidth_of_kernels(part);
    for (const Moved& m : all)
        lines.push_back({m.name + ": beside a copy", "us", m.seconds * 1e6, m.copy_seconds * 1e6, bar});
    if (part.empty()) add_cross_entropy(all, lines);
    return lines;
}

std::vector<Line> ring_lines() {
    constexpr double bar = 1.25; // two steps' results are added, which the causal call has not to do
    std::vector<Line> lines;
    for (const RingStep& r : ring_steps())
        lines.push_back({r.name + ": beside causal", "us", r.seconds * 1e6, r.causal_seconds * 1e6, bar});
    return lines;
}

// Within a ninth of the copy engine's time: prices of offload take what the link gives.
std::vector<Line> host_copy_lines() {
    constexpr double bar = 1.0 / 0.9;
    std::vector<Line> lines;
    for (const HostCopy& c : host_copies())
        lines.push_back({c.name + ": beside the copy engine", "us", c.seconds * 1e6, c.engine_seconds * 1e6,
                         c.blocks == program::host_copy_blocks ? std::optional(bar) : std::nullopt});
    return lines;
}

// No bar: plans avoid such widths, and prices know them (gemm.unaligned in profiles/coefficients.json).
std::vector<Line> alignment_lines() {
    std::vector<Line> lines;
    for (const AlignedProduct& p : aligned_products())
        lines.push_back({p.name + ": beside whole 16 bytes", "us", p.seconds * 1e6, p.whole_seconds * 1e6, {}});
    return lines;
}

void print(const std::vector<Line>& lines) {
    fmt::print("\n{:<78} {:>11} {:>11} {:>8} {:>5}  {}\n", "name", "ours", "reference", "ratio", "bar", "ok");
    for (const Line& l : lines) {
        fmt::print("{:<78} {:>11.4g} {:>11.4g} {:>8.3f} {:>5}  {}\n", l.name, l.ours, l.reference, l.ratio(),
                   l.bar ? fmt::format("{:.3g}", *l.bar) : "-", l.ok() ? "yes" : "NO");
    }
}

bool write(const std::string& path, const Device& device, const std::vector<Line>& lines, bool passed) {
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const Line& l : lines) {
        rows.push_back({{"name", l.name}, {"unit", l.unit}, {"ours", l.ours}, {"reference", l.reference}});
        rows.back()["ratio"] = l.ratio();
        rows.back()["bar"] = l.bar ? nlohmann::ordered_json(*l.bar) : nlohmann::ordered_json();
        rows.back()["ok"] = l.ok();
    }
    std::ofstream file(path);
    file << nlohmann::ordered_json{{"device", device.name},
                                   {"gemm", cuda_gemm_library()},
                                   {"attention", cuda_attention_library()},
                                   {"cases", all_checked().size()},
                                   {"passed", passed},
                                   {"rows", rows}}
                .dump(1)
         << '\n';
    file.close();
    return !file.fail();
}

// These cases, which libraries and kernels of one architecture take, are also run on the plain kernels behind them.
constexpr const char* plain_cases = "*gemm:*,attention*";

// Takes "--out FILE", "--bench", "--bandwidth" (of the memory-bound kernels alone; "--bandwidth=PART": of those with
// that in their names), "--ring" (of ring attention's steps alone), "--host-copies" (of those to the host and back
// alone), "--alignment" (of products by the addresses of their rows) and "--plain" (what has plain kernels, on those)
// out of the arguments; the rest is doctest's. Who chooses cases gets those alone, on the kernels that run or on the
// plain ones.
struct Options {
    std::string out, part;
    bool bench = false, bandwidth = false, ring = false, alignment = false, host_copies = false, plain = false,
         chosen = false;
    std::vector<char*> rest;

    Options(int argc, char** argv) {
        for (int i = 0; i < argc; ++i) {
            const std::string_view argument = argv[i];
            if (argument == "--out" && i + 1 < argc) {
                out = argv[++i];
            } else if (argument == "--bench") {
                bench = bandwidth = ring = alignment = host_copies = true;
            } else if (argument == "--bandwidth") {
                bandwidth = true;
            } else if (argument.rfind("--bandwidth=", 0) == 0) {
                bandwidth = true;
                part = argument.substr(argument.find('=') + 1);
            } else if (argument == "--ring") {
                ring = true;
            } else if (argument == "--host-copies") {
                host_copies = true;
            } else if (argument == "--alignment") {
                alignment = true;
            } else if (argument == "--plain") {
                plain = true;
            } else {
                chosen = chosen || argument.rfind("-tc=", 0) == 0 || argument.rfind("--test-case=", 0) == 0;
                rest.push_back(argv[i]);
            }
        }
    }
};

int report(const Options& options, bool passed) {
    const Device device = describe_device();
    std::vector<Line> lines = error_lines();
    const auto append = [&](const std::vector<Line>& times) { lines.insert(lines.end(), times.begin(), times.end()); };
    if (options.bench) append(time_lines(device));
    if (options.ring) append(ring_lines());
    if (options.alignment) append(alignment_lines());
    if (options.host_copies) append(host_copy_lines());
    if (options.bandwidth) append(bandwidth_lines(options.part));
    print(lines);
    if (!options.out.empty() && !write(options.out, device, lines, passed)) {
        fmt::print(stderr, "cannot write {}\n", options.out);
        return 1;
    }
    fmt::print("\n{}, {}, {}: {} cases checked, {}\n", device.name, cuda_gemm_library(), cuda_attention_library(),
               all_checked().size(), passed ? "all passed" : "FAILED");
    return passed ? 0 : 1;
}

} // namespace

const Kernels& moe::test::table() { return staged_kernels(); }

TEST_CASE("the CUDA table is complete and names itself") {
    const Kernels& k = *cuda_kernels();
    CHECK(std::string(k.name) == "cuda");
    for (const Kernels* t : {&k, &staged_kernels()}) {
        const auto* entries = static_cast<const unsigned char*>(static_cast<const void*>(t));
        const unsigned char none[sizeof(void*)] = {};
        for (std::size_t at = 0; at < sizeof(Kernels); at += sizeof(void*)) {
            INFO("entry ", at / sizeof(void*));
            CHECK(std::memcmp(entries + at, none, sizeof none) != 0);
        }
    }
}

TEST_CASE("sums that many blocks share give the same bits every time") {
    const auto& k = table();
    Random random("repeat");
    const std::int64_t rows = 3000, cols = 70;
    const Tensor x = random.tensor(Type::bf16, rows * cols), dy = random.tensor(Type::bf16, rows * cols);
    const Tensor w = random.tensor(Type::f32, cols);
    const Index ids = random.indices(rows, 40);
    Tensor y(Type::f32, rows * cols), rstd(Type::f32, rows), dx(Type::f32, rows * cols);
    k.rmsnorm(x.src(), w.src(), y.dst(), rstd.f32(), rows, cols, 0, 1e-6, nullptr);
    std::vector<Vec> seen;
    for (int repeat = 0; repeat < 3; ++repeat) {
        Tensor dw(Type::f32, Vec(static_cast<std::size_t>(cols), 0.0)), squares(Type::f32, Vec{0.0});
        Tensor dtable(Type::f32, Vec(static_cast<std::size_t>(40 * cols), 0.0));
        k.rmsnorm_grad(dy.src(), x.src(), w.src(), rstd.f32(), {}, dx.dst(), dw.f32(), rows, cols, 0, nullptr);
        k.embedding_grad(ids.data(), dy.src(), dtable.f32(), rows, cols, 0, 40, nullptr);
        k.sum_squares(x.src(), squares.f32(), rows * cols, nullptr);
        Vec all = dw.values();
        for (const Vec& part : {dtable.values(), squares.values()}) all.insert(all.end(), part.begin(), part.end());
        seen.push_back(all);
    }
    CHECK(seen[0] == seen[1]);
    CHECK(seen[0] == seen[2]);
}

TEST_CASE("deterministic gradients of attention have the same bits every time") {
    Random random("repeat attention");
    AttentionShape s;
    s.batch = 2, s.seq_q = s.seq_k = 700, s.heads = 4, s.kv_heads = 2, s.qk_dim = s.v_dim = 64, s.scale = 0.125;
    s.q_stride = 4 * 64, s.k_stride = s.v_stride = 2 * 64, s.deterministic = true;
    const std::int64_t rows = s.batch * s.seq_q;
    const Tensor q = random.tensor(Type::bf16, rows * s.q_stride), k = random.tensor(Type::bf16, rows * s.k_stride),
                 v = random.tensor(Type::bf16, rows * s.v_stride), dout = random.tensor(Type::bf16, rows * s.q_stride);
    Tensor o(Type::bf16, rows * s.q_stride), lse(Type::f32, s.heads * rows);
    table().attention(s, q.src(), k.src(), v.src(), {}, o.dst(), lse.f32(), nullptr);
    std::vector<Vec> seen;
    for (int repeat = 0; repeat < 3; ++repeat) {
        Tensor dq(Type::bf16, rows * s.q_stride), dk(Type::bf16, rows * s.k_stride), dv(Type::bf16, rows * s.v_stride);
        table().attention_grad(s, dout.src(), q.src(), k.src(), v.src(), o.src(), lse.f32(), {}, dq.dst(), dk.dst(),
                               dv.dst(), nullptr, nullptr);
        Vec all = dq.values();
        for (const Vec& part : {dk.values(), dv.values()}) all.insert(all.end(), part.begin(), part.end());
        seen.push_back(all);
    }
    CHECK(seen[0] == seen[1]);
    CHECK(seen[0] == seen[2]);
}

TEST_CASE("grouped products give the same bits every time, and the same result on fewer multiprocessors") {
    Random random("repeat grouped products");
    GroupedShape shape{GroupedProduct::wgrad, 3, 392, 264, 600};
    const Tensor a = random.tensor(Type::bf16, shape.capacity * shape.n);
    const Tensor b = random.tensor(Type::bf16, shape.capacity * shape.k);
    const Vec before = random.normal(shape.groups * shape.n * shape.k);
    const Index counts{333, 1, 250};
    std::vector<Vec> seen;
    for (int repeat = 0; repeat < 3; ++repeat) {
        Tensor c(Type::f32, before);
        table().grouped_gemm(shape, a.src(), b.src(), counts.data(), c.dst(), nullptr);
        seen.push_back(c.values());
    }
    CHECK(seen[0] == seen[1]);
    CHECK(seen[0] == seen[2]);
    for (const int reserved_sms : {15, 130}) { // of an H200's 132
        Tensor c(Type::f32, before);
        shape.reserved_sms = reserved_sms;
        table().grouped_gemm(shape, a.src(), b.src(), counts.data(), c.dst(), nullptr);
        CHECK(relative_error(c, seen[0]) <= f32_tolerance);
    }
}

namespace {

int tested(int argc, char** argv) {
    // A kernel that is loaded when it is first captured may need calls that a capture forbids. Who runs a case under
    // compute-sanitizer, which rewrites every kernel that is loaded, may ask for LAZY.
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    // Buffers of megabytes come and go; asking the system for each anew takes longer than the references.
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    std::cout << std::unitbuf; // what was said before a time limit ends this is seen
    std::string why;
    if (!cuda_supported(why)) {
        fmt::print("skipped: {}\n", why);
        return skipped_status;
    }
    const Options options(argc, argv);
    doctest::Context context(static_cast<int>(options.rest.size()), options.rest.data());
    if (options.plain && !options.chosen) context.addFilter("test-case", plain_cases);
    staged_plain() = options.plain;
    bool passed = context.run() == 0;
    if (!context.shouldExit() && !options.chosen && !options.plain) {
        staged_plain() = true;
        doctest::Context again;
        again.addFilter("test-case", plain_cases);
        passed = again.run() == 0 && passed;
    }
    staged_plain() = false;
    return context.shouldExit() ? (passed ? 0 : 1) : report(options, passed);
}

} // namespace

int main(int argc, char** argv) {
    try {
        return tested(argc, argv);
    } catch (const std::exception& error) {
        fmt::print(stderr, "kernels_cuda_test: {}\n", error.what());
        return 1;
    }
}
