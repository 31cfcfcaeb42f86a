// The verb calibrate: measures this machine and writes a hardware profile that search and replay price with.
#include "engine/backends/backends.hpp"
#include "engine/base/run_in_subprocess.hpp"
#include "engine/bench/collective_bench.hpp"
#include "engine/bench/microbench.hpp"
#include "engine/ops/backend.hpp"
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "planner/machine/gpu_properties.hpp"
#include "planner/program/measured.hpp"
#include "planner/program/op.hpp"
#include "tools/calibrate/merged_cards.hpp"
#include "tools/calibrate/overlap_calibration.hpp"
#include "tools/calibrate/profile_update.hpp"
#include "tools/print/console.hpp"
#include "tools/print/table.hpp"
#include "tools/verbs/verbs.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <fstream>

namespace moe::tools {

namespace {

// The processor as the kernel names it; other architectures than x86 have no such line.
std::string processor_name() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);)
        if (line.rfind("model name", 0) == 0 && line.find(": ") != std::string::npos)
            return line.substr(line.find(": ") + 2);
    return "processor without a name in /proc/cpuinfo";
}

std::string today() {
    const std::time_t now = std::time(nullptr);
    std::tm utc{};
    ::gmtime_r(&now, &utc);
    return fmt::format("{:04}-{:02}-{:02}", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday);
}

// Peaks, links and capacity stay those of the datasheet, or follow from the GPU's properties where there is none: one
// GPU says nothing of the fabric. The stack finds what it states for the datasheet's GPU by the name without
// "-measured".
machine::Hardware measured_gpu(const CalibrateOptions& options, const machine::GpuProperties& gpu,
                               const bench::Microbench& bench) {
    machine::Hardware hardware = machine::starting_profile(gpu);
    hardware.name += "-measured";
    hardware.default_stack = "moe-plan";
    hardware.context_bytes = bench.context_bytes;
    hardware.measured = bench.measured;
    hardware.product_tiles = bench.product_tiles;
    hardware.measured_by =
        fmt::format("{}, {}, moe-plan calibrate --backend {}; launch {:.2f} us, stamp {:.2f} us (taken off)", today(),
                    bench.device, options.backend, 1e6 * bench.launch_seconds, 1e6 * bench.event_overhead);
    hardware.source = "costs by op kind and context_bytes measured on this GPU; the rest: " + hardware.source;
    return hardware;
}

// The costs of one GPU by itself are measured by one rank, or were before.
machine::Hardware measured_one_gpu(const CalibrateOptions& options, bench::MicrobenchOptions how,
                                   bench::Microbench& bench) {
    if (!options.from.empty()) {
        machine::Hardware known = machine::load_hardware(options.from);
        if (known.measured.empty()) refuse("--from {}: holds no measurements: leave it out", options.from);
        return known;
    }
    how.one_rank = how.in_subprocess = true;
    how.seconds = 240.0; // every process starts the driver and its libraries anew
    const machine::GpuProperties gpu = machine::gpu_properties_from_json(engine::run_in_subprocess(
        [&options] { return machine::to_json(backends::backend_named(options.backend).properties()); }));
    bench = bench::run_microbench(how);
    return measured_gpu(options, gpu, bench);
}

// Communication among 2, 4, .. GPUs.
void measure_between(machine::Hardware& hardware, const CalibrateOptions& options, int gpus, bench::Microbench& bench) {
    if (gpus < 2) return;
    machine::CommunicatorBytes& taken = hardware.communicators = {};
    for (int ranks = 2; ranks <= gpus; ranks *= 2) {
        const bench::CollectiveBench between =
            bench::run_collective_bench(backends::backend_named(options.backend), ranks);
        for (const auto& [key, calls] : between.measured) hardware.measured[key] = bench.measured[key] = calls;
        taken.collective.insert(between.taken.collective.begin(), between.taken.collective.end());
        taken.pairwise.insert(between.taken.pairwise.begin(), between.taken.pairwise.end());
        bench.device = between.device;
        if (ranks > 2) continue;
        // The first communicators of a process bring kernels along, others do not, and messages are always between two.
        taken.first = between.taken.first;
        taken.first_pairwise = between.taken.first_pairwise;
        taken.messages = between.taken.messages;
    }
    for (int ranks = 2; ranks <= gpus; ranks *= 2) {
        measure_in_step(hardware, options.backend, ranks);
        for (const char* key : program::in_step_keys)
            bench.measured[program::group_key(key, ranks)] = hardware.measured[program::group_key(key, ranks)];
    }
    hardware.measured_by += fmt::format("; {}, {}, moe-plan calibrate --backend {} --gpus {}", today(), bench.device,
                                        options.backend, gpus);
}

