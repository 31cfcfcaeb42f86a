// Hardware profiles: the shipped ones load and survive a round trip; bad ones are refused.
#include "planner/base/files.hpp"
#include "planner/base/profile.hpp"
#include "planner/machine/hardware.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/support/changed.hpp"
#include "tests/support/folder.hpp"

#include <doctest/doctest.h>

#include <string>

namespace {

std::string fault(const std::string& text) {
    return fault_of([&] { moe::machine::hardware_from_json(text, "h.json"); });
}

std::string gpu(const std::string& more) {
    return changed(
        R"({"name": "g", "sm_count": 100, "peak_flops": {"bf16": 1e15}, "memory_bytes": 8e10, "memory_bandwidth": 3e12,
        "nvlink_domain": 8, "nvlink": {"bandwidth": 4.5e11, "latency": 2e-6}})",
        more);
}

std::string communicators(const std::string& collective) {
    return gpu(R"("communicator_bytes": {"first": 3, "collective": )" + collective +
               R"(, "pairwise": 2, "messages": 1})");
}

double peak(const moe::machine::Hardware& hardware, moe::machine::Precision precision) {
    return hardware.peak_flops[static_cast<std::size_t>(precision)];
}

} // namespace

TEST_CASE("every shipped GPU loads with sources and survives a round trip") {
    for (const std::string& name : moe::profile_names("hardware")) {
        CAPTURE(name);
        const moe::machine::Hardware hardware = moe::machine::load_hardware(name);
        CHECK(hardware.name == name);
        if (hardware.cpu || !hardware.measured.empty()) continue;
        CHECK(hardware.source.size() > 100);
        CHECK(hardware.source.find("ompute capability") != std::string::npos);
        CHECK(hardware.vendor == "NVIDIA");
        // What the tensor cores can scale came with 8.9 (by tensors), 9.0 (by blocks) and 10.0 (MXFP8, NVFP4).
        const double capability = hardware.compute_capability;
        const auto computes = [&](moe::machine::Precision p) { return peak(hardware, p) > 0.0; };
        CHECK(computes(moe::machine::Precision::fp8_tensor) == (capability >= 8.9));
        if (computes(moe::machine::Precision::fp8_blockwise)) CHECK(capability >= 9.0);
        CHECK(computes(moe::machine::Precision::mxfp8) == (capability >= 10.0));
        CHECK(computes(moe::machine::Precision::nvfp4) == (capability >= 10.0));
        if (capability >= 8.9)
            CHECK(peak(hardware, moe::machine::Precision::fp8_tensor) >
                  1.9 * peak(hardware, moe::machine::Precision::bf16));
        // A node without NVLink among all of its GPUs has PCIe between them.
        CHECK((hardware.pcie.bandwidth > 0.0) == (hardware.gpus_per_node > hardware.nvlink_domain));
        CHECK(hardware.context_bytes > 0.0);
        const moe::machine::Hardware again = moe::machine::hardware_from_json(moe::machine::to_json(hardware), "again");
        CHECK(moe::machine::to_json(again) == moe::machine::to_json(hardware));
        CHECK(again.peak_flops == hardware.peak_flops);
        CHECK(again.memory_bytes == hardware.memory_bytes);
    }
}

TEST_CASE("figures of the profiles") {
    const moe::machine::Hardware gb200 = moe::machine::load_hardware("gb200-nvl72");
    CHECK(peak(gb200, moe::machine::Precision::bf16) == 2450e12);
    CHECK(peak(gb200, moe::machine::Precision::mxfp8) == 4900e12);
    CHECK(gb200.memory_bytes == 189471.0 * 1048576.0);
    CHECK(gb200.nvlink_domain == 72);
    CHECK(gb200.nvlink_domain_used == 64);
    CHECK(gb200.nic.bandwidth == 50e9);
    const moe::machine::Hardware h100 = moe::machine::load_hardware("h100");
    CHECK(h100.memory_bytes == 81559.0 * 1048576.0);
    CHECK(h100.nvlink.bandwidth == 450e9);
    CHECK(moe::machine::load_hardware("h800").nvlink.bandwidth == 200e9);
}

