// A back end: one function per op kind, called with the op and its resolved operands.
#pragma once

#include "engine/comm/collectives.hpp"
#include "engine/comm/communicator.hpp"
#include "engine/comm/peers.hpp"
#include "engine/device/device.hpp"
#include "kernels/kernels.hpp"
#include "planner/program/program.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace moe {

inline constexpr std::size_t op_kind_count = static_cast<std::size_t>(OpKind::copy_from_host) + 1;

// What an op needs to know of the rank that runs it.
struct RankPosition {
    int rank = 0;
    int tensor = 0;        // index in the TP group
    int context = 0;       // index in the CP group
    int expert = 0;        // index in the EP group
    int expert_tensor = 0; // index in the ETP group
};

struct OpContext {
    const Op& op;
    const Program& program;
    const RankPosition& position;
    Communicator& communicator;
    const Kernels& kernels;
    void* stream = nullptr;        // for the kernels
    void* const* in = nullptr;     // by index in op.in; null where the operand is absent
    void* const* out = nullptr;    // by index in op.out
    std::int64_t shard_offset = 0; // adamw: elements of the bucket before this rank's shard
    int spared = 0;                // multiprocessors that a product leaves to what runs beside it
    bool merged = false;           // another slot's ops run beside it

    // Shape and dtype of an operand; only for operands that are present.
    const Tensor& input(std::size_t i) const { return program.tensors[static_cast<std::size_t>(op.in[i])]; }
    const Tensor& output(std::size_t i) const { return program.tensors[static_cast<std::size_t>(op.out[i])]; }
    bool has_input(std::size_t i) const { return i < op.in.size() && op.in[i] != no_tensor; }
    bool has_output(std::size_t i) const { return i < op.out.size() && op.out[i] != no_tensor; }
};

using OpFunction = void (*)(const OpContext& context);

struct Backend {
    const char* name = "";
    const Kernels* kernels = nullptr;
    // The memory and queue of one rank, on the machine's device of that number. Where `replayed`, its queue records a
    // step once and replays it.
    std::unique_ptr<Device> (*open)(bool replayed, int device) = nullptr;
    int (*devices)() = nullptr; // of this machine, one for each rank; null: ranks share its cores
    // What joins ranks on devices; null: messages between threads and processes do.
    const CollectiveLibrary& (*collectives)() = nullptr;
    // How ranks on devices reach each other's memory; null: they do not.
    const PeerLibrary& (*peers)() = nullptr;
    // Whether its grouped products run on the tiles of kernels/tiles.hpp on the current device; null: they do not.
    bool (*tiled)() = nullptr;
    bool can_replay = false;                       // cuda_graph = full
    std::array<OpFunction, op_kind_count> table{}; // null: this back end cannot run the op kind

    OpFunction function(OpKind kind) const { return table[static_cast<std::size_t>(kind)]; }
};

// Fills in the ops that kernels carry out.
void add_kernels(Backend& backend);
// Fills in the communication ops, which are the same for every back end whose memory the communicator can reach.
void add_communication(Backend& backend);

} // namespace moe