// The number of GPUs that take part; 0: the cores do.
int gpus_of(const CalibrateOptions& options) {
    const ops::Backend& backend = backends::backend_named(options.backend);
    if (backend.devices == nullptr) {
        if (options.gpus != 0 || !options.from.empty())
            refuse("calibrate: {} is for GPUs: use --backend cuda", options.gpus != 0 ? "--gpus" : "--from");
        return 0;
    }
    const int here = backend.devices();
    if (options.gpus < 0 || options.gpus > here) refuse("--gpus {}: this machine has {}", options.gpus, here);
    const int gpus = options.gpus == 0 ? here : options.gpus;
    if (gpus == 1 && !options.from.empty())
        refuse("--from {}: with one GPU there is nothing more to measure", options.from);
    return gpus;
}

machine::Hardware measured_cores(const CalibrateOptions& options, const bench::Microbench& bench) {
    machine::Hardware hardware = machine::load_hardware("cpu-local");
    hardware.name = std::filesystem::path(options.out).stem().string();
    hardware.peak_flops[static_cast<std::size_t>(machine::Precision::fp32)] = bench.fp32_flops;
    hardware.peak_flops[static_cast<std::size_t>(machine::Precision::bf16)] = bench.bf16_flops;
    hardware.peak_flops[static_cast<std::size_t>(machine::Precision::fp8_blockwise)] = bench.fp8_flops;
    hardware.memory_bandwidth = bench.memory_bandwidth;
    hardware.measured = bench.measured;
    hardware.measured_by = fmt::format("{}, {} ({}), moe-plan calibrate --backend {}", today(), processor_name(),
                                       counted(hardware.cores, "core"), options.backend);
    hardware.source = "rates of one core and costs by op kind measured on this machine; links are those of cpu-local, "
                      "which only op kinds without a measurement fall back to";
    return hardware;
}

// A table of the calls by family: how many there are, and the ends of them.
Table calls_table(const std::map<std::string, std::vector<machine::MeasuredCall>>& measured) {
    Table table({"<op kind", "calls", "smallest", "largest", "G/s at largest"});
    for (const auto& [kind, calls] : measured) {
        if (calls.empty()) continue;
        const machine::MeasuredCall& largest = calls.back();
        table.add({kind, count_text(static_cast<double>(calls.size())), seconds_text(calls.front().seconds),
                   seconds_text(largest.seconds),
                   largest.seconds > 0.0 ? fmt::format("{:.2f}", largest.work / largest.seconds / 1e9) : "-"});
    }
    return table;
}

// The measurement in figures: so many calls of so many op kinds.
std::string calls_text(const std::map<std::string, std::vector<machine::MeasuredCall>>& measured) {
    std::size_t calls = 0;
    for (const auto& [kind, list] : measured) calls += list.size();
    return fmt::format("{} of {}", counted(calls, "call"), counted(measured.size(), "op kind"));
}

void print_next(Console& console, const CalibrateOptions& options) {
    if (!console.verbose()) console.note("Each op kind is in the profile, and printed with --verbose");
    console.note("Next: moe-plan search --hardware {} ...", options.out);
}

void feed_back(const CalibrateOptions& options) {
    if (options.gpus != 0) refuse("--gpus {}: --runs measures nothing now: leave it out", options.gpus);
    Feedback fed = fed_back(options.runs, options.from);
    fed.hardware.measured_by +=
        fmt::format("; {}, {}, moe-plan calibrate --runs", today(), counted(options.runs.size(), "run"));
    const std::string profile = machine::to_json(fed.hardware);
    write_file(options.out, profile);
    if (options.json) return print(profile);
    Console console(options);
    console.say("{}: {} of {} joined, {}", options.out, counted(fed.ops, "op"), counted(options.runs.size(), "run"),
                calls_text(fed.measured));
    if (console.verbose()) {
        console.say("{}", fed.hardware.measured_by);
        console.table(calls_table(fed.measured));
    }
    print_next(console, options);
}