// The profiles say what nvidia-smi reports, so that plans are held to one measure on every machine.
TEST_CASE("memory of the profiles is what nvidia-smi reports in public logs") {
    for (const auto& [name, mib] : {std::pair{"h100", 81559.0},
                                    {"h800", 81559.0},
                                    {"h200", 143771.0},
                                    {"b200", 183359.0},
                                    {"b300", 275040.0},
                                    {"gb200-nvl72", 189471.0},
                                    {"gb300-nvl72", 284208.0}}) {
        CAPTURE(name);
        CHECK(moe::machine::load_hardware(name).memory_bytes == mib * 1048576.0);
    }
}

TEST_CASE("the local CPU takes cores and memory from the machine, and a plan keeps what it took") {
    const moe::machine::Hardware cpu = moe::machine::load_hardware("cpu-local");
    CHECK(cpu.cpu);
    CHECK(cpu.cores >= 1);
    CHECK(cpu.memory_bytes > 1e8);
    CHECK(cpu.default_stack == "moe-plan");
    CHECK(peak(cpu, moe::machine::Precision::fp32) > 0.0);
    CHECK(peak(cpu, moe::machine::Precision::fp8_tensor) == 0.0);
    moe::machine::Hardware other = cpu;
    other.cores = 8192;
    other.memory_bytes = 12345e6;
    other.measured["gemm"] = {{1e6, 1e-4}, {1e9, 0.05}};
    other.measured["grouped_gemm.forward"] = {{2e6, 1e-4, {100.0, 100.0, 100.0, 1.0}}};
    other.sm_count = 100;
    other.product_tiles["grouped_gemm.forward"] = {{2, 128, 384, 64, 500.5, 0.0, true}};
    other.measured_by = "2026-01-01, test";
    const moe::machine::Hardware again = moe::machine::hardware_from_json(moe::machine::to_json(other), "again");
    CHECK(again.cores == 8192);
    CHECK(again.memory_bytes == 12345e6);
    REQUIRE(again.measured.at("gemm").size() == 2);
    CHECK(again.measured.at("gemm")[1].work == 1e9);
    CHECK(again.measured.at("gemm")[1].seconds == 0.05);
    REQUIRE(again.measured.at("grouped_gemm.forward").size() == 1);
    CHECK(again.measured.at("grouped_gemm.forward")[0].sides == std::vector<double>{100.0, 100.0, 100.0, 1.0});
    CHECK(again.product_tiles == other.product_tiles);
    CHECK(again.measured_by == other.measured_by);
}

TEST_CASE("measured calls are sorted by work") {
    const moe::machine::Hardware hardware =
        moe::machine::hardware_from_json(gpu(R"("measured": {"gemm": [[3, 0.3], [1, 0.1], [2, 0.2]]})"), "h.json");
    CHECK(hardware.measured.at("gemm")[0].work == 1.0);
    CHECK(hardware.measured.at("gemm")[2].seconds == 0.3);
}

TEST_CASE("a communicator takes what one of the next larger number of members was measured to take") {
    const moe::machine::Hardware hardware =
        moe::machine::hardware_from_json(communicators("[[4, 9], [2, 5]]"), "h.json");
    const moe::machine::CommunicatorBytes& bytes = hardware.communicators;
    CHECK(moe::machine::bytes_among(bytes.collective, 2) == 5.0);
    CHECK(moe::machine::bytes_among(bytes.collective, 3) == 9.0);
    CHECK(moe::machine::bytes_among(bytes.collective, 8) == 9.0);
    CHECK(moe::machine::bytes_among(bytes.pairwise, 4) == 2.0);
    CHECK(bytes.messages == 1.0);
    CHECK(bytes.first == 3.0);
    CHECK(bytes.first_pairwise == 0.0);
    CHECK(moe::machine::to_json(moe::machine::hardware_from_json(moe::machine::to_json(hardware), "again")) ==
          moe::machine::to_json(hardware));
    const moe::machine::Hardware any = moe::machine::hardware_from_json(gpu(R"("communicator_bytes": 7)"), "h.json");
    CHECK(moe::machine::bytes_among(any.communicators.collective, 16) == 7.0);
    CHECK(moe::machine::to_json(any).find("\"communicator_bytes\": 7") != std::string::npos);
}

