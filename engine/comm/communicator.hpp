// A communicator of a rank: its end of every group that it is a member of.
//
// Every member of a group calls the same operations in the same order with the same sizes. Buffers belong to the caller
// and may be used again when the call returns. Sums run in group order, so results do not depend on timing. Calls throw
// Error (failure) with the numbers that disagree, or Aborted when another rank has failed.
#pragma once

#include "planner/plan/group.hpp"
#include "planner/program/fwd.hpp"
#include "planner/program/op_kind.hpp"
#include "planner/program/tensor.hpp"

#include <cstdint>

namespace moe::comm {

// Operands of dispatch_tokens and combine_tokens (planner/program/op_kind.hpp); absent ones are null.
struct TokenOperands {
    std::int64_t tokens = 0;
    int top_k = 0;
    program::Dtype dtype = program::Dtype::f32; // type of x, rows, y and parts
    const void* in = nullptr;                   // x of dispatch, or rows of combine
    const float* in_scale = nullptr;            // scales of fp8_block rows, as out_scale
    const std::int32_t *all_counts = nullptr, *row_of = nullptr, *places = nullptr;
    const float* values = nullptr;         // weight of dispatch, or one value per row of combine
    void *out = nullptr, *parts = nullptr; // rows of dispatch, or y of combine; parts of combine
    float* out_scale = nullptr;
    float* values_out = nullptr; // probs of dispatch, or by_copy of combine
    std::int32_t* places_out = nullptr;
    bool beside = false; // whether the device computes something else meanwhile
};

class Communicator {
public:
    virtual ~Communicator() = default;

    virtual int rank() const = 0;
    virtual int size(plan::Group group) = 0;
    virtual int index(plan::Group group) = 0; // this rank's position in the group

    // x[bytes] of every member -> y[size * bytes] in group order; x may be my part of y.
    virtual void all_gather(plan::Group group, const void* x, void* y, std::int64_t bytes) = 0;
    // x[size * elements] -> y[elements]: my part of the sum; y may be my part of x.
    virtual void reduce_scatter(plan::Group group, const void* x, void* y, std::int64_t elements,
                                program::Dtype dtype) = 0;
    // Sum or maximum of x over the members -> y of each; y may be x.
    virtual void all_reduce(plan::Group group, const void* x, void* y, std::int64_t elements, program::Dtype dtype,
                            bool max) = 0;

    // Routed rows over EP. all_counts[ep * etp, experts] (ETP fastest) says how many rows each source has for each
    // expert. attr.combine false: x, in expert-major order, -> y, in order of (source, expert), rows of my experts
    // only; true: back. x_rows, capacity_rows: rows that x and y can hold.
    virtual void all_to_all_rows(plan::Group group, const void* x, const std::int32_t* all_counts, void* y,
                                 const program::RowsAttr& attr, program::Dtype dtype, std::int64_t x_rows,
                                 std::int64_t capacity_rows) = 0;
    // Over ETP: the members' rows one after another; and back, each member's part summed over all.
    virtual void all_gather_rows(plan::Group group, const void* x, const std::int32_t* all_counts, void* y,
                                 const program::RowsAttr& attr, program::Dtype dtype, std::int64_t x_rows,
                                 std::int64_t capacity_rows) = 0;
    virtual void reduce_scatter_rows(plan::Group group, const void* x, const std::int32_t* all_counts, void* y,
                                     const program::RowsAttr& attr, program::Dtype dtype, std::int64_t x_rows,
                                     std::int64_t capacity_rows) = 0;

    // Slots of attr.capacity rows of attr.cols, one for each of the attr.ep members: slot m of x goes to slot `me` of
    // member m's y. counts[ep, ep] says how many rows each member has for each; attr.combine: those rows come back.
    // Members whose host knows the counts send no more than those rows; devices that count them, those rows rounded up
    // to chunks; others whole slots.
    virtual void all_to_all_slots(plan::Group group, const void* x, const std::int32_t* counts, void* y,
                                  const program::RowsAttr& attr, program::Dtype dtype) = 0;

    // Tokens to experts and (attr.combine) back, over memory that the members reach. False where they do not: the
    // caller then moves rows.
    virtual bool exchange_tokens(plan::Group, const program::RowsAttr&, const TokenOperands&) { return false; }

    // x[rows, cols] -> to_heads: y[rows * parts, cols / parts], else y[rows / parts, cols * parts], as AllToAllAttr
    // says; element_bytes each.
    virtual void all_to_all(plan::Group group, const void* x, void* y, const program::AllToAllAttr& attr,
                            std::int64_t element_bytes) = 0;
    // x goes to the next member of the group, y comes from the previous one.
    virtual void ring_exchange(plan::Group group, const void* x, void* y, std::int64_t bytes) = 0;

    // These send to and receive from the rank `peer.delta` pipeline stages away. A send never waits; messages of one
    // (pair, tag, stage) arrive in order.
    virtual void send(const program::PeerAttr& peer, const void* x, std::int64_t bytes) = 0;
    virtual void recv(const program::PeerAttr& peer, void* y, std::int64_t bytes) = 0;

    // Takes, where work is queued, before send() the bytes that it will send, on a stream of its own, so that x may be
    // used again although nobody has received it.
    virtual void put(const program::PeerAttr&, const void*, std::int64_t) {}
    // Calls from now on go to this stream of the rank's queue.
    virtual void use(program::Stream, void*) {}
    // A step is about to be queued.
    virtual void begin_step() {}
    // While queued work runs: throws Error or Aborted where it cannot come to an end because of the others.
    virtual void check() {}

    // Seconds this rank has spent waiting for others (and then for a core) since it began.
    virtual double waited() const = 0;
    // True where it waits just now, or did a moment ago. For any thread.
    virtual bool waits() const = 0;
};

} // namespace moe::comm
