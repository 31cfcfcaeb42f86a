// A back end: its device, its libraries, and one function per op kind.
#pragma once

#include "engine/comm/collectives.hpp"
#include "engine/comm/peers.hpp"
#include "engine/device/device.hpp"
#include "kernels/kernels.hpp"
#include "planner/machine/fwd.hpp"
#include "planner/program/op_kind.hpp"

#include <array>
#include <cstddef>
#include <memory>
#include <string>

namespace moe::ops {

inline constexpr std::size_t op_kind_count = static_cast<std::size_t>(program::OpKind::copy_from_host) + 1;

struct OpContext;
// C (+)= op(A) op(B) of BF16 operands that hold values of `format` in whole blocks of the contracted index; false, with
// nothing done, where it does not take them.
using BlockScaledGemm = bool (*)(RoundFormat format, const GemmShape& shape, Src a, Src b, Dst c, void* stream);
using OpFunction = void (*)(const OpContext& context);

struct Backend {
    const char* name = "";
    const Kernels* kernels = nullptr;
    // The memory and queue of one rank, on the machine's device of that number. Where `replayed`, its queue records a
    // step once and replays it.
    std::unique_ptr<device::Device> (*open)(bool replayed, int device) = nullptr;
    int (*devices)() = nullptr; // number of devices of this machine, one for each rank; null: ranks share its cores
    // What the driver says of the first of them; null: there are none.
    machine::GpuProperties (*properties)() = nullptr;
    // The library that joins ranks on devices; null: messages between threads and processes do.
    const comm::CollectiveLibrary& (*collectives)() = nullptr;
    // The library by which ranks on devices reach each other's memory; null: they do not.
    const comm::PeerLibrary& (*peers)() = nullptr;
    // Tells whether its grouped products run on the tiles of kernels/tiles.hpp on the current device; null: they do
    // not.
    bool (*tiled)() = nullptr;
    // Products on tensor cores that scale blocks (cuda_block_scaled_gemm()); null: the device has none, and operands
    // that are rounded to mxfp8 and nvfp4 are multiplied in BF16.
    BlockScaledGemm block_scaled_gemm = nullptr;
    bool can_replay = false;                       // whether steps, and parts of them, can be replayed: cuda_graph
    bool tells_logits = false;                     // whether attention tells its heads' largest logits: QK-clip
    bool tells_picked_logits = false;              // and over keys that an indexer picks
    std::array<OpFunction, op_kind_count> table{}; // functions by op kind; null: this back end cannot run it

    OpFunction function(program::OpKind kind) const { return table[static_cast<std::size_t>(kind)]; }
};

// Fills in the ops that kernels carry out.
void add_kernels(Backend& backend);
// Fills in the communication ops, which are the same for every back end whose memory the communicator can reach.
void add_communication(Backend& backend);

} // namespace moe::ops