TEST_CASE("bad hardware is refused by field") {
    CHECK(fault(gpu("")).empty());
    CHECK(fault(R"({"name": ""})").find("must name the machine") != std::string::npos);
    const auto tiled = [](const std::string& more) {
        return fault(gpu(R"("measured": {"gemm": [[1, 1]]}, "product_tiles": {)" + more + "}"));
    };
    CHECK(tiled(R"("gemm": [[2, 128, 384, 64, 500, 0, 0]])").empty());
    CHECK(tiled(R"("gem": [[2, 128, 384, 64, 500, 0, 0]])").find("a family of \"measured\"") != std::string::npos);
    for (const char* row : {"2, 128, 384, 64, 500, 0", "2, 128, 384, 64, 500, 0, 2", "0, 128, 384, 64, 500, 0, 1",
                            "2, 128, 384, 64, 0, 0, 1", "2, 128, 1e30, 64, 500, 0, 1"})
        CHECK(tiled(std::string(R"("gemm": [[)") + row + "]]").find("[multiprocessors, down") != std::string::npos);
    CHECK(tiled(R"("gemm": [[101, 128, 384, 64, 500, 0, 0]])").find("sm_count = 100") != std::string::npos);
    CHECK(fault(gpu(R"("measured": {"gemm": [[1, 1, 0.5]]})")).find("sides >= 1") != std::string::npos);
    CHECK(fault(gpu(R"("measured": {"gemm": [[1, 1], [1, 1, 2]]})")).find("same number of sides") != std::string::npos);
    CHECK(fault(gpu(R"("memory_bytez": 1)")) ==
          "2: h.json: unknown field \"memory_bytez\": did you mean memory_bytes?");
    CHECK(fault(gpu(R"("memory_bytes": 0)")).find("memory_bytes = 0") != std::string::npos);
    CHECK(fault(gpu(R"("memory_bytes": -1)")).find("memory_bytes = -1") != std::string::npos);
    CHECK(fault(gpu(R"("peak_flops": {})")).find("at least one precision") != std::string::npos);
    CHECK(fault(gpu(R"("peak_flops": {"bf17": 1})")).find("did you mean bf16?") != std::string::npos);
    CHECK(fault(gpu(R"("nvlink_domain_used": 9)")).find("must not exceed nvlink_domain = 8") != std::string::npos);
    CHECK(fault(gpu(R"("nvlink": {"bandwidth": 0, "latency": 0})")).find("bandwidth = 0") != std::string::npos);
    CHECK(fault(gpu(R"("nvlink": null)")).find("nvlink = null: must be given, since nvlink_domain = 8") !=
          std::string::npos);
    CHECK(fault(gpu(R"("gpus_per_node": 16)"))
              .find("field \"pcie\" is missing: must be given, since gpus_per_node = 16") != std::string::npos);
    CHECK(fault(gpu(R"("gpus_per_node": 16, "pcie": {"bandwidth": 2e10, "latency": 5e-6})")).empty());
    CHECK(fault(gpu(R"("compute_capability": 0)")).find("compute_capability = 0") != std::string::npos);
    CHECK(fault(gpu(R"("context_bytes": 9e10)")).find("must be below memory_bytes") != std::string::npos);
    CHECK(fault(communicators("[[1, 5]]")).find("[members, bytes], members >= 2") != std::string::npos);
    CHECK(fault(communicators("[[2]]")).find("[members, bytes], members >= 2") != std::string::npos);
    CHECK(fault(gpu(R"("measured": {"gemm": [[1]]})")).find("[work, seconds, sides..]") != std::string::npos);
    CHECK(fault(gpu(R"("measured": {"gemm": [[1, 0]]})")).find("[work, seconds, sides..]") != std::string::npos);
    CHECK(fault(gpu(R"("sm_count": 0)")).find("sm_count = 0") != std::string::npos);
    CHECK(fault("{").find("not valid JSON") != std::string::npos);
    CHECK(fault_of([] { moe::machine::load_hardware("gb200"); }) ==
          "2: unknown hardware 'gb200': did you mean gb200-nvl36?");
    CHECK(fault_of([] { moe::machine::precision_from_string("fp8"); }).find("did you mean fp8-tensor?") !=
          std::string::npos);
}