// The least and the largest factor of a card over the families that it shares, as what it takes longer.
std::string span_text(const machine::MeasuredCard& card) {
    std::vector<double> factors;
    for (const auto& [family, factor] : card.factors) factors.push_back(factor);
    std::sort(factors.begin(), factors.end());
    const auto longer = [&factors](double share) {
        return fmt::format(
            "{:+.1f} %",
            100.0 * (factors[static_cast<std::size_t>(share * static_cast<double>(factors.size() - 1))] - 1.0));
    };
    return fmt::format("{} in the middle of its op kinds, {} to {} in most", longer(0.5), longer(0.1), longer(0.9));
}

void merge(const CalibrateOptions& options) {
    for (const auto& [said, name] :
         {std::pair{options.gpus != 0, "--gpus"}, {!options.from.empty(), "--from"}, {!options.runs.empty(), "--runs"}})
        if (said) refuse("--merge: measures nothing: leave {} out", name);
    machine::Hardware kind = merged_cards(options.merge);
    kind.measured_by = fmt::format("{}, the mean of {} cards, moe-plan calibrate --merge", today(), kind.cards.size());
    const std::string profile = machine::to_json(kind);
    write_file(options.out, profile);
    if (options.json) return print(profile);
    Console console(options);
    console.say("{}: {} of {} cards", options.out, calls_text(kind.measured), kind.cards.size());
    for (std::size_t card = 0; card < kind.cards.size(); ++card)
        console.say("{}: {}", options.merge[card], span_text(kind.cards[card]));
    if (console.verbose()) console.table(calls_table(kind.measured));
    print_next(console, options);
}

void print_communicators(Console& console, const machine::CommunicatorBytes& taken) {
    for (const auto& [members, bytes] : taken.collective)
        console.say("A communicator of {} takes {:.0f} MiB of a GPU, {:.0f} where members send to each other", members,
                    bytes / (1 << 20), machine::bytes_among(taken.pairwise, members) / (1 << 20));
    console.say("One for messages takes {:.0f} MiB, the first of all {:.0f} more, the first that sends {:.0f} more",
                taken.messages / (1 << 20), taken.first / (1 << 20), taken.first_pairwise / (1 << 20));
}

// One line, and with --verbose everything that was measured.
void print_profile(Console& console, const machine::Hardware& hardware, const bench::Microbench& bench,
                   const std::string& out) {
    std::string rates;
    if (bench.fp32_flops > 0.0)
        rates = fmt::format("{:.1f} GFLOP/s fp32, {:.1f} bf16, {:.1f} GB/s; ", bench.fp32_flops / 1e9,
                            bench.bf16_flops / 1e9, bench.memory_bandwidth / 1e9);
    const std::string machine =
        hardware.cpu ? counted(hardware.cores, "core") + ", each" : (bench.device.empty() ? "GPUs" : bench.device);
    console.say("{}: {} {}{}", out, machine, rates, calls_text(bench.measured));
    if (!console.verbose()) return;
    console.say("{}", hardware.measured_by);
    console.say("{:.1f} GiB of memory", gib(hardware.memory_bytes));
    if (hardware.communicators.first > 0.0) print_communicators(console, hardware.communicators);
    console.table(calls_table(bench.measured));
}

} // namespace

void calibrate_verb(const CalibrateOptions& options) {
    if (!options.anchors.empty() || !options.stack.empty()) return calibrate_anchors(options);
    if (!options.merge.empty()) return merge(options);
    if (!options.runs.empty()) return feed_back(options);
    // Another process counts the GPUs, because this one must not have begun to use a GPU when its trainings are
    // (engine/base/run_in_subprocess.hpp).
    const int gpus = parse_json<nlohmann::json>(
                         engine::run_in_subprocess([&] { return std::to_string(gpus_of(options)); }), "number of GPUs")
                         .get<int>();
    Console console(options);
    bench::MicrobenchOptions how;
    how.backend = options.backend;
    how.progress = [&console](const std::string& line) { console.progress(line); };
    bench::Microbench bench;
    machine::Hardware hardware;
    if (gpus > 0) {
        hardware = measured_one_gpu(options, how, bench);
        measure_between(hardware, options, gpus, bench);
    } else {
        bench = bench::run_microbench(how);
        hardware = measured_cores(options, bench);
    }
    const std::string profile = machine::to_json(hardware);
    write_file(options.out, profile);
    if (options.json) return print(profile);
    print_profile(console, hardware, bench, options.out);
    print_next(console, options);
}

} // namespace moe::tools
