// What the exchange of slots takes from NCCL's device API, where the kernels are compiled with it.
#pragma once

#include "kernels/slot_exchange.hpp"

namespace moe {

// The NCCL that the device functions are compiled with, as NCCL_VERSION_CODE has it; 0: it has none.
int nccl_device_version();
// The first one that says whether a communicator has a network that the device drives: since 2.29.2 there is a query,
// since 2.29.7 connections between all members can be asked for.
inline constexpr int nccl_network_version = 22907;
// Signals that a call over the network takes of the device communicator.
int nccl_exchange_signals(int blocks);

// Of a communicator, SlotGroup::library. window: ncclWindow_t; comm: ncclDevComm of host memory.
struct NcclEnd {
    void* window = nullptr;
    const void* comm = nullptr;
};

// Writes the windows of the members that are reached by loads and stores, `count` of them from number `first` on, as
// the current device addresses them, and null for the others, to reached[members] on the device. Returns when it is
// done.
void nccl_reached_windows(void* window, int first, int count, int members, char** reached);

namespace cuda {
struct Exchange;
// One call of a group that has remote members.
void nccl_exchange(const Exchange& exchange, void* stream);
} // namespace cuda

} // namespace moe
