// Communication op kinds as calls of the rank's communicator.
#include "engine/ops/backend.hpp"
#include "engine/ops/token_ops.hpp"

namespace moe::ops {

namespace {

const std::int32_t* counts(const OpContext& c) { return static_cast<const std::int32_t*>(c.in[1]); }
const program::RowsAttr& rows(const OpContext& c) { return std::get<program::RowsAttr>(c.op.attr); }

// Gathers of quantized rows the elements and, behind all of them, the scales.
void all_gather(const OpContext& c) {
    const program::Tensor& x = c.input(0);
    if (x.dtype != program::Dtype::fp8_block)
        return c.communicator.all_gather(c.op.group, c.in[0], c.out[0], x.bytes());
    c.communicator.all_gather(c.op.group, c.in[0], c.out[0], x.elements());
    c.communicator.all_gather(c.op.group, static_cast<const char*>(c.in[0]) + x.scale_offset(),
                              static_cast<char*>(c.out[0]) + c.output(0).scale_offset(), x.bytes() - x.scale_offset());
}

void reduce_scatter(const OpContext& c) {
    const auto* piece = std::get_if<program::ReduceAttr>(&c.op.attr);
    const bool whole = piece == nullptr || piece->elements == 0;
    void* out = whole ? c.out[0] : static_cast<char*>(c.out[0]) + program::bytes_of(c.output(0).dtype, piece->offset);
    c.communicator.reduce_scatter(c.op.group, c.in[0], out, whole ? c.output(0).elements() : piece->elements,
                                  c.input(0).dtype);
}

void all_reduce(const OpContext& c) {
    c.communicator.all_reduce(c.op.group, c.in[0], c.out[0], c.input(0).elements(), c.input(0).dtype,
                              std::get<program::ReduceAttr>(c.op.attr).max);
}

void all_to_all_rows(const OpContext& c) {
    c.communicator.all_to_all_rows(c.op.group, c.in[0], counts(c), c.out[0], rows(c), c.input(0).dtype, c.input(0).rows,
                                   c.output(0).rows);
}

void all_to_all_slots(const OpContext& c) {
    c.communicator.all_to_all_slots(c.op.group, c.in[0], counts(c), c.out[0], rows(c), c.input(0).dtype);
}

void all_gather_rows(const OpContext& c) {
    c.communicator.all_gather_rows(c.op.group, c.in[0], counts(c), c.out[0], rows(c), c.input(0).dtype, c.input(0).rows,
                                   c.output(0).rows);
}

void reduce_scatter_rows(const OpContext& c) {
    c.communicator.reduce_scatter_rows(c.op.group, c.in[0], counts(c), c.out[0], rows(c), c.input(0).dtype,
                                       c.input(0).rows, c.output(0).rows);
}

void all_to_all(const OpContext& c) {
    c.communicator.all_to_all(c.op.group, c.in[0], c.out[0], std::get<program::AllToAllAttr>(c.op.attr),
                              program::bytes_of(c.input(0).dtype, 1));
}

void ring_exchange(const OpContext& c) {
    c.communicator.ring_exchange(c.op.group, c.in[0], c.out[0], c.input(0).bytes());
}
void send(const OpContext& c) {
    c.communicator.send(std::get<program::PeerAttr>(c.op.attr), c.in[0], c.input(0).bytes());
}
void recv(const OpContext& c) {
    c.communicator.recv(std::get<program::PeerAttr>(c.op.attr), c.out[0], c.output(0).bytes());
}

} // namespace

void add_communication(Backend& backend) {
    const auto set = [&](program::OpKind kind, OpFunction function) {
        backend.table[static_cast<std::size_t>(kind)] = function;
    };
    set(program::OpKind::all_gather, all_gather);
    set(program::OpKind::reduce_scatter, reduce_scatter);
    set(program::OpKind::all_reduce, all_reduce);
    set(program::OpKind::all_to_all_rows, all_to_all_rows);
    set(program::OpKind::all_to_all_slots, all_to_all_slots);
    set(program::OpKind::dispatch_tokens, exchange_tokens);
    set(program::OpKind::combine_tokens, exchange_tokens);
    set(program::OpKind::all_gather_rows, all_gather_rows);
    set(program::OpKind::reduce_scatter_rows, reduce_scatter_rows);
    set(program::OpKind::all_to_all, all_to_all);
    set(program::OpKind::ring_exchange, ring_exchange);
    set(program::OpKind::send, send);
    set(program::OpKind::recv, recv);
}

} // namespace moe::ops