TEST_CASE("hardware: figures in another unit are refused with the range and what a machine has") {
    const auto refused = [](const std::string& more, const std::string& field, const std::string& range) {
        const std::string line = fault(gpu(more));
        CAPTURE(line);
        CHECK(line.starts_with("2: h.json: "));
        CHECK(line.find(field) != std::string::npos);
        CHECK(line.find(range) != std::string::npos);
    };
    refused(R"("peak_flops": {"bf16": 0.5})", "bf16 = 0.5", "must be in FLOP/s, from 1e+11 to 1e+18: an H100 has");
    refused(R"("peak_flops": {"bf16": 989})", "peak_flops: bf16 = 989", "must be in FLOP/s");
    refused(R"("memory_bytes": 80)", "memory_bytes = 80", "must be in bytes, from 1e+09");
    refused(R"("memory_bandwidth": 3350)", "memory_bandwidth = 3350", "must be in bytes/s");
    refused(R"("nvlink": {"bandwidth": 450, "latency": 2e-6})", "nvlink: bandwidth = 450", "must be in bytes/s");
    refused(R"("nvlink": {"bandwidth": 4.5e11, "latency": 2})", "latency = 2", "must be in seconds, from 0 to 0.1");
    refused(R"("measured": {"gemm.bf16": [[1e12, 1e-3], [1e12, 1e9]]})", "measured: gemm.bf16: row 2 = [1e+12, 1e+09",
            "in seconds from 1e-09 to 10000");
    refused(R"("measured": {"gemm.bf16": [[1e300, 1e-3]]})", "row 1 = [1e+300", "up to 1e+24");
    for (const std::string& name : moe::profile_names("hardware")) // all that ship are plausible
        CHECK_NOTHROW(moe::machine::load_hardware(name));
}

TEST_CASE("what a profile leaves out of its node and its tensor cores follows from the rest") {
    const auto of = [](const std::string& more) { return moe::machine::hardware_from_json(gpu(more), "h.json"); };
    CHECK(of("").gpus_per_node == 8);
    CHECK(of(R"("nvlink_domain": 72)").gpus_per_node == 4);
    CHECK(of("").vendor == "NVIDIA");
    CHECK(of("").compute_capability == 8.0);
    CHECK(of(R"("peak_flops": {"fp8-tensor": 2e15})").compute_capability == 9.0);
    CHECK(of(R"("peak_flops": {"mxfp8": 2e15})").compute_capability == 10.0);
    CHECK(of(R"("compute_capability": 10.3)").compute_capability == 10.3);
    CHECK(moe::machine::load_hardware("cpu-local").compute_capability == 0.0);
}

TEST_CASE("accelerators of other vendors are refused by name") {
    for (const auto& [name, vendor] : {std::pair{"mi300x", "AMD"},
                                       {"MI355X", "AMD"},
                                       {"tpu-v5p", "Google"},
                                       {"gaudi3", "Intel"},
                                       {"trainium2", "Amazon"}}) {
        CAPTURE(name);
        const std::string line = fault_of([&] { moe::machine::load_hardware(name); });
        CHECK(line.rfind("2: ", 0) == 0);
        CHECK(line.find(vendor) != std::string::npos);
        CHECK(line.find(name) != std::string::npos);
    }
    CHECK(fault_of([] { moe::machine::load_hardware("mi300x.json"); }).find("AMD") == std::string::npos); // a file
}

