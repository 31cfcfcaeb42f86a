// Memory that ranks on devices hold beside the arena so that they can talk: communicators, slots of routed rows and
// boxes.
#pragma once

#include "planner/machine/fwd.hpp"
#include "planner/plan/fwd.hpp"
#include "planner/program/fwd.hpp"
#include "planner/program/op_kind.hpp"

#include <compare>
#include <cstdint>
#include <map>
#include <vector>

namespace moe::program {

// Messages leave through boxes: a send copies into a place of its channel's box, on a stream of its own, and what
// computes next may use the memory again although nobody has received the message. Without that, ranks of a pipeline
// wait for each other in a cycle: each to receive until its own message is gone.
struct Channel {
    int delta = 0; // pipeline ranks to the receiver, modulo their number; 0: a rank's message to itself
    int tag = 0, stage = 0;
    auto operator<=>(const Channel&) const = default;
};
struct Box {
    int places = 1;         // one, or as many as messages to itself wait at once
    std::int64_t bytes = 0; // bytes of one place
};
Channel channel_of(const PeerAttr& peer, int stages);
std::map<Channel, Box> boxes_of(const Program& program, int stages);

// Rows of one slot of an exchange: no more than the buffers on either side can hold.
constexpr std::int64_t slot_rows(std::int64_t x_rows, std::int64_t y_rows) { return x_rows < y_rows ? x_rows : y_rows; }
// Bytes of slots that an op's rows are packed into, which those on one stream share; 0 for most ops.
std::int64_t slots_of(const Program& program, const Op& op);

// Whether domains exchange chunks of slots where their devices can, see chunks_gain(); else whole slots.
bool sends_chunks(const Program& program);
// Bytes that windows take through which they do: what arrives, and over a network what leaves.
std::int64_t windows_of(const Program& program);

// Bytes of the slots of all streams, each as large as its largest op's.
std::int64_t all_slots(const Program& program);

// Channels of a message's communicator, each of which holds a multiprocessor from when a side is ready until both are.
inline constexpr int message_channels = 8;
// Multiprocessors that products of experts leave to messages, one coming and one leaving. On an H200 products beside a
// waiting receive took 1.74 times as long with all 132 for themselves, and no longer with 16 less, which costs them 2 %
// at the limit of its power and 11 to 14 % of their time below it.
//
// So do offloaded activations, in a captured step, to the kernels that copy them: each runs on as many multiprocessors
// as it has blocks, of which two keep more bytes on their way than PCIe 5.0 needs (kernels/cuda/host_copy.cu).
inline constexpr int host_copy_blocks = 2;
int reserved_sms_of(const Program& program, int stages);
// The multiprocessors that any Program of the plan leaves; each has messages where there are several stages, and copies
// where activations are offloaded.
int reserved_sms_of(const plan::Plan& plan);

// True for copies between the device and the host's memory.
constexpr bool copies_with_host(OpKind kind) { return kind == OpKind::copy_to_host || kind == OpKind::copy_from_host; }

// True where members of a group send to each other in it, besides what a collective does.
bool is_pairwise(OpKind kind);

// True where the plan's ranks lie on devices and this project's engine joins them.
bool joins_devices(const plan::Plan& plan);

// The communicators of one rank. Work of one communicator has one order, so collectives have one for each group and
// stream, messages one for each sender, receiver and tag.
struct Communicators {
    std::vector<int> collective, pairwise; // members of each
    int messages = 0;
    std::int64_t buffer_bytes = 0; // bytes of slots and boxes
    std::int64_t window_bytes = 0; // bytes of windows between domains, as many as over a network; 0 within one domain
    double bytes(const machine::CommunicatorBytes& each) const;
};
// The communicators of any rank that runs the Program.
Communicators communicators_of(const Program& program, const plan::Mesh& mesh);

} // namespace moe::program
