// The profile that a GPU starts with: shipped ones by its properties, else one that follows from them.
#include "planner/machine/gpu_properties.hpp"
#include "planner/stack/stack.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <string>

namespace {

using moe::machine::GpuProperties;
using moe::machine::Precision;

double peak(const moe::machine::Hardware& hardware, Precision precision) {
    return hardware.peak_flops[static_cast<std::size_t>(precision)];
}

// Clocks and buses as deviceQuery prints them.
const GpuProperties h100{"NVIDIA H100 80GB HBM3", 9, 0, 132, 1.98e9, 79.18 * 0x1p30, 2.619e9, 5120};
const GpuProperties a100{"NVIDIA A100-SXM4-80GB", 8, 0, 108, 1.41e9, 79.15 * 0x1p30, 1.593e9, 5120};
const GpuProperties b200{"NVIDIA B200", 10, 0, 148, 1.965e9, 178.35 * 0x1p30, 3.996e9, 7680};
const GpuProperties rtx4090{"NVIDIA GeForce RTX 4090", 8, 9, 128, 2.52e9, 23.64 * 0x1p30, 10.501e9, 384};
const GpuProperties rtx_pro{
    "NVIDIA RTX PRO 6000 Blackwell Server Edition", 12, 0, 188, 2.617e9, 94.97 * 0x1p30, 12.481e9, 512};

GpuProperties named(GpuProperties gpu, const char* name) {
    gpu.name = name;
    return gpu;
}

} // namespace

TEST_CASE("a GPU that has a profile starts with it, by its properties") {
    using moe::machine::matching_profile;
    CHECK(matching_profile(h100) == "h100");
    CHECK(matching_profile(named(h100, "NVIDIA H800")) == "h800"); // the same chip, told apart by its name
    CHECK(matching_profile(a100) == "a100-sxm");
    CHECK(matching_profile(named(a100, "NVIDIA A100 80GB PCIe")) == "a100-pcie");
    CHECK(matching_profile(named(a100, "NVIDIA A800-SXM4-80GB")) == "a800-sxm");
    CHECK(matching_profile(named(a100, "NVIDIA PG506-232")) == "a100-sxm"); // a name that nobody listed
    CHECK(matching_profile(b200) == "b200");
    CHECK(matching_profile(rtx4090) == "rtx-4090");
    CHECK(matching_profile(rtx_pro) == "rtx-pro-6000");
    GpuProperties gb200 = named(b200, "NVIDIA GB200");
    gb200.multiprocessors = 152, gb200.memory_bytes = 184.3 * 0x1p30;
    CHECK(matching_profile(gb200) == "gb200-nvl72"); // the largest domain of those that have it
    GpuProperties h200 = named(h100, "NVIDIA H200");
    h200.memory_bytes = 139.8 * 0x1p30;
    CHECK(matching_profile(h200) == "h200"); // not the measured one
    GpuProperties gh200 = named(h100, "NVIDIA GH200 480GB");
    gh200.memory_bytes = 94.5 * 0x1p30;
    CHECK(matching_profile(gh200) == "gh200");
    GpuProperties pcie = named(h100, "NVIDIA H100 PCIe");
    pcie.multiprocessors = 114;
    CHECK(matching_profile(pcie).empty());
}

TEST_CASE("what follows from properties is near the data sheets of GPUs that have profiles") {
    for (const GpuProperties& gpu : {h100, a100, b200, rtx4090, rtx_pro}) {
        CAPTURE(gpu.name);
        const moe::machine::Hardware derived = moe::machine::hardware_of(gpu),
                                     known = moe::machine::load_hardware(moe::machine::matching_profile(gpu));
        // Boost clocks are above those of the data sheets' peaks for tensor cores of H100 and B200.
        for (int i = 0; i < moe::machine::precision_count; ++i) {
            const auto precision = static_cast<Precision>(i);
            CAPTURE(moe::machine::to_string(precision));
            CHECK((peak(derived, precision) > 0.0) == (peak(known, precision) > 0.0));
            if (peak(known, precision) > 0.0)
                CHECK(peak(derived, precision) == nearly(peak(known, precision)).epsilon(0.11));
        }
        CHECK(derived.memory_bandwidth == nearly(known.memory_bandwidth).epsilon(0.01));
        CHECK(derived.sm_count == known.sm_count);
        CHECK(derived.compute_capability == known.compute_capability);
    }
}

TEST_CASE("a GPU without a profile starts with one of its own, which stacks plan for") {
    GpuProperties pcie = named(h100, "NVIDIA H100 PCIe");
    pcie.multiprocessors = 114, pcie.clock = 1.755e9, pcie.memory_clock = 1.593e9;
    const moe::machine::Hardware hardware = moe::machine::starting_profile(pcie);
    CHECK(hardware.name == "nvidia-h100-pcie");
    CHECK(peak(hardware, Precision::bf16) == nearly(114 * 1.755e9 * 4096.0));
    CHECK(hardware.memory_bandwidth == nearly(2.039e12).epsilon(0.001));
    CHECK(hardware.gpus_per_node == 8);
    CHECK(hardware.pcie.bandwidth > 0.0);
    CHECK(hardware.source.find("assumptions") != std::string::npos);
    CHECK(moe::stack::load_stack("moe-plan", hardware).figures_of == "h100");
    CHECK(moe::machine::to_json(moe::machine::hardware_from_json(moe::machine::to_json(hardware), "again")) ==
          moe::machine::to_json(hardware));
    const GpuProperties again = moe::machine::gpu_properties_from_json(moe::machine::to_json(pcie));
    CHECK(again.name == pcie.name);
    CHECK(again.memory_bytes == pcie.memory_bytes);
    CHECK(again.memory_bus == pcie.memory_bus);
    GpuProperties old = named(h100, "Tesla V100");
    old.major = 7;
    CHECK(fault_of([&] { moe::machine::starting_profile(old); }).find("no BF16") != std::string::npos);
}