TEST_CASE("clocks of measured calls survive a round trip, whatever the order of the rows") {
    const std::string calls =
        R"("measured": {"gemm.nn.bf16": [[8, 2e-6, 2, 2, 2], [4, 1e-6, 1, 2, 2]], "add": [[1, 1e-6]]})";
    const auto with = [&](const std::string& clocks) { return gpu(calls + R"(, "measured_clocks": )" + clocks); };
    const moe::machine::Hardware read =
        moe::machine::hardware_from_json(with(R"({"gemm.nn.bf16": [1500.5, 1980]})"), "h.json");
    const std::vector<moe::machine::MeasuredCall>& products = read.measured.at("gemm.nn.bf16");
    CHECK(products[0].work == 4.0); // sorted by work
    CHECK(products[0].clock_hz == 1.98e9);
    CHECK(products[1].clock_hz == 1.5005e9);
    CHECK(read.measured.at("add")[0].clock_hz == 0.0);
    const moe::machine::Hardware again = moe::machine::hardware_from_json(read.json, "again");
    CHECK(again.json == read.json);
    CHECK(again.measured.at("gemm.nn.bf16")[1].clock_hz == 1.5005e9);
    // A profile without them says nothing of them.
    const moe::machine::Hardware none = moe::machine::hardware_from_json(gpu(calls), "h.json");
    CHECK(none.measured.at("gemm.nn.bf16")[0].clock_hz == 0.0);
    CHECK(none.json.find("measured_clocks") == std::string::npos);

    CHECK(fault(with(R"({"gemm.nn.bf16": [1500]})")).find("must hold 2 clocks") != std::string::npos);
    CHECK(fault(with(R"({"gemm.nn": [1500]})")).find("gemm.nn") != std::string::npos);
    CHECK(fault(with(R"({"gemm.nn.bf16": [1500, -1]})")).find("must be a number from 0") != std::string::npos);
}

TEST_CASE("a profile with a base states what differs from it") {
    const moe::machine::Hardware base = moe::machine::load_hardware("h100"),
                                 efa = moe::machine::load_hardware("h100-efa");
    CHECK(efa.name == "h100-efa");
    CHECK(efa.like == "h100");
    CHECK(efa.peak_flops == base.peak_flops);
    CHECK(efa.memory_bytes == base.memory_bytes);
    CHECK(efa.nic.latency > 5.0 * base.nic.latency);
    CHECK(efa.nic.message > 0.0);
    CHECK(base.nic.message == 0.0);
    CHECK(efa.source.find("EFA") < efa.source.find(base.source)); // its own first, those of the base behind them
    const moe::machine::Hardware again = moe::machine::hardware_from_json(efa.json, "plan");
    CHECK(again.nic.message == efa.nic.message);
    CHECK(moe::machine::load_hardware("a800-sxm").nvlink.bandwidth == 200e9);
    CHECK(moe::machine::load_hardware("a800-sxm").nvlink.latency > 0.0);

    const Folder folder;
    const auto fault_with = [&](const std::string& text) {
        const std::string path = folder / "mine.json";
        moe::write_file(path, text);
        return fault_of([&] { moe::machine::load_hardware(path); });
    };
    CHECK(fault_with(R"({"name": "mine", "base": "h100", "nic": {"bandwidth": 25e9}})").empty());
    CHECK(fault_with(R"({"name": "mine", "base": "h1000"})").find("base 'h1000'") != std::string::npos);
    CHECK(fault_with(R"({"name": "mine", "base": "h100-efa"})").find("must name a profile without a base") !=
          std::string::npos);
    CHECK(fault_with(R"({"name": "mine", "base": "h100", "nvlink": {"message": 1e-6}})").find("message") !=
          std::string::npos);
    CHECK(fault_with(R"({"name": "mine", "base": "h100", "nic": {"message": 3}})").find("message = 3") !=
          std::string::npos);
    CHECK(fault(gpu(R"("base": "h100")")).find("base") != std::string::npos); // of a plan: whole profiles alone
}
