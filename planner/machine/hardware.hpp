// A machine to plan for: one accelerator, its node, its links, and what was measured on it.
#pragma once

#include "planner/machine/precision.hpp"

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace moe::machine {

// One tier of the network. bandwidth: bytes/s one way per GPU; latency: seconds of a message from end to end; message:
// seconds for which each message of an exchange holds the NIC beside its bytes, where one goes to every other member.
struct Link {
    double bandwidth = 0.0;
    double latency = 0.0;
    double message = 0.0; // of `nic` alone
};

// One measured call of a family of ops (planner/program/measured.hpp): `work` is its FLOPs, or its bytes where it has
// no FLOPs.
struct MeasuredCall {
    double work = 0.0;
    double seconds = 0.0;
    std::vector<double> sides{}; // none, or as many for every call of a family
    double clock_hz = 0.0;       // that the GPU reported meanwhile; 0: not known (docs/notes/clock.md)
};

// A kind of tile that the grouped products of a family may be computed on, as their kernels choose it: so many
// multiprocessors compute `down` rows x `across` columns of one group's result at once (of its transpose where
// `swapped`), in steps of `depth` contracted elements.
struct ProductTile {
    int multiprocessors = 1;
    int down = 1, across = 1, depth = 1;
    double step_cycles = 0.0; // cycles of the tensor cores, and of issuing what they do
    double tile_cycles = 0.0; // cycles of a tile's start and its results, where nothing hides them
    bool swapped = false;
    bool operator==(const ProductTile&) const = default;
};

// One of the cards whose calls a profile of their kind is the mean of (calibrate --merge).
struct MeasuredCard {
    std::string measured_by;               // as of its own profile
    std::map<std::string, double> factors; // by family: its seconds over those of the profile, geometric mean
};

// Bytes that a communicator takes of a member's device at most: one for collectives alone and one whose members also
// send to each other, by how many members were measured; one for messages of a pipeline, between two. The first of a
// rank takes so much more, and so does the first whose members send. Under published stacks every group counts as one
// for collectives.
struct CommunicatorBytes {
    double first = 0.0, first_pairwise = 0.0, messages = 0.0;
    std::map<int, double> collective, pairwise;
};
// Bytes of a communicator of so many members: those of the next larger number that was measured, or of the largest; 0
// where none was.
double bytes_among(const std::map<int, double>& measured, int members);

struct Hardware {
    std::string name;
    std::string vendor = "NVIDIA";   // of the GPU
    double compute_capability = 0.0; // CUDA's, of the GPU: 9.0, 10.3; 0 on CPUs and where it is not known
    bool cpu = false;                // ranks are threads that share `cores`
    int cores = 0;                   // cpu only
    int sm_count = 0;
    std::array<double, precision_count> peak_flops{}; // dense FLOP/s by Precision; 0 = cannot run it
    double memory_bytes = 0.0;                        // bytes that a job can use on one GPU, before the constants below
    double memory_bandwidth = 0.0;                    // bytes/s, datasheet
    int nvlink_domain = 1;                            // GPUs that reach each other over NVLink
    int nvlink_domain_used = 1;                       // GPUs of a domain that a job uses (64 of 72 on NVL72)
    int gpus_per_node = 1;                            // GPUs of one host
    Link nvlink, pcie, nic, host;    // pcie: between the NVLink domains of a node; host: GPU <-> CPU memory
    double host_memory_bytes = 0.0;  // host bytes of one GPU's share, for what is offloaded; 0 = not known, no limit
    double context_bytes = 0.0;      // CUDA context and library workspaces, not available to tensors
    CommunicatorBytes communicators; // taken of a rank's memory
    std::string default_stack;
    std::string like; // the machine whose figures stacks apply to this one; "" = see load_stack()
    std::string source;
    // Measured profiles only: calls by measured_key(), sorted by work. Empty for datasheet profiles.
    std::map<std::string, std::vector<MeasuredCall>> measured;
    std::map<std::string, std::vector<ProductTile>> product_tiles; // by families of `measured`, where they are known
    std::string measured_by;                                       // date, machine and command of the measurement
    std::vector<MeasuredCard> cards; // of a kind, two or more; empty for profiles of one card
    std::string json;                // the file as read, so that a plan can carry its hardware
};

// A whole profile, without a base.
Hardware hardware_from_json(const std::string& text, const std::string& place);
// `name_or_path`: a JSON file, or a name in profiles/hardware. A file that names a "base", a profile of that folder
// without one itself, holds only what differs from it; sources are those of both, its own first.
Hardware load_hardware(const std::string& name_or_path);
std::string to_json(const Hardware& hardware);

} // namespace moe::machine
