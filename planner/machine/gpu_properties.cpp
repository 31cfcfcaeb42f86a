// Matches a GPU's properties with the shipped profiles, and derives a profile where none is like it.
#include "planner/machine/gpu_properties.hpp"

#include "planner/base/error.hpp"
#include "planner/base/json.hpp"
#include "planner/base/names.hpp"
#include "planner/base/profile.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <tuple>

namespace moe::machine {
namespace {

// CUDA counts a little less than nvidia-smi reports (178.35 of 179.06 GiB on a B200), and some profiles are nominal.
constexpr double memory_tolerance = 0.1;

std::string lower(std::string text) {
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
    return text;
}

// Words of a profile's name, joined by '-', that stand in the GPU's name.
int words_in(const std::string& profile, const std::string& gpu) {
    int found = 0;
    for (std::size_t at = 0; at <= profile.size();) {
        const std::size_t end = std::min(profile.find('-', at), profile.size());
        found += gpu.find(profile.substr(at, end - at)) != std::string::npos ? 1 : 0;
        at = end + 1;
    }
    return found;
}

bool alike(const Hardware& profile, const GpuProperties& gpu) {
    return !profile.cpu && profile.measured.empty() && profile.sm_count == gpu.multiprocessors &&
           std::abs(profile.compute_capability - gpu.compute_capability()) < 0.05 &&
           std::abs(profile.memory_bytes / gpu.memory_bytes - 1.0) < memory_tolerance;
}

// FLOPs of a multiprocessor per cycle: dense BF16 products with FP32 sums at full rate, and FP32 outside the tensor
// cores. Of A100 (312 TFLOPS, 108 SMs, 1.41 GHz), RTX 3090 and 4090, H100, B200 and RTX PRO 6000.
std::pair<double, double> rates_of(const GpuProperties& gpu) {
    if (gpu.major == 8 && gpu.minor == 0) return {2048.0, 128.0};
    if (gpu.major == 9) return {4096.0, 256.0};
    if (gpu.major == 10) return {8192.0, 256.0};
    return {1024.0, 256.0};
}

} // namespace

std::string to_json(const GpuProperties& gpu) {
    return nlohmann::json{gpu.name,  gpu.major,        gpu.minor,        gpu.multiprocessors,
                          gpu.clock, gpu.memory_bytes, gpu.memory_clock, gpu.memory_bus}
        .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

GpuProperties gpu_properties_from_json(const std::string& text) {
    const nlohmann::json from = parse_json<nlohmann::json>(text, "properties of a GPU");
    return {from[0], from[1], from[2], from[3], from[4], from[5], from[6], from[7]};
}

std::string matching_profile(const GpuProperties& gpu) {
    const std::string name = lower(gpu.name);
    std::string best;
    std::pair<int, int> most{-1, 0};
    for (const std::string& known : profile_names("hardware")) {
        const Hardware profile = load_hardware(known);
        if (!alike(profile, gpu)) continue;
        const std::pair<int, int> fit{words_in(known, name), profile.nvlink_domain};
        if (fit > most) std::tie(best, most) = std::pair(known, fit);
    }
    return best;
}

Hardware hardware_of(const GpuProperties& gpu) {
    if (gpu.major < 8)
        refuse("calibrate: the GPU {} has compute capability {:.1f}: its tensor cores have no BF16", shown(gpu.name),
               gpu.compute_capability());
    const double capability = gpu.compute_capability();
    const auto [tensor, plain] = rates_of(gpu);
    const double cycles = gpu.multiprocessors * gpu.clock, full = cycles * tensor;
    const double bf16 = gpu.name.find("GeForce") != std::string::npos ? full / 2.0 : full;
    const bool blocks = capability >= 9.0 && capability < 12.0;
    nlohmann::ordered_json json;
    json["name"] = lower(gpu.name);
    for (char& c : json["name"].get_ref<std::string&>())
        if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '-';
    json["compute_capability"] = capability;
    json["sm_count"] = gpu.multiprocessors;
    json["peak_flops"] = {{"fp32", cycles * plain}, {"bf16", bf16}};
    if (capability >= 8.9) json["peak_flops"]["fp8-tensor"] = 2.0 * bf16;
    if (blocks) json["peak_flops"]["fp8-blockwise"] = 2.0 * bf16;
    if (capability >= 10.0) json["peak_flops"].update({{"mxfp8", 2.0 * bf16}, {"nvfp4", 4.0 * full}});
    json["memory_bytes"] = gpu.memory_bytes;
    json["memory_bandwidth"] = 2.0 * gpu.memory_clock * gpu.memory_bus / 8.0;
    const double pcie = capability < 9.0 ? 24e9 : 50e9;
    json["nvlink_domain"] = 1;
    json["gpus_per_node"] = 8;
    json["pcie"] = json["host"] = {{"bandwidth", pcie}, {"latency", 5e-6}};
    json["nic"] = {{"bandwidth", pcie / 8.0}, {"latency", 1e-5}};
    json["source"] = {
        fmt::format("{}: peaks, memory and its rate by what the driver says of its multiprocessors ({} at "
                    "{:.0f} MHz) and its memory ({} bits at {:.0f} MHz)",
                    gpu.name, gpu.multiprocessors, gpu.clock / 1e6, gpu.memory_bus, gpu.memory_clock / 1e6),
        "nodes of eight without NVLink, PCIe Gen4 before compute capability 9.0 and Gen5 since, a NIC for "
        "eight: assumptions, to be replaced by the machine's own"};
    return hardware_from_json(json.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace), gpu.name);
}

Hardware starting_profile(const GpuProperties& gpu) {
    const std::string name = matching_profile(gpu);
    return name.empty() ? hardware_of(gpu) : load_hardware(name);
}

} // namespace moe::machine
