// The profile that a GPU starts with before it is measured, by what its driver says of it.
#pragma once

#include "planner/machine/hardware.hpp"

#include <string>

namespace moe::machine {

// As cudaDeviceProp and cudaDeviceGetAttribute give it.
struct GpuProperties {
    std::string name;         // "NVIDIA H100 80GB HBM3"
    int major = 0, minor = 0; // compute capability
    int multiprocessors = 0;
    double clock = 0.0;        // of the multiprocessors at most, Hz
    double memory_bytes = 0.0; // that CUDA counts
    double memory_clock = 0.0; // at most, Hz; two transfers per cycle
    int memory_bus = 0;        // bits
    double compute_capability() const { return major + minor / 10.0; }
};

std::string to_json(const GpuProperties& gpu);
GpuProperties gpu_properties_from_json(const std::string& text); // what to_json() wrote

// The profile of data-sheet figures in profiles/hardware of the same compute capability and multiprocessors and of
// about as much memory; among several the one more words of whose name stand in the GPU's, then of the larger NVLink
// domain.
// "" where none is like it.
std::string matching_profile(const GpuProperties& gpu);

// A profile by properties alone. Peaks: multiprocessors x clock x the tensor cores' rate by compute capability, half of
// it for GeForce, which accumulate in FP32 at half rate (NVIDIA's architecture white papers: A100, Ada, H100,
// Blackwell). Memory rate: bus x clock x 2. Links are those of PCIe cards, one GPU to a domain, eight to a node, and
// say so in `source`. Throws Error (bad_input) for GPUs before compute capability 8.0, whose tensor cores have no BF16.
Hardware hardware_of(const GpuProperties& gpu);

// The former where there is one, else the latter.
Hardware starting_profile(const GpuProperties& gpu);

} // namespace moe::machine
